"""Our own rules for sizes say what ONNX's say, or nothing."""

from __future__ import annotations

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import TensorProto, helper

from gradgraph.graph.shapes import (
    FAILURES,
    OPSET,
    infer_node,
    record_shape,
    recorded_shape,
    shape_of_type,
    types_by_schema,
)
from gradgraph.graph.size_rules import sizes_by_rule

Dims = tuple[int | str | None, ...]


def node_of(op_type: str, shapes: list[Dims | None], target: list[int] | None, **attributes: object) -> ir.Node:
    """A node with inputs of these shapes; the second one is an initializer, if there is a ``target``."""
    inputs = [ir.Value(name=f"x{i}", type=ir.TensorType(ir.DataType.FLOAT)) for i in range(len(shapes))]
    for value, shape in zip(inputs, shapes, strict=True):
        record_shape(value, shape)
    if target is not None:
        tensor = ir.Tensor(np.array(target, np.int64), name="target")
        kind = ir.TensorType(ir.DataType.INT64)
        inputs.append(ir.Value(name="target", type=kind, shape=ir.Shape([len(target)]), const_value=tensor))
    node = ir.node(op_type, inputs, attributes=attributes)
    node.outputs[0].name, node.outputs[0].type = "y", ir.TensorType(ir.DataType.FLOAT)
    return node


def by_onnx(node: ir.Node, target: list[int] | None) -> Dims | None:
    """What ONNX's own rules say; None if they object, too."""
    data = {} if target is None else {"target": helper.make_tensor("target", TensorProto.INT64, [len(target)], target)}
    try:
        found = types_by_schema(node, [recorded_shape(v) for v in node.inputs], OPSET, lambda _: data)
    except FAILURES:
        return None
    return shape_of_type(found.get("y", onnx.TypeProto()))


SHAPES: list[Dims] = [
    (),
    (1,),
    (6,),
    (2, 3),
    (3, 2),
    (4, 1, 6),
    (1, 3, 2),
    (2, 2, 3),
    (0, 3),
    ("n", 3),
    (None, 6),
    (2, "n", 3),
    (3, 4),
    (2, 3, 4),
    (2, 1, 3, 3),
]
TARGETS = [
    [],
    [-1],
    [6],
    [2, 3],
    [0, -1],
    [-1, 0],
    [0, 0],
    [0, 0, 0],
    [3, -1, 2],
    [-1, -1],
    [4, -1],
    [0],
    [1, 0, 3],
    [7],
]
NODES = {
    **{f"Reshape {s} to {t}": ("Reshape", [s], t, {}) for s in SHAPES for t in TARGETS},
    **{f"Reshape {s} to {t}, zeros": ("Reshape", [s], t, {"allowzero": 1}) for s in SHAPES[4:9] for t in TARGETS},
    **{f"Transpose {s}": ("Transpose", [s], None, {}) for s in SHAPES},
    **{f"Transpose {s} by {p}": ("Transpose", [s], None, {"perm": p})
       for s in SHAPES for p in ([0], [1, 0], [2, 0, 1], [0, 1, 1])},
    **{f"MatMul {a} {b}": ("MatMul", [a, b], None, {}) for a in SHAPES for b in SHAPES},
}  # fmt: skip


@pytest.mark.parametrize("op_type", ["Reshape", "Transpose", "MatMul"])
def test_they_say_what_onnx_says(op_type: str) -> None:
    spoken = 0
    for label, (kind, shapes, target, attributes) in NODES.items():
        if kind != op_type:
            continue
        node = node_of(kind, list(shapes), target, **attributes)
        own = sizes_by_rule(
            node, [recorded_shape(v) for v in node.inputs], None if target is None else np.array(target, np.int64)
        )
        theirs = by_onnx(node, target)
        assert own is None or own == theirs, label
        spoken += own is not None
        infer_node(node)
        assert theirs is None or recorded_shape(node.outputs[0]) == theirs, label
    assert spoken > 8


def test_without_types_nothing_is_said() -> None:
    node = node_of("Reshape", [(2, 3)], [6])
    node.inputs[0].type = None
    infer_node(node)
    assert node.outputs[0].shape is None or recorded_shape(node.outputs[0]) == (None,)

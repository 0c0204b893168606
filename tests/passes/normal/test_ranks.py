"""Inputs of other ranks than an operator takes are named; those that onnxruntime bends to are computed as it does."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import TensorProto, helper

from gradgraph.errors import ModelError
from gradgraph.graph.ranks import MOST_AXES, axes_of
from gradgraph.passes.normal import normalise
from gradgraph.rules import registry
from gradgraph.transforms import vjp
from gradgraph.verify import cases
from tests.kit.small_models import run

FLOAT = TensorProto.FLOAT


def sites() -> Iterator[tuple[str, tuple[registry.Rule, registry.Case, int, int]]]:
    """For each input that must have some ranks: a case that has it, the nearest rank below and the nearest above."""
    for rule in registry.RULES.values():
        whole = [case for case in rule.cases if not case.graph and not rule.domain]
        for i, axes in enumerate(axes_of(rule.op_type)[0]):
            case = next((c for c in whole if i < len(c.inputs) and c.inputs[i] is not None), None)
            for rank in (axes.least - 1, axes.most + 1):
                if case is not None and 0 <= rank <= MOST_AXES:
                    yield f"{rule.op_type}, input {i} of rank {rank}", (rule, case, i, rank)


SITES = dict(sites())


@pytest.mark.parametrize("name", SITES)
def test_an_input_of_another_rank_is_named(name: str) -> None:
    rule, case, i, rank = SITES[name]
    graph = cases.trial(rule, case, dtype=np.float32).model.graph
    for info in graph.input:
        if info.name == f"x{i}":
            kind = info.type.tensor_type.elem_type
            info.CopyFrom(helper.make_tensor_value_info(info.name, kind, [f"n{a}" for a in range(rank)]))
    for tensor in graph.initializer:
        if tensor.name == f"x{i}":
            dtype = helper.tensor_dtype_to_np_dtype(tensor.data_type)
            tensor.CopyFrom(onnx.numpy_helper.from_array(np.zeros((1,) * rank, dtype), tensor.name))
    broken = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    with pytest.raises(ModelError, match=rf"^(the model .*: )?node 'node' \({rule.op_type}\) .*'x{i}'"):
        normalise(broken)


def test_most_operators_are_looked_at() -> None:
    assert len({name.split(",")[0] for name in SITES}) > 50


def model(op_type: str, weights: dict[str, Any], **attributes: Any) -> onnx.ModelProto:
    """Y of x [1, 1, 2, 3] and ``weights``; those called "-" are left out."""
    names = [name if not name.startswith("-") else "" for name in weights]
    found = helper.make_node(op_type, names if op_type == "ConstantOfShape" else ["x", *names], ["c"], **attributes)
    nodes = [found, helper.make_node("Cast", ["c"], ["d"], to=FLOAT), helper.make_node("ReduceSum", ["x"], ["total"])]
    nodes.append(helper.make_node("Mul", ["d", "total"], ["y"]))
    tensors = [onnx.numpy_helper.from_array(np.asarray(a), n) for n, a in weights.items() if not n.startswith("-")]
    ends = [helper.make_tensor_value_info(name, FLOAT, shape) for name, shape in (("x", [1, 1, 2, 3]), ("y", None))]
    graph = helper.make_graph(nodes, "g", ends[:1], ends[1:], tensors)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)


BENT = {
    "Expand to a number": model("Expand", {"s": np.array(1)}),
    "Expand to a matrix": model("Expand", {"s": np.array([[2, 3]])}),
    "Unsqueeze at a number": model("Unsqueeze", {"s": np.array(0)}),
    "Compress by a matrix": model("Compress", {"s": np.array([[True, False]])}, axis=3),
    "ConstantOfShape of a matrix": model("ConstantOfShape", {"s": np.array([[2, 3]])}),
    "Clip between vectors": model("Clip", {"a": np.array([1.0], np.float32), "b": np.array([3.0], np.float32)}),
    "Resize by a matrix": model("Resize", {"-": 0, "s": np.array([[1, 1], [2, 2]], np.float32)}),
    "Resize to a matrix": model("Resize", {"-": 0, "--": 0, "s": np.array([[1, 1], [4, 6]])}),
}


@pytest.mark.parametrize("name", BENT)
def test_what_onnxruntime_bends_to_is_computed_as_it_does(name: str) -> None:
    x = np.arange(6, dtype=np.float32).reshape(1, 1, 2, 3)
    (expected,) = run(BENT[name], {"x": x})
    (found,) = run(ir.to_proto(normalise(BENT[name])), {"x": x})
    np.testing.assert_array_equal(found, expected)
    gradient = vjp(BENT[name], wrt=["x"])
    assert run(gradient, {"x": x, "y.cotangent": np.ones_like(expected)})[1].shape == x.shape


@pytest.mark.parametrize("weight", [False, True])
def test_a_number_is_clipped_at_a_vector_of_one_number(weight: bool) -> None:
    """As onnxruntime has it the result is a number; the bound's gradient has the bound's one axis."""
    ends = [helper.make_tensor_value_info(name, FLOAT, shape) for name, shape in (("x", []), ("b", [1]), ("y", None))]
    bound = [onnx.numpy_helper.from_array(np.ones(1, np.float32), "b")] if weight else []
    node = helper.make_node("Clip", ["x", "", "b"], ["y"])
    graph = helper.make_graph([node], "g", ends[: 1 if weight else 2], ends[2:], bound)
    clipped = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    gradient = vjp(clipped, wrt=["x", "b"])
    feeds = {"x": np.array(3.0, np.float32), "y.cotangent": np.array(2.0, np.float32)}
    y, dx, db = run(gradient, feeds if weight else feeds | {"b": np.ones(1, np.float32)})
    assert (y.tolist(), dx.tolist(), db.tolist()) == (1.0, 0.0, [2.0])

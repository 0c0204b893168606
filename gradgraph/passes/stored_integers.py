"""Pass for an inference model: weights that are rounded to integers are stored as integers.

Case: a QuantizeLinear of stored numbers, with a scale that is stored or computed from stored numbers → its result as an
initializer, and the scale as another one. Only where the model says that it was made for that (``marks.QUANTISED``).
"""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
from onnx.reference import ReferenceEvaluator

from gradgraph.marks import QUANTISED
from gradgraph.prune import needed

Array = np.ndarray[Any, Any]
_LIMITS = {
    onnx.TensorProto.INT4: (-8, 7),
    onnx.TensorProto.UINT4: (0, 15),
    onnx.TensorProto.INT8: (-128, 127),
    onnx.TensorProto.UINT8: (0, 255),
}


def stores_integers(model: onnx.ModelProto) -> bool:
    """Whether the pass has anything to do in ``model``."""
    return any(p.key == QUANTISED for p in model.metadata_props)


def store_integers(model: onnx.ModelProto) -> None:
    """Apply the pass to ``model``, in place."""
    if not stores_integers(model):
        return
    graph, stored = model.graph, {t.name: t for t in model.graph.initializer}
    known = _computable(graph, set(stored))
    gone: set[str] = set()
    for node in graph.node:
        if node.op_type != "QuantizeLinear" or not set(filter(None, node.input)) <= known:
            continue
        kind = _kind(graph, stored, node)
        if kind not in _LIMITS:
            continue
        x, scale, zero = _values(model, [*node.input, ""][:3])
        numbers = _quantised(x, scale, zero, kind, _axis(node))
        graph.initializer.append(ir.to_proto(ir.tensor(numbers, dtype=ir.DataType(kind), name=node.output[0])))
        if node.input[1] not in stored:
            graph.initializer.append(onnx.numpy_helper.from_array(scale, node.input[1]))
            stored[node.input[1]] = graph.initializer[-1]
            gone.add(node.input[1])
        gone.add(node.output[0])
    kept = [n for n in graph.node if gone.isdisjoint(n.output)]
    nodes, names = needed(kept, [v.name for v in graph.output], lambda n: n.output, lambda n: n.input)
    _keep(graph, nodes, names)


def _keep(graph: onnx.GraphProto, nodes: list[onnx.NodeProto], names: set[str]) -> None:
    initializers = [t for t in graph.initializer if t.name in names]
    for field, values in ((graph.node, nodes), (graph.initializer, initializers)):
        copies = [type(v).FromString(v.SerializeToString()) for v in values]
        del field[:]
        field.extend(copies)


def _computable(graph: onnx.GraphProto, stored: set[str]) -> set[str]:
    """The names of all values that depend on stored numbers only."""
    known = set(stored)
    for node in graph.node:
        plain = not any(a.type in (onnx.AttributeProto.GRAPH, onnx.AttributeProto.GRAPHS) for a in node.attribute)
        if plain and set(filter(None, node.input)) <= known:
            known.update(node.output)
    return known


def _values(model: onnx.ModelProto, names: list[str]) -> list[Array]:
    """The numbers of computable values; an empty array for one that is left out."""
    wanted = [n for n in names if n]
    stored = {t.name: t for t in model.graph.initializer}
    nodes, read = needed(
        [n for n in model.graph.node if set(n.output).isdisjoint(stored)], wanted, lambda n: n.output, lambda n: n.input
    )
    outputs = [onnx.helper.make_tensor_value_info(n, onnx.TensorProto.UNDEFINED, None) for n in wanted]
    part = onnx.helper.make_graph(nodes, "part", [], outputs, [t for n, t in stored.items() if n in read])
    made = onnx.helper.make_model(part, opset_imports=list(model.opset_import), ir_version=model.ir_version)
    found = dict(zip(wanted, ReferenceEvaluator(made).run(None, {}), strict=True)) if nodes else {}
    found |= {n: onnx.numpy_helper.to_array(stored[n]) for n in wanted if n in stored}
    return [np.asarray(found[n]) if n else np.zeros(0) for n in names]


def _quantised(x: Array, scale: Array, zero: Array, kind: int, axis: int) -> Array:
    """``clip(round(x / s) + z)``, rounded to even, in float32, as runtimes compute it."""
    sizes = [-1 if a == axis % max(x.ndim, 1) else 1 for a in range(x.ndim)] if scale.ndim else []
    step = scale.reshape(sizes) if scale.ndim else scale
    point = zero.astype(np.float32).reshape(sizes if zero.ndim else ()) if zero.size else np.float32(0)
    low, high = _LIMITS[kind]
    return np.clip(np.rint(x / step) + point, low, high).astype(np.int8 if low < 0 else np.uint8)


def _axis(node: onnx.NodeProto) -> int:
    return next((a.i for a in node.attribute if a.name == "axis"), 1)


def _kind(graph: onnx.GraphProto, stored: dict[str, onnx.TensorProto], node: onnx.NodeProto) -> int:
    """The element type of the integers."""
    point = node.input[2] if len(node.input) > 2 else ""
    if point in stored:
        return int(stored[point].data_type)
    made = next((n for n in graph.node if point and point in n.output), None)
    if made is not None and made.op_type == "Constant":
        return int(made.attribute[0].t.data_type)
    declared = next((a.i for a in node.attribute if a.name == "output_dtype"), 0)
    return int(declared or onnx.TensorProto.UINT8)

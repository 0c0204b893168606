"""Pass for an inference model: weights that are rounded to integers are stored as integers.

1. a QuantizeLinear of stored numbers, with a scale that is stored or computed from stored numbers → its result as an
   initializer;
2. a Cast to whole numbers of 32 bits that a DequantizeLinear reads, a bias → its result as an initializer;
3. a scale that either reads and that is computed from stored numbers → an initializer.

Only where the model says that it was made for that (``marks.QUANTISED``).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
from onnx.reference import ReferenceEvaluator

from gradgraph.graph.marks import QUANTISED
from gradgraph.graph.prune import needed
from gradgraph.graph.quantisers import INTEGER_RANGES, Quantiser

Array = np.ndarray[Any, Any]
Tensors = dict[str, onnx.TensorProto]
Makers = Mapping[str, tuple[int, onnx.NodeProto]]  # by value: the place of a node in the graph, and it


def stores_integers(model: onnx.ModelProto) -> bool:
    """Does the model say that its weights are to be stored as integers?"""
    return any(p.key == QUANTISED for p in model.metadata_props)


def store_integers(model: onnx.ModelProto) -> None:
    """Apply the pass to ``model``, in place."""
    if not stores_integers(model):
        return
    graph = model.graph
    stored = {t.name: t for t in graph.initializer}
    made_by = {name: (i, node) for i, node in enumerate(graph.node) for name in node.output}
    known = _computable(graph, set(stored))
    new: Tensors = {}
    for node in graph.node:
        for name, tensor in _stored_for(node, stored, made_by, known, model):
            if name not in new:
                new[name] = tensor
    graph.initializer.extend(new.values())
    kept = [n for n in graph.node if new.keys().isdisjoint(n.output)]
    nodes, names = needed(kept, [v.name for v in graph.output], lambda n: n.output, lambda n: n.input)
    _keep(graph, nodes, names)


def _stored_for(
    node: onnx.NodeProto,
    stored: Tensors,
    made_by: Makers,
    known: set[str],
    model: onnx.ModelProto,
) -> Iterator[tuple[str, onnx.TensorProto]]:
    """Yield the tensors that are stored for ``node`` instead of being computed, by name."""
    if node.op_type not in ("QuantizeLinear", "DequantizeLinear"):
        return
    maker = _maker(made_by, node.input[1])
    if maker is not None and maker.op_type != "Constant" and node.input[1] in known:
        (scale,) = _values(model, stored, made_by, [node.input[1]])
        yield node.input[1], onnx.numpy_helper.from_array(scale, node.input[1])
    if node.op_type == "QuantizeLinear" and set(filter(None, node.input)) <= known:
        kind = _integer_type(stored, made_by, node)
        if kind in INTEGER_RANGES:
            x, scale, zero = _values(model, stored, made_by, [*node.input, ""][:3])
            axis, block = _int_attribute(node, "axis", 1), _int_attribute(node, "block_size", 0)
            limits = INTEGER_RANGES[kind]
            whole = Quantiser(scale, zero if zero.size else None, limits, axis, block).quantised(x)
            held = np.dtype(f"{'' if limits[0] else 'u'}int{max(8, kind.bitwidth)}")
            yield node.output[0], ir.to_proto(ir.tensor(whole.astype(held), dtype=kind, name=node.output[0]))
    maker = _maker(made_by, node.input[0])
    if node.op_type == "DequantizeLinear" and maker is not None and maker.op_type == "Cast" and node.input[0] in known:
        (bias,) = _values(model, stored, made_by, [node.input[0]])
        yield node.input[0], onnx.numpy_helper.from_array(bias, node.input[0])


def _keep(graph: onnx.GraphProto, nodes: list[onnx.NodeProto], names: set[str]) -> None:
    initializers = [t for t in graph.initializer if t.name in names]
    kept: list[tuple[Any, Any]] = [(graph.node, nodes), (graph.initializer, initializers)]
    for field, values in kept:
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


def _values(model: onnx.ModelProto, stored: Tensors, made_by: Makers, names: list[str]) -> list[Array]:
    """The numbers of computable values; an empty array for one that is left out."""
    computed = [n for n in names if n and n not in stored]
    found = {n: onnx.numpy_helper.to_array(stored[n]) for n in names if n in stored}
    if computed:
        nodes, read = _makers(made_by, computed)
        outputs = [onnx.helper.make_tensor_value_info(n, onnx.TensorProto.UNDEFINED, None) for n in computed]
        part = onnx.helper.make_graph(nodes, "part", [], outputs, [stored[n] for n in read if n in stored])
        made = onnx.helper.make_model(part, opset_imports=list(model.opset_import), ir_version=model.ir_version)
        found |= dict(zip(computed, ReferenceEvaluator(made).run(None, {}), strict=True))
    return [np.asarray(found[n]) if n else np.zeros(0) for n in names]


def _makers(made_by: Makers, names: list[str]) -> tuple[list[onnx.NodeProto], set[str]]:
    """The nodes that compute these values, in the order of the graph, and all that they read."""
    found, read, waiting = dict[int, onnx.NodeProto](), set(names), list(names)
    while waiting:
        place, node = made_by.get(waiting.pop(), (0, None))
        if node is not None and place not in found:
            found[place] = node
            read.update(filter(None, node.input))
            waiting += filter(None, node.input)
    return [found[place] for place in sorted(found)], read


def _int_attribute(node: onnx.NodeProto, name: str, default: int) -> int:
    return next((a.i for a in node.attribute if a.name == name), default)


def _maker(made_by: Makers, name: str) -> onnx.NodeProto | None:
    return made_by[name][1] if name in made_by else None


def _integer_type(stored: Tensors, made_by: Makers, node: onnx.NodeProto) -> ir.DataType:
    """The element type of the integers that a QuantizeLinear gives."""
    point = node.input[2] if len(node.input) > 2 else ""
    made = _maker(made_by, point)
    if point in stored:
        return ir.DataType(stored[point].data_type)
    if made is not None and made.op_type == "Constant":
        return ir.DataType(made.attribute[0].t.data_type)
    return ir.DataType(_int_attribute(node, "output_dtype", 0) or onnx.TensorProto.UINT8)

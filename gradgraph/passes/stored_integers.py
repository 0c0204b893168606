"""Pass for an inference model: store quantized weights as integers.

Three kinds of values that are computed from stored numbers become initializers:

1. the result of a QuantizeLinear, together with a Clip after it, if there is one;
2. the result of a Cast to int32 that a DequantizeLinear reads (a bias);
3. the scale of a QuantizeLinear or DequantizeLinear.

The pass applies only to a model that is marked for it (``marks.QUANTISED``). Integers of large external weights are
computed one tensor at a time, while the file is written: neither the floats nor the integers are all in memory at once.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
from onnx.reference import ReferenceEvaluator

from gradgraph.files.external import is_external, point_at
from gradgraph.files.large_weights import LEAST_BYTES
from gradgraph.graph.marks import QUANTISED
from gradgraph.graph.prune import needed
from gradgraph.graph.quantisers import INTEGER_RANGES, Quantiser
from gradgraph.graph.shapes import all_sizes, shape_of_type

Array = np.ndarray[Any, Any]
Tensors = dict[str, onnx.TensorProto]
Makers = Mapping[str, tuple[int, onnx.NodeProto]]  # value → (index of its node, the node)
Stored = tuple[str, Callable[[], onnx.TensorProto]]  # the name of a value, and a function that computes its tensor


class Internal:
    """Weights stored in the protobuf message of the model itself, where integers computed from them are stored, too."""

    def numbers(self, tensor: onnx.TensorProto) -> Array:
        return np.asarray(onnx.numpy_helper.to_array(tensor))

    def kept(self, tensor: ir.LazyTensor) -> onnx.TensorProto:
        """Return the tensor of integers as it is stored in the message."""
        return ir.to_proto(tensor)


class External(Internal):
    """The weights of a model whose large tensors are external; large integers computed from them become external, too.

    Args:
        tensors: the external tensors by name; large integers are added.
    """

    def __init__(self, tensors: dict[str, ir.TensorProtocol]) -> None:
        self.tensors = tensors

    def numbers(self, tensor: onnx.TensorProto) -> Array:
        return self.tensors[tensor.name].numpy() if is_external(tensor) else super().numbers(tensor)

    def kept(self, tensor: ir.LazyTensor) -> onnx.TensorProto:
        if tensor.nbytes < LEAST_BYTES:
            return super().kept(tensor)
        self.tensors[tensor.name or ""] = tensor
        return _elsewhere(tensor)


def with_stored_integers(model: ir.Model) -> ir.Model:
    """Return a copy whose quantized weights are integers, if marked; external weights are read one at a time."""
    slim = model.clone()
    large = {v.name or "": t for v in slim.graph.initializers.values()
             if (t := v.const_value) is not None and t.nbytes >= LEAST_BYTES}  # fmt: skip
    for name in large:
        slim.graph.initializers[name].const_value = ir.tensor(np.zeros(0, np.float32), name=name)
    proto = ir.to_proto(slim)
    for stored in proto.graph.initializer:
        if stored.name in large:
            stored.CopyFrom(_elsewhere(large[stored.name]))
    weights = External(large)
    store_integers(proto, weights)
    result: ir.Model = ir.from_proto(proto)
    for name, value in result.graph.initializers.items():
        if name in weights.tensors:
            value.const_value = weights.tensors[name]
    return result


def _elsewhere(tensor: ir.TensorProtocol) -> onnx.TensorProto:
    """Return a message with only the type and shape of ``tensor``, as if its data were in another file."""
    empty = onnx.TensorProto(name=tensor.name, data_type=int(tensor.dtype), dims=tensor.shape.numpy())
    point_at(empty, "elsewhere", 0, tensor.nbytes)
    return empty


def stores_integers(model: onnx.ModelProto) -> bool:
    """Whether the model is marked to store its weights as integers."""
    return any(p.key == QUANTISED for p in model.metadata_props)


def store_integers(model: onnx.ModelProto, weights: Internal | None = None) -> None:
    """Store quantized weights as integers, in place, if the model is marked for it; ``weights`` reads initializers."""
    if not stores_integers(model):
        return
    graph = model.graph
    stored = {t.name: t for t in graph.initializer}
    made_by = {name: (i, node) for i, node in enumerate(graph.node) for name in node.output}
    known = _computable(graph, set(stored))
    new: Tensors = {}
    values = _Values(model, stored, made_by, weights or Internal())
    clips = {n.input[0]: n for n in graph.node if n.op_type == "Clip" and len(n.input) == 3 and {*n.input} <= known}
    for node in graph.node:
        for name, computed in _stored_for(node, values, known, clips.get(next(iter(node.output), ""))):
            if name not in new:
                new[name] = stored[name] = computed()
    graph.initializer.extend(new.values())
    kept = [n for n in graph.node if new.keys().isdisjoint(n.output)]
    nodes, names = needed(kept, [v.name for v in graph.output], lambda n: n.output, lambda n: n.input)
    _keep(graph, nodes, names)


def _stored_for(
    node: onnx.NodeProto, values: _Values, known: set[str], clip: onnx.NodeProto | None
) -> Iterator[Stored]:
    """Yield the name of each value to store at ``node`` or ``clip``, and a function that computes its tensor."""
    if node.op_type not in ("QuantizeLinear", "DequantizeLinear"):
        return
    maker = _maker(values.made_by, node.input[1])
    if maker is not None and maker.op_type != "Constant" and node.input[1] in known:
        yield node.input[1], functools.partial(values.as_tensor, node.input[1])
    if node.op_type == "QuantizeLinear" and set(filter(None, node.input)) <= known:
        kind = _integer_type(values.stored, values.made_by, node)
        if kind in INTEGER_RANGES:
            yield (clip or node).output[0], functools.partial(_integers, node, kind, values, clip)
    maker = _maker(values.made_by, node.input[0])
    if node.op_type == "DequantizeLinear" and maker is not None and maker.op_type == "Cast" and node.input[0] in known:
        yield node.input[0], functools.partial(values.as_tensor, node.input[0])


def _integers(
    node: onnx.NodeProto, kind: ir.DataType, values: _Values, clip: onnx.NodeProto | None
) -> onnx.TensorProto:
    """Return the result of a QuantizeLinear of stored values, or of ``clip``, the Clip after it."""
    source, scale, *point = node.input
    axis, block = _int_attribute(node, "axis", 1), _int_attribute(node, "block_size", 0)
    limits, name = INTEGER_RANGES[kind], (clip or node).output[0]
    if clip is not None:
        low, high = values([*clip.input[1:]])
        limits = int(low), int(high)
    held = np.dtype(f"{'' if limits[0] else 'u'}int{max(8, kind.bitwidth)}")

    def rounded() -> ir.TensorProtocol:
        x, scales, points = values([source, scale, *point, ""][:3])
        whole = Quantiser(scales, points if points.size else None, limits, axis, block).quantised(x, held)
        return ir.tensor(whole, dtype=kind, name=name)

    sizes = values.sizes(source)
    if sizes is None:
        return ir.to_proto(rounded())
    return values.weights.kept(ir.LazyTensor(rounded, kind, ir.Shape(sizes), name=name))


def _keep(graph: onnx.GraphProto, nodes: list[onnx.NodeProto], names: set[str]) -> None:
    initializers = [t for t in graph.initializer if t.name in names]
    gone = {t.name for t in graph.initializer} - names
    inputs = [v for v in graph.input if v.name not in gone]  # in IR version 3, initializers are inputs, too
    kept: list[tuple[Any, Any]] = [(graph.node, nodes), (graph.initializer, initializers), (graph.input, inputs)]
    for field, values in kept:
        copies = [type(v).FromString(v.SerializeToString()) for v in values]
        del field[:]
        field.extend(copies)


def _computable(graph: onnx.GraphProto, stored: set[str]) -> set[str]:
    """Return the names of all values that depend on stored values only."""
    known = set(stored)
    for node in graph.node:
        plain = not any(a.type in (onnx.AttributeProto.GRAPH, onnx.AttributeProto.GRAPHS) for a in node.attribute)
        if plain and set(filter(None, node.input)) <= known:
            known.update(node.output)
    return known


@dataclass(frozen=True)
class _Values:
    """An evaluator of values of ``model`` that depend on ``stored`` initializers only."""

    model: onnx.ModelProto
    stored: Tensors
    made_by: Makers
    weights: Internal

    def __call__(self, names: list[str]) -> list[Array]:
        """Return the values of ``names``; an empty array for each empty name."""
        computed = [n for n in names if n and n not in self.stored]
        found = {n: self.weights.numbers(self.stored[n]) for n in names if n in self.stored}
        if computed:
            nodes, read = _makers(self.made_by, computed, self.stored)
            # inputs, not initializers: an evaluator has a reference cycle, and would keep these until garbage
            # collection
            given = {n: self.weights.numbers(self.stored[n]) for n in read if n in self.stored}
            inputs, outputs = (
                [onnx.helper.make_tensor_value_info(n, onnx.TensorProto.UNDEFINED, None) for n in ends]
                for ends in (given, computed)
            )
            part = onnx.helper.make_graph(nodes, "part", inputs, outputs)
            opsets, version = list(self.model.opset_import), self.model.ir_version
            made = onnx.helper.make_model(part, opset_imports=opsets, ir_version=version)
            found |= dict(zip(computed, ReferenceEvaluator(made).run(None, given), strict=True))
        return [np.asarray(found[n]) if n else np.zeros(0) for n in names]

    def sizes(self, name: str) -> list[int] | None:
        """Return the sizes of a stored value, or of one with a declared shape; None if unknown."""
        if name in self.stored:
            return list(self.stored[name].dims)
        said = (shape_of_type(v.type) for v in self.model.graph.value_info if v.name == name)
        return all_sizes(next((shape for shape in said if shape is not None), None))

    def as_tensor(self, name: str) -> onnx.TensorProto:
        (numbers,) = self([name])
        return onnx.numpy_helper.from_array(numbers, name)


def _makers(made_by: Makers, names: list[str], stored: Tensors) -> tuple[list[onnx.NodeProto], set[str]]:
    """Return the nodes that compute ``names`` from stored values, in graph order, and the names of all inputs."""
    found, read, waiting = dict[int, onnx.NodeProto](), set(names), list(names)
    while waiting:
        name = waiting.pop()
        place, node = (0, None) if name in stored else made_by.get(name, (0, None))
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
    point = node.input[2] if len(node.input) > 2 else ""
    made = _maker(made_by, point)
    if point in stored:
        return ir.DataType(stored[point].data_type)
    if made is not None and made.op_type == "Constant":
        return ir.DataType(made.attribute[0].t.data_type)
    return ir.DataType(_int_attribute(node, "output_dtype", 0) or onnx.TensorProto.UINT8)

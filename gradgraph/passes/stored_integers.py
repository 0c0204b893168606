"""Pass for an inference model: store quantized weights as integers.

Three kinds of values that are computed from stored numbers become initializers:

1. the result of a QuantizeLinear, together with a Clip after it, if there is one;
2. the result of a Cast to int32 that a DequantizeLinear reads (a bias);
3. the scale of a QuantizeLinear or DequantizeLinear.

The pass applies only to a model that is marked for it (``marks.QUANTISED``). On request, large integers are computed
one tensor at a time, while the file is written: neither the floats nor the integers are all in memory at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
from onnx.reference import ReferenceEvaluator

from gradgraph.files.large_weights import LEAST_BYTES
from gradgraph.graph.checks import subgraphs
from gradgraph.graph.constant_nodes import tensor_in
from gradgraph.graph.marks import QUANTISED
from gradgraph.graph.nodes import input_at, inputs_of, is_standard, made_by
from gradgraph.graph.prune import is_wanted, prune_graph
from gradgraph.graph.quantisers import INTEGER_RANGES, Quantiser
from gradgraph.graph.shapes import all_sizes, recorded_shape, stored_sizes
from gradgraph.machine.threads import workers
from gradgraph.passes.normal.edit import replace_value

Array = np.ndarray[Any, Any]
Known = set[ir.Value]  # the values that depend on stored values only


def store_integers(model: ir.Model, lazily: bool = False) -> None:
    """Store quantized weights as integers, in place, if the model is marked for it.

    With ``lazily``, integers of at least ``LEAST_BYTES`` are computed each time they are read.
    """
    if QUANTISED not in model.metadata_props:
        return
    graph, known = model.graph, _computable(model.graph)
    pairs = [n for n in graph if is_standard(n, "QuantizeLinear", "DequantizeLinear")]
    scales = [v for v in dict.fromkeys(inputs_of(n)[1] for n in pairs) if v in known and _is_computed(v)]
    for scale, tensor in zip(scales, _tensors(scales, model), strict=True):
        known.add(_store(scale, tensor, graph))
    for node in pairs:
        for value, tensor in _stored_for(node, known, model, lazily):
            known.add(_store(value, tensor, graph))
    prune_graph(graph, shorten=False)
    unread = {v for v in graph.initializers.values() if not is_wanted(v)}
    graph.inputs[:] = [v for v in graph.inputs if v not in unread]  # in IR version 3, initializers are inputs, too
    for value in unread:
        del graph.initializers[value.name or ""]


def _computable(graph: ir.Graph) -> Known:
    """Return all values of ``graph`` that depend on stored values only."""
    known = set(graph.initializers.values())
    for node in graph:
        if known.issuperset(inputs_of(node)) and not any(subgraphs(node)):
            known.update(node.outputs)
    return known


def _store(value: ir.Value, tensor: ir.TensorProtocol, graph: ir.Graph) -> ir.Value:
    """Replace ``value`` with an initializer that contains ``tensor``, and return it."""
    new = ir.Value(name=value.name, type=ir.TensorType(tensor.dtype), shape=ir.Shape(tensor.shape.numpy()))
    new.const_value = tensor
    replace_value(value, new)
    value.name = None
    graph.register_initializer(new)
    return new


def _is_computed(value: ir.Value) -> bool:
    maker = value.producer()
    return maker is not None and maker.op_type != "Constant"


def _stored_for(
    node: ir.Node, known: Known, model: ir.Model, lazily: bool
) -> Iterator[tuple[ir.Value, ir.TensorProtocol]]:
    """Yield each value to store at ``node`` besides its scale, or at a Clip after it, and its tensor."""
    x = inputs_of(node)[0]
    if is_standard(node, "DequantizeLinear") and made_by(x, "Cast") is not None and x in known:
        yield x, _tensors([x], model)[0]
    if is_standard(node, "QuantizeLinear") and known.issuperset(inputs_of(node)):
        kind = _integer_type(node)
        if kind in INTEGER_RANGES:
            readers = (n for n in node.outputs[0].consumers() if is_standard(n, "Clip") and len(inputs_of(n)) == 3)
            clip = next((n for n in readers if known.issuperset([*inputs_of(n)[1:], *node.outputs])), None)
            yield (clip or node).outputs[0], _integers(node, kind, clip, model, lazily)


def _tensors(values: Sequence[ir.Value], model: ir.Model) -> list[ir.TensorProtocol]:
    """Compute values that depend on stored values only, on several threads."""
    with workers() as pool:  # each thread holds a few copies of the magnitudes of a weight
        computed = pool.map(lambda read: read()[0], [_reader([value], model) for value in values])
        return [ir.tensor(numbers, name=v.name) for v, numbers in zip(values, computed, strict=True)]


def _integers(
    node: ir.Node, kind: ir.DataType, clip: ir.Node | None, model: ir.Model, lazily: bool
) -> ir.TensorProtocol:
    """Return the result of a QuantizeLinear of stored values, or of ``clip``, the Clip after it."""
    source, *others = inputs_of(node)
    scales, *points = _reader(others, model)()
    axis, block = node.attributes.get_int("axis", 1), node.attributes.get_int("block_size", 0)
    limits, name = INTEGER_RANGES[kind], (clip or node).outputs[0].name
    if clip is not None:
        low, high = _reader(inputs_of(clip)[1:], model)()
        limits = int(low), int(high)
    quantiser = Quantiser(scales, points[0] if points and points[0].size else None, limits, axis, block)
    held = np.dtype(f"{'' if limits[0] else 'u'}int{max(8, kind.bitwidth)}")
    read = _reader([source], model)

    def rounded() -> ir.TensorProtocol:
        (floats,) = read()
        return ir.tensor(quantiser.quantised(floats, held), dtype=kind, name=name)

    sizes = stored_sizes(source) if source.const_value is not None else all_sizes(recorded_shape(source))
    if not lazily or sizes is None:
        return rounded()
    lazy = ir.LazyTensor(rounded, kind, ir.Shape(sizes), name=name)
    return rounded() if lazy.nbytes < LEAST_BYTES else lazy


def _reader(values: Sequence[ir.Value], model: ir.Model) -> Callable[[], list[Array]]:
    """Return a function that computes ``values``, which depend on stored values only, even after ``model`` changes."""
    nodes, stored = dict[ir.Node, None](), dict[str, ir.TensorProtocol]()  # in the order of their computation

    def collect(value: ir.Value) -> None:
        node = value.producer()
        if value.const_value is not None:
            stored[value.name or ""] = value.const_value
        elif node is not None and node not in nodes:
            for each in inputs_of(node):
                collect(each)
            nodes[node] = None

    for value in values:
        collect(value)
    protos = [ir.to_proto(node) for node in nodes]
    names, opsets = [v.name or "" for v in values], model.opset_imports.items()

    def compute() -> list[Array]:
        found = {name: tensor.numpy() for name, tensor in stored.items()}
        if protos:
            # inputs, not initializers: an evaluator has a reference cycle, and would keep these until garbage
            # collection
            inputs, outputs = (
                [onnx.helper.make_tensor_value_info(n, onnx.TensorProto.UNDEFINED, None) for n in ends]
                for ends in (stored, [n for n in names if n not in stored])
            )
            part = onnx.helper.make_graph(protos, "part", inputs, outputs)
            made = onnx.helper.make_model(
                part, opset_imports=[onnx.helper.make_opsetid(*one) for one in opsets], ir_version=model.ir_version
            )
            found |= dict(zip((v.name for v in outputs), ReferenceEvaluator(made).run(None, found), strict=True))
        return [np.asarray(found[name]) for name in names]

    return compute


def _integer_type(node: ir.Node) -> ir.DataType:
    """Return the element type of a QuantizeLinear's output: that of its zero point, or that of its attribute."""
    point = input_at(node, 2)
    constant = made_by(point, "Constant")
    tensor = tensor_in(constant) if constant is not None else None if point is None else point.const_value
    return (
        ir.DataType(node.attributes.get_int("output_dtype", 0) or ir.DataType.UINT8) if tensor is None else tensor.dtype
    )

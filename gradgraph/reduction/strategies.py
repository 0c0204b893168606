"""Strategies that shrink models: generators of smaller candidates, the largest reductions first.

After each candidate, the generator is sent whether the candidate still has the fault, and continues from the last one
that had it. The argument ``learn`` of a strategy returns the facts about a model (types and values).
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator, Mapping

import numpy as np
import onnx
import onnx.inliner
from onnx import numpy_helper

from gradgraph.files.protos import copied, node_graphs, proto_graphs, proto_nodes, proto_tensors
from gradgraph.reduction.submodels import Learn, part

Tries = Generator[onnx.ModelProto, bool, None]
Strategy = Callable[[onnx.ModelProto, Learn], Tries]

_OPEN = (1, 2, 3, 4, 8, 16, 32, 64)  # sizes to try for symbolic dimensions
_DIVISORS = (64, 32, 16, 8, 4, 3, 2)
_SMALLEST = 2  # minimum size to try: a size of 1 broadcasts, which may change the fault
_STEERING = 64  # elements: smaller integer tensors may contain sizes


def fewer_nodes(model: onnx.ModelProto, learn: Learn) -> Tries:
    """Yield models without half of the nodes, then a quarter, … (delta debugging: Zeller and Hildebrandt, 2002)."""
    facts, kept = learn(model), [*range(len(model.graph.node))]
    length = (len(kept) + 1) // 2
    while length:
        start = 0
        while start < len(kept):
            rest = kept[:start] + kept[start + length :]
            small = part(model, rest, facts)
            if small is not None and (yield small):
                kept = rest
            else:
                start += length
        length = min(length, len(kept) + 1) // 2


def fewer_outputs(model: onnx.ModelProto, learn: Learn) -> Tries:
    """Yield models without one of the outputs, one output after the other."""
    facts, places = learn(model), range(len(model.graph.node))
    for name in [o.name for o in model.graph.output]:
        small = copied(model)
        rest = [o for o in model.graph.output if o.name != name]
        del small.graph.output[:]
        small.graph.output.extend(rest)
        candidate = part(small, places, facts) if rest else None
        if candidate is not None and (yield candidate):
            model = small


def bypassed(model: onnx.ModelProto, learn: Learn) -> Tries:
    """Yield models without one node, also in bodies; readers of its first output read one of its inputs instead."""
    types = learn(model).types
    for name in [y for g in proto_graphs(model) for n in g.node for y in n.output[:1] if y]:
        small = copied(model)
        places = [(g, n) for g in proto_graphs(small) for n in g.node if n.output and n.output[0] == name]
        if not places:
            continue
        graph, node = places[0]
        if any(o.name == name for o in graph.output):
            continue
        kind = types[name].SerializeToString() if name in types else None
        sources = [x for x in node.input if x and (x not in types or types[x].SerializeToString() == kind)]
        for source in dict.fromkeys(sources):
            _read_instead(small, {name: source})
            graph.node.remove(node)
            whole = part(small, range(len(small.graph.node)), learn(small))
            if whole is not None and (yield whole):
                model = whole
                break
            small = copied(model)
            graph, node = next((g, n) for g in proto_graphs(small) for n in g.node if n.output and n.output[0] == name)


def without_branches(model: onnx.ModelProto, learn: Learn) -> Tries:
    """Yield models in which an If is replaced by the nodes of one branch."""
    for name in [n.output[0] for n in model.graph.node if n.op_type == "If"]:
        for branch in ("then_branch", "else_branch"):
            small = copied(model)
            place, node = next((i, n) for i, n in enumerate(small.graph.node) if n.output and n.output[0] == name)
            body = next(a.g for a in node.attribute if a.name == branch)
            inner = [*map(copied, body.node)]
            given = dict(zip((o.name for o in body.output), node.output, strict=True))
            for each in inner:
                each.output[:] = [given.get(y, y) for y in each.output]
                for reader in proto_nodes([each]):
                    reader.input[:] = [given.get(x, x) for x in reader.input]
            nodes = [*small.graph.node[:place], *inner, *small.graph.node[place + 1 :]]
            weights = [*body.initializer]
            own = [*map(copied, nodes)]
            small.graph.initializer.extend(weights)
            del small.graph.node[:]
            small.graph.node.extend(own)
            if (yield small):
                model = small
                break


def without_functions(model: onnx.ModelProto, learn: Learn) -> Tries:
    """Yield the model with its model-local functions inlined, if it has any."""
    if model.functions:
        yield onnx.inliner.inline_local_functions(model)


def bare(model: onnx.ModelProto, learn: Learn) -> Tries:
    """Yield the model without ``value_info``, the recorded types and shapes of inner values."""
    small = copied(model)
    for graph in proto_graphs(small):
        del graph.value_info[:]
    yield small


def fixed_sizes(model: onnx.ModelProto, learn: Learn) -> Tries:
    """Yield models with a symbolic dimension replaced by a number, one dimension after the other."""
    for name in sorted({d.dim_param for d in _dims(model) if d.dim_param}):
        for number in _OPEN:
            small = copied(model)
            for dim in _dims(small):
                if dim.dim_param == name:
                    dim.dim_value = number
            if (yield small):
                model = small
                break
            if (yield _without_inner_sizes(small)):
                model = _without_inner_sizes(small)
                break


def smaller_sizes(model: onnx.ModelProto, learn: Learn) -> Tries:
    """Yield models with smaller sizes: all sizes divided by a common factor, then one size reduced after the other.

    Weights, small integer tensors and attributes are adapted.
    """
    by_all = ({n: n // d for n in _sizes(model) if n % d == 0 and n > d} for d in _DIVISORS)
    by_one = ({n: m} for n in sorted(_sizes(model), reverse=True) for m in (_SMALLEST, 3, 4, n // 2) if m < n)
    for mapping in (*by_all, *by_one):
        if mapping.keys() & _sizes(model):
            small = _resized(model, mapping)
            if (yield small):
                model = small
            elif (yield _without_inner_sizes(small)):
                model = _without_inner_sizes(small)


STRATEGIES: tuple[Strategy, ...] = (
    fixed_sizes, fewer_nodes, fewer_outputs, without_functions, without_branches, bypassed, bare, smaller_sizes,
)  # fmt: skip


def _read_instead(model: onnx.ModelProto, names: Mapping[str, str]) -> None:
    for node in proto_nodes(model.graph.node):
        node.input[:] = [names.get(x, x) for x in node.input]
        for body in node_graphs(node):
            for output in body.output:
                output.name = names.get(output.name, output.name)


def _without_inner_sizes(model: onnx.ModelProto) -> onnx.ModelProto:
    small = copied(model)
    for graph in proto_graphs(small):
        del graph.value_info[:]
    for output in small.graph.output:
        output.type.tensor_type.ClearField("shape")
    return small


def _dims(model: onnx.ModelProto) -> Iterator[onnx.TensorShapeProto.Dimension]:
    for graph in proto_graphs(model):
        for value in (*graph.input, *graph.value_info, *graph.output):
            yield from value.type.tensor_type.shape.dim


def _sizes(model: onnx.ModelProto) -> set[int]:
    """Return all axis lengths of inputs and weights that are larger than ``_SMALLEST``."""
    inputs = (d.dim_value for v in model.graph.input for d in v.type.tensor_type.shape.dim)
    weights = (d for t in model.graph.initializer for d in t.dims)
    return {n for n in (*inputs, *weights) if n > _SMALLEST}


def _resized(model: onnx.ModelProto, mapping: Mapping[int, int]) -> onnx.ModelProto:
    """Return a copy of a model with axis lengths replaced by ``mapping`` (old length → new length).

    They are replaced in shapes, weights, small integer tensors and attributes.
    """
    small = copied(model)
    for dim in _dims(small):
        if dim.dim_value in mapping:
            dim.dim_value = mapping[dim.dim_value]
    for tensor in proto_tensors(small):
        _resize(tensor, mapping)
    for node in proto_nodes(small.graph.node):
        for attribute in node.attribute:
            if attribute.type == onnx.AttributeProto.INT:
                attribute.i = mapping.get(attribute.i, attribute.i)
            elif attribute.type == onnx.AttributeProto.INTS:
                attribute.ints[:] = [mapping.get(i, i) for i in attribute.ints]
    return small


def _resize(tensor: onnx.TensorProto, mapping: Mapping[int, int]) -> None:
    whole = tensor.data_type in (onnx.TensorProto.INT64, onnx.TensorProto.INT32)
    if mapping.keys().isdisjoint(tensor.dims) and not whole:
        return
    array = numpy_helper.to_array(tensor)
    array = array[tuple(slice(mapping.get(n, n)) for n in array.shape)]
    if whole and array.size <= _STEERING:
        array = np.vectorize(lambda n: mapping.get(int(n), n), otypes=[array.dtype])(array) if array.size else array
    tensor.CopyFrom(numpy_helper.from_array(np.ascontiguousarray(array).reshape(array.shape), tensor.name))


def size_of(model: onnx.ModelProto) -> tuple[int, int]:
    """Return the number of nodes and the number of bytes of a model."""
    return sum(1 for _ in proto_nodes(model.graph.node)), model.ByteSize()


def apply_strategies(
    model: onnx.ModelProto, strategies: Iterable[Strategy], shows: Callable[[onnx.ModelProto], bool], learn: Learn
) -> onnx.ModelProto:
    """Return the smallest model that the strategies find, each applied to the smallest model so far.

    Args:
        model: the model to reduce.
        strategies: the strategies to apply, in order.
        shows: returns whether a model still has the fault.
        learn: returns the facts about a model that strategies need.
    """
    for way in strategies:
        tries, kept = way(model, learn), False
        try:
            candidate = next(tries)
            while True:
                kept = shows(candidate)
                if kept:
                    model = candidate
                candidate = tries.send(kept)
        except StopIteration:
            pass
    return model

"""Analysis of which state tensors a training session may overwrite with their next values.

A run may use one buffer for the old and the next value if, in any execution order, every node that reads the old value
has read it before the next one is written:

1. every other reader of the tensor, or of a view of it, is an ancestor of the node that writes the next value;
2. if that node reads the tensor itself, it reads each element no later than it writes it;
3. the tensor and its views are not outputs of the model, and no body of a control-flow node reads them.

The analysis reads the graph that onnxruntime executes, after its optimizations.

The weight W of a matrix product usually violates condition 1: the gradient of the product's input, dX = dY·Wᵀ, reads W,
but no update depends on dX. Before a graph is passed to onnxruntime, ``with_updates_last`` therefore makes the updates
of large tensors wait for dX. It passes another input of the update through a Reshape that keeps the shape: the target
shape contains zeros, each of which copies a size, and is computed from an element of dX.
"""

from __future__ import annotations

import functools
import heapq
import math
import operator
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np
import onnx
from onnx import helper, numpy_helper

from gradgraph.backends.ort_native import library as native
from gradgraph.files.protos import names_in_bodies
from gradgraph.graph import lifetimes
from gradgraph.graph.shapes import shape_of_type, sizes_or

VIEWS = lifetimes.VIEWS | {"Optional", "OptionalGetElement"}
"""Operators whose output onnxruntime lets share the memory of their first input."""

OVERWRITING: dict[tuple[str, str], tuple[int, ...]] = {
    **{("", name): (0, 1) for name in ("Add", "Sub", "Mul", "Div")},  # element by element
    # these copy their data input to the output first, unless both have the same memory
    **{("", name): (0,) for name in ("ScatterND", "ScatterElements")},
    (native.DOMAIN, "AdamUpdate"): (0, 1, 2, 3),  # element by element, too
    (native.DOMAIN, "MomentumUpdate"): (0, 1, 2),
}
"""Domain and operator → the inputs that it may overwrite with outputs of the same shape."""


LARGE = 1 << 18
"""Minimum elements of a tensor for which saving its second copy is worth the ten nodes that make its update wait."""


def with_updates_last(model: onnx.ModelProto, next_of: Mapping[str, str]) -> onnx.ModelProto:
    """Make the updates of large state tensors run after all their readers, in place; return ``model``.

    ``model`` is a train graph in topological order; ``next_of`` as for ``overwritable``.
    """
    waits = _Readers(model.graph).not_waiting(next_of, large_of(model, next_of))
    if not waits:
        return model
    nodes = list(model.graph.node)
    scope = "in_place"
    while any(y.startswith(f"{scope}/") for node in nodes for y in node.output):  # a name in the user's model
        scope += "_"
    for name, (updates, others) in waits.items():
        # for each update, the last input that is not the tensor itself: usually the smallest one
        last = {i: [k for k, x in enumerate(nodes[i].input) if x not in ("", name)][-1:] for i in updates}
        if all(last.values()):
            turn = _write_turn(model.graph, f"{scope}/{name}", [nodes[i].output[0] for i in others])
            for i, (place,) in last.items():
                let_wait(model.graph, nodes[i], place, turn)
    sort_nodes(model.graph)
    return model


def large_of(model: onnx.ModelProto, next_of: Mapping[str, str]) -> list[str]:
    """Return the names of the updated state tensors of a train graph with at least ``LARGE`` elements."""
    sizes = {x.name: math.prod(sizes_or(shape_of_type(x.type), 0)) for x in model.graph.input}
    return [name for name, size in sizes.items() if name in next_of and size >= LARGE]


def append(graph: onnx.GraphProto, op_type: str, inputs: Sequence[str], output: str, **attributes: Any) -> str:
    """Append a node, to be sorted later by :func:`sort_nodes`; return the name of its output."""
    graph.node.append(helper.make_node(op_type, inputs, [output], **attributes))
    return output


def _write_turn(graph: onnx.GraphProto, scope: str, tensors: Sequence[str]) -> str:
    """Append nodes that compute the int64 vector [0] from elements of all ``tensors``; return its name.

    A node that reads the vector runs after all ``tensors`` have been computed.
    """
    numbers = {"flat": [-1], "from": [0], "to": [1]}
    graph.initializer.extend(numpy_helper.from_array(np.array(v), f"{scope}/{k}") for k, v in numbers.items())
    firsts = []
    for i, tensor in enumerate(tensors):
        row = append(graph, "Reshape", [tensor, f"{scope}/flat"], f"{scope}/row{i}")
        first = append(graph, "Slice", [row, f"{scope}/from", f"{scope}/to"], f"{scope}/first{i}")
        firsts.append(append(graph, "Cast", [first], f"{scope}/float{i}", to=onnx.TensorProto.FLOAT))
    least = append(graph, "Min", firsts, f"{scope}/least")
    no = append(graph, "Less", [least, least], f"{scope}/no")  # false, of NaN too
    return append(graph, "Cast", [no], f"{scope}/zero", to=onnx.TensorProto.INT64)


def let_wait(graph: onnx.GraphProto, node: onnx.NodeProto, place: int, turn: str) -> None:
    """Make ``node`` wait for the tensor ``turn``, an int64 vector of one zero.

    The node's input at index ``place`` passes through a Reshape to zeros (each copies a size) plus ``turn``.
    """
    x, scope, zero = node.input[place], f"{turn}/{node.output[0]}", numpy_helper.from_array(np.array([0]))
    shape = append(graph, "Shape", [x], f"{scope}/shape")
    rank = append(graph, "Shape", [shape], f"{scope}/rank")
    zeros = append(graph, "ConstantOfShape", [rank], f"{scope}/zeros", value=zero)
    copied = append(graph, "Add", [zeros, turn], f"{scope}/copied")
    node.input[place] = append(graph, "Reshape", [x, copied], f"{scope}/late")


def sort_nodes(graph: onnx.GraphProto) -> None:
    """Sort nodes topologically, in place; of several ready nodes, the first in the file comes next.

    Nodes without readers come last, in file order, since onnxruntime begins with the ancestors of the last node in the
    file.
    """
    nodes = list(graph.node)
    writer = {name: i for i, node in enumerate(nodes) for name in node.output if name}
    before = [{writer[x] for x in (*node.input, *names_in_bodies(node)) if x in writer} - {i}
              for i, node in enumerate(nodes)]  # fmt: skip
    missing, behind = [len(b) for b in before], defaultdict[int, list[int]](list)
    for i, b in enumerate(before):
        for j in b:
            behind[j].append(i)
    ready, order = [i for i, count in enumerate(missing) if not count], list[int]()
    while ready:
        order.append(heapq.heappop(ready))
        for i in behind[order[-1]]:
            missing[i] -= 1
            if not missing[i]:
                heapq.heappush(ready, i)
    last = [i for i in range(len(nodes)) if not behind[i]]
    place = {i: k for k, i in enumerate([*(i for i in order if behind[i]), *last])}
    places = (place[i] for i in range(len(nodes)))
    graph.node.sort(key=lambda _: next(places))  # nodes are moved; taking them out and adding them would copy each


def overwritable(model: onnx.ModelProto, next_of: Mapping[str, str], behind: str = "") -> frozenset[str]:
    """Return the state tensors that their next values may overwrite.

    Args:
        model: the graph as onnxruntime executes it: nodes in topological order, functions inlined.
        next_of: state tensor → the output with its next value, of the same shape and type.
        behind: a tensor that must be computed before anything is overwritten.
    """
    return _Readers(model.graph).overwritable(next_of, behind)


class _Readers:
    """An index of the nodes that read each tensor of a graph, for the analysis of overwriting.

    Sets of reader nodes are integers with one bit per reader.
    """

    def __init__(self, graph: onnx.GraphProto) -> None:
        self._nodes = list(graph.node)
        self._outputs = {o.name for o in graph.output}
        self._writer = {name: i for i, node in enumerate(self._nodes) for name in node.output if name}
        self._readers: dict[str, list[int]] = {}
        self._inner: set[str] = set()  # names of tensors that subgraphs read
        for i, node in enumerate(self._nodes):
            inner = names_in_bodies(node)
            self._inner |= inner
            for name in {*node.input, *inner} - {""}:
                self._readers.setdefault(name, []).append(i)

    def overwritable(self, next_of: Mapping[str, str], behind: str) -> frozenset[str]:
        """Return the state tensors that can be overwritten, as the function ``overwritable`` does."""
        if behind and behind not in self._writer:
            return frozenset()
        gates = {self._writer[behind]} if behind else set[int]()
        reading = {name: self._memory(name) for name in next_of}
        readers = gates.union(*(nodes for _, nodes in reading.values()))
        bits = {i: 1 << k for k, i in enumerate(sorted(readers))}
        ancestors = self._ancestors(bits)
        found = set[str]()
        for name, (views, nodes) in reading.items():
            if views & (self._outputs | self._inner) or next_of[name] not in self._writer:
                continue
            last = self._writer[next_of[name]]
            node, others = self._nodes[last], sum(bits[i] for i in {*nodes, *gates} if i != last)
            allowed = OVERWRITING.get((node.domain, node.op_type), ())
            if ancestors[last] & others == others and all(
                place in allowed and x == name for place, x in enumerate(node.input) if x in views
            ):
                found.add(name)
        return frozenset(found)

    def not_waiting(self, next_of: Mapping[str, str], names: Collection[str]) -> dict[str, tuple[list[int], list[int]]]:
        """Return the state tensors whose update does not yet wait for all other readers.

        Return, by name, the indices of two groups of nodes: the update nodes, which read the tensor only to compute its
        next value, and the readers for which they must wait. Tensors whose other readers depend on an update are
        excluded, since waiting would be circular.
        """
        writers = {name: self._writer[following] for name, following in next_of.items() if following in self._writer}
        reading: dict[str, list[int]] = {}
        for name in (n for n in names if n in writers):
            views, nodes = self._memory(name)  # nodes that only create a view are left out below
            reading[name] = [i for i in sorted(nodes) if views.isdisjoint(self._nodes[i].output)]
        bits = {i: 1 << k for k, i in enumerate(sorted({i for readers in reading.values() for i in readers}))}
        ancestors = self._ancestors(bits)
        behind = {name: ancestors[i] | bits.get(i, 0) for name, i in writers.items()}
        once = twice = 0  # the readers that at least one next value depends on, and at least two
        for needed in {i: behind[name] for name, i in writers.items()}.values():  # a node may write several
            once, twice = once | needed, twice | (once & needed)
        found = {}
        for name, readers in reading.items():
            others = [i for i in readers if not behind[name] & bits[i]]
            for_others = functools.reduce(operator.or_, (ancestors[i] for i in others), twice)
            updates = [i for i in readers if behind[name] & bits[i] & ~for_others]
            if updates and others and name not in self._inner:
                found[name] = updates, others
        every = functools.reduce(operator.or_, (bits[i] for updates, _ in found.values() for i in updates), 0)
        return {
            name: (updates, others)
            for name, (updates, others) in found.items()
            if not any(ancestors[i] & every for i in others)
        }

    def _memory(self, name: str) -> tuple[set[str], set[int]]:
        """Return the names of a tensor and its views, and the indices of the nodes that read any of them."""
        views, nodes, waiting = {name}, set[int](), [name]
        while waiting:
            for i in self._readers.get(waiting.pop(), ()):
                nodes.add(i)
                node = self._nodes[i]
                # a view that is an output of the model gets memory of its own
                if node.op_type in VIEWS and not views.issuperset(node.output) and node.output[0] not in self._outputs:
                    views.add(node.output[0])
                    waiting.append(node.output[0])
        return views, nodes

    def _ancestors(self, bits: Mapping[int, int]) -> list[int]:
        """Return, for each node, the bit mask of its ancestors in ``bits`` (node index → bit)."""
        found: list[int] = []
        before: dict[str, int] = {}  # tensor → bits of the readers that it depends on
        for i, node in enumerate(self._nodes):
            mask = 0
            for name in {*node.input, *names_in_bodies(node)}:
                mask |= before.get(name, 0)
            found.append(mask)
            for name in node.output:
                before[name] = mask | bits.get(i, 0)
        return found

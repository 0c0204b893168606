"""A training session may write the next values of some state tensors over the old ones; this finds which.

One buffer as input and output of the same run is safe if, in whatever order nodes run, everything that reads the old
value has read it before the new one is written:

1. every other reader of the tensor, or of a view of it, is an ancestor of the node that writes the next value;
2. that node, if it reads the tensor itself, reads each element no later than it writes it there;
3. the tensor and its views are no outputs of the model, and no body of a control-flow node reads them.

The graph in question is the one that onnxruntime executes: its optimised form.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import onnx

from gradgraph.backends.ort_native import library as native

VIEWS = {"Identity", "Reshape", "Flatten", "Squeeze", "Unsqueeze", "Optional", "OptionalGetElement"}
"""Operators whose output onnxruntime lets share the memory of their first input."""

OVERWRITING: dict[tuple[str, str], tuple[int, ...]] = {
    **{("", name): (0, 1) for name in ("Add", "Sub", "Mul", "Div")},  # element by element
    **{
        ("", name): (0,) for name in ("ScatterND", "ScatterElements")
    },  # the data are copied first, if they lie elsewhere
    (native.DOMAIN, "AdamUpdate"): (0, 1, 2, 3),  # likewise element by element
    (native.DOMAIN, "MomentumUpdate"): (0, 1, 2),
}
"""Domain and operator → the inputs that it may overwrite with its outputs, if they have their shape."""


def overwritable(model: onnx.ModelProto, next_of: Mapping[str, str]) -> frozenset[str]:
    """The state tensors whose next value may be written over them.

    Args:
        model: as onnxruntime executes it: nodes in topological order, functions inlined.
        next_of: state tensor → the output that holds its next value, of the same shape and type.
    """
    return _Readers(model.graph).proven(next_of)


class _Readers:
    """Who reads a tensor, and which of these readers a node depends on: one bit for each reader of a state tensor."""

    def __init__(self, graph: onnx.GraphProto) -> None:
        self._nodes = list(graph.node)
        self._outputs = {o.name for o in graph.output}
        self._writer = {name: i for i, node in enumerate(self._nodes) for name in node.output if name}
        self._readers: dict[str, list[int]] = {}
        self._inner: set[str] = set()  # names that bodies mention
        for i, node in enumerate(self._nodes):
            inner = set(_names_in_bodies(node))
            self._inner |= inner
            for name in {*node.input, *inner} - {""}:
                self._readers.setdefault(name, []).append(i)

    def proven(self, next_of: Mapping[str, str]) -> frozenset[str]:
        reading = {name: self._memory(name) for name in next_of}
        bits = {i: 1 << k for k, i in enumerate(sorted({i for _, nodes in reading.values() for i in nodes}))}
        ancestors = self._ancestors(bits)
        return frozenset(
            name
            for name, (views, nodes) in reading.items()
            if not views & (self._outputs | self._inner)
            and self._is_last(name, next_of[name], views, nodes, bits, ancestors)
        )

    def _memory(self, name: str) -> tuple[set[str], set[int]]:
        """The tensor with its views, and the nodes that read any of them."""
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
        """For each node, the bits of the readers among its ancestors."""
        found: list[int] = []
        before: dict[str, int] = {}  # tensor → bits of the readers that it depends on
        for i, node in enumerate(self._nodes):
            mask = 0
            for name in {*node.input, *_names_in_bodies(node)}:
                mask |= before.get(name, 0)
            found.append(mask)
            for name in node.output:
                before[name] = mask | bits.get(i, 0)
        return found

    def _is_last(
        self, name: str, following: str, views: set[str], nodes: set[int], bits: Mapping[int, int], ancestors: list[int]
    ) -> bool:
        """Whether the node that writes ``following`` comes after all others that read ``name``."""
        if following not in self._writer:
            return False
        last = self._writer[following]
        others = sum(bits[i] for i in nodes if i != last)
        return ancestors[last] & others == others and (
            last not in nodes or _may_overwrite(self._nodes[last], name, views)
        )


def _may_overwrite(node: onnx.NodeProto, name: str, views: set[str]) -> bool:
    """Whether ``node`` reads ``name`` only where it may, and no view of it."""
    places = [i for i, read in enumerate(node.input) if read in views]
    allowed = OVERWRITING.get((node.domain, node.op_type), ())
    return all(i in allowed and node.input[i] == name for i in places)


def _names_in_bodies(node: onnx.NodeProto) -> Iterator[str]:
    """Every name that the bodies of a control-flow node mention: those of its own tensors do no harm."""
    waiting = [a.g for a in node.attribute if a.type == onnx.AttributeProto.GRAPH]
    while waiting:
        graph = waiting.pop()
        yield from (o.name for o in graph.output)
        for inner in graph.node:
            yield from inner.input
            waiting += [a.g for a in inner.attribute if a.type == onnx.AttributeProto.GRAPH]

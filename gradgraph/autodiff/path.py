"""Activity analysis: find the nodes on paths from the differentiation variables (``wrt``) to the targets.

The path is the intersection of two graph searches, forwards from ``wrt`` and backwards from the targets, in linear
time. Edges lead from each value to the values that depend on it smoothly: from a node's inputs to its outputs; into and
out of the bodies of If, Loop and Scan; and from a loop's state at the end of an iteration to the start of the next. A
captured value needs no edge of its own, because nodes inside the body read it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import product

import onnx_ir as ir

from gradgraph.graph.checks import WITH_BODIES, describe, subgraphs
from gradgraph.rules import registry

Edge = tuple[ir.Value | None, ir.Value]


def carries(value: ir.Value | None) -> bool:
    """Whether ``value`` carries gradients: floating-point tensors do, and sequences and optionals of them."""
    return value is not None and value.dtype is not None and value.dtype.is_floating_point()


def is_tensor(value: ir.Value) -> bool:
    """Whether ``value`` is a tensor, or may be one because its type is unknown; not a sequence or optional."""
    return value.type is None or isinstance(value.type, ir.TensorType)


def _may_carry(value: ir.Value | None) -> bool:
    """Whether ``value`` is floating-point or has no type, like outputs of unknown operators, reported later."""
    return value is not None and (carries(value) or value.type is None)


# --- inputs of nodes -------------------------------------------------------------------------------------


def reads(node: ir.Node) -> Iterator[ir.Value]:
    """Yield every value that ``node`` reads: its inputs, and the outer values that its bodies capture."""
    yield from [v for v in node.inputs if v is not None]
    if node.domain or node.op_type in WITH_BODIES:
        yield from captures(node)


def captures(node: ir.Node) -> Iterator[ir.Value]:
    """Yield the outer values that the subgraphs of ``node`` read, once per read."""
    for graph in subgraphs(node):
        inside = set(graph.inputs) | set(graph.initializers.values())
        nodes = list(graph.all_nodes())
        inside.update(out for n in nodes for out in n.outputs)
        inside.update(v for n in nodes for g in subgraphs(n) for v in (*g.inputs, *g.initializers.values()))
        read = [v for n in nodes for v in n.inputs] + list(graph.outputs)
        yield from (v for v in read if v is not None and v not in inside)


def reads_smoothly(node: ir.Node) -> Iterator[ir.Value]:
    """Yield the values that ``node`` reads, except inputs that its gradient rule treats as settings, such as shapes."""
    rule = registry.rule_of(node)
    settings = rule.settings if rule is not None else ()
    if not settings:
        yield from reads(node)
        return
    held = {v for i, v in enumerate(node.inputs) if i in settings}
    kept = {v for i, v in enumerate(node.inputs) if i not in settings}
    yield from (v for v in reads(node) if v not in held or v in kept)


# --- edges ---------------------------------------------------------------------------------------------


def _if(node: ir.Node) -> Iterator[Edge]:
    for branch in subgraphs(node):
        yield from zip(branch.outputs, node.outputs, strict=False)


def _loop(node: ir.Node) -> Iterator[Edge]:
    body = node.attributes["body"].as_graph()
    return _iterated(node, node.inputs[2:], [], body.inputs[2:], body.outputs[1:])


def _scan(node: ir.Node) -> Iterator[Edge]:
    body = node.attributes["body"].as_graph()
    count = len(node.inputs) - node.attributes["num_scan_inputs"].as_int()
    return _iterated(node, node.inputs[:count], node.inputs[count:], body.inputs, body.outputs)


def _iterated(
    node: ir.Node,
    initial: Sequence[ir.Value | None],
    scanned: Sequence[ir.Value | None],
    inner: Sequence[ir.Value],
    results: Sequence[ir.Value],
) -> Iterator[Edge]:
    count = len(initial)
    yield from zip((*initial, *scanned), inner, strict=True)
    yield from zip(results, node.outputs, strict=False)
    yield from zip(results[:count], inner[:count], strict=True)
    yield from zip(initial, node.outputs[:count], strict=True)  # a loop without iterations returns its initial states


def _by_batch(node: ir.Node) -> Iterator[Edge]:
    """Yield edges of BatchNormalization in training mode: the old running statistics affect only the new ones."""
    x, scale, bias, *running = node.inputs
    y, *updated = node.outputs
    yield from ((v, y) for v in (x, scale, bias))
    for old, new in zip(running, updated, strict=False):
        yield from ((x, new), (old, new))


_BODIES: Mapping[str, Callable[[ir.Node], Iterator[Edge]]] = {"If": _if, "Loop": _loop, "Scan": _scan}


def _has_body(node: ir.Node) -> bool:
    return node.op_type in _BODIES and node.domain == ""


def _edges(node: ir.Node) -> Iterable[Edge]:
    if registry.stops_gradient(node):
        return ()
    if node.op_type == "BatchNormalization" and node.domain == "" and node.attributes["training_mode"].as_int():
        return _by_batch(node)
    return _BODIES[node.op_type](node) if _has_body(node) else product(reads_smoothly(node), node.outputs)


class Path:
    """The nodes, in graph order, that carry a gradient from ``targets`` back to ``wrt``.

    Attributes:
        nodes: the nodes on the path, without nodes in bodies.
        every_node: the nodes on the path, including nodes in bodies.
        reached: every value that depends on ``wrt`` smoothly.
        active: the values in ``reached`` that a target depends on smoothly.
    """

    def __init__(self, graph: Iterable[ir.Node], targets: Iterable[ir.Value], wrt: Iterable[ir.Value]) -> None:
        self.targets, self.wrt = list(targets), list(wrt)
        nodes = list(graph)
        inside = list(_with_bodies(nodes))
        after: dict[ir.Value, list[ir.Value]] = defaultdict(list)
        before: dict[ir.Value, list[ir.Value]] = defaultdict(list)
        for node in inside:
            for x, y in _edges(node):
                if x is not None and _may_carry(x) and _may_carry(y):
                    after[x].append(y)
                    before[y].append(x)
        self.reached = _search(self.wrt, after)
        self.active = _search(self.targets, before) & self.reached
        self._computed = self.active & {y for x in self.reached for y in after.get(x, ())}
        self.nodes = [n for n in nodes if self.is_on(n)]
        self.every_node = [n for n in inside if self.is_on(n)]

    def is_on(self, node: ir.Node) -> bool:
        return any(y in self._computed for y in node.outputs)

    def captured(self, node: ir.Node) -> list[ir.Value]:
        """Return the outer values that the bodies of ``node`` read, and whose gradient the bodies compute."""
        outside = {v for v in captures(node) if v in self.active}
        inner = [n for graph in subgraphs(node) for n in graph.all_nodes() if self.is_on(n)]
        read = [v for n in inner for v in (n.inputs if _has_body(n) else reads_smoothly(n))]
        read += [v for graph in subgraphs(node) for v in graph.outputs]
        return list(dict.fromkeys(v for v in read if v in outside))

    def has_reader(self, value: ir.Value) -> bool:
        """Whether ``value`` is a graph output, or a node on the path reads it."""
        return value.is_graph_output() or any(y in self.active for node in value.consumers() for y in node.outputs)

    def where_it_ends(self, value: ir.Value) -> str:
        """Return the reason, for an error message, why no path leads from ``value`` to the targets."""
        if not value.consumers() and not value.is_graph_output():
            return "nothing reads it"
        for node in value.consumers():
            if registry.stops_gradient(node):
                return f"its path ends at {describe(node)}, which has no gradient: {registry.why_it_stops(node)}"
            if value not in set(reads_smoothly(node)):
                return f"{describe(node)} reads it as a setting, which has no gradient"
            if not any(map(carries, node.outputs)):
                return f"its path ends at {describe(node)}, whose output is not floating-point"
        return "no path of floating-point tensors leads from it to the output"


def _with_bodies(nodes: Iterable[ir.Node]) -> Iterator[ir.Node]:
    """Yield each node, followed by the nodes in its bodies."""
    stack = list(nodes)[::-1]
    while stack:
        node = stack.pop()
        yield node
        if _has_body(node):
            stack.extend(n for graph in subgraphs(node) for n in graph)


def _search(start: Iterable[ir.Value], edges: Mapping[ir.Value, Sequence[ir.Value]]) -> set[ir.Value]:
    found = set(start)
    stack = list(found)
    while stack:
        new = [v for v in edges.get(stack.pop(), ()) if v not in found]
        found.update(new)
        stack.extend(new)
    return found

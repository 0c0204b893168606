"""Activity analysis: which nodes lie between what is differentiated and what it is differentiated by."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import onnx_ir as ir

from gradgraph import registry


def carries(value: ir.Value | None) -> bool:
    """Gradients flow through floating tensors only; integer, boolean and string paths stop them."""
    return value is not None and value.dtype is not None and value.dtype.is_floating_point()


def _may_carry(value: ir.Value) -> bool:
    """What an unknown operator computes may be floating: its way must end in an error, not silently."""
    return carries(value) or value.type is None


def reads(node: ir.Node) -> Iterator[ir.Value]:
    """Every value the node reads: its inputs, and what its subgraphs capture from outside."""
    yield from (v for v in node.inputs if v is not None)
    for graph in _subgraphs(node):
        inside = set(graph.inputs) | set(graph.initializers.values())
        nodes = list(graph.all_nodes())
        inside.update(out for n in nodes for out in n.outputs)
        inside.update(v for n in nodes for g in _subgraphs(n) for v in (*g.inputs, *g.initializers.values()))
        read = [v for n in nodes for v in n.inputs] + list(graph.outputs)
        yield from (v for v in read if v is not None and v not in inside)


def reads_smoothly(node: ir.Node) -> Iterator[ir.Value]:
    """What the node reads as numbers: all but the settings of its rule."""
    rule = registry.rule_of(node)
    settings = rule.settings if rule is not None else ()
    held = {v for i, v in enumerate(node.inputs) if i in settings}
    kept = {v for i, v in enumerate(node.inputs) if i not in settings}
    yield from (v for v in reads(node) if v not in held or v in kept)


def _subgraphs(node: ir.Node) -> Iterator[ir.Graph]:
    for attribute in node.attributes.values():
        if attribute.type == ir.AttributeType.GRAPH:
            yield attribute.value
        elif attribute.type == ir.AttributeType.GRAPHS:
            yield from attribute.value


class Path:
    """The nodes, in graph order, that carry a gradient from ``targets`` back to ``wrt``.

    ``reached`` holds every value that depends on ``wrt`` smoothly, whether or not a target reads it.
    """

    def __init__(self, graph: ir.Graph, targets: Iterable[ir.Value], wrt: Iterable[ir.Value]) -> None:
        self.targets, self.wrt = list(targets), list(wrt)
        self.reached = set(self.wrt)
        downstream = []
        for node in graph:
            if registry.stops_gradient(node) or not any(map(_may_carry, node.outputs)):
                continue
            if any(v in self.reached and _may_carry(v) for v in reads_smoothly(node)):
                downstream.append(node)
                self.reached.update(v for v in node.outputs if _may_carry(v))
        wanted = set(self.targets)
        self.nodes: list[ir.Node] = []
        for node in reversed(downstream):
            if any(y in wanted for y in node.outputs):
                self.nodes.append(node)
                wanted.update(v for v in reads_smoothly(node) if v in self.reached)
        self.nodes.reverse()
        self.active = wanted & self.reached

    def where_it_ends(self, value: ir.Value) -> str:
        """Words for an error: where the way from ``value`` to the targets stops."""
        if not value.consumers() and not value.is_graph_output():
            return "nothing reads it"
        for node in value.consumers():
            if registry.stops_gradient(node):
                reason = registry.NO_GRADIENT[registry.key_of(node)]
                return f"its path ends at {node.op_type} (node '{node.name}'), which has no gradient: {reason}"
            if value not in set(reads_smoothly(node)):
                return f"{node.op_type} (node '{node.name}') reads it as a setting, which has no gradient"
            if not any(map(carries, node.outputs)):
                return f"its path ends at {node.op_type} (node '{node.name}'), whose output is not floating"
        return "no path of floating tensors leads from it to the output"

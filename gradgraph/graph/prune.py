"""Remove nodes and initializers that no graph output depends on.

1. A node is removed if neither a node nor the graph's outputs read any of its outputs. The walk is backwards, so values
   that only this node or its bodies needed are removed, too.
2. A remaining node loses trailing outputs that are unread branch results (If) or scan outputs (Loop, Scan); then its
   bodies are pruned.
3. An unread initializer is removed.

Graph inputs and outputs stay. onnx-ir's own pass is not used, as it also drops default attributes that the normal form
relies on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeVar

import onnx_ir as ir

from gradgraph.graph.checks import WITH_BODIES, has_bodies, subgraphs

Node = TypeVar("Node")
Name = TypeVar("Name")


def needed(
    nodes: Iterable[Node],
    results: Iterable[Name],
    made: Callable[[Node], Iterable[Name]],
    read: Callable[[Node], Iterable[Name]],
) -> tuple[list[Node], set[Name]]:
    """Return the nodes that ``results`` depend on, in order, and the set of values they read, plus ``results``.

    Args:
        nodes: all nodes, in topological order.
        results: the values, or their names.
        made: returns the outputs of a node.
        read: returns the inputs of a node, and the outer values that its bodies read.
    """
    wanted, kept = set(results), list[Node]()
    for node in reversed(list(nodes)):
        if not wanted.isdisjoint(made(node)):
            kept.append(node)
            wanted.update(read(node))
    return kept[::-1], wanted


def prune(model: ir.Model) -> ir.Model:
    """Prune ``model`` in place and return it."""
    graph = model.graph
    prune_graph(graph)
    for name, value in list(graph.initializers.items()):
        if not (is_wanted(value) or value.is_graph_input()):
            del graph.initializers[name]
    return model


def prune_graph(graph: ir.Graph, shorten: bool = True) -> None:
    """Prune ``graph`` and the bodies inside in place; with ``shorten=False`` remaining nodes keep all their outputs."""
    stack = [reversed(graph)]
    gone: dict[ir.Graph, list[ir.Node]] = {}  # removed together: each removal scans all outputs of the graph
    while stack:
        node = next(stack[-1], None)
        if node is None:
            stack.pop()
        elif not any(map(is_wanted, node.outputs)):
            detach(node)
            assert isinstance(node.graph, ir.Graph)
            gone.setdefault(node.graph, []).append(node)
        elif node.op_type in WITH_BODIES and has_bodies(node):
            bodies = list(subgraphs(node))
            if shorten:
                _shorten(node, bodies)
            stack.extend(reversed(body) for body in bodies)
    for owner, nodes in gone.items():
        owner.remove(nodes)


def is_wanted(value: ir.Value) -> bool:
    """Whether a node reads ``value``, or it is an output of its graph."""
    return value.is_graph_output() or bool(value.uses())


def detach(node: ir.Node) -> None:
    """Disconnect ``node`` and its bodies from their inputs, before the node is removed."""
    for body in subgraphs(node):
        for inner in body.all_nodes():
            inner.resize_inputs(0)
    node.resize_inputs(0)


def _shorten(node: ir.Node, bodies: list[ir.Graph]) -> None:
    """Drop trailing unread outputs of an If, Loop or Scan and of its bodies, except states and the first output."""
    kept = max((i + 1 for i, y in enumerate(node.outputs) if is_wanted(y)), default=1)
    if node.op_type == "Loop":
        kept = max(kept, len(node.inputs) - 2, 1)
    elif node.op_type == "Scan":
        kept = max(kept, len(node.inputs) - node.attributes["num_scan_inputs"].as_int(), 1)
        for name in ("scan_output_axes", "scan_output_directions"):
            if (given := node.attributes.get_ints(name)) is not None:
                left = len(given) - (len(node.outputs) - kept)
                node.attributes[name] = ir.AttrInt64s(name, given[:left])
    elif node.op_type != "If":
        return
    dropped = len(node.outputs) - kept
    if dropped:
        node.resize_outputs(kept)
        for body in bodies:
            del body.outputs[-dropped:]

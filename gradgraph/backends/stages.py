"""Assign nodes to stages: no counted edge is on a path between nodes of one stage, which can therefore be merged."""

from __future__ import annotations

from collections.abc import Callable

import onnx_ir as ir

from gradgraph.graph.checks import has_bodies


def stages(graph: ir.Graph, counts: Callable[[ir.Node, ir.Node], bool]) -> dict[ir.Node, int]:
    """Return, for each node of a topologically sorted graph, the largest number of counted edges on any path to it.

    ``counts`` is whether the edge from a node to a reader is counted. A node with bodies (If, Loop, Scan) may read any
    value, so it starts a new stage after all nodes before it.
    """
    found: dict[ir.Node, int] = {}
    latest = 0
    for node in graph:
        stage = latest + 1 if has_bodies(node) else 0
        for before in (x.producer() for x in node.inputs if x is not None):
            if before is not None and before in found:
                stage = max(stage, found[before] + counts(before, node))
        found[node] = stage
        latest = max(latest, stage)
    return found

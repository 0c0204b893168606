"""The order in which onnxruntime executes the nodes of a graph."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import onnx_ir as ir

from gradgraph.autodiff.path import reads


def as_executed(graph: ir.Graph) -> list[ir.Node]:
    """Return the nodes of ``graph`` in onnxruntime's execution order, assuming that onnxruntime keeps all of them."""
    place = {node: i for i, node in enumerate(graph)}
    needed = [{place[m] for x in reads(node) if (m := x.producer()) in place} for node in place]
    nodes = list(place)
    return [nodes[i] for i in executed_order(needed)]


def executed_order(needed: Sequence[Collection[int]]) -> list[int]:
    """Return the indices of nodes in onnxruntime's execution order, from the indices of the producers of their inputs.

    onnxruntime starts from the last node without readers, and executes the producer of a node's last input first.
    """
    found, seen = list[int](), set[int]()
    stack = [(i, False) for i in sorted(set(range(len(needed))).difference(*needed))]
    while stack:
        i, is_ready = stack.pop()
        if is_ready:
            found.append(i)
        elif i not in seen:
            seen.add(i)
            stack.append((i, True))
            stack.extend((j, False) for j in sorted(needed[i]))
    return found

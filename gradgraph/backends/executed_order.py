"""The order in which onnxruntime computes the nodes of a graph."""

from __future__ import annotations

import onnx_ir as ir

from gradgraph.autodiff.path import reads


def as_executed(graph: ir.Graph) -> list[ir.Node]:
    """The nodes of ``graph`` in the order in which onnxruntime computes them, as far as it leaves them what they are.

    It begins at the last node that nobody reads, and computes first what the last of several inputs needs.
    """
    place = {node: i for i, node in enumerate(graph)}
    before = {node: sorted({place[m] for x in reads(node) if (m := x.producer()) in place}) for node in place}
    nodes, found, seen = list(place), list[ir.Node](), set[int]()
    stack = [(i, False) for i, node in enumerate(nodes) if not any(y.uses() for y in node.outputs)]
    while stack:
        i, is_ready = stack.pop()
        if is_ready:
            found.append(nodes[i])
        elif i not in seen:
            seen.add(i)
            stack.append((i, True))
            stack.extend((j, False) for j in before[nodes[i]])
    return found

"""Prune: remove what no output needs.

1. A node none of whose outputs is read, by a node or as a graph output, goes; so, walking backwards, does whatever
   only it needed.
2. An initializer that nothing reads goes.

Graph inputs and outputs stay. Written here rather than taken from onnx-ir, whose pass also drops default attributes
that the normal form relies on.
"""

from __future__ import annotations

import onnx_ir as ir


def prune(model: ir.Model) -> ir.Model:
    """Prune ``model`` in place and return it."""
    graph = model.graph
    outputs = set(graph.outputs)
    for node in reversed(graph):
        if not any(out in outputs or out.uses() for out in node.outputs):
            graph.remove(node, safe=True)
    for name, value in list(graph.initializers.items()):
        if not (value.uses() or value in outputs or value.is_graph_input()):
            del graph.initializers[name]
    return model

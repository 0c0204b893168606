"""Models whose weights are Constant nodes, converted from models that store them as initializers."""

from __future__ import annotations

from collections.abc import Iterable

import onnx


def with_constants(model: onnx.ModelProto, but: Iterable[str] = ()) -> onnx.ModelProto:
    """Return a copy with a Constant node for each initializer, also in bodies, except the names in ``but``."""
    copy = onnx.ModelProto.FromString(model.SerializeToString())
    _write_constants(copy.graph, set(but))
    return copy


def _write_constants(graph: onnx.GraphProto, but: set[str]) -> None:
    tensors = [t for t in graph.initializer if t.name not in but]
    kept = [t for t in graph.initializer if t.name in but]
    nodes = [onnx.helper.make_node("Constant", [], [t.name], value=t) for t in tensors] + list(graph.node)
    for node in nodes[len(tensors) :]:
        for body in (g for a in node.attribute for g in (a.g, *a.graphs) if g.node):
            _write_constants(body, but)
    del graph.initializer[:], graph.node[:]
    graph.initializer.extend(kept)
    graph.node.extend(nodes)

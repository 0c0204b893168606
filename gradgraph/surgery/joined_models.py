"""Joining of two models in one graph: the names of one get a prefix, and its nodes and weights move to the other."""

from __future__ import annotations

import onnx_ir as ir

from gradgraph.graph.constant_nodes import own_tensor


def prefix_names(model: ir.Model, prefix: str) -> None:
    """Prefix the names of all nodes and values of ``model`` except its inputs, in place."""
    inputs = set(model.graph.inputs)
    for graph in (model.graph, *model.graph.subgraphs()):
        values = [*graph.initializers.values(), *(v for node in graph for v in node.outputs)]
        if graph is not model.graph:
            values += graph.inputs
        for node in graph:
            node.name = f"{prefix}{node.name}" if node.name else None
        for value in dict.fromkeys(values):
            if value in inputs or not value.name:
                continue
            if value.const_value is not None:
                value.const_value = own_tensor(value.const_value, value.name)
            value.name = f"{prefix}{value.name}"


def take_in(work: ir.Model, other: ir.Model) -> None:
    """Move the nodes and weights of ``other`` into ``work``; its inputs must have been connected."""
    nodes, weights = list(other.graph), list(other.graph.initializers.values())
    other.graph.outputs.clear()
    other.graph.remove(nodes)
    other.graph.initializers.clear()
    for weight in weights:
        work.graph.register_initializer(weight)
    work.graph.extend(nodes)
    for domain, version in other.opset_imports.items():
        work.opset_imports.setdefault(domain, version)

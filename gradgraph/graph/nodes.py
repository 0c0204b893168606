"""Predicates and accessors of nodes for patterns: operator, inputs, producers."""

from __future__ import annotations

import onnx_ir as ir


def is_standard(node: ir.Node, *op_types: str) -> bool:
    """Whether it is one of these operators of ONNX's own domain."""
    return node.domain == "" and node.op_type in op_types


def input_at(node: ir.Node, i: int) -> ir.Value | None:
    """Input ``i``; None if it is absent or omitted."""
    return node.inputs[i] if i < len(node.inputs) else None


def inputs_of(node: ir.Node) -> list[ir.Value]:
    """The inputs that are present."""
    return [v for v in node.inputs if v is not None]


def made_by(value: ir.Value | None, *op_types: str) -> ir.Node | None:
    """The node that computes ``value``, if it is one of these operators of ONNX's own domain."""
    node = None if value is None else value.producer()
    return node if node is not None and is_standard(node, *op_types) else None


def source_of(value: ir.Value | None, *op_types: str) -> ir.Value | None:
    """The first input of the node that computes ``value``, if it is one of these operators of ONNX's own domain."""
    node = made_by(value, *op_types)
    return None if node is None else input_at(node, 0)


def read_once(value: ir.Value, reader: ir.Node) -> bool:
    """Whether ``reader`` is the only reader, in one place, and in the same graph (a body may run more often)."""
    producer = value.producer()
    same_graph = producer is not None and producer.graph is reader.graph
    return same_graph and not value.is_graph_output() and [node for node, _ in value.uses()] == [reader]

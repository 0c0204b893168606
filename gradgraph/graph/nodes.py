"""Nodes as patterns look at them: which operator they call, what they read, who computes a value."""

from __future__ import annotations

import onnx_ir as ir


def is_standard(node: ir.Node, *op_types: str) -> bool:
    """Is it one of these operators of ONNX's own domain?"""
    return node.domain == "" and node.op_type in op_types


def input_at(node: ir.Node, i: int) -> ir.Value | None:
    """Input ``i``; None where it is absent, at the end as well."""
    return node.inputs[i] if i < len(node.inputs) else None


def inputs_of(node: ir.Node) -> list[ir.Value]:
    """The inputs that are not left out."""
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
    """Does ``reader`` alone read it, in one place and no more often than it is computed, which a body's node may?"""
    producer = value.producer()
    beside = producer is not None and producer.graph is reader.graph
    return beside and not value.is_graph_output() and [node for node, _ in value.uses()] == [reader]

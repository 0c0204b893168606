"""Predicates and accessors of nodes for patterns: operator, inputs, producers."""

from __future__ import annotations

from collections import UserDict
from collections.abc import Mapping, Sequence
from typing import Any

import onnx_ir as ir


def is_standard(node: ir.Node, *op_types: str) -> bool:
    """Whether the operator of ``node`` is one of ``op_types``, in ONNX's own domain."""
    return node.domain == "" and node.op_type in op_types


def input_at(node: ir.Node, i: int) -> ir.Value | None:
    """Return input ``i`` of ``node``; None if the node has fewer inputs or omits this one."""
    return node.inputs[i] if i < len(node.inputs) else None


def inputs_of(node: ir.Node) -> list[ir.Value]:
    """Return the inputs of ``node`` without omitted ones."""
    return [v for v in node.inputs if v is not None]


def made_by(value: ir.Value | None, *op_types: str) -> ir.Node | None:
    """Return the node that computes ``value`` if its operator is one of ``op_types`` of ONNX's domain, else None."""
    node = None if value is None else value.producer()
    return node if node is not None and is_standard(node, *op_types) else None


def source_of(value: ir.Value | None, *op_types: str) -> ir.Value | None:
    """Return the first input of the node that computes ``value`` if the node is one of ``op_types``, else None."""
    node = made_by(value, *op_types)
    return None if node is None else input_at(node, 0)


def before_swap(value: ir.Value | None) -> ir.Value | None:
    """Return the value before the Transpose of the last two axes that computes ``value``, or None if there is none."""
    node = made_by(value, "Transpose")
    if node is None or value is None:
        return None
    rank = None if value.shape is None else len(value.shape)
    perm = list(node.attributes.get_ints("perm", range(rank or 0)[::-1]))
    axes = list(range(len(perm)))
    return node.inputs[0] if len(axes) > 1 and perm == [*axes[:-2], axes[-1], axes[-2]] else None


def read_once(value: ir.Value, reader: ir.Node) -> bool:
    """Whether ``value`` has a single use: an input of ``reader``, in the same graph. A body may run several times."""
    producer = value.producer()
    same_graph = producer is not None and producer.graph is reader.graph
    return same_graph and not value.is_graph_output() and [node for node, _ in value.uses()] == [reader]


def only_reader(value: ir.Value, *op_types: str, ignored: Sequence[ir.Node] = ()) -> ir.Node | None:
    """Return the node with the only use of ``value``; None if there are more or none, or it is a graph output.

    Uses by ``ignored`` nodes do not count. With ``op_types``, the node must be one of these, in ONNX's domain.
    """
    readers = [node for node, _ in value.uses() if node not in ignored]
    is_alone = len(readers) == 1 and not value.is_graph_output()
    return readers[0] if is_alone and (not op_types or is_standard(readers[0], *op_types)) else None


def plain(attributes: Mapping[str, ir.Attr]) -> dict[str, Any]:
    """Return the values of ``attributes`` by name, as Python values; tensors and graphs unchanged."""
    found = attributes.data if isinstance(attributes, UserDict) else attributes
    return {name: list(a.value) if isinstance(a.value, tuple) else a.value for name, a in found.items()}

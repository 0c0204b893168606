"""Infer the rank of a value from the nodes that read it, such as a Conv with its kernel, or a Transpose with its order.

A reader in the value's own graph always runs, and fails for any other rank, which proves the rank. A reader in a branch
may never run, and proves nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import onnx_ir as ir

from gradgraph.graph.nodes import input_at
from gradgraph.graph.ranks import axes_of
from gradgraph.graph.shapes import POOLS, record_shape, recorded_shape


def record_required_ranks(values: Iterable[ir.Value]) -> bool:
    """Record the rank that a reader requires of each of ``values`` of unknown shape; return True if there were any."""
    changed = False
    for value in values:
        readers = [(node, i) for node, i in value.uses() if value.producer() is not None and node.graph is value.graph]
        required = (required_rank(node, i) for node, i in readers if node.domain == "")
        rank = next((r for r in required if r is not None), None)
        if value.shape is None and rank is not None:
            record_shape(value, (None,) * rank)
            changed = True
    return changed


def required_rank(node: ir.Node, i: int) -> int | None:
    """Return the rank that ``node`` requires of its input ``i`` if the node alone determines it, else None."""
    axes = axes_of(node.op_type)[0]
    if i < len(axes) and axes[i].least == axes[i].most:
        return axes[i].least
    if node.op_type == "Einsum":
        return _letters(node.attributes["equation"].as_string(), i)
    return _of_first(node) if i == 0 else None


def _letters(equation: str, i: int) -> int | None:
    terms = equation.replace(" ", "").split("->")[0].split(",")
    return len(terms[i]) if i < len(terms) and "." not in terms[i] else None


def _of_first(node: ir.Node) -> int | None:
    if node.op_type in POOLS:
        return _plus(2, node.attributes.get_ints("kernel_shape"))
    if node.op_type in ("Conv", "ConvTranspose", "DeformConv", "GridSample"):
        return _plus(0, recorded_shape(input_at(node, 1))) or _plus(2, node.attributes.get_ints("kernel_shape"))
    if node.op_type == "Transpose":
        return _plus(0, node.attributes.get_ints("perm"))
    if node.op_type == "Tile":
        return _length(node, 1)
    if node.op_type == "Pad" and input_at(node, 3) is None:
        return None if (length := _length(node, 1)) is None else length // 2
    if node.op_type == "Resize" and "axes" not in node.attributes:
        return _length(node, 2) or _length(node, 3)
    return None


def _plus(more: int, found: Sequence[object] | None) -> int | None:
    return None if found is None else more + len(found)


def _length(node: ir.Node, i: int) -> int | None:
    """Return the length of the vector at input ``i``, or None if unknown."""
    shape = recorded_shape(input_at(node, i))
    return shape[0] if shape is not None and len(shape) == 1 and isinstance(shape[0], int) else None

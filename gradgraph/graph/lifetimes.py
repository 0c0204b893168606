"""Memory of values during execution: sizes, views that share memory, and the bytes alive at each node."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable

import onnx_ir as ir

from gradgraph.graph.shape_inference import shape_of
from gradgraph.graph.shapes import all_sizes

VIEWS = frozenset(("Flatten", "Identity", "Reshape", "Squeeze", "Unsqueeze"))
"""Operators whose output shares the memory of their first input."""


def is_view(node: ir.Node) -> bool:
    return node.op_type in VIEWS and node.domain == "" and node.inputs[0] is not None


def owners(nodes: Iterable[ir.Node]) -> dict[ir.Value, ir.Value]:
    """Return, for each view that ``nodes`` (in execution order) create, the value whose memory it shares."""
    found = dict[ir.Value, ir.Value]()
    for node in nodes:
        x = node.inputs[0] if is_view(node) else None
        if x is not None:
            found[node.outputs[0]] = found.get(x, x)
    return found


def known_bytes(value: ir.Value) -> int | None:
    """Return the size of a value in bytes; None if its shape or type is unknown."""
    sizes = all_sizes(shape_of(value))
    return None if sizes is None or value.dtype is None else math.ceil(math.prod(sizes) * value.dtype.itemsize)


def bytes_alive(lives: Iterable[tuple[int, int, int]], count: int) -> list[int]:
    """Return the bytes alive at each of ``count`` nodes, from the (first node, last node, bytes) of each value."""
    change = [0] * (count + 1)
    for first, last, size in lives:
        change[first] += size
        change[last + 1] -= size
    return list(itertools.accumulate(change[:-1]))

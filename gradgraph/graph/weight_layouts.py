"""Layouts of weights: which axes index a layer's output units, and which axis it sums over.

Layouts follow from the operator, never from the shape. ``gg.build`` records layouts before it adds a loss or a backward
pass, whose nodes also read weights, possibly transposed. If several layers read one weight, the first layer decides.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import onnx_ir as ir

from gradgraph.graph.shape_inference import shape_of
from gradgraph.graph.shapes import all_sizes

_RECORDED = "gradgraph.layout"  # Value.meta key
_SAME = frozenset({"Cast", "CastLike", "DequantizeLinear", "Identity", "QuantizeLinear", "Slice", "Split"})
_RESHAPED = frozenset({"Reshape", "Squeeze", "Unsqueeze"})


@dataclass(frozen=True)
class Layout:
    """The axes along which a layer reads a weight.

    Attributes:
        outputs: the weight axes that index output units of the layer; empty for a vector, which is one unit.
        inputs: the weight axis over which products are summed (for a Conv, the channels); None if no layer multiplies
            the weight.
        operators: the operators of all nodes that read the weight.
        place: the index of the first reader among all nodes of the model.
    """

    outputs: tuple[int, ...] = ()
    inputs: int | None = None
    operators: frozenset[str] = frozenset()
    place: int = 0

    def summed(self, rank: int) -> list[int]:
        """Return the axes of a weight of ``rank`` axes that do not index output units."""
        return [axis for axis in range(rank) if axis not in self.outputs]

    def matrix(self, sizes: Sequence[int]) -> tuple[int, int]:
        """Return the sizes of a weight as a matrix: the product of the output sizes, and of all other sizes."""
        rows = math.prod(size for axis, size in enumerate(sizes) if axis in self.outputs)
        return rows, math.prod(sizes) // max(rows, 1)


def layout_at(node: ir.Node, place: int, rank: int) -> Layout | None:
    """Return the layout in which a node reads input ``place``, of ``rank`` axes; None if it is not a layer's weight."""
    kind, number = node.op_type, node.attributes.get_int
    if kind == "Gather" and place == 0:
        return Layout((number("axis", 0) % max(rank, 1),))
    if kind == "MatMulNBits" and place == 1:
        return Layout((0,), 1)
    if kind in ("MatMul", "FusedMatMul", "Gemm", "FusedGemm") and place in (0, 1):
        is_turned = number("transB" if place else "transA", 0) != 0
        inputs = (rank - 1 if is_turned else rank - 2) if place else (rank - 2 if is_turned else rank - 1)
        return None if rank < 2 else Layout(tuple(axis for axis in range(rank) if axis != inputs), inputs)
    if kind in ("Conv", "DeformConv", "FusedConv", "CausalConvWithState") and place == 1:
        return Layout((0,), 1)
    if kind == "ConvTranspose" and place == 1:
        return _transposed_conv(node)
    if kind in ("GRU", "LSTM", "RNN") and place in (1, 2):
        return Layout((0, 1), 2)
    return _einsum(node, place) if kind == "Einsum" else None


def _transposed_conv(node: ir.Node) -> Layout:
    """Return the layout of a ConvTranspose kernel, with axes [input channels, output channels per group, space…]."""
    groups, sizes = node.attributes.get_int("group", 1), shape_of(node.inputs[1])
    by_channel = groups > 1 and sizes is not None and sizes[0] == groups
    return Layout((0, 1), None) if by_channel else Layout((1,), 0 if groups == 1 else None)


def _einsum(node: ir.Node, place: int) -> Layout | None:
    terms, arrow, result = node.attributes["equation"].as_string().replace(" ", "").partition("->")
    letters = terms.split(",")[place]
    if not arrow or "." in letters:
        return None
    summed = [axis for axis, letter in enumerate(letters) if letter not in result]
    outputs = tuple(axis for axis, letter in enumerate(letters) if letter in result)
    return Layout(outputs, summed[0]) if summed else None


def record_layouts(graph: ir.Graph) -> None:
    """Record the layout in which each initializer of ``graph`` is read; existing records are kept."""
    new = [value for value in graph.initializers.values() if _RECORDED not in value.meta]
    places = {node: i for i, node in enumerate(graph.all_nodes())} if new else {}
    for value in new:
        value.meta[_RECORDED] = _found(value, places)


def carry_layout(weight: ir.Value, other: ir.Value) -> None:
    """Copy the layout of a weight to a value that replaces it, such as its float32 copy."""
    other.meta[_RECORDED] = layout_of(weight)


def layout_of(weight: ir.Value) -> Layout:
    """Return the recorded layout of a weight, or by default the layout in which its current readers read it."""
    recorded = weight.meta.get(_RECORDED)
    return recorded if isinstance(recorded, Layout) else _found(weight, {})


def layouts(weight: ir.Value) -> list[Layout]:
    """Return the layout for each layer that reads ``weight``, a weight of two axes or more."""
    return [found for read in _reads(weight) if (found := _of_read(*read)) is not None]


def _found(weight: ir.Value, places: dict[ir.Node, int]) -> Layout:
    rank = len(shape_of(weight) or ())
    reads = sorted(_reads(weight), key=lambda read: places.get(read[0], len(places)))
    kinds = frozenset(node.op_type for node, _, _ in reads)
    layers = [layout for read in reads if rank > 1 and (layout := _of_read(*read)) is not None]
    first = layers[0] if layers else Layout((0,) if rank > 1 else ())
    return replace(first, operators=kinds, place=places.get(reads[0][0], 0) if reads else 0)


def _of_read(node: ir.Node, place: int, axes: tuple[int, ...]) -> Layout | None:
    """Return the layout in which ``node`` reads a weight at input ``place``, or None if the operator defines none.

    ``axes`` is as in ``_reads``.
    """
    found = layout_at(node, place, len(axes))
    if found is None:
        return None
    outputs = tuple(sorted({axes[axis] for axis in found.outputs} - {-1}))
    return Layout(outputs, None if found.inputs is None or axes[found.inputs] < 0 else axes[found.inputs])


def _reads(weight: ir.Value) -> Iterator[tuple[ir.Node, int, tuple[int, ...]]]:
    """Yield (node, input index, axes of the input) for each node that computes with a weight.

    Each axis is the index of an axis of the weight, or −1 if a reshape has added it.
    """
    waiting, seen = [(weight, tuple(range(len(shape_of(weight) or ()))))], {weight}
    while waiting:
        value, now = waiting.pop()
        for node, place in value.uses():
            if node.graph is None:
                continue
            there = _behind(node, place, now)
            if there is None:
                yield node, place, now
                continue
            for result in node.outputs:
                if result not in seen:
                    seen.add(result)
                    waiting.append((result, there))


def _behind(node: ir.Node, place: int, axes: tuple[int, ...]) -> tuple[int, ...] | None:
    """Return ``axes`` (see ``_reads``) after a node that only copies, transposes or reshapes a weight, else None."""
    if node.domain not in ("", "com.microsoft") or place:
        return None
    if node.op_type in _SAME:
        return axes
    if node.op_type == "Transpose":
        order = node.attributes.get_ints("perm", range(len(axes))[::-1])
        return tuple(axes[i] for i in order)
    if node.op_type not in _RESHAPED:
        return None
    before, after = all_sizes(shape_of(node.inputs[0])), all_sizes(shape_of(node.outputs[0]))
    kept = [] if before is None else [i for i, size in enumerate(before) if size != 1]
    wide = [] if after is None else [i for i, size in enumerate(after) if size != 1]
    if before is None or after is None or [before[i] for i in kept] != [after[i] for i in wide]:
        return None
    moved = dict(zip(wide, kept, strict=True))
    return tuple(axes[moved[i]] if i in moved else -1 for i in range(len(after)))

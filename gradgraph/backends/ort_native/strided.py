"""Describe nodes that only move data (Transpose, Reshape, Split, …) as strided views of a tensor.

``source`` returns a value as a view of the tensor from which it was moved; ``destinations`` yields the values to which
it is moved, with their layouts. Scalar factors in between (Mul or Div) are returned separately.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import onnx_ir as ir

from gradgraph.autodiff.after import behind_orders
from gradgraph.backends.ort_cpu.movement_forms import RESHAPED
from gradgraph.graph import shapes
from gradgraph.graph.nodes import only_reader
from gradgraph.graph.shape_inference import shape_of
from gradgraph.rules.registry import attributes

Sizes: TypeAlias = tuple[int, ...]


@dataclass(frozen=True)
class Strided:
    """A view in which element (i, j, …) is at ``offset + i·strides[0] + j·strides[1] + …``."""

    offset: int
    shape: Sizes
    strides: Sizes

    @classmethod
    def whole(cls, shape: Sizes) -> Strided:
        """Return a contiguous view of this shape."""
        strides, step = [], 1
        for size in reversed(shape):
            strides.append(step)
            step *= size
        return cls(0, shape, tuple(reversed(strides)))

    def transposed(self, perm: Sequence[int]) -> Strided:
        return Strided(self.offset, tuple(self.shape[a] for a in perm), tuple(self.strides[a] for a in perm))

    def turned(self) -> Strided:
        """Return this view with the last two axes swapped."""
        axes = range(len(self.shape))
        return self.transposed([*axes[:-2], axes[-1], axes[-2]])

    def part(self, axis: int, begin: int, size: int) -> Strided:
        shape = (*self.shape[:axis], size, *self.shape[axis + 1 :])
        return Strided(self.offset + begin * self.strides[axis], shape, self.strides)

    @property
    def runs(self) -> list[tuple[int, int]]:
        """Size and stride of each run: of axes that lie side by side, without those of size 1."""
        runs: list[tuple[int, int]] = []
        for size, stride in zip(self.shape, self.strides, strict=True):
            if runs and size != 1 and runs[-1][1] == size * stride:
                runs[-1] = runs[-1][0] * size, stride
            elif size != 1:
                runs.append((size, stride))
        return runs

    def reshaped(self, shape: Sizes) -> Strided | None:
        """Return this view reshaped to ``shape``; None if data would have to be moved."""
        runs = self.runs
        strides, left, step = [], 1, 0
        for size in reversed(shape):
            if left == 1 and size != 1 and runs:
                left, step = runs.pop()
            if left % size:
                return None
            strides.append(step if size != 1 else 0)
            left, step = left // size, step * size
        return Strided(self.offset, shape, tuple(reversed(strides)))


Move: TypeAlias = Callable[[Strided], "Strided | None"]


def sizes_of(value: ir.Value | None) -> Sizes | None:
    """Return the shape of ``value`` if it is fully known and has no axis of size 0; else None."""
    shape = shape_of(value)
    sizes = tuple(d for d in shapes.known_sizes(shape) if d > 0)
    return sizes if shape is not None and len(sizes) == len(shape) else None


def spreads(given: shapes.Shape | None, sizes: shapes.Shape) -> bool:
    """Return whether the shape ``given`` broadcasts to ``sizes``."""
    if given is None or len(given) > len(sizes):
        return False
    return all(d in (1, size) for d, size in zip(reversed(given), reversed(sizes), strict=False))


def number(value: ir.Value | None) -> float | None:
    """Return the only element of a constant; None if ``value`` is not a constant with one element."""
    known = None if value is None else shapes.constant_of(value)
    return float(known.reshape(())) if known is not None and known.size == 1 else None


def scaled(node: ir.Node) -> tuple[ir.Value, float] | None:
    """Return the tensor that ``node`` multiplies or divides by a constant scalar, and the factor; else None."""
    if node.domain != "" or node.op_type not in ("Mul", "Div") or len(node.inputs) != 2:
        return None
    for x, other in (node.inputs, node.inputs[::-1])[: 2 if node.op_type == "Mul" else 1]:
        factor = number(other)
        if x is not None and factor and sizes_of(x) == sizes_of(node.outputs[0]):
            return x, factor if node.op_type == "Mul" else 1 / factor
    return None


# --- sources -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Source:
    """The origin of a value that equals ``scale`` times the view ``view`` of the tensor ``base``."""

    base: ir.Value
    view: Strided
    scale: float

    def turned(self) -> Source:
        return Source(self.base, self.view.turned(), self.scale)

    def is_like(self, other: Source | None) -> bool:
        """Return whether ``other`` is the same view of the same tensor; factors may differ."""
        return other is not None and self.base is other.base and self.view == other.view


def source(value: ir.Value | None, behind: bool = False) -> Source | None:
    """Return the earliest tensor that ``value`` is a view of, and the view; None if sizes are unknown.

    ``behind`` also looks through nodes that only wait for others. Use it only for comparisons: a reader of the result
    would not wait.
    """
    sizes = sizes_of(value)
    if value is None or sizes is None:
        return None
    moves: list[Move] = []
    scale, base = 1.0, behind_orders(value) if behind else value
    best = Source(base, Strided.whole(sizes), 1.0)
    while (node := base.producer()) is not None:
        factor = scaled(node)
        if factor is not None:
            base, scale = factor[0], scale * factor[1]
        else:
            move = _forward_move(node, base)
            if move is None or node.inputs[0] is None:
                break
            base = node.inputs[0]
            moves.append(move)
        base = behind_orders(base) if behind else base
        view = _view_after(base, reversed(moves))
        if view is not None:
            best = Source(base, view, scale)
    return best


def _view_after(base: ir.Value, moves: Iterator[Move]) -> Strided | None:
    """Return the view of ``base`` after ``moves`` (transpositions, reshapes, slices); None if it is not strided."""
    sizes = sizes_of(base)
    view = None if sizes is None else Strided.whole(sizes)
    for move in moves:
        view = None if view is None else move(view)
    return view


def _forward_move(node: ir.Node, output: ir.Value) -> Move | None:
    """Return the map from the input layout of ``node`` to the layout of ``output``; None unless it only moves data."""
    sizes, given = sizes_of(output), sizes_of(node.inputs[0]) if node.inputs else None
    if node.domain != "" or sizes is None or given is None:
        return None
    if node.op_type == "Transpose":
        perm = permutation(node, len(given))
        return lambda view: view.transposed(perm)
    if node.op_type in RESHAPED:
        return lambda view: view.reshaped(sizes)
    if node.op_type == "Split":
        axis, lengths = int(attributes(node).get("axis", 0)) % len(given), [sizes_of(y) for y in node.outputs]
        before = lengths[: list(node.outputs).index(output)]
        begin = sum(length[axis] for length in before if length is not None)
        return None if None in before else lambda view: view.part(axis, begin, sizes[axis])
    if node.op_type == "Gather":
        axis, index = int(attributes(node).get("axis", 0)) % len(given), number(node.inputs[1])
        if index is None or len(sizes) != len(given) - (sizes_of(node.inputs[1]) == ()):
            return None
        return lambda view: view.part(axis, int(index) % given[axis], 1).reshaped(sizes)
    return None


def permutation(node: ir.Node, rank: int) -> list[int]:
    """Return the attribute ``perm`` of a Transpose of ``rank`` axes."""
    return list(attributes(node).get("perm", range(rank)[::-1]))


# --- destinations ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Destination:
    """A ``value`` that is a tensor times ``scale``, transposed or reshaped.

    ``back`` maps the layout of ``value`` to that of the tensor.
    """

    value: ir.Value
    scale: float = 1.0
    back: tuple[Move, ...] = field(default=(), compare=False)

    def view(self, whole: Strided | None = None) -> Strided | None:
        """Return the view of the tensor's elements in ``value``; None if it is not strided.

        If set, ``whole`` is the view of a larger tensor that contains ``value``.
        """
        sizes = sizes_of(self.value)
        view = Strided.whole(sizes) if whole is None and sizes is not None else whole
        for move in reversed(self.back):
            view = None if view is None else move(view)
        return view


def destinations(value: ir.Value, ignored: Sequence[ir.Node] = ()) -> Iterator[Destination]:
    """Yield ``value``, and each value that is computed from it by scaling, transposing or reshaping, in order.

    Stop at a value with several readers, not counting ``ignored``.
    """
    at = Destination(value)
    while True:
        yield at
        reader = only_reader(at.value, ignored=ignored)
        given = sizes_of(at.value)
        if reader is None or given is None:
            return
        factor = scaled(reader)
        if factor is not None:
            at = Destination(reader.outputs[0], at.scale * factor[1], at.back)
            continue
        back = _backward_move(reader, given)
        if back is None:
            return
        at = Destination(reader.outputs[0], at.scale, (*at.back, back))


def _backward_move(node: ir.Node, given: Sizes) -> Move | None:
    """Return the map from the output layout of ``node`` to its input layout; None unless it transposes or reshapes."""
    if node.domain == "" and node.op_type == "Transpose":
        perm = permutation(node, len(given))
        inverse = [perm.index(axis) for axis in range(len(perm))]
        return lambda view: view.transposed(inverse)
    if node.domain == "" and node.op_type in RESHAPED and sizes_of(node.outputs[0]) is not None:
        return lambda view: view.reshaped(given)
    return None

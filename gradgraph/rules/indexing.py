"""Gradient rules of operators that read or write elements at indices; the gradient of a read is a write.

For a data-dependent selection, the forward operator is applied to a tensor of element positions (``positions``). Its
result contains the source position of each output element.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from gradgraph.graph.builder import Builder, Var
from gradgraph.rules.placement import FIRST, LAST, add_slices, as_block, as_int64, positions, put, scattered, sizes_of
from gradgraph.rules.registry import Gradients, boolean, case, distinct, integers, point, real, vjp
from gradgraph.rules.rounding import all_wide, back
from gradgraph.rules.shape import flat, reshaped

# --- Slice -------------------------------------------------------------------------------------------


MOST_ELEMENTS = 2**62  # the assumed size of an axis of unknown length


@vjp(
    "Slice",
    case(real(4, 5), [1, 2], [3, 5]),
    case(real(4, 5), [1], [4], [-1]),
    case(real(4, 5, 2), [0, -3], [LAST, -1], [2, 1]),
    case(real(7, 5), [1], [7], [0], [2]),
    case(real(7, 6), [0, 1], [LAST, LAST], [0, 1], [2, 2]),
    case(real(7), [5], [0], [0], [-2]),
    case(real(7), [-1], [FIRST], [0], [-1]),
    case(real(4, 6), [-1, 9], [FIRST, 1], [1, 0], [-3, -1]),
    case(real(5), [-9], [9]),
    case(real(5), [3], [2]),
    case(real(5), [2], [4], [0], [-1]),
    case(real(5), [9], [9], [0], [3]),
    case(real(7), [5], [3], [0], [-2]),  # one element, backwards
    case(real(4, 6), [-1, 1], [FIRST, 5], [0, 1], [-1, 2]),
    case(real(4, 6), [1], [6], [2], graph="a = Constant<value_ints=[1]>()  y0 = Slice(x0, x1, x2, a, x3)"),
    case(real(4, 6), [1], [6], [1], graph="s = Constant<value_ints=[2]>()  y0 = Slice(x0, x1, x2, x3, s)"),
    case(real(0, 3), [0], [2], [0]),
    case(real(0, 3), [-1], [FIRST], [0], [-1]),
    case(real(3, 4), [0], [1]),
    case(real(3, 4), np.zeros(0, np.int64), np.zeros(0, np.int64), np.zeros(0, np.int64)),
    case(real(3, 4), [0, 0], [3, 4]),
    case(real(3, 4), [1], [3], [0], [5]),  # steps beyond the axis
    case(real(3, 4), [-1], [FIRST], [1], [-9]),
    case(
        real(6, 3), np.array([2], np.int32), np.array([6], np.int32), np.array([0], np.int32), np.array([3], np.int32)
    ),
)
def slice_(
    op: Builder, dy: Var, y: Var, x: Var, starts: Var, ends: Var, axes: Var | None = None, steps: Var | None = None
) -> Gradients:
    along, stride = _along(x, starts, axes), _constant(steps, starts)
    if along is None or stride is None:  # the sliced axes or their steps are only known at run time
        return (put(op, dy, op.Slice(positions(op, x), starts, ends, axes, steps), x),)
    if not along:
        return (dy,)
    dx, stride = dy, _within(x, along, stride)
    if (stride < 0).any():
        back = [a for a, s in zip(along, stride, strict=True) if s < 0]
        dx = op.Slice(dx, [-1] * len(back), [FIRST] * len(back), back, [-1] * len(back))
    for axis, step in zip(along, stride, strict=True):
        dx = dx if abs(step) == 1 else spread(op, dx, axis, abs(int(step)), None if x.shape is None else x.rank)
    size, taken = sizes_of(op, x, along), sizes_of(op, y, along)
    low = _lowest(op, size, taken, starts, stride)
    return (_placed(op, dx, low, size, taken, along, stride),)


def _along(x: Var, starts: Var, axes: Var | None) -> list[int] | None:
    """Return the nonnegative indices of a Slice's axes; None if they are only known at run time."""
    if axes is not None:
        if axes.const is None or (x.shape is None and (axes.const < 0).any()):
            return None
        return [int(a) if a >= 0 else int(a) % x.rank for a in axes.const]
    count = starts.dim(0)
    return list(range(count)) if isinstance(count, int) else None


def _within(x: Var, along: Sequence[int], stride: np.ndarray) -> np.ndarray:
    """Return the Slice steps ``stride`` limited to the axis sizes, so that the gradient needs less padding."""
    sizes = [MOST_ELEMENTS if x.shape is None or not isinstance(d := x.shape[a], int) else max(d, 1) for a in along]
    return np.array([max(-size, min(int(step), size)) for step, size in zip(stride, sizes, strict=True)], np.int64)


def _constant(steps: Var | None, starts: Var) -> np.ndarray | None:
    if steps is not None:
        return None if steps.const is None else steps.const.astype(np.int64)
    count = starts.dim(0)
    return np.ones(count, np.int64) if isinstance(count, int) else None


def _lowest(op: Builder, size: Var, taken: Var, starts: Var, stride: np.ndarray) -> Var:
    """Return the lowest position that a Slice reads along each axis: the clamped start, or the end if stepping back."""
    back = (stride < 0).astype(np.int64)
    if starts.const is not None and not starts.const.any() and not back.any():
        return op.const(np.zeros(len(stride), np.int64))
    starts = as_int64(op, starts)
    if starts.const is None or (starts.const < 0).any():
        starts = op.Where(starts < 0, starts + size, starts)
    first = op.Max(op.Min(starts, size - back if back.any() else size), 0)
    return first + op.Max(taken - 1, 0) * np.minimum(stride, 0) if back.any() else first


def _placed(op: Builder, dx: Var, low: Var, size: Var, taken: Var, along: Sequence[int], stride: np.ndarray) -> Var:
    """Return ``dx`` padded with zeros to ``size``, starting at ``low``, along each axis; any excess is cropped."""
    rest = size - (taken if (abs(stride) == 1).all() else taken * abs(stride))
    if low.const is None or low.const.any():
        rest = rest - low
    pads = op.Concat(low, rest, axis=0)
    if pads.const is not None and not pads.const.any():
        return dx
    return op.Pad(dx, pads, None, along)


def spread(op: Builder, x: Var, axis: int, step: int, rank: int | None) -> Var:
    """Return ``x`` with ``step - 1`` zeros inserted after each element along ``axis``."""
    before, size, after = op.dims(x, 0, axis), op.dims(x, axis, axis + 1), op.dims(x, axis + 1, rank)
    gaps = op.full(op.Concat(before, size, [step - 1], after, axis=0), 0, x.dtype)
    rows = op.Concat(op.Unsqueeze(x, [axis + 1]), gaps, axis=axis + 1)
    return op.Reshape(rows, op.Concat(before, size * step, after, axis=0), allowzero=1)


# --- selecting ----------------------------------------------------------------------------------------


@vjp(
    "Gather",
    case(real(5, 3), [[0, 2], [2, -1]]),
    case(real(3, 5, 2), [4, 0, 0, -1], axis=1),
    case(real(3, 5), [[1, 1], [0, -2]], axis=-1),
    case(real(3, 5), 2, axis=1),
    case(real(1, 2), [0, -1]),
    case(real(3, 2), [0, 1, 1], [[30000.0], [1.0], [1.0]], graph="g = Gather(x0, x1)  y0 = Mul(g, x2)"),  # digits
    case(real(3, 5), -1),
    case(real(3, 5), 0, axis=1),
    case(real(3, 5), -2, axis=1),
    case(real(3, 5), [3], axis=1),
    case(real(3, 5), [[2]], axis=1),
    case(real(3, 5), [[[2]]], axis=1),
    case(real(3, 5), integers(-5, 5, 2, 2), axis=1),
    case(real(3, 5), np.zeros((0,), np.int64), axis=1),
    case(real(0, 3), [1, -1], axis=1),
    case(real(0, 3), integers(0, 1, 0)),
    case(real(2, 0, 3), integers(0, 1, 0), axis=1),
    case(real(6), np.array([1, 1], np.int32)),
    case(real(3, 4, 2), np.array(1, np.int32), axis=1),
    case(real(3, 4, 2), np.array([1, -1, 1], np.int32), axis=1),
)
def gather(op: Builder, dy: Var, y: Var, x: Var, indices: Var, *, axis: int = 0) -> Gradients:
    if x.shape is None:
        rows, block = flat(op, indices), as_block(op, x, axis)
        dy = op.Reshape(dy, op.Concat(op.dim(block, 0), op.shape(rows), op.dim(block, 2), axis=0), allowzero=1)
        return (reshaped(op, add_slices(op, dy, rows, block, 1), x),)
    axis, chosen = axis % x.rank, indices.const
    if chosen is not None and chosen.size == 1:
        return (_single(op, dy, int(chosen.item()), x, axis, chosen.ndim),)
    rows = indices
    if indices.rank != 1:
        rows, rest = flat(op, indices), op.dims(x, axis + 1, x.rank)
        dy = op.Reshape(dy, op.Concat(op.dims(x, 0, axis), op.shape(rows), rest, axis=0), allowzero=1)
    return (add_slices(op, dy, rows, x, axis),)


def _single(op: Builder, dy: Var, index: int, x: Var, axis: int, rank: int) -> Var:
    """Return the gradient of a Gather with one constant index: zeros, except for ``dy`` at ``index``."""
    if rank != 1:
        dy = op.Unsqueeze(dy, [axis]) if rank == 0 else op.Squeeze(dy, np.arange(axis, axis + rank - 1))
    size, one = op.dim(x, axis), op.const([1])
    before, after = (index * one, size - (index + 1)) if index >= 0 else (size + index, (-index - 1) * one)
    return op.Pad(dy, op.Concat(before, after, axis=0), None, [axis])


@vjp(
    "GatherElements",
    case(real(3, 4), [[0, 2, 2, -1]], axis=0),
    case(real(3, 4), [[0, 0], [1, 3], [-1, -4]], axis=1),
    case(real(2, 3, 2), integers(-3, 3, 2, 5, 2), axis=-2),
    case(real(3, 4), np.zeros((0, 4), np.int64)),
)
def gather_elements(op: Builder, dy: Var, y: Var, x: Var, indices: Var, *, axis: int = 0) -> Gradients:
    return (scattered(op, op.zeros_like(x), indices, dy, axis, "add"),)


@vjp(
    "GatherND",
    case(real(3, 4, 2), [[0, 1], [2, -1], [0, 1]]),
    case(real(3, 4), [[[1], [1]], [[-3], [0]]]),
    case(real(2, 3, 4), [[[0], [2], [2]], [[-1], [0], [1]]], batch_dims=1),
    case(real(2, 3, 4), [[[1], [1], [-1]], [[0], [1], [3]]], batch_dims=2),
    case(real(2, 2, 3, 2), integers(-3, 3, 2, 2, 4, 1), batch_dims=2),
    case(real(3, 4), np.zeros((0, 2), np.int64)),
)
def gather_nd(op: Builder, dy: Var, y: Var, x: Var, indices: Var, *, batch_dims: int = 0) -> Gradients:
    return (put(op, dy, op.GatherND(positions(op, x), indices, batch_dims=batch_dims), x, "add"),)


@vjp(
    "TopK",
    case(distinct(3, 6), [2], outputs=2),
    case(distinct(3, 4), [4], outputs=2, axis=-1, largest=0),
    case(distinct(5, 2), [3], outputs=2, axis=0),
    case(distinct(3, 6), [1], outputs=2, sorted=0),
    case(distinct(3, 6), [2], outputs=2, sorted=0, onnxruntime="the order of the chosen is unspecified"),
    case(distinct(3, 2), [0], outputs=2),
    point([[1.0, 3.0, 3.0, 0.0]], [1], gives=[[[0.0, 1.0, 0.0, 0.0]], None], outputs=2),  # ties: the chosen one
)
def top_k(
    op: Builder, dys: tuple[Var | None, ...], ys: tuple[Var, ...], x: Var, k: Var, *, axis: int = -1, **_: int
) -> Gradients:
    dy, indices = dys[0], ys[1]
    return () if dy is None else (op.ScatterElements(op.zeros_like(x), indices, dy, axis=axis),)


@vjp(
    "Compress",
    case(real(3, 4), [True, False, True], axis=0),
    case(real(3, 4), [False, True], axis=-1),
    case(real(2, 3), [True, False, False, True]),
    case(real(3), [False, False, False]),
    case(real(2, 3), boolean(3), axis=1),
)
def compress(op: Builder, dy: Var, y: Var, x: Var, condition: Var, *, axis: int | None = None) -> Gradients:
    kept = flat(op, op.NonZero(condition))
    return (put(op, dy, kept, x) if axis is None else add_slices(op, dy, kept, x, axis % x.rank, distinct=True),)


@vjp(
    "OneHot",
    case([0, 2, 1, 2], 3, real(2)),
    case([[0, -1], [-3, 1]], [3], real(2), axis=0),
    case([[0, 5], [1, 1]], 2, real(2), axis=1),
    case(np.zeros(0, np.int64), 2, real(2)),
)
def one_hot(op: Builder, dy: Var, y: Var, indices: Var, depth: Var, values: Var, *, axis: int = -1) -> Gradients:
    """Return the gradient of ``values`` = [off, on]: the sum of dy over the off elements, and over the on elements.

    If an index is out of range, its whole row is off.
    """
    masks = (op.OneHot(indices, depth, op.const(v, dy.dtype), axis=axis) for v in ([1, 0], [0, 1]))
    off, on = (op.ReduceSum(dy * mask, keepdims=0) for mask in masks)
    return None, None, op.Concat(op.Unsqueeze(off, [0]), op.Unsqueeze(on, [0]), axis=0)


@vjp(
    "Unique",
    case(distinct(6)),
    case(distinct(2, 3), outputs=2, read=[0]),
    case(distinct(4), outputs=4, sorted=0),
    case(distinct(3, 2), axis=0),
    case(distinct(3, 2), axis=-1),
    point([3.0, 1.0, 3.0], gives=[[1.0, 1.0, 0.0]]),  # equal elements: the first gets the gradient
)
def unique(
    op: Builder, dys: tuple[Var | None, ...], ys: tuple[Var, ...], x: Var, *, axis: int | None = None, sorted: int = 1
) -> Gradients:
    _, first = op.Unique(x, outputs=2, axis=axis, sorted=sorted)
    dy = dys[0]
    if dy is None:
        return ()
    return (put(op, dy, first, x) if axis is None else add_slices(op, dy, first, x, axis % x.rank, distinct=True),)


# --- writing -----------------------------------------------------------------------------------------

Read = Callable[[Var], Var]
Write = Callable[[Var, Var, str], Var]


def _written(op: Builder, dy: Var, data: Var, updates: Var, read: Read, write: Write, reduction: str) -> Gradients:
    """Return the gradients of ``data`` and ``updates`` of a scatter.

    ``read`` and ``write`` gather from and scatter to the positions of the updates. Without a reduction, positions must
    not repeat (by the specification), and each update gets its cotangent.
    """
    if reduction == "none":
        return write(dy, op.zeros_like(updates), "none"), None, read(dy)
    if reduction == "add":
        return dy, None, read(dy)
    gradient = _product if reduction == "mul" else _extreme
    wide_dy, wide_data, wide_updates = all_wide(op, dy, data, updates)
    found = gradient(op, wide_dy, wide_data, wide_updates, read, write, reduction)
    return back(op, found, (data, None, updates))


def _product(op: Builder, dy: Var, data: Var, updates: Var, read: Read, write: Write, how: str) -> Gradients:
    """Return the gradients of a scatter with reduction "mul": dy times the product of the other factors.

    To avoid a division by zero, zeros among the factors are counted, and replaced by ones in their product. The
    derivative of this formula is exact unless two or more factors of one position are zero.
    """
    zero = op.Equal(updates, 0.0)
    nonzero, one = op.Where(zero, 1.0, updates), op.cast(zero, dy.dtype)
    rest = write(data, nonzero, how)
    zeros = write(op.zeros_like(data), one, "add")
    others = op.Equal(read(zeros), one)  # no other factor is zero
    d_updates = op.Where(others, read(dy * rest) / nonzero, 0.0)
    return dy * write(op.ones_like(data), updates, how), None, d_updates


def _extreme(op: Builder, dy: Var, data: Var, updates: Var, read: Read, write: Write, how: str) -> Gradients:
    """Return the gradients of a scatter with reduction "max" or "min", shared equally among ties, as in ReduceMax."""
    y = write(data, updates, how)
    d_data = op.cast(op.Equal(data, y), dy.dtype)
    d_updates = op.cast(op.Equal(updates, read(y)), dy.dtype)
    share = dy / write(d_data, d_updates, "add")
    return d_data * share, None, d_updates * read(share)


@vjp(
    "ScatterElements",
    case(real(3, 4), [[0, 2, 1, -1]], real(1, 4)),
    case(real(3, 4), [[0, -1], [2, 1]], real(2, 2), axis=-1),
    case(real(3, 4), [[0, 0, 1], [0, 3, -1]], real(2, 3), axis=1, reduction="add"),
    case(real(3, 4), [[0, 0, 1], [0, 0, 0]], real(2, 3), axis=1, reduction="mul"),
    case(distinct(3, 4), [[0, 0, 1, -3]], real(1, 4), axis=1, reduction="max"),
    case(distinct(3, 4), [[0, 0, 1, -3]], real(1, 4), axis=1, reduction="min"),
    case(real(3, 4), np.zeros((0, 4), np.int64), real(0, 4), reduction="mul"),
    point([1.0, 2.0], [0, 0], [0.0, 3.0], reduction="mul", gives=[[0.0, 1.0], None, [3.0, 0.0]]),
    point([2.0], [0, 0], [0.0, 0.0], reduction="mul", gives=[[0.0], None, [0.0, 0.0]]),
    point([0.0], [0, 0], [5.0, 3.0], reduction="mul", gives=[[15.0], None, [0.0, 0.0]]),
    point([1.0, 4.0], [0, 0, 1], [1.0, 1.0, 0.0], reduction="max", gives=[[1 / 3, 1.0], None, [1 / 3, 1 / 3, 0.0]]),
    point([1.0, 4.0], [0, -2, 1], [1.0, 2.0, 0.0], reduction="min", gives=[[0.5, 0.0], None, [0.5, 0.0, 1.0]]),
)
def scatter_elements(
    op: Builder, dy: Var, y: Var, data: Var, indices: Var, updates: Var, *, axis: int = 0, reduction: str = "none"
) -> Gradients:
    def read(t: Var) -> Var:
        result = op.GatherElements(t, indices, axis=axis)
        return op.like(result, updates)

    def write(t: Var, u: Var, how: str) -> Var:
        return scattered(op, t, indices, u, axis, how)

    return _written(op, dy, data, updates, read, write, reduction)


@vjp(
    "ScatterND",
    case(real(4, 3), [[0], [-1]], real(2, 3)),
    case(real(4, 3), [[[0, 1], [3, -1]]], real(1, 2)),
    case(real(4, 3), [[0], [2], [0]], real(3, 3), reduction="add"),
    case(real(4, 3), [[0, 1], [2, 0], [0, 1]], real(3), reduction="mul"),
    case(distinct(4, 3), [[0], [2], [-4]], real(3, 3), reduction="max"),
    case(distinct(4, 3), [[0], [2], [-4]], real(3, 3), reduction="min"),
    case(real(4, 3), np.zeros((0, 1), np.int64), real(0, 3), reduction="add"),
    point([1.0, 2.0], [[0], [0]], [0.0, 3.0], reduction="mul", gives=[[0.0, 1.0], None, [3.0, 0.0]]),
    point(
        [1.0, 4.0], [[0], [0], [1]], [1.0, 1.0, 0.0], reduction="max", gives=[[1 / 3, 1.0], None, [1 / 3, 1 / 3, 0.0]]
    ),
)
def scatter_nd(
    op: Builder, dy: Var, y: Var, data: Var, indices: Var, updates: Var, *, reduction: str = "none"
) -> Gradients:
    if reduction in ("none", "add"):
        kept = dy if reduction == "add" else op.ScatterND(dy, indices, op.zeros_like(updates))
        return kept, None, op.GatherND(dy, indices)
    where = flat(op, op.GatherND(positions(op, data), indices))

    def read(t: Var) -> Var:
        return reshaped(op, op.Gather(flat(op, t), where), updates)

    def write(t: Var, u: Var, how: str) -> Var:
        if how in ("max", "min"):  # the operator itself
            return op.like(op.ScatterND(t, indices, u, reduction=how), data)
        return reshaped(op, scattered(op, flat(op, t), where, flat(op, u), 0, how), data)

    return _written(op, dy, data, updates, read, write, reduction)

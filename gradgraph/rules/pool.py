"""Gradient rules of pooling.

A maximum passes its cotangent to the selected element: the first of equal ones, as in onnxruntime and PyTorch. Averages
and norms distribute their cotangent over the window with ``spread``.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from gradgraph.errors import ModelError, shown
from gradgraph.graph.builder import Builder, Var
from gradgraph.rules.conv import hand_back
from gradgraph.rules.named_operators import named_operator
from gradgraph.rules.placement import scattered
from gradgraph.rules.registry import Gradients, case, distinct, integers, point, real, vjp
from gradgraph.rules.rounding import all_wide
from gradgraph.rules.shape import reshaped
from gradgraph.rules.windows import Windows, flat, positions, ranked, sizes, space, spatial, windows


def _seen(x: Var, y: Var, ceil_mode: int = 0, **attrs: Any) -> tuple[Windows, Var]:
    """Return the windows of a pool, and ``y``, with the rank of ``x`` if its shape is unknown."""
    seen, y = windows(**attrs), ranked(y, x)
    if ceil_mode:
        _refuse_windows_behind_the_end(x, y, seen)
    return seen, y


def _refuse_windows_behind_the_end(x: Var, y: Var, seen: Windows) -> None:
    """Raise ModelError if the inferred shape counts a window beyond the end of an axis, which runtimes drop."""
    rows = zip(seen.spatial(x), seen.extents, seen.strides, seen.begins, seen.ends, strict=True)
    for size, extent, stride, begin, end in rows:
        count = 1 - (extent - size - begin - end) // stride if isinstance(size, int) and extent is not None else 0
        if isinstance(size, int) and (count - 1) * stride >= size + begin:
            raise ModelError(
                f"ONNX shape inference counts {count} windows of '{shown(y.value.name)}' along an axis of size {size}, "
                "but the last one would start beyond the end; use ceil_mode=0 and explicit pads for this pool"
            )


# --- the largest element -------------------------------------------------------------------------------


@vjp(
    "MaxPool",
    case(distinct(2, 3, 8), kernel_shape=[2], strides=[2]),
    case(distinct(2, 3, 6, 9), kernel_shape=[2, 3], strides=[2, 3]),
    case(distinct(2, 2, 7, 8), kernel_shape=[3, 3], strides=[2, 2], pads=[1, 1, 1, 1]),
    case(distinct(1, 2, 5, 4, 6), kernel_shape=[2, 1, 3], strides=[1, 1, 2], pads=[0, 0, 2, 1, 0, 1]),
    case(distinct(2, 2, 5, 7), kernel_shape=[2, 2], strides=[2, 2]),  # a remainder is never read
    case(distinct(2, 2, 5, 8), kernel_shape=[2, 2], strides=[3, 3], ceil_mode=1),
    case(distinct(1, 2, 7, 6), kernel_shape=[3, 3], strides=[3, 2], pads=[1, 0, 0, 1], ceil_mode=1),
    case(distinct(1, 2, 5, 6), kernel_shape=[2, 3], strides=[2, 2], pads=[1, 0, 1, 0], ceil_mode=1),
    case(distinct(2, 2, 9, 8), kernel_shape=[3, 2], dilations=[2, 3]),
    case(distinct(2, 2, 9), kernel_shape=[2], dilations=[4], strides=[2], pads=[1, 1]),
    case(distinct(2, 2, 4, 6), kernel_shape=[2, 2], strides=[2, 2], outputs=2),
    case(distinct(2, 2, 4, 5), kernel_shape=[3, 2], outputs=2),
    case(distinct(2, 2, 4, 5), kernel_shape=[3, 2], storage_order=1, outputs=2),
    case(distinct(2, 3, 5, 6), kernel_shape=[3, 2], strides=[2, 2], auto_pad="SAME_LOWER"),
    case(distinct(1, 1, 1, 1), kernel_shape=[1, 1]),
    point([[[1.0, 1.0, 0.0, 0.0]]], gives=[[[[1.0, 0.0, 1.0, 0.0]]]], kernel_shape=[2], strides=[2]),
    point([[[1.0, 1.0, 1.0]]], gives=[[[[1.0, 1.0, 0.0]]]], kernel_shape=[2]),
    point([[[0.0, 1.0, 0.0]]], gives=[[[[0.0, 2.0, 0.0]]]], kernel_shape=[2]),
)
def max_pool(op: Builder, dys: Sequence[Var], ys: Sequence[Var], x: Var, **attrs: Any) -> Gradients:
    seen, dy = _seen(x, dys[0], **attrs)
    if len(ys) > 1 and ys[1].value.name and not attrs.get("storage_order"):
        return (_to_winners(op, dy, ys[1], x, seen),)
    return (max_pool_gradient(op, dy, x, **attrs),)


@named_operator(
    "MaxPoolGrad",
    case(real(2, 3, 4, 3), distinct(2, 3, 8, 6), kernel_shape=[2, 2], strides=[2, 2]),
    case(real(2, 2, 3, 4), distinct(2, 2, 6, 8), kernel_shape=[3, 3], strides=[2, 2], pads=[1, 1, 1, 1]),
    like=[1],
)
def max_pool_gradient(op: Builder, dy: Var, x: Var, **attrs: Any) -> Var:
    """Return the gradient of ``x``: each cotangent is added to the first largest element of its window."""
    _, winners = op.MaxPool(x, outputs=2, **{**attrs, "storage_order": 0})
    return _to_winners(op, dy, winners, x, windows(**attrs))


def _to_winners(op: Builder, dy: Var, winners: Var, x: Var, seen: Windows) -> Var:
    """Return zeros in the shape of ``x`` with ``dy`` added at the row-major positions ``winners`` of the maxima."""
    if tiles(seen, x, dy):
        return op.MaxUnpool(dy, winners, kernel_shape=seen.taps, strides=seen.strides)
    size = op.ReduceProd(op.shape(x), keepdims=1)
    zeros = op.full(size, 0, x.dtype)
    alone = all(e is not None and e <= s for e, s in zip(seen.extents, seen.strides, strict=True))
    winners, dy = op.Reshape(winners, [-1]), op.Reshape(dy, [-1])
    dx = scattered(op, zeros, winners, dy, 0, "none" if alone else "add")
    return reshaped(op, dx, x)


def tiles(seen: Windows, x: Var, y: Var) -> bool:
    """Whether the windows are known to cover every element exactly once, so that MaxUnpool infers its output size."""
    return seen.side_by_side and not any(r is None or r for r in seen.rest(x, y))


@vjp(
    "MaxUnpool",
    case(real(1, 1, 2, 2), [[[[5, 7], [13, 10]]]], kernel_shape=[2, 2], strides=[2, 2]),
    case(real(1, 2, 3), [[[0, 4, 2], [6, 9, 8]]], kernel_shape=[2], strides=[2], pads=[0, 1]),
    case(real(1, 1, 2), [[[4, 1]]], [1, 1, 5], kernel_shape=[2], strides=[2]),
    case(real(1, 1, 1), integers(1, 2, 1, 1, 1), kernel_shape=[2], strides=[2]),
)
def max_unpool(op: Builder, dy: Var, y: Var, x: Var, indices: Var, size: Var | None = None, **_: Any) -> Gradients:
    # if values share an index, the output is any one of them: each gets the cotangent
    dx = op.GatherElements(op.Reshape(dy, [-1]), op.Reshape(indices, [-1]))
    return (reshaped(op, dx, x),)


@vjp(
    "GlobalMaxPool",
    case(distinct(2, 3, 5)),
    case(distinct(2, 3, 4, 5)),
    case(distinct(1, 2, 2, 3, 2)),
    case(distinct(1, 1, 1, 1)),
    point([[[1.0, 3.0, 3.0]]], gives=[[[[0.0, 1.0, 0.0]]]]),
)
def global_max_pool(op: Builder, dy: Var, y: Var, x: Var) -> Gradients:
    line = flat(op, x, 0, 0)
    winner = op.ArgMax(line, axis=2)
    dx = op.ScatterElements(op.zeros_like(line), winner, op.Reshape(dy, [0, 0, 1]), axis=2)
    return (reshaped(op, dx, x),)


# --- averages and norms --------------------------------------------------------------------------------


@vjp(
    "AveragePool",
    case(real(2, 3, 8), kernel_shape=[2], strides=[2]),
    case(real(2, 3, 6, 9), kernel_shape=[2, 3], strides=[2, 3]),
    case(real(2, 2, 5, 8), kernel_shape=[2, 3], strides=[2, 3]),  # a remainder is never read
    case(real(2, 2, 5, 6), kernel_shape=[3, 2]),
    case(real(2, 2, 5, 6), kernel_shape=[3, 3], pads=[1, 1, 1, 1]),
    case(real(2, 2, 5, 6), kernel_shape=[3, 2], pads=[1, 1, 0, 0], count_include_pad=1),
    case(real(2, 2, 7, 8), kernel_shape=[3, 3], strides=[2, 2], pads=[1, 1, 1, 1]),
    case(real(2, 2, 7, 8), kernel_shape=[3, 3], strides=[2, 2], pads=[1, 0, 1, 1], count_include_pad=1),
    case(real(1, 2, 4, 5, 4), kernel_shape=[2, 3, 2], strides=[1, 2, 2], pads=[1, 1, 0, 0, 1, 0]),
    case(real(2, 2, 7, 6), kernel_shape=[3, 3], strides=[3, 2], ceil_mode=1),
    case(real(2, 2, 5), kernel_shape=[2], strides=[2], ceil_mode=1),
    case(real(1, 2, 7, 6), kernel_shape=[3, 3], strides=[3, 2], pads=[1, 0, 0, 1], ceil_mode=1),
    case(real(1, 2, 7, 6), kernel_shape=[3, 2], strides=[3, 3], pads=[1, 1, 1, 1], ceil_mode=1, count_include_pad=1),
    case(
        real(1, 1, 5, 4, 5),
        kernel_shape=[3, 2, 2],
        strides=[2, 2, 2],
        pads=[1, 0, 1, 0, 0, 0],
        ceil_mode=1,
        count_include_pad=1,
    ),
    # the last window along an axis would start beyond its end, so it does not count
    case(real(1, 2, 4, 7), kernel_shape=[2, 3], strides=[2, 3], pads=[0, 0, 1, 0], ceil_mode=1),
    case(real(1, 2, 5, 4), kernel_shape=[2, 2], strides=[2, 2], pads=[1, 0, 1, 1], ceil_mode=1, count_include_pad=1),
    case(real(2, 2, 9, 8), kernel_shape=[3, 2], dilations=[2, 3]),
    case(real(2, 2, 9, 8), kernel_shape=[3, 2], dilations=[2, 3], pads=[1, 0, 2, 1], strides=[2, 1]),
    case(real(2, 2, 9), kernel_shape=[2], dilations=[3], pads=[1, 1]),
    case(real(2, 2, 7), kernel_shape=[2], strides=[2], dilations=[2]),
    case(real(2, 3, 5, 6), kernel_shape=[3, 2], strides=[2, 2], auto_pad="SAME_LOWER"),
    case(real(2, 3, 5, 6), kernel_shape=[3, 2], strides=[2, 2], auto_pad="SAME_UPPER", count_include_pad=1),
    case(real(2, 3, 5, 6), kernel_shape=[3, 2], strides=[2, 2], auto_pad="VALID"),
    case(real(1, 1, 1, 1), kernel_shape=[1, 1]),
    point([[[1.0, 2.0]]], gives=[[[[1.5, 0.5]]]], kernel_shape=[2], pads=[1, 0]),  # padding does not count
)
def average_pool(op: Builder, dy: Var, y: Var, x: Var, **attrs: Any) -> Gradients:
    return (average_pool_gradient(op, dy, x, **attrs),)


@named_operator(
    "AveragePoolGrad",
    case(real(2, 3, 4, 3), real(2, 3, 8, 6), kernel_shape=[2, 2], strides=[2, 2]),
    case(real(2, 2, 4, 4), real(2, 2, 7, 8), kernel_shape=[3, 3], strides=[2, 2], pads=[1, 1, 1, 1]),
    case(real(2, 2, 3, 5), real(2, 2, 5, 6), kernel_shape=[3, 2]),
    like=[1],
    shape_only=[1],
)
def average_pool_gradient(
    op: Builder, dy: Var, x: Var, *, ceil_mode: int = 0, count_include_pad: int = 0, **attrs: Any
) -> Var:
    """Return the gradient of ``x``: each cotangent is divided among the taps of its window that the average counts."""
    seen, dy = _seen(x, dy, ceil_mode=ceil_mode, **attrs)
    axes = [a for a in range(seen.rank) if _may_lack_taps(x, dy, a, seen, bool(count_include_pad), bool(ceil_mode))]
    if axes:  # in a mean over fewer elements, each has more weight
        counts = functools.reduce(op.Mul, [_counts(op, x, dy, a, seen, bool(count_include_pad)) for a in axes])
        whole = math.prod(seen.taps[a] for a in axes)
        known = counts.const
        dy = dy * (float(whole) / op.cast(counts, dy.dtype) if known is None else op.const(whole / known, dy.dtype))
    return spread(op, dy, x, seen)


@vjp(
    "LpPool",
    case(real(2, 3, 8), kernel_shape=[2], strides=[2]),
    case(real(2, 2, 5, 6), kernel_shape=[3, 3], pads=[1, 0, 1, 1], p=1),
    case(real(2, 2, 7, 8), kernel_shape=[3, 2], strides=[2, 2], pads=[1, 0, 1, 1], p=3),
    case(real(2, 2, 7, 8), kernel_shape=[3, 2], strides=[2, 3], ceil_mode=1, p=4),
    case(real(2, 2, 9), kernel_shape=[3], dilations=[2]),
    case(real(1, 1, 4, 3, 3), kernel_shape=[2, 2, 3]),
    point([[[0.0, 0.0, 3.0, 4.0]]], gives=[[[[0.0, 0.0, 0.6, 0.8]]]], kernel_shape=[2], strides=[2]),
    point([[[0.0, 0.0, 3.0, -4.0]]], gives=[[[[0.0, 0.0, 1.0, -1.0]]]], kernel_shape=[2], strides=[2], p=1),
    point([[[0.0, 0.0]]], gives=[[[[0.0, 0.0]]]], kernel_shape=[2], p=3),
)
def lp_pool(op: Builder, dy: Var, y: Var, x: Var, *, p: int = 2, **attrs: Any) -> Gradients:
    seen, dy = _seen(x, dy, **attrs)
    size = float(math.prod(seen.taps))
    wide_dy, wide_x, norm = all_wide(op, dy, x, y)
    dx = spread(op, _norm_cotangent(op, wide_dy, norm, p) * size, wide_x, seen) * _norm_slope(op, wide_x, p)
    return (op.cast(dx, x.dtype),)


@vjp(
    "GlobalLpPool",
    case(real(2, 3, 5)),
    case(real(2, 3, 4, 5), p=1),
    case(real(1, 2, 2, 3, 2), p=3),
    point([[[0.0, 0.0]]], gives=[[[[0.0, 0.0]]]]),
)
def global_lp_pool(op: Builder, dy: Var, y: Var, x: Var, *, p: int = 2) -> Gradients:
    wide_dy, wide_x, norm = all_wide(op, dy, x, y)
    return (op.cast(_norm_cotangent(op, wide_dy, norm, p) * _norm_slope(op, wide_x, p), x.dtype),)


@vjp(
    "GlobalAveragePool",
    case(real(2, 3, 5)),
    case(real(2, 3, 4, 5)),
    case(real(1, 2, 2, 3, 2)),
    case(real(1, 1, 1, 1)),
)
def global_average_pool(op: Builder, dy: Var, y: Var, x: Var) -> Gradients:
    static, ones = sizes(x), op.Concat([1, 1], space(op, x), axis=0)
    if static is not None:
        return (dy * op.full(ones, 1 / max(math.prod(static), 1), dy.dtype),)
    return (dy / op.cast(op.ReduceProd(space(op, x), keepdims=1), dy.dtype) * op.full(ones, 1, dy.dtype),)


# y = (Σ|x|ᵖ)^(1/p):  dx = dy · y^(1-p) · |x|^(p-1) · sign x, and 0 if all elements of a window are 0


def _norm_cotangent(op: Builder, dy: Var, y: Var, p: int) -> Any:
    if p == 1:
        return dy
    power = op.Where(y > 0.0, y, 1.0)
    return dy / (power if p == 2 else power ** float(p - 1))


def _norm_slope(op: Builder, x: Var, p: int) -> Any:
    if p == 1:
        return op.Sign(x)
    return x if p == 2 else x * op.Abs(x) ** float(p - 2)


# --- distributing cotangents over windows -------------------------------------------------------------------


def spread(op: Builder, dy: Var, x: Var, seen: Windows) -> Var:
    """Return ``dx``, the sum over windows i and taps t of ``dx[i·s + t·d - p] += dy[i] / (number of taps)``.

    Here s is the stride, d the dilation and p the begin padding. For adjacent windows, the result repeats each
    cotangent; with stride 1, it is an average pool of ``dy``. Otherwise it is a ConvTranspose with one channel:
    channels are merged into the batch, as their number may be unknown.
    """
    rest = [r for r in seen.rest(x, dy) if r is not None and r >= 0]
    if seen.side_by_side and len(rest) == seen.rank:
        return _repeated(op, dy * (1 / math.prod(seen.taps)), seen, rest)
    back = seen.mirrored
    if back is not None and all(p < k for p, k in zip(back, seen.taps * 2, strict=True)):
        return op.AveragePool(dy, count_include_pad=1, kernel_shape=seen.taps, dilations=seen.dilations, pads=back)
    mean = op.const(np.full((1, 1, *seen.taps), 1 / math.prod(seen.taps), dy.dtype.numpy()))
    one_channel = op.Reshape(dy, op.Concat([-1, 1], space(op, dy), axis=0))
    return reshaped(op, hand_back(op, one_channel, mean, x, seen, group=1), x)


def _repeated(op: Builder, dy: Var, seen: Windows, rest: Sequence[int]) -> Var:
    """Return ``dy`` with each number repeated over its window; ``rest`` elements at the end are zero."""
    scales = op.const(np.array([1, 1, *seen.taps], np.float32))
    nearest: dict[str, Any] = {
        "mode": "nearest",
        "coordinate_transformation_mode": "asymmetric",
        "nearest_mode": "floor",
    }
    dx = op.Resize(dy, None, scales, **nearest)
    return op.Pad(dx, [0] * seen.rank + list(rest), None, spatial(dy)) if any(rest) else dx


def _may_lack_taps(x: Var, y: Var, axis: int, seen: Windows, pads_count: bool, ceil: bool) -> bool:
    """Whether a window may have taps along ``axis`` that the average excludes: in the padding or beyond the end."""
    rest = seen.rest(x, y)[axis]
    overhang = ceil and (rest is None or rest < 0)
    return overhang or (not pads_count and (seen.begins[axis] > 0 or seen.ends[axis] > 0))


def _counts(op: Builder, x: Var, y: Var, axis: int, seen: Windows, pads_count: bool) -> Any:
    """Return the number of taps in each window along one axis that the average counts: int64, ready to broadcast."""
    begin, end = seen.begins[axis], seen.ends[axis]
    taps, size = positions(op, y, seen, axis), op.dim(x, axis + 2)
    low, high = (0, op.Add(size, begin + end)) if pads_count else (begin, op.Add(size, begin))
    inside = op.And(op.GreaterOrEqual(taps, low), op.Less(taps, high))
    counts = op.ReduceSum(op.Where(inside, 1, 0), [1], keepdims=0)
    return op.Unsqueeze(counts, list(range(1, seen.rank - axis)))

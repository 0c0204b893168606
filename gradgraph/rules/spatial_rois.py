"""Gradient rules of pooling over regions of interest: RoiAlign and MaxRoiPool.

The sampling points of a region form a grid, so the mean over a bin is separable: ``y[r, c] = A[r] · x[batch[r], c] ·
B[r]ᵀ`` with one matrix per axis, for region r and channel c. All gradients of RoiAlign in mode "avg" are thus matrix
products. A maximum passes its cotangent to the selected pixel, the first of equal ones. R is the number of regions;
tensors of samples along one axis have the shape [R, bins, samples].
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from gradgraph.graph.builder import Builder, Var
from gradgraph.rules.placement import INT64, put
from gradgraph.rules.registry import Case, Gradients, Point, case, distinct, point, real, uniform, vjp
from gradgraph.rules.rounding import wide
from gradgraph.rules.shape import flat
from gradgraph.rules.windows import flat as flat_space

Move = tuple[Var, Var]  # gradients of sample coordinates; their products with the relative positions


@dataclass(frozen=True)
class Samples:
    """The sampling points of all regions along one axis.

    Attributes:
        at: the pixel coordinates, [R, bins, samples].
        counted: whether each sample exists, as regions may have different numbers of samples.
        share: 1 / (the number of samples of a bin), or 0 for a sample too far outside the image.
        along: the relative position of each sample between the start (0) and the end (1) of the region.
        free: [R, 1, 1], 1 if the length of the region depends on its corners, 0 if it is clamped to the minimum.
    """

    at: Var
    counted: Var
    share: Var
    along: Var
    free: Var


@dataclass(frozen=True)
class Geometry:
    """RoiAlign's attributes."""

    bins: tuple[int, int]
    ratio: int
    scale: float
    half_pixel: bool

    def samples(self, op: Builder, rois: Var, size: Var, axis: int) -> Samples:
        """Return the samples along rows (``axis`` 0) or columns (1) of images with ``size`` pixels along that axis."""
        bins, offset = self.bins[axis], 0.5 if self.half_pixel else 0.0
        start, end = (op.Gather(rois, [[corner]], axis=1) * self.scale - offset for corner in (1 - axis, 3 - axis))
        length = end - start
        free = op.ones_like(length) if self.half_pixel else op.cast(length >= 1.0, rois.dtype)
        length = length if self.half_pixel else op.Max(length, 1.0)
        if self.ratio:
            count = op.const(self.ratio, rois.dtype)
            number = op.const(np.arange(self.ratio).reshape(1, 1, -1), rois.dtype)
        else:
            count = op.Max(op.Ceil(length / float(bins)), 0.0)
            most = op.ReduceMax(op.Concat(flat(op, op.cast(count, INT64)), [1], axis=0), keepdims=0)
            number = op.cast(op.Unsqueeze(op.Range(0, most, 1), [0, 1]), rois.dtype)
        many = op.Max(count, 1.0)
        along = ((number + 0.5) / many + np.arange(bins).reshape(-1, 1)) / float(bins)
        at = start + length * along
        counted = number < count
        inside = (at >= -1.0) & (at <= size) & counted
        return Samples(at, counted, op.cast(inside, rois.dtype) / many, along, free)


def _ways() -> list[Case]:
    images, boxes, batch = real(2, 3, 6, 7), uniform(-1.0, 8.0, 4, 4), [0, 1, 1, 0]
    return [
        case(
            images,
            boxes,
            batch,
            mode=mode,
            sampling_ratio=ratio,
            coordinate_transformation_mode=transformation,
            output_height=2,
            output_width=3,
            spatial_scale=0.7,
        )
        for mode, ratio, transformation in itertools.product(
            ("avg", "max"), (0, 2), ("half_pixel", "output_half_pixel")
        )
    ]


_BOXES = [
    [0.3, 0.2, 5.1, 4.4],
    [-2.1, -1.2, 3.3, 9.3],
    [1.1, 1.3, 1.2, 1.2],
    [4.4, 3.3, 2.1, 1.2],
    [9.0, 8.0, 9.5, 9.9],
]


def _on_edges() -> list[Point]:
    """Return test points with one sample in a row of three pixels, at positions where the formula changes."""
    pixels, ends = [[[[1.0, 5.0, 2.0]]]], "output_half_pixel"
    rows: list[tuple[float, float, int, float, dict[str, Any]]] = [
        (-1.5, 0.5, 0, 0.0, {}),  # one pixel before the first: the limit for samples outside
        (-0.5, 1.5, 0, 2.0, {}),  # on the first
        (2.5, 4.5, 2, 0.0, {}),  # one pixel after the last
        (0.5, 1.5, 1, -1.5, {"coordinate_transformation_mode": ends}),  # the minimum length of a region there
        (-1.0, 1.0, 0, 0.0, {"mode": "max"}),  # before the first
        (-0.5, 1.5, 0, -0.5, {"mode": "max"}),  # on the first
        (1.5, 3.5, 2, 0.0, {"mode": "max"}),  # on the last
    ]
    return [
        point(
            pixels,
            [[left, 0.0, right, 1.0]],
            [0],
            gives=[[[[[float(i == pixel) for i in range(3)]]]], [[slope, 0.0, slope, 0.0]], None],
            sampling_ratio=1,
            **how,
        )
        for left, right, pixel, slope, how in rows
    ]


_REGIONS = [[float(n), *box] for n, box in zip([0, 1, 1, 0, 0], _BOXES, strict=True)]


@vjp(
    "RoiAlign",
    *_ways(),
    case(real(2, 2, 6, 7), _BOXES, [0, 1, 1, 0, 0], output_height=3, output_width=2),
    case(real(2, 2, 6, 7), _BOXES, [0, 1, 1, 0, 0], output_height=3, output_width=2, mode="max"),
    case(real(1, 2, 4, 4), [[0.3, 0.2, 3.1, 2.4]], [0]),
    case(real(1, 1, 1, 1), uniform(-1.0, 1.0, 2, 4), [0, 0], sampling_ratio=1),
    case(real(1, 2, 4, 4), np.zeros((0, 4)), np.zeros(0, np.int64), output_height=2),
    point(  # one sample, exactly on the second of three pixels
        [[[[1.0, 5.0, 2.0]]]],
        [[0.5, 0.0, 2.5, 1.0]],
        [0],
        gives=[[[[[0.0, 1.0, 0.0]]]], [[-1.5, 0.0, -1.5, 0.0]], None],
        sampling_ratio=1,
    ),
    *_on_edges(),
)
def roi_align(
    op: Builder,
    dy: Var,
    y: Var,
    x: Var,
    rois: Var,
    batch: Var,
    *,
    mode: str = "avg",
    output_height: int = 1,
    output_width: int = 1,
    sampling_ratio: int = 0,
    spatial_scale: float = 1.0,
    coordinate_transformation_mode: str = "half_pixel",
) -> Gradients:
    dtype, half_pixel = x.dtype, coordinate_transformation_mode == "half_pixel"
    dy, x, rois = (wide(op, v) for v in (dy, x, rois))
    geometry = Geometry((output_height, output_width), sampling_ratio, spatial_scale, half_pixel)
    sizes = [op.Squeeze(op.cast(op.dim(x, axis), rois.dtype)) for axis in (2, 3)]
    rows, columns = (geometry.samples(op, rois, size, axis) for axis, size in enumerate(sizes))
    pooled = _mean if mode == "avg" else _largest
    dx, *moves = pooled(op, dy, x, batch, rows, columns, sizes)
    (top, bottom), (left, right) = (_ends(op, *d, s.free) for d, s in zip(moves, (rows, columns), strict=True))
    d_rois = op.Concat(left, top, right, bottom, axis=1) * spatial_scale
    return op.cast(dx, dtype), op.cast(d_rois, dtype)


def _ends(op: Builder, moved: Var, turned: Var, free: Var) -> tuple[Var, Var]:
    """Return the gradients of the starts and ends of all regions, [R, 1] each.

    ``moved`` holds the gradients of the sample coordinates, and ``turned`` the products of these gradients and the
    samples' relative positions.
    """
    total, far = (op.ReduceSum(d, [1, 2], keepdims=1) for d in (moved, turned))
    far = far * free
    start, end = (op.Squeeze(d, [2]) for d in (total - far, far))
    return start, end


# --- mode "avg": one matrix per axis ---------------------------------------------------------------------


def _mean(
    op: Builder, dy: Var, x: Var, batch: Var, rows: Samples, columns: Samples, sizes: Sequence[Var]
) -> tuple[Var, Move, Move]:
    """Return the gradients of the image and of the sample coordinates along both axes, for mode "avg".

    All images form one matrix [N·H, C·W]. It is multiplied by a matrix [R·bins, N·H], in which the columns for the
    image of region r contain A[r].
    """
    (a, a_slope), (b, b_slope) = (_hats(op, s, size) for s, size in ((rows, sizes[0]), (columns, sizes[1])))
    n, c, h, w = (op.dim(x, axis) for axis in range(4))
    mine = op.cast(op.Equal(op.Unsqueeze(batch, [1]), op.Range(0, op.Squeeze(n), 1)), x.dtype)  # [R, N]
    spread = op.Unsqueeze(a, [2]) * op.Unsqueeze(mine, [1, 3])  # [R, bins, N, H]
    matrix = op.Reshape(spread, op.Concat([-1], op.Mul(n, h), axis=0))
    image = op.Reshape(op.Transpose(x, perm=[0, 2, 1, 3]), op.Concat(op.Mul(n, h), op.Mul(c, w), axis=0))
    back = op.Transpose(dy @ op.Unsqueeze(b, [1]), perm=[0, 2, 1, 3])  # [R, bins, C, W]
    flat_back = op.Reshape(back, op.Concat([-1], op.Mul(c, w), axis=0))
    dx = op.Reshape(op.Transpose(matrix, perm=[1, 0]) @ flat_back, op.Concat(n, h, c, w, axis=0))
    d_spread = op.Reshape(flat_back @ op.Transpose(image, perm=[1, 0]), op.Shape(spread))
    da = op.ReduceSum(d_spread * op.Unsqueeze(mine, [1, 3]), [2], keepdims=0)
    seen = op.Reshape(matrix @ image, op.Shape(back))
    db = op.ReduceSum(op.Transpose(dy, perm=[0, 2, 3, 1]) @ seen, [1], keepdims=0)
    d_rows, d_columns = (
        op.ReduceSum(op.Unsqueeze(d, [2]) * slope, [3], keepdims=0) for d, slope in ((da, a_slope), (db, b_slope))
    )
    return op.Transpose(dx, perm=[0, 2, 1, 3]), (d_rows, d_rows * rows.along), (d_columns, d_columns * columns.along)


def _hats(op: Builder, samples: Samples, size: Var) -> tuple[Var, Var]:
    """Return the weight of each pixel in a bin [R, bins, size], and its derivatives with respect to sample coordinates.

    The derivatives are [R, bins, samples, size]. A sample distributes its weight linearly between its two neighbouring
    pixels; at a pixel, the derivatives are the right-hand ones.
    """
    held = op.Clip(samples.at, 0.0, size - 1.0)
    away = op.Unsqueeze(held, [3]) - op.cast(op.Range(0, op.cast(size, INT64), 1), held.dtype)
    share = op.Unsqueeze(samples.share, [3])
    weight = op.ReduceSum(op.Max(1.0 - op.Abs(away), 0.0) * share, [2], keepdims=0)
    free = op.cast((samples.at >= 0.0) & (samples.at < size - 1.0), held.dtype)
    rise = op.cast((away >= -1.0) & (away < 0.0), held.dtype) - op.cast((away >= 0.0) & (away < 1.0), held.dtype)
    return weight, rise * op.Unsqueeze(free, [3]) * share


# --- mode "max": one pixel per bin ----------------------------------------------------------------------


@dataclass(frozen=True)
class Reach:
    """The K pixels that each bin reads along one axis; all tensors are [R, bins, K].

    Attributes:
        pixel: the indices of the pixels.
        counted: whether the sample of each pixel exists.
        weight: the weights of the pixels.
        slope: the derivative of the weight with respect to the coordinate of the sample.
        turned: ``slope`` times the relative position of the sample in the region.
    """

    pixel: Var
    counted: Var
    weight: Var
    slope: Var
    turned: Var


def _largest(
    op: Builder, dy: Var, x: Var, batch: Var, rows: Samples, columns: Samples, sizes: Sequence[Var]
) -> tuple[Var, Move, Move]:
    """Return the gradients of the image and of the sample coordinates along both axes, for mode "max".

    As in onnxruntime, the maximum is over single pixels times their weights, not over interpolated values.
    """
    i, j = (_neighbours(op, s, size) for s, size in ((rows, sizes[0]), (columns, sizes[1])))
    weight = _crossed(op, i.weight, j.weight, op.Mul)
    winner, at = _winners(op, x, batch, i.pixel, j.pixel, _crossed(op, i.counted, j.counted, op.And), weight)

    def of_winner(p: Var, q: Var) -> Var:
        return op.GatherElements(_crossed(op, p, q, op.Mul), winner, axis=2)

    d = op.Transpose(flat_space(op, dy, 0, 0), perm=[0, 2, 1])  # [R, bins·bins, C]
    dx = put(op, d * of_winner(i.weight, j.weight), at, x, "add")
    d_weight = d * op.Gather(flat(op, x), at)
    d_rows, d_columns = (
        (d_weight * of_winner(*moved), d_weight * of_winner(*turned))
        for moved, turned in (
            ((i.slope, j.weight), (i.turned, j.weight)),
            ((i.weight, j.slope), (i.weight, j.turned)),
        )
    )
    return dx, d_rows, d_columns


def _neighbours(op: Builder, samples: Samples, size: Var) -> Reach:
    """Return the two neighbouring pixels of each sample."""
    held = op.Clip(samples.at, 0.0, size - 1.0)
    low = op.Floor(held)
    share, t = op.cast(samples.share > 0.0, held.dtype), held - low
    rise = op.cast((samples.at >= 0.0) & (samples.at < size - 1.0), held.dtype) * share
    pixel = op.cast(op.Concat(low, op.Min(low + 1.0, size - 1.0), axis=2), INT64)
    slope = op.Concat(-rise, rise, axis=2)
    weight = op.Concat((1.0 - t) * share, t * share, axis=2)
    counted, along = (op.Concat(v, v, axis=2) for v in (samples.counted, samples.along))
    return Reach(pixel, counted, weight, slope, slope * along)


def _crossed(op: Builder, p: Var, q: Var, combine: Callable[..., Var]) -> Var:
    """Apply ``combine`` to each pair of a row in p and a column in q, [R, bins, K] each; return [R, bins·bins, K·K]."""
    pairs = combine(op.Unsqueeze(p, [2, 4]), op.Unsqueeze(q, [1, 3]))
    ends = [op.ReduceProd(op.dims(pairs, k, k + 2), keepdims=1) for k in (1, 3)]
    return op.Reshape(pairs, op.Concat(op.Shape(pairs, end=1), *ends, axis=0), allowzero=1)


def _winners(
    op: Builder, x: Var, batch: Var, rows: Var, columns: Var, counted: Var, weight: Var | None = None
) -> tuple[Var, Var]:
    """Return the index of the largest pixel per bin and channel [R, bins·bins, C], and its position in flattened x."""
    where = _crossed(op, op.Mul(rows, op.dim(x, 3)), columns, op.Add)
    count, batch = op.ReduceProd(op.dims(x, 2, 4), keepdims=1), op.Unsqueeze(batch, [1, 2])
    table = op.Reshape(op.Transpose(flat_space(op, x, 0, 0), perm=[0, 2, 1]), op.Concat([-1], op.dim(x, 1), axis=0))
    pixels = op.Gather(table, op.Add(where, op.Mul(batch, count)))
    products = pixels if weight is None else pixels * op.Unsqueeze(weight, [3])
    winner = op.ArgMax(op.Where(op.Unsqueeze(counted, [3]), products, -math.inf), axis=2, keepdims=0)
    planes = op.Add(op.Mul(batch, op.dim(x, 1)), op.Range(0, op.Squeeze(op.dim(x, 1)), 1))
    return winner, op.Add(op.Mul(planes, count), op.GatherElements(where, winner, axis=2))


@vjp(
    "MaxRoiPool",
    case(distinct(2, 3, 6, 7), _REGIONS, pooled_shape=[2, 3]),
    case(distinct(2, 3, 6, 7), _REGIONS, pooled_shape=[3, 2], spatial_scale=0.7),
    case(distinct(2, 3, 6, 7), uniform(0.0, 1.9, 3, 5), pooled_shape=[2, 2], spatial_scale=2.0),
    case(distinct(3, 1, 3, 4), [[2.0, 0.0, 0.0, 3.0, 2.0], [1.0, 1.0, 1.0, 2.0, 2.0]], pooled_shape=[2, 2]),
    case(distinct(1, 1, 1, 1), [[0.0, 0.0, 0.0, 0.0, 0.0]], pooled_shape=[1, 1]),
    case(distinct(1, 2, 3, 3), real(0, 5), pooled_shape=[2, 2]),
    point([[[[1.0, 3.0, 3.0]]]], [[0.0, 0.0, 0.0, 2.0, 0.0]], gives=[[[[[0.0, 1.0, 0.0]]]], None], pooled_shape=[1, 1]),
    settings=[1],  # regions are rounded to whole pixels
)
def max_roi_pool(
    op: Builder, dy: Var, y: Var, x: Var, rois: Var, *, pooled_shape: Sequence[int], spatial_scale: float = 1.0
) -> Gradients:
    rois = wide(op, rois)
    batch = op.cast(op.Gather(rois, 0, axis=1), INT64)
    (i, rows), (j, columns) = (
        _whole_pixels(op, rois, op.dim(x, 2 + a), a, pooled_shape[a], spatial_scale) for a in (0, 1)
    )
    counted = _crossed(op, rows, columns, op.And)
    winner, at = _winners(op, x, batch, i, j, counted)
    full = op.cast(op.GatherElements(counted, winner, axis=2), dy.dtype)  # except for a bin outside the image
    return (put(op, op.Transpose(flat_space(op, dy, 0, 0), perm=[0, 2, 1]) * full, at, x, "add"),)


def _whole_pixels(op: Builder, rois: Var, size: Var, axis: int, bins: int, scale: float) -> tuple[Var, Var]:
    """Return the indices of each bin's K pixels along one axis, int64 [R, bins, K], and a mask of those that exist."""
    corners = (op.Gather(rois, [[corner]], axis=1) * scale for corner in (2 - axis, 4 - axis))
    first, last = (op.Sign(c) * op.Floor(op.Abs(c) + 0.5) for c in corners)
    length, bin_ = (
        op.Max(last - first + 1.0, 1.0) / float(bins),
        np.arange(bins, dtype=rois.dtype.numpy()).reshape(-1, 1),
    )
    ends = (op.cast(end + first, INT64) for end in (op.Floor(length * bin_), op.Ceil(length * (bin_ + 1))))
    low, high = (op.Max(op.Min(end, size), op.const([0])) for end in ends)
    most = op.ReduceMax(op.Concat(flat(op, op.Sub(high, low)), [1], axis=0), keepdims=0)
    pixel = op.Add(low, op.Range(0, most, 1))
    return op.Min(pixel, op.Sub(size, 1)), pixel < high

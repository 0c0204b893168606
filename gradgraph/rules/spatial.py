"""Gradient rules of sampling at computed positions: GridSample, AffineGrid and DeformConv.

``spatial_taps`` reads the pixels and adds cotangents back; this file computes coordinates. GridSample and DeformConv
are linear in the image, and DeformConv also in its weight, bias and mask. Grids and offsets determine the sampling
points.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np

from gradgraph.graph.builder import Builder, Var
from gradgraph.rules.conv import bias_gradient
from gradgraph.rules.placement import INT64, LAST
from gradgraph.rules.registry import Case, Gradients, Point, case, point, real, uniform, vjp
from gradgraph.rules.rounding import wide
from gradgraph.rules.shape import reshaped
from gradgraph.rules.spatial_taps import add_back, along, moved, read, sizes, taps
from gradgraph.rules.windows import ranked


def _every_mode(x: Any, grid: Any, modes: Sequence[str]) -> list[Case]:
    return [
        case(x, grid, mode=mode, padding_mode=padding, align_corners=aligned)
        for mode, padding, aligned in itertools.product(modes, ("zeros", "border", "reflection"), (0, 1))
    ]


def _edge(at: float, dx: list[float], dg: float, padding_mode: str = "border") -> Point:
    """Return a test point: GridSample of a row of three pixels, at -1, 0 and 1, at the coordinate ``at``."""
    row, grid = [[[[1.0, 5.0, 2.0]]]], [[[[at, 0.0]]]]
    return point(row, grid, gives=[[[[dx]]], [[[[dg, 0.0]]]]], padding_mode=padding_mode, align_corners=1)


@vjp(
    "GridSample",
    *_every_mode(real(2, 3, 5, 4), uniform(-1.6, 1.6, 2, 3, 2, 2), ("linear", "nearest", "cubic")),
    *_every_mode(real(1, 2, 3, 4, 2), uniform(-1.6, 1.6, 1, 2, 3, 2, 3), ("linear", "nearest")),
    case(real(2, 3, 5), uniform(-1.6, 1.6, 2, 4, 1), onnxruntime="samples images and volumes only"),
    case(
        real(1, 2, 3, 4, 3),
        uniform(-1.3, 1.3, 1, 2, 1, 2, 3),
        mode="cubic",
        onnxruntime="has cubic sampling of images only",
    ),
    case(real(2, 1, 5, 4), [[[[0.1, -0.3], [0.7, 2.0]]], [[[0.0, 0.4], [-3.0, 0.0]]]]),
    case(real(1, 1, 1, 1), uniform(-2.0, 2.0, 1, 3, 2, 2)),
    case(real(1, 1, 1, 4), uniform(-2.0, 2.0, 1, 3, 2, 2), padding_mode="border", align_corners=1),
    case(real(1, 2, 5, 4), uniform(-6.0, 6.0, 1, 4, 5, 2), padding_mode="reflection", align_corners=1),
    case(real(2, 3, 5, 4), uniform(-1.0, 1.0, 2, 0, 2, 2)),
    case(real(2, 3, 5, 4), uniform(-1.0, 1.0, 2, 2, 0, 2), mode="cubic"),
    _edge(0.0, [0.0, 1.0, 0.0], -3.0),
    _edge(-1.0, [1.0, 0.0, 0.0], 0.0),
    _edge(1.0, [0.0, 0.0, 1.0], 0.0, padding_mode="reflection"),
    _edge(9.0, [0.0, 0.0, 0.0], 0.0, padding_mode="zeros"),
)
def grid_sample(
    op: Builder,
    dy: Var,
    y: Var,
    x: Var,
    grid: Var,
    *,
    mode: str = "linear",
    padding_mode: str = "zeros",
    align_corners: int = 0,
) -> Gradients:
    points = wide(op, grid)
    n = op.Squeeze(sizes(op, x, points.dtype), [2])
    turn = list(range(x.rank - 2))[::-1]  # a grid is ordered x, y, z; axes are z, y, x
    rows = op.Reshape(points, op.Concat(op.dim(grid, 0), _points(op, grid), [x.rank - 2], axis=0), allowzero=1)
    g = op.Gather(op.Transpose(rows, perm=[0, 2, 1]), turn, axis=1)
    u = (g + 1.0) * 0.5 * (n - 1.0) if align_corners else ((g + 1.0) * n - 1.0) * 0.5
    seen = taps(op, u, x, mode, padding_mode, bool(align_corners))
    dy = op.Reshape(dy, op.Concat(op.dims(x, 0, 2), _points(op, grid), axis=0), allowzero=1)
    dx = add_back(op, dy, seen, x)
    if mode == "nearest":
        return dx, op.zeros_like(grid)
    du = moved(op, along(op, read(op, x, seen.where), dy), seen)
    dg = op.Transpose(op.Gather(du * ((n - 1.0 if align_corners else n) * 0.5), turn, axis=1), perm=[0, 2, 1])
    return dx, op.cast(reshaped(op, dg, grid), grid.dtype)


def _points(op: Builder, grid: Var) -> Var:
    return op.ReduceProd(op.dims(grid, 1, grid.rank - 1), keepdims=1)


@vjp(
    "AffineGrid",
    case(real(2, 2, 3), [2, 3, 4, 5]),
    case(real(2, 2, 3), [2, 1, 4, 3], align_corners=1),
    case(real(1, 3, 4), [1, 2, 3, 2, 4]),
    case(real(2, 3, 4), [2, 2, 3, 2, 4], align_corners=1),
    case(real(1, 2, 3), [1, 1, 1, 1]),
    case(real(1, 2, 3), [1, 1, 1, 3], align_corners=1),
)
def affine_grid(op: Builder, dy: Var, y: Var, theta: Var, size: Var, *, align_corners: int = 0) -> Gradients:
    """Return the gradient of theta: Σ dy[n, p]·[b[p], 1] over points p, because ``y[n, p] = theta[n] @ [b[p], 1]``.

    Here b[p] is the position of point p in the identity grid.
    """
    axes = op.dim(theta, 1)
    identity = op.EyeLike(op.full(op.dims(theta, 1, 3), 0, theta.dtype))
    once = op.Concat([1], op.Slice(size, [1], [LAST], [0]), axis=0)
    base = op.AffineGrid(op.Unsqueeze(identity, [0]), once, align_corners=align_corners)
    rows = op.Transpose(op.Reshape(dy, op.Concat([0, -1], axes, axis=0)), perm=[0, 2, 1])
    linear = rows @ op.Reshape(base, op.Concat([-1], axes, axis=0))
    return (op.Concat(linear, op.ReduceSum(rows, [2], keepdims=1), axis=2),)


# --- deformable convolution ----------------------------------------------------------------------------


@vjp(
    "DeformConv",
    case(real(2, 3, 5, 6), real(4, 3, 2, 3), uniform(-1.5, 1.5, 2, 12, 4, 4), real(4), uniform(0.2, 1.0, 2, 6, 4, 4)),
    case(real(1, 2, 4, 4), real(3, 2, 2, 2), uniform(-1.5, 1.5, 1, 8, 3, 3)),
    case(real(1, 2, 4, 4), real(3, 2, 2, 2), uniform(-1.5, 1.5, 1, 8, 3, 3), real(3)),
    case(real(1, 2, 4, 4), real(2, 2, 1, 1), uniform(-5.0, 5.0, 1, 2, 4, 4), None, real(1, 1, 4, 4)),
    case(
        real(2, 4, 5, 6),
        real(4, 2, 2, 2),
        uniform(-1.5, 1.5, 2, 16, 2, 6),
        None,
        real(2, 8, 2, 6),
        group=2,
        offset_group=2,
        kernel_shape=[2, 2],
        strides=[2, 1],
        pads=[1, 1, 0, 1],
        dilations=[2, 2],
    ),
    case(real(1, 4, 3, 3), real(2, 4, 2, 2), uniform(-1.0, 1.0, 1, 16, 2, 2), offset_group=2),
    case(real(1, 4, 4, 3), real(4, 1, 2, 2), uniform(-1.0, 1.0, 1, 8, 3, 2), group=4),
    case(
        real(1, 2, 3, 4, 3),
        real(2, 2, 2, 1, 2),
        uniform(-1.0, 1.0, 1, 24, 2, 4, 2),
        real(2),
        offset_group=2,
        onnxruntime="has deformable convolution of images only",
    ),
    case(real(1, 1, 1, 1), real(1, 1, 1, 1), uniform(-0.8, 0.8, 1, 2, 1, 1)),
)
def deform_conv(
    op: Builder,
    dy: Var,
    y: Var,
    x: Var,
    w: Var,
    offset: Var,
    b: Var | None = None,
    mask: Var | None = None,
    *,
    group: int = 1,
    offset_group: int = 1,
    **attrs: Any,
) -> Gradients:
    """Return the gradients of DeformConv, a product of w with the columns ``v = mask · sampled x`` [N, C·taps, places].

    The og offset groups are merged into the batch: N·og images of C/og channels, with taps·places points each.
    """
    images, dy = _grouped(op, x, offset_group), ranked(dy, x)
    seen = taps(op, _offset_places(op, offset, w, **attrs), images)
    pixels = read(op, images, seen.where)
    weighted = pixels * op.cast(op.Unsqueeze(seen.weight, [3]), x.dtype)
    sampled = op.Transpose(op.ReduceSum(weighted, [1], keepdims=0), perm=[0, 2, 1])
    factor = None if mask is None else op.Reshape(mask, op.Concat(op.Shape(sampled, end=1), [1, -1], axis=0))
    dw, dv = _product(op, dy, w, sampled if factor is None else sampled * factor, group)
    ds = dv if factor is None else dv * factor
    d_mask = None if mask is None else reshaped(op, op.ReduceSum(dv * sampled, [1], keepdims=0), mask)
    du = moved(op, along(op, pixels, ds), seen)
    apart = op.Reshape(du, op.Concat([0, 0], _count(op, w), _count(op, offset), axis=0))
    d_offset = op.cast(reshaped(op, op.Transpose(apart, perm=[0, 2, 1, 3]), offset), offset.dtype)
    dx = reshaped(op, add_back(op, ds, seen, images), x)
    return dx, dw, d_offset, None if b is None else bias_gradient(op, dy), d_mask


def _grouped(op: Builder, x: Var, groups: int) -> Var:
    """Return [N, C, *sizes] as [N·groups, C/groups, *sizes]."""
    if groups == 1:
        return x
    shape = op.Concat([-1], op.Div(op.dim(x, 1), [groups]), op.dims(x, 2, x.rank), axis=0)
    images = op.Reshape(x, shape)
    return ranked(images, x)


def _offset_places(
    op: Builder,
    offset: Var,
    w: Var,
    *,
    strides: Sequence[int] | None = None,
    dilations: Sequence[int] | None = None,
    pads: Sequence[int] | None = None,
    **_: Any,
) -> Var:
    """Return the pixel coordinates [N·og, axes, taps·places] of samples, from offsets [N, og·taps·axes, *places]."""
    axes = w.rank - 2
    ones = [1] * axes
    lattice = op.Mul(_lattice(op, op.dims(w, 2, w.rank)), _column(op, dilations or ones))
    starts = op.Mul(_lattice(op, op.dims(offset, 2, offset.rank)), _column(op, strides or ones))
    start = op.Sub(starts, _column(op, (pads or [0] * axes)[:axes]))
    offset = wide(op, offset)
    place = op.cast(op.Add(op.Unsqueeze(lattice, [2]), op.Unsqueeze(start, [1])), offset.dtype)  # [axes, taps, places]
    apart = op.Reshape(offset, op.Concat([-1], _count(op, w), [axes], _count(op, offset), axis=0))
    u = op.Transpose(apart, perm=[0, 2, 1, 3]) + place
    return op.Reshape(u, op.Concat([0], [axes], op.Mul(_count(op, w), _count(op, offset)), axis=0))


def _lattice(op: Builder, shape: Var) -> Var:
    """Return the indices of all elements of a tensor of shape ``shape`` in row-major order: int64 [axes, elements]."""
    return op.NonZero(op.full(shape, 1, INT64))


def _column(op: Builder, numbers: Sequence[int]) -> Var:
    return op.const(np.array(numbers, np.int64).reshape(-1, 1))


def _count(op: Builder, x: Var) -> Var:
    """Return the number of spatial positions of ``x``, int64 [1]."""
    return op.ReduceProd(op.dims(x, 2, x.rank), keepdims=1)


def _product(op: Builder, dy: Var, w: Var, v: Var, group: int) -> tuple[Var, Var]:
    """Return the gradients of w and of the columns v [N·og, C/og, taps·places] for ``y = w @ v``, group by group."""
    rows = op.Reshape(dy, op.Concat([0, group, -1], _count(op, dy), axis=0))  # [N, g, M/g, places]
    matrix = op.Reshape(w, op.Concat([group, -1], op.ReduceProd(op.dims(w, 1, w.rank), keepdims=1), axis=0))
    columns = op.Reshape(v, op.Concat(op.Shape(dy, end=1), [group, -1], _count(op, dy), axis=0))
    dw = op.ReduceSum(rows @ op.Transpose(columns, perm=[0, 1, 3, 2]), [0], keepdims=0)
    dv = op.Transpose(matrix, perm=[0, 2, 1]) @ rows
    return reshaped(op, dw, w), op.Reshape(dv, op.Shape(v))

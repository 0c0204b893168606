"""Forms of operators of com.microsoft that ONNX has, too, under the same or another name (see ``contrib``)."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import onnx_ir as ir

from gradgraph.graph.builder import Builder, Var
from gradgraph.passes.normal.dialects.contrib import fused, refuse

_INT64 = ir.DataType.INT64

# --- movement and indexing -------------------------------------------------------------------------------


@fused("SampleOp")
def sample_op(op: Builder, node: ir.Node, x: Var) -> Any:
    return op.Identity(x)


@fused("Trilu")
def trilu(op: Builder, node: ir.Node, x: Var, k: Var | None = None, *, upper: int = 1) -> Any:
    return op.Trilu(x, k, upper=upper)


@fused("ExpandDims")
def expand_dims(op: Builder, node: ir.Node, x: Var, axis: Var) -> Any:
    return op.Unsqueeze(x, op.Reshape(op.cast(axis, _INT64), [1]))


@fused("GatherND")
def gather_nd(op: Builder, node: ir.Node, x: Var, indices: Var) -> Any:
    return op.GatherND(x, op.cast(indices, _INT64))


@fused("Pad")
def pad(op: Builder, node: ir.Node, x: Var, pads: Var, value: Var | None = None, *, mode: str = "constant") -> Any:
    """Convert Pad, whose pads may have shape [1, 2 · rank] and whose value may have shape [1]."""
    flat = pads if pads.rank == 1 else op.Reshape(pads, [-1])
    if value is not None and value.rank:
        value = op.Reshape(value, op.const([], _INT64))
    return op.Pad(x, flat, value, mode=mode)


@fused("Range")
def range_of(op: Builder, node: ir.Node, start: Var, limit: Var, delta: Var | None = None) -> Any:
    """Convert Range, whose inputs may have shape [1]; the step is 1 by default."""
    step: Any = op.const(1, start.dtype) if delta is None else delta
    return op.Range(*(x if x.rank == 0 else op.Reshape(x, op.const([], _INT64)) for x in (start, limit, step)))


@fused("Unique")
def unique(op: Builder, node: ir.Node, x: Var) -> Any:
    """Return the distinct values in the order of their first occurrence, the index of each entry, and the counts."""
    y, _, inverse, counts = op.Unique(x, sorted=0, outputs=4)
    return y, inverse, counts


@fused("TorchEmbedding")
def torch_embedding(
    op: Builder,
    node: ir.Node,
    weight: Var,
    indices: Var,
    padding: Var | None = None,
    by_frequency: Var | None = None,
) -> Any:
    """Convert TorchEmbedding; a negative ``padding`` is no padding, as PyTorch's exporter writes it."""
    if by_frequency is not None and (by_frequency.const is None or by_frequency.const.any()):
        raise refuse(node, "scales gradients by the frequency of indices")
    if padding is not None and (padding.const is None or padding.const.item() >= 0):
        raise refuse(node, "has a row for padding that is not trained")
    return op.Gather(weight, indices)


@fused("UnfoldTensor")
def unfold_tensor(op: Builder, node: ir.Node, x: Var, *, size: int, dim: int = -1, step: int = 1) -> Any:
    """Return the slices of ``size`` entries along axis ``dim``, one every ``step`` entries, along a new last axis."""
    axis = dim % x.rank
    last = op.Squeeze(op.dim(x, axis), [0]) - (size - 1)
    rows = op.Unsqueeze(op.Range(0, last, step), [1]) + op.const(range(size), _INT64)
    windows = op.Gather(x, rows, axis=axis)
    order = [i for i in range(x.rank + 1) if i != axis + 1]
    return op.Transpose(windows, perm=[*order, axis + 1])


# --- distances and images --------------------------------------------------------------------------------


@fused("CDist")
def c_dist(op: Builder, node: ir.Node, a: Var, b: Var, *, metric: str = "sqeuclidean") -> Any:
    """Return the distances [M, K] of the rows of ``a`` [M, N] and ``b`` [K, N]."""
    if metric not in ("euclidean", "sqeuclidean"):
        raise refuse(node, f"has the metric '{metric}'")
    offset = op.Unsqueeze(a, [1]) - op.Unsqueeze(b, [0])
    if metric == "euclidean":
        return op.ReduceL2(offset, [2], keepdims=0)
    return op.ReduceSumSquare(offset, [2], keepdims=0)


_MODES = {"bilinear": "linear", "bicubic": "cubic", "nearest": "nearest"}


@fused("GridSample")
def grid_sample(op: Builder, node: ir.Node, x: Var, grid: Var, *, mode: str = "bilinear", **attrs: Any) -> Any:
    if mode not in _MODES:
        raise refuse(node, f"has the mode '{mode}'")
    return op.GridSample(x, grid, mode=_MODES[mode], **attrs)


@fused("CropAndResize")
def crop_and_resize(
    op: Builder,
    node: ir.Node,
    x: Var,
    boxes: Var,
    batches: Var,
    size: Var,
    *,
    mode: str = "bilinear",
    extrapolation_value: float = 0.0,
) -> Any:
    """Sample each of the ``boxes`` [boxes, (y1, x1, y2, x2)], relative to the image, at a grid of ``size`` points.

    Corners of a box are corners of the grid; with a single point, its centre is sampled. Points outside of the image
    have ``extrapolation_value``.
    """
    if mode not in ("bilinear", "nearest"):
        raise refuse(node, f"has the mode '{mode}'")
    count = op.Reshape(op.cast(size, _INT64), [2])
    low_y, low_x, high_y, high_x = op.Split(boxes, axis=1, num_outputs=4, outputs=4)  # each [boxes, 1]
    sizes = [op.cast(op.dim(x, axis) - 1, boxes.dtype) for axis in (2, 3)]  # of the image, without the last pixel
    ys, xs = (
        _points(op, low, high, op.Slice(count, [i], [i + 1], [0]), last)
        for i, (low, high, last) in enumerate([(low_y, high_y, sizes[0]), (low_x, high_x, sizes[1])])
    )  # [boxes, points], in pixels
    shape = op.Concat(op.dim(boxes, 0), count, axis=0)
    points = [op.Expand(op.Unsqueeze(p, [axis]), shape) for p, axis in ((ys, 2), (xs, 1))]
    within = [(p >= 0.0) & (p <= last) for p, last in zip(points, sizes, strict=True)]
    if mode == "nearest":  # halves are rounded up, unlike in GridSample
        points = [op.Floor(p + 0.5) for p in points]
    y, x_ = (op.Unsqueeze(p / op.Max(last, 1.0), [3]) for p, last in zip(points, sizes, strict=True))
    grid = op.Concat(x_, y, axis=3) * 2.0 - 1.0
    kind = _MODES[mode]
    found = op.GridSample(op.Gather(x, batches), grid, mode=kind, align_corners=1, padding_mode="border")
    return op.Where(op.Unsqueeze(within[0] & within[1], [1]), found, extrapolation_value)


def _points(op: Builder, low: Var, high: Var, count: Var, last: Var) -> Var:
    """Return ``count`` equidistant points from ``low`` to ``high`` [boxes, 1], of which 1.0 is the pixel ``last``.

    A single point is in the middle. The last of several is ``high`` without rounding, since one beyond the border would
    be outside of the image.
    """
    number = op.arange(count)
    gaps = op.cast(op.Max(count - 1, [1]), low.dtype)
    steps = op.Unsqueeze(op.cast(number, low.dtype), [0]) * ((high - low) * last / gaps)
    several = op.Where(op.Equal(number, count - 1), high * last, low * last + steps)
    return op.Where(op.Equal(count, 1), (low + high) * 0.5 * last, several)


@fused("ConvTransposeWithDynamicPads")
def conv_transpose_with_dynamic_pads(
    op: Builder, node: ir.Node, x: Var, w: Var, pads: Var | None = None, b: Var | None = None, **attrs: Any
) -> Any:
    """Convert the operator to ConvTranspose; pads that are computed are cut off the output without pads."""
    if pads is None:
        return op.ConvTranspose(x, w, b, **attrs)
    if pads.const is not None:
        return op.ConvTranspose(x, w, b, pads=pads.const.reshape(-1).tolist(), **attrs)
    if attrs.get("auto_pad", "NOTSET") != "NOTSET":
        raise refuse(node, f"has both pads and auto_pad='{attrs['auto_pad']}'")
    whole = op.ConvTranspose(x, w, b, **attrs)
    before, behind = op.Split(op.Reshape(pads, [2, -1]), axis=0, num_outputs=2, outputs=2)
    axes = list(range(2, x.rank))
    stop = op.dims(whole, 2) - op.Squeeze(behind, [0])
    return op.Slice(whole, op.Squeeze(before, [0]), stop, axes)


# --- matrices --------------------------------------------------------------------------------------------

_LARGEST = 8  # rows of a matrix that is inverted by determinants: their work is of the fifth power


@fused("Inverse")
def inverse(op: Builder, node: ir.Node, x: Var) -> Any:
    """Return cofactorsᵀ / determinant; larger matrices, and those of unknown size, keep their operator.

    Rows and columns are first divided by powers of two, so that no determinant overflows.
    """
    size = x.dim(-1)
    if not isinstance(size, int) or size > _LARGEST:
        return None
    rows = _magnitude(op, x, -1)
    columns = _magnitude(op, x / rows, -2)
    scaled = x / rows / columns
    eye = np.eye(size)
    unit = op.const(eye[None, :, None].astype(x.dtype.numpy()))  # [1, column, 1, n]
    replaced = op.Where(op.const(eye.astype(bool)[:, None, :, None]), unit, op.Unsqueeze(scaled, [-4, -3]))
    cofactors = op.Det(replaced)  # of x with row i replaced by the unit vector j
    perm = [*range(x.rank - 2), x.rank - 1, x.rank - 2]
    y = op.Transpose(cofactors, perm=perm) / op.Unsqueeze(op.Det(scaled), [-2, -1])
    return y / op.Transpose(columns, perm=perm) / op.Transpose(rows, perm=perm)


def _magnitude(op: Builder, x: Var, axis: int) -> Var:
    """Return the power of two at or below the largest absolute value along ``axis``; it has no gradient."""
    largest = op.ReduceMax(op.Abs(x), [axis], keepdims=1)
    return op.Pow(op.const(2.0, x.dtype), op.Floor(op.Log(largest) / math.log(2)))


# --- complex numbers -------------------------------------------------------------------------------------


@fused("ComplexMul", "ComplexMulConj")
def complex_mul(op: Builder, node: ir.Node, a: Var, b: Var) -> Any:
    """Multiply complex numbers [..., (real, imaginary)]; ComplexMulConj conjugates the second factor."""
    sign = -1.0 if node.op_type == "ComplexMulConj" else 1.0
    (ar, ai), (br, bi) = (op.Split(z, axis=-1, num_outputs=2, outputs=2) for z in (a, b))
    bi = bi if sign > 0 else -bi
    return op.Concat(ar * br - ai * bi, ai * br + ar * bi, axis=-1)


@fused("Rfft")
def rfft(op: Builder, node: ir.Node, x: Var, *, signal_ndim: int, normalized: int = 0, onesided: int = 1) -> Any:
    """Return the transform of real signals along the last axis, [..., n] to [..., n / 2 + 1, 2]."""
    if signal_ndim != 1 or normalized or not onesided:
        raise refuse(node, "transforms several axes, normalizes, or returns both sides")
    return op.DFT(op.Unsqueeze(x, [-1]), None, op.const(-2, _INT64), onesided=1)

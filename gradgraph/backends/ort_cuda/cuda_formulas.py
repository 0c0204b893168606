"""Operators without a CUDA kernel, as formulas of operators that have one.

The formulas keep their accuracy where textbook formulas lose digits: ``_log1p`` computes log(1 + t) accurately for
small t, and nearly equal numbers are never subtracted. Matrix products are avoided, since onnxruntime rounds their
factors on CUDA.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx_ir as ir

from gradgraph.backends.ort_cuda.cuda_table import form
from gradgraph.graph.builder import Builder, Var
from gradgraph.graph.shapes import is_static
from gradgraph.rules.norm import channel_mean
from gradgraph.rules.placement import scattered
from gradgraph.rules.registry import case, real, uniform


def _odd(x: Var, of_magnitude: Var) -> Var:
    """Return f(x) for an odd function f, where ``of_magnitude`` is f(|x|)."""
    return of_magnitude * x.op.Sign(x)


# --- trigonometry -------------------------------------------------------------------------------------------


@form("Tan", case(uniform(-9.0, 9.0, 50)))
def tangent(op: Builder, x: Var) -> Var:
    return op.Sin(x) / op.Cos(x)


# (atan z - z) / z³ as a polynomial in z², fitted by least squares up to z = tan(π/8): accurate to 7e-10
_ARC_TANGENT = (-0.06071255, 0.10590755, -0.14243062, 0.19998442, -0.33333315)


@form("Atan", case(uniform(-5.0, 5.0, 99)))
def arc_tangent(op: Builder, x: Var) -> Var:
    """Compute Atan by a polynomial up to tan(π/8); above, atan a is π/4 + atan (a − 1)/(a + 1) or π/2 − atan 1/a.

    The polynomial is accurate enough for float32. In float64, a correction towards tan(angle) = a, with Sin and Cos,
    triples the number of correct digits.
    """
    a = op.Abs(x)
    steep, far = a > math.tan(math.pi / 8), a > math.tan(3 * math.pi / 8)
    z = op.Where(far, -1.0 / a, op.Where(steep, (a - 1.0) / (a + 1.0), a))
    base = op.Where(far, math.pi / 2, op.Where(steep, math.pi / 4, op.const(0.0, x.dtype)))
    square = z * z
    series = functools.reduce(lambda total, c: total * square + c, _ARC_TANGENT[1:], square * 0.0 + _ARC_TANGENT[0])
    angle = base + (z + z * square * series)
    if x.dtype == ir.DataType.DOUBLE:
        sine, cosine = op.Sin(angle), op.Cos(angle)
        # sine and cosine of the missing angle, which is small, times the same factor
        off = op.Where(far, cosine - sine / a, a * cosine - sine)
        angle = angle + off / op.Where(far, sine + cosine / a, cosine + a * sine)
    return _odd(x, angle)


@form("Asin", case(uniform(-1.0, 1.0, 50)))
def arc_sine(op: Builder, x: Var) -> Var:
    return op.Atan(x / op.Sqrt((1.0 - x) * (1.0 + x)))


@form("Acos", case(uniform(-1.0, 1.0, 50)))
def arc_cosine(op: Builder, x: Var) -> Var:
    """Compute Acos by the half-angle formula: π/2 − asin x would lose all digits near x = 1."""
    return op.Atan(op.Sqrt((1.0 - x) / (1.0 + x))) * 2.0


# --- hyperbolic functions -----------------------------------------------------------------------------------


@form("Cosh", case(uniform(-9.0, 9.0, 50)))
def hyperbolic_cosine(op: Builder, x: Var) -> Var:
    """Compute Cosh by exp(|x|/2), halved before it is squared, which overflows only if the result does."""
    root = op.Exp(op.Abs(x) * 0.5)
    return root * 0.5 * root + 0.5 / root / root


@form("Sinh", case(uniform(-9.0, 9.0, 50)))
def hyperbolic_sine(op: Builder, x: Var) -> Var:
    return op.Tanh(x) * op.Cosh(x)


def _large(x: Var) -> float:
    """Return a bound above which log(1 + x) equals log x, and √(x² + 1) equals x; its square does not overflow."""
    return 200.0 if x.dtype == ir.DataType.FLOAT16 else 1e8


def _log1p(op: Builder, t: Var) -> Var:
    """Return log(1 + t): as the sum u = 1 + t is rounded, log u is corrected by the factor t / (u − 1)."""
    u = t + 1.0
    ratio = op.Where(t > _large(t), 1.0, t / (u - 1.0))
    return op.Where(op.Equal(u, 1.0), t, op.Log(u) * ratio)


@form("Asinh", case(uniform(-9.0, 9.0, 50)))
def area_sine(op: Builder, x: Var) -> Var:
    """Compute Asinh as ``sign(x)·log(a + √(a² + 1))`` with a = |x|."""
    a, large = op.Abs(x), _large(x)
    near = op.Min(a, large)
    small = _log1p(op, near + near * (near / (op.Sqrt(near * near + 1.0) + 1.0)))
    return _odd(x, op.Where(a > large, op.Log(a) + math.log(2), small))


@form("Acosh", case(uniform(1.0, 9.0, 50)))
def area_cosine(op: Builder, x: Var) -> Var:
    """Compute Acosh as ``log(x + √(x² − 1))``."""
    large = _large(x)
    near = op.Min(x, large)
    above = near - 1.0
    return op.Where(x > large, op.Log(x) + math.log(2), _log1p(op, above + op.Sqrt(above * (near + 1.0))))


@form("Atanh", case(uniform(-1.0, 1.0, 50)))
def area_tangent(op: Builder, x: Var) -> Var:
    """Compute Atanh as ``sign(x)·log((1 + a)/(1 − a))/2`` with a = |x|."""
    a = op.Abs(x)
    return _odd(x, _log1p(op, a * 2.0 / (1.0 - a)) * 0.5)


# --- activations, means -------------------------------------------------------------------------------------


@form("Celu", case(real(2, 30)), case(real(2, 30), alpha=0.5), case(real(2, 30), alpha=2.0))
def scaled_elu(op: Builder, x: Var, *, alpha: float = 1.0) -> Var | None:
    """Compute Celu as ``α·Elu(x/α)``; None unless α is positive."""
    if alpha <= 0:
        return None
    return op.Elu(x) if alpha == 1 else op.Elu(x * (1 / alpha)) * alpha


@form("Mean", case(real(2, 3)), case(real(2, 3), real(3)), case(real(2, 1), real(), real(1, 3)))
def mean(op: Builder, *xs: Var) -> Var:
    return op.Sum(*xs) * (1 / len(xs))


@form("MeanVarianceNormalization", case(real(2, 3, 2, 2)), case(real(2, 3, 4), axes=[0, 2]))
def standardized(op: Builder, x: Var, *, axes: Sequence[int] = (0, 2, 3)) -> Var:
    """Compute MeanVarianceNormalization as ``(x − mean)/(deviation + 1e-9)`` over ``axes``."""
    centred = x - op.ReduceMean(x, axes, keepdims=1)
    return centred / (op.Sqrt(op.ReduceMean(centred * centred, axes, keepdims=1)) + 1e-9)


@form(
    "LRN",
    case(real(2, 5, 2, 2), size=3),
    case(real(1, 2, 1, 3), size=5, alpha=1.0, beta=1.5, bias=2.0),
    when=lambda call: call.attrs["size"] % 2 == 0,
)
def even_window(op: Builder, x: Var, *, size: int, alpha: float = 1e-4, beta: float = 0.75, bias: float = 1.0) -> Var:
    """Compute LRN over an even number of channels, which cuDNN does not support, by a pooled mean over channels."""
    return x * (channel_mean(op, x * x, size, (size - 1) // 2, size // 2) * alpha + bias) ** -beta


# --- pools --------------------------------------------------------------------------------------------------


@form(
    "LpPool",
    case(real(2, 3, 8), kernel_shape=[2], strides=[2]),
    case(real(2, 2, 5, 6), kernel_shape=[3, 3], pads=[1, 0, 1, 1], p=1),
    case(real(2, 2, 7, 8), kernel_shape=[3, 2], strides=[2, 2], pads=[1, 0, 1, 1], p=3),
    case(real(2, 2, 9), kernel_shape=[3], dilations=[2]),
)
def pooled_powers(
    op: Builder, x: Var, *, kernel_shape: Sequence[int], p: int = 2, ceil_mode: int = 0, **attrs: Any
) -> Var | None:
    """Compute LpPool by an AveragePool of the powers; None for ``ceil_mode``, where the last windows are smaller."""
    if ceil_mode:
        return None
    powers = op.AveragePool(_power(op, x, p), kernel_shape=kernel_shape, count_include_pad=1, **attrs)
    return _root(op, powers * float(math.prod(kernel_shape)), p)


@form("GlobalLpPool", case(real(2, 3, 5)), case(real(2, 3, 4, 5), p=1), case(real(1, 2, 2, 3, 2), p=3))
def global_norm(op: Builder, x: Var, *, p: int = 2) -> Var | None:
    """Compute GlobalLpPool as ``(Σ |x|ᵖ)^(1/p)`` over each channel of an image; None if the rank of x is unknown."""
    if x.shape is None:
        return None
    return _root(op, op.ReduceSum(_power(op, x, p), list(range(2, x.rank)), keepdims=1), p)


def _power(op: Builder, x: Var, p: int) -> Var:
    return x * x if p == 2 else op.Abs(x) if p == 1 else op.Abs(x) ** float(p)


def _root(op: Builder, x: Var, p: int) -> Var:
    return op.Sqrt(x) if p == 2 else x if p == 1 else x ** (1 / p)


# --- constant positions -------------------------------------------------------------------------------------


@form(
    "Col2Im",
    case(real(2, 6, 9), [4, 5], [2, 3]),
    case(real(1, 4, 6), [5, 4], [2, 2], strides=[2, 1], pads=[1, 0, 0, 1], dilations=[2, 2]),
    case(real(2, 8, 12), [4, 3, 3], [2, 2, 2]),
)
def scattered_columns(
    op: Builder,
    x: Var,
    image_shape: Var,
    block_shape: Var,
    *,
    strides: Sequence[int] | None = None,
    pads: Sequence[int] | None = None,
    dilations: Sequence[int] | None = None,
) -> Var | None:
    """Compute Col2Im: add columns to an image of zeros, with atomic operations at constant positions.

    One extra position after the image receives the padding. None if a shape is not constant, or the rank of x is
    unknown.
    """
    if image_shape.const is None or block_shape.const is None or x.shape is None:
        return None
    image, block = image_shape.const.tolist(), block_shape.const.tolist()
    ones = [1] * len(image)
    pads = list(pads or [0, 0] * len(image))
    places, behind = np.zeros((1, 1), np.int64), math.prod(image)
    outside = np.zeros((1, 1), bool)
    for a, (size, taps) in enumerate(zip(image, block, strict=True)):
        begin, end, stride, dilation = pads[a], pads[len(image) + a], (strides or ones)[a], (dilations or ones)[a]
        windows = (size + begin + end - (taps - 1) * dilation - 1) // stride + 1
        at = np.add.outer(np.arange(taps) * dilation, np.arange(windows) * stride) - begin
        places = _crossed(places * size, at)
        outside = _crossed(outside.astype(np.int64), (at < 0) | (at >= size)) > 0
    index = np.where(outside, behind, places).reshape(1, -1)
    rows = op.Reshape(x, [-1, index.size])
    count = op.Shape(rows, start=0, end=1)
    zeros = op.full(op.Concat(count, [behind + 1], axis=0), 0, x.dtype)
    summed = scattered(op, zeros, op.Expand(op.const(index), op.Shape(rows)), rows, 1, "add")
    return op.Reshape(op.Slice(summed, [0], [behind], [1]), op.Concat(op.dim(x, 0), [-1], image, axis=0))


def _crossed(rows: np.ndarray, columns: np.ndarray) -> np.ndarray:
    """Return all sums of a flat position in ``rows`` and one in ``columns``, [all taps, all windows]."""
    total: np.ndarray = rows[:, None, :, None] + columns[None, :, None, :]
    return total.reshape(rows.shape[0] * columns.shape[0], -1)


@form(
    "AffineGrid",
    case(real(2, 2, 3), [2, 3, 4, 5]),
    case(real(2, 2, 3), [2, 1, 4, 3], align_corners=1),
    case(real(2, 3, 4), [2, 2, 3, 2, 4]),
    case(real(1, 2, 3), [1, 1, 1, 3], align_corners=1),
)
def moved_places(op: Builder, theta: Var, size: Var, *, align_corners: int = 0) -> Var | None:
    """Compute AffineGrid by Mul and ReduceSum of theta and pixel positions, since CUDA products round their factors.

    None if ``size`` is not constant, or the shape of theta unknown.
    """
    if size.const is None or not is_static(theta.shape):
        return None
    batch, _, *space = size.const.tolist()
    ticks = [_ticks(s, bool(align_corners)) for s in space]
    grid = np.stack([*reversed(np.meshgrid(*ticks, indexing="ij")), np.ones(space)], axis=-1)
    places = op.const(grid.reshape(1, -1, 1, len(space) + 1), theta.dtype)
    return op.Reshape(op.ReduceSum(places * op.Unsqueeze(theta, [1]), [3], keepdims=0), [batch, *space, len(space)])


def _ticks(count: int, corners: bool) -> np.ndarray:
    """Return ``count`` pixel centres between −1 and 1; with ``corners`` from −1 to 1 inclusive, a single one at 1."""
    if corners:
        return np.linspace(-1, 1, count) if count > 1 else np.ones(1)
    return (2 * np.arange(count) + 1) / count - 1

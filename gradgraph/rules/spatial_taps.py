"""Interpolated reads of images: helpers for GridSample and DeformConv.

Point p reads K pixels (taps), each with a weight that depends on the point's position: ``y[n, c, p] = Σ_k weight[n, k,
p] · x[n, c, where[n, k, p]]``. The cotangent, times the weights, is thus added to the pixels that were read, and the
gradient of the point's position follows from the derivatives of the weights. Points are the last axis, because products
of long rows are fast.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_ir as ir

from gradgraph.graph.builder import Builder, Var
from gradgraph.rules.placement import INT64, put
from gradgraph.rules.windows import flat as flat_space

# tap weights as polynomials in the fractional position t, one row per power of t; cubic: Keys with a = -3/4
_A = -0.75
_POWERS: dict[str, list[list[float]]] = {
    "nearest": [[1.0], [0.0]],
    "linear": [[1.0, 0.0], [-1.0, 1.0]],
    "cubic": [
        [0.0, 1.0, 0.0, 0.0],
        [_A, 0.0, -_A, 0.0],
        [-2 * _A, -(_A + 3), 2 * _A + 3, _A],
        [_A, _A + 2, -(_A + 2), -_A],
    ],
}


@dataclass(frozen=True)
class Taps:
    """The pixels that each of P points reads of its image.

    Attributes:
        where: the positions of the pixels in the flat image, int64 [N, K, P].
        weight: the weights of the pixels, [N, K, P].
        slopes: the derivatives of the weights with respect to the pixel coordinates of the point, [N, axes, K, P].
    """

    where: Var
    weight: Var
    slopes: Var


def taps(op: Builder, u: Var, x: Var, mode: str = "linear", padding: str = "zeros", aligned: bool = True) -> Taps:
    """Return the taps of points with pixel coordinates ``u`` [N, axes, P] in images ``x`` [N, C, *sizes].

    At a pixel, where linear weights have a kink, the right-hand derivatives are used. With border or reflection
    padding, the derivatives are zero at the first and last pixel of an axis, as in PyTorch.
    """
    powers, n, u = _POWERS[mode], sizes(op, x, u.dtype), op.Unsqueeze(u, [2])
    base = op.Round(u) if mode == "nearest" else op.Floor(u)
    reach = np.arange(len(powers[0]), dtype=u.dtype.numpy()).reshape(-1, 1) - (1 if mode == "cubic" else 0)
    i, t = base + reach, u - base
    weight, slope = _polynomial(t, powers), _polynomial(t, [k * np.array(row) for k, row in enumerate(powers)][1:])
    if padding == "zeros":
        seen = op.cast((i >= 0.0) & (i < n), u.dtype)
        weight, slope = seen * weight, seen * slope
    elif mode != "cubic":
        inner = _mirrored(op, u, n, aligned) if padding == "reflection" else u
        slope = op.cast((inner > 0.0) & (inner < n - 1.0), u.dtype) * slope
    at = op.cast(_mirrored(op, i, n, aligned) if padding == "reflection" else i, INT64)
    weights, rises = unstacked(op, weight, x.rank - 2), unstacked(op, slope, x.rank - 2)
    slopes = [outer(op, [*weights[:a], rise, *weights[a + 1 :]], op.Mul) for a, rise in enumerate(rises)]
    return Taps(positions(op, at, x), outer(op, weights, op.Mul), stacked(op, slopes, 1))


def sizes(op: Builder, x: Var, dtype: ir.DataType) -> Var:
    """Return the spatial sizes of ``x``, [axes, 1, 1]."""
    column = op.Unsqueeze(op.dims(x, 2, x.rank), [1, 2])
    static = column.const
    return op.cast(column, dtype) if static is None else op.const(static, dtype)


def _polynomial(t: Var, powers: Sequence[Any]) -> Any:
    """Return Σ_k powers[k] · t^k by Horner's rule."""
    rows: list[Any] = [np.asarray(row, t.dtype.numpy()).reshape(-1, 1) for row in powers]
    return functools.reduce(lambda value, row: t * value + row, reversed(rows[:-1]), rows[-1])


def _mirrored(op: Builder, i: Var, n: Var, aligned: bool) -> Var:
    """Return coordinates reflected at the ends of an axis: at centres (``aligned``) or edges of the end pixels."""
    low, span = (0.0, n - 1.0) if aligned else (-0.5, n)
    far = op.Mod(op.Abs(i - low), span * 2.0, fmod=1)
    return op.Min(far, span * 2.0 - far) + low


def positions(op: Builder, at: Var, x: Var) -> Var:
    """Return the row-major positions in the flat image [N, K, P], from indices along each axis.

    ``at``, int64 [N, axes, T, P], are the indices of T taps along each axis; K counts all combinations of them. Indices
    outside the image are clamped to its edge.
    """
    n = sizes(op, x, INT64)
    inside = op.Max(op.Min(at, op.Sub(n, 1)), op.const(0))
    pitches = [op.ReduceProd(op.dims(x, axis + 1, x.rank), keepdims=1) for axis in range(2, x.rank - 1)]
    pitch = op.Unsqueeze(op.Concat(*pitches, [1], axis=0), [1, 2])
    return outer(op, unstacked(op, op.Mul(inside, pitch), x.rank - 2), op.Add)


def unstacked(op: Builder, v: Var, axes: int) -> list[Var]:
    """Return the slice [N, T, P] of each spatial axis of ``v`` [N, axes, T, P]."""
    return [op.Gather(v, a, axis=1) for a in range(axes)]


def stacked(op: Builder, parts: Sequence[Var], axis: int) -> Var:
    return op.Concat(*(op.Unsqueeze(part, [axis]) for part in parts), axis=axis)


def outer(op: Builder, parts: Sequence[Var], combine: Callable[..., Var]) -> Var:
    """Apply ``combine`` to all combinations of taps along several axes, [N, T, P] each; return [N, T^axes, P]."""
    spread = [op.Unsqueeze(p, [1 + b for b in range(len(parts)) if b != a]) for a, p in enumerate(parts)]
    combined = functools.reduce(combine, spread)
    count = op.ReduceProd(op.dims(combined, 1, len(parts) + 1), keepdims=1)
    shape = op.Concat(op.dim(parts[0], 0), count, op.dim(parts[0], 2), axis=0)
    return op.Reshape(combined, shape, allowzero=1)


# --- reading and writing -------------------------------------------------------------------------------


def read(op: Builder, x: Var, where: Var) -> Var:
    """Return the pixels of ``x`` [N, C, *sizes] at ``where`` [N, K, P], as [N, K, P, C]."""
    rows = op.Transpose(flat_space(op, x, 0, 0), perm=[0, 2, 1])
    return op.GatherND(rows, op.Unsqueeze(where, [-1]), batch_dims=1)


def add_back(op: Builder, dy: Var, seen: Taps, x: Var) -> Var:
    """Return the gradient of ``x``: ``dy`` [N, C, P] times weights, added at the pixels that each point reads."""
    weight = op.cast(op.Unsqueeze(seen.weight, [1]), dy.dtype)
    return add_at(op, op.Unsqueeze(dy, [2]) * weight, seen.where, x)


def add_at(op: Builder, updates: Var, where: Var, x: Var) -> Var:
    """Return zeros in the shape of ``x`` with ``updates`` [N, C, K, P] added at the pixels ``where`` [N, K, P]."""
    planes = op.Range(0, op.ReduceProd(op.dims(x, 0, 2), keepdims=0), 1)
    first = op.Mul(planes, op.ReduceProd(op.dims(x, 2, x.rank), keepdims=0))
    first = op.Reshape(first, op.Concat(op.dims(x, 0, 2), [1, 1], axis=0))
    return put(op, updates, op.Add(op.Unsqueeze(where, [1]), first), x, "add")


def along(op: Builder, pixels: Var, dy: Var) -> Var:
    """Return the gradient of each tap's weight [N, K, P], from ``pixels`` [N, K, P, C] and ``dy``."""
    rows = op.Unsqueeze(op.Transpose(dy, perm=[0, 2, 1]), [1])
    return op.ReduceSum(pixels * rows, [3], keepdims=0)


def moved(op: Builder, q: Var, seen: Taps) -> Var:
    """Return the gradient of the pixel coordinates [N, axes, P] from ``q``, the gradients of the taps' weights."""
    return op.ReduceSum(op.cast(op.Unsqueeze(q, [1]), seen.slopes.dtype) * seen.slopes, [2], keepdims=0)

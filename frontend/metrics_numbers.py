"""Regression metrics: mean errors, and shares of explained variance that keep their digits at any mean."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import onnx_ir as ir

from gradgraph.errors import ModelError
from gradgraph.frontend.losses_values import pair
from gradgraph.frontend.metric_sums import Sums, counts_of, mean_of, metric
from gradgraph.frontend.pointwise import cast
from gradgraph.frontend.shaping import stack
from gradgraph.frontend.trace import op, tensor

if TYPE_CHECKING:
    from gradgraph.frontend.tensor import Tensor

_EPSILON = 2.0**-52  # scikit-learn's


@metric(reads="numbers", better="min")
def mae(x: Tensor, target: Tensor, mask: Tensor | None = None) -> Sums:
    """``mean |x − t|``."""
    d, counts = _differences(x, target, mask)
    return mean_of(op.Abs(d), counts)


@metric(reads="numbers", better="min")
def mse(x: Tensor, target: Tensor, mask: Tensor | None = None) -> Sums:
    """``mean (x − t)²``."""
    d, counts = _differences(x, target, mask)
    return mean_of(d * d, counts)


@metric(reads="numbers", better="min")
def rmse(x: Tensor, target: Tensor, mask: Tensor | None = None) -> Sums:
    """``√ mean (x − t)²``."""
    d, counts = _differences(x, target, mask)
    return mean_of(d * d, counts, "root")


def _differences(x: Tensor, target: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return ``x − t`` and the weights of its elements, in float32 and of equal shapes."""
    a, b = pair(x, target)
    differences = cast(a - b, ir.DataType.FLOAT)
    return differences, counts_of(mask, differences)


@metric(reads="numbers", better="max")
def r2(x: Tensor, target: Tensor, mask: Tensor | None = None) -> Sums:
    """``1 − Σ (t − x)² / Σ (t − mean t)²``, averaged over the values on the last axis."""
    a, t, counted, width = _columns("r2", x, target, mask)
    errors = op.ReduceSum(op.Reshape((t - a) * (t - a) * counted, [-1, width]), [0], keepdims=0)
    return _shifted("r2_shifted", [*_moments(t, counted, width), cast(errors, ir.DataType.DOUBLE)], width)


@metric(reads="numbers", better="min")
def mape(x: Tensor, target: Tensor, mask: Tensor | None = None) -> Sums:
    """``mean |x − t| / max(|t|, 2.2e-16)``, as a fraction, not in percent; unsuitable for targets near 0."""
    d, counts = _differences(x, target, mask)
    _, t = pair(x, target)
    return mean_of(op.Abs(d) / op.Max(op.Abs(cast(t, ir.DataType.FLOAT)), _EPSILON), counts)


@metric(reads="numbers", better="max")
def explained_variance(x: Tensor, target: Tensor, mask: Tensor | None = None) -> Sums:
    """``1 − Var(t − x) / Var t``, averaged over the values on the last axis.

    Unlike r2, it ignores a constant error.
    """
    a, t, counted, width = _columns("explained_variance", x, target, mask)
    moments = [*_moments(t, counted, width), *_moments(t - a, counted, width)]
    return _shifted("explained_variance_shifted", moments, width)


def _moments(t: Tensor, counted: Tensor, width: int) -> list[Tensor]:
    """Return ``[n, Σ p, Σ d, Σ p², Σ 2·p·d, Σ d²]``, float64 vectors ``[width]``, of the counted values ``t = p + d``.

    The pivot ``p`` is the mean of this batch, rounded to 9 bits. The sums of ``p`` and ``p²`` are therefore exact, and
    ``d`` is small, so rounding errors do not matter when the variance is computed from these sums.
    """
    t, counted = (op.Reshape(cast(y, ir.DataType.DOUBLE), [-1, width]) for y in (t, counted))
    count = op.ReduceSum(counted, [0], keepdims=0)
    mean = op.ReduceSum(t * counted, [0], keepdims=0) / op.Max(count, 1.0)
    size = op.Max(op.Abs(mean), 1e-300)
    unit = op.Pow(tensor(2.0, ir.DataType.DOUBLE), op.Floor(op.Log(size) * (1.0 / np.log(2.0))) - 8.0)
    pivot = op.Round(mean / unit) * unit
    rest = (t - pivot) * counted
    rests, squares = (op.ReduceSum(y, [0], keepdims=0) for y in (rest, rest * rest))
    return [count, count * pivot, rests, count * pivot * pivot, 2.0 * pivot * rests, squares]


def _shifted(finish: str, rows: list[Tensor], width: int) -> Sums:
    """Return the float64 vectors ``rows`` as sums ``[3, rows, width]``, each the sum of three float32 numbers."""
    rest, addends = stack(rows), []
    for _ in range(3):
        addends.append(cast(rest, ir.DataType.FLOAT))
        rest = rest - cast(addends[-1], ir.DataType.DOUBLE)
    return Sums(stack(addends), (3, len(rows), width), finish)


def _columns(name: str, x: Tensor, target: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor, Tensor, int]:
    """Return prediction, target and mask in float32, and the length of the last axis, which must be fixed."""
    a, t = (cast(y, ir.DataType.FLOAT) for y in pair(x, target))
    width = t.shape[-1] if t.ndim > 1 else 1
    if not isinstance(width, int):
        raise ModelError(f"{name} requires a fixed number of values, but the last axis has the symbolic size {width}")
    return a, t, counts_of(mask, t), width

"""Gradient rules of reductions, along axes that are absent (all axes), constant, or only known at run time.

Without axes, or with an empty list, every axis is reduced. If ``noop_with_empty_axes`` is set, none is, but the
operator still applies to each element, as in onnxruntime: ReduceSumSquare squares it, ReduceL1 returns ``|x|``.

Conventions: the ties of ReduceMax and ReduceMin share the gradient equally; the gradient of ReduceL1 and ReduceL2 is 0
at 0, as for PyTorch's norms; the gradient of ReduceLogSumExp is 0 in a slice whose numbers are all ``-inf``.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import onnx_ir as ir

from gradgraph.graph import shapes
from gradgraph.graph.builder import Builder, Var
from gradgraph.rules.registry import Case, Draw, Gradients, case, distinct, point, positive, real, uniform, vjp
from gradgraph.rules.rounding import all_wide, wide


def _calls(draw: Callable[..., Draw]) -> tuple[Case, ...]:
    """Return cases with every way to specify the axes."""
    return (
        case(draw(2, 3)),
        case(draw(2, 3), keepdims=0),
        case(draw(2, 3), [1]),
        case(draw(2, 3, 2), [0, -1], keepdims=0),
        case(draw(2, 3, 2), [-2], keepdims=0),
        case(draw(2, 1, 3), [1, 2]),
        case(draw(2, 3), [], keepdims=0),
        case(draw(2, 3), []),
        case(draw(2, 3), [], noop_with_empty_axes=1),
        case(draw(2, 3), None, keepdims=0, noop_with_empty_axes=1),
        case(draw(2, 3), [0], keepdims=0, noop_with_empty_axes=1),
        case(draw(0, 3), [1], keepdims=0),
        case(draw(1)),
        case(draw()),
    )


def _empty_axes(axes: Var | None) -> bool:
    """Return whether ``axes`` is omitted, or known to be empty."""
    return axes is None or (axes.const is not None and axes.const.size == 0)


def _kept(op: Builder, y: Var, axes: Var | None, keepdims: int, **_: int) -> Var:
    """Return ``y`` with its reduced axes restored as size 1; a scalar broadcasts without them."""
    return y if keepdims or axes is None or _empty_axes(axes) else op.Unsqueeze(y, axes)


def _spread(op: Builder, dy: Var, x: Var, axes: Var | None, keepdims: int, noop_with_empty_axes: int) -> Var:
    """Return ``dy`` repeated along the reduced axes, in the shape of ``x``."""
    return dy if noop_with_empty_axes and _empty_axes(axes) else op.Expand(_kept(op, dy, axes, keepdims), op.shape(x))


def _total(op: Builder, x: Var, axes: Var | None, noop_with_empty_axes: int, **_: int) -> Var:
    return op.ReduceSum(x, axes, keepdims=1, noop_with_empty_axes=noop_with_empty_axes)


# --- sums ------------------------------------------------------------------------------------------------


@vjp("ReduceSum", *_calls(real), case(real(2, 0, 3), [1]))
def reduce_sum(op: Builder, dy: Var, y: Var, x: Var, axes: Var | None = None, **how: int) -> Gradients:
    return (_spread(op, dy, x, axes, **how),)


@vjp("ReduceMean", *_calls(real), point([[1.0, 2.0, 4.0]], [1], gives=[[[1 / 3, 1 / 3, 1 / 3]], None]))
def reduce_mean(op: Builder, dy: Var, y: Var, x: Var, axes: Var | None = None, **how: int) -> Gradients:
    return (_spread(op, dy * _weight(op, y, x, axes, how["noop_with_empty_axes"]), x, axes, **how),)


def _weight(op: Builder, y: Var, x: Var, axes: Var | None, noop: int) -> Var | float:
    """Return 1 / (the number of reduced elements), as float16 can represent 1/100000, but not 100000."""
    if noop and _empty_axes(axes):
        return 1.0
    reduced = x.shape
    if axes is not None and not _empty_axes(axes) and reduced is not None:
        reduced = None if axes.const is None else tuple(reduced[int(i)] for i in axes.const)
    if reduced is not None and shapes.is_static(reduced):
        return 1.0 / max(math.prod(shapes.known_sizes(reduced)), 1)
    # both sizes are 0 where y is empty
    size = op.Size(x) if _empty_axes(axes) else op.Size(x) / op.Max(op.Size(y), 1)
    wide = ir.DataType.DOUBLE if x.dtype == ir.DataType.DOUBLE else ir.DataType.FLOAT
    return op.cast(op.Reciprocal(op.cast(size, wide)), x.dtype)


@vjp("ReduceSumSquare", *_calls(real))
def reduce_sum_square(op: Builder, dy: Var, y: Var, x: Var, axes: Var | None = None, **how: int) -> Gradients:
    return (x * (_kept(op, dy, axes, **how) * 2.0),)


@vjp(
    "ReduceLogSum",
    *_calls(positive),
    point([[1.0, 3.0], [0.0, 0.0]], [1], gives=[[[0.25, 0.25], [math.inf, math.inf]], None], keepdims=0),
)
def reduce_log_sum(op: Builder, dy: Var, y: Var, x: Var, axes: Var | None = None, **how: int) -> Gradients:
    share = _kept(op, dy, axes, **how) / _total(op, x, axes, **how)
    return (_spread(op, share, x, axes, **how | {"keepdims": True}),)


@vjp(
    "ReduceLogSumExp",
    *_calls(real),
    point(
        [[100.0, 100.0], [-200.0, -200.0], [100.0, -200.0]],
        [1],
        gives=[[[0.5, 0.5], [0.5, 0.5], [1.0, math.exp(-300.0)]], None],
    ),
    point([[-math.inf, -math.inf], [-math.inf, 0.0]], [-1], gives=[[[0.0, 0.0], [0.0, 1.0]], None], keepdims=0),
    point([[math.inf, 0.0]], [-1], gives=[[[math.nan, 0.0]], None]),
    point([[1e17, 1e17, 1e17]], [1], gives=[[[1 / 3, 1 / 3, 1 / 3]], None]),  # y is rounded to 1e17, without log(3)
)
def reduce_log_sum_exp(op: Builder, dy: Var, y: Var, x: Var, axes: Var | None = None, **how: int) -> Gradients:
    level = wide(op, y)
    finite = op.cast(op.Where(op.IsInf(level, detect_positive=0), 0.0, level), x.dtype)  # -inf - -inf is NaN
    shares = op.Exp(x - _kept(op, finite, axes, **how))
    total = _total(op, shares, axes, how["noop_with_empty_axes"])  # 1, up to the rounding of a large y
    return (shares * (_kept(op, dy, axes, **how) / op.Where(total > 0.0, total, 1.0)),)


# --- norms -----------------------------------------------------------------------------------------------


@vjp(
    "ReduceL1", *_calls(real), point([[0.0, -0.0], [math.nan, -3.0]], [1], gives=[[[0.0, 0.0], [math.nan, -1.0]], None])
)
def reduce_l1(op: Builder, dy: Var, y: Var, x: Var, axes: Var | None = None, **how: int) -> Gradients:
    return (op.Sign(x) * _kept(op, dy, axes, **how),)


@vjp(
    "ReduceL2",
    *_calls(real),
    point([[0.0, -0.0], [3.0, -4.0]], [1], gives=[[[0.0, 0.0], [0.6, -0.8]], None], keepdims=0),
)
def reduce_l2(op: Builder, dy: Var, y: Var, x: Var, axes: Var | None = None, **how: int) -> Gradients:
    wide_dy, wide_x, norm = all_wide(op, dy, x, y)
    scale = wide_dy / op.Where(op.Equal(norm, 0.0), 1.0, norm)  # where the norm is 0, x is 0, and so is the gradient
    return (op.cast(wide_x * _kept(op, scale, axes, **how), x.dtype),)


# --- extrema and products ----------------------------------------------------------------------------------


@vjp(
    "ReduceMax",
    *_calls(distinct),
    point([[1.0, 3.0, 3.0], [2.0, 2.0, 2.0]], [1], gives=[[[0.0, 0.5, 0.5], [1 / 3, 1 / 3, 1 / 3]], None], keepdims=0),
    point([[-math.inf, -math.inf], [math.inf, 0.0]], [1], gives=[[[0.5, 0.5], [1.0, 0.0]], None]),
    point([[math.nan, 1.0], [2.0, 2.0]], [1], gives=[[[math.nan, math.nan], [0.5, 0.5]], None]),
)
def reduce_max(op: Builder, dy: Var, y: Var, x: Var, axes: Var | None = None, **how: int) -> Gradients:
    return _extremum(op, dy, x, axes, op.ReduceMax, **how)


@vjp(
    "ReduceMin",
    *_calls(distinct),
    point([[1.0, 3.0, 1.0], [2.0, 2.0, 2.0]], [1], gives=[[[0.5, 0.0, 0.5], [1 / 3, 1 / 3, 1 / 3]], None], keepdims=0),
    point([[math.nan, 1.0], [2.0, 2.0]], [1], gives=[[[math.nan, math.nan], [0.5, 0.5]], None]),
)
def reduce_min(op: Builder, dy: Var, y: Var, x: Var, axes: Var | None = None, **how: int) -> Gradients:
    return _extremum(op, dy, x, axes, op.ReduceMin, **how)


def _extremum(op: Builder, dy: Var, x: Var, axes: Var | None, choose: Callable[..., Var], **how: int) -> Gradients:
    wide_dy, same = all_wide(op, dy, x)
    y = choose(same, axes, keepdims=how["keepdims"], noop_with_empty_axes=how["noop_with_empty_axes"])
    chosen = op.cast(op.Equal(same, _kept(op, y, axes, **how)), same.dtype)
    share = _kept(op, wide_dy, axes, **how) / _total(op, chosen, axes, **how)
    return (op.cast(chosen * share, x.dtype),)


@vjp(
    "ReduceProd",
    *_calls(real),
    # slices with one zero and with two, also for the second derivative
    *(
        case(
            uniform(0.0, 0.0, 2, zeros),
            real(2, 2),
            graph="along = Constant<value_ints = [1]>()  x = Concat<axis = 1>(x0, x1)  y0 = ReduceProd(x, along)",
        )
        for zeros in (1, 2)
    ),
    point(
        [[0.0, 2.0, 3.0], [0.0, 0.0, 3.0], [4.0, 5.0, 6.0]],
        [1],
        gives=[[[6.0, 0.0, 0.0], [0.0] * 3, [30.0, 24.0, 20.0]], None],
    ),
    point(
        [[0.0, *[1e38] * 9], [*[1e38] * 8, -1e38, 0.0], [*[0.0] * 9, 1e38]],  # products overflow in float64, too
        [1],
        gives=[[[math.inf, *[0.0] * 9], [*[0.0] * 9, -math.inf], [0.0] * 10], None],
        keepdims=0,
    ),
    point([0.0], gives=[[1.0]], keepdims=0),
)
def reduce_prod(op: Builder, dy: Var, y: Var, x: Var, axes: Var | None = None, **how: int) -> Gradients:
    wide_dy, wide_x = all_wide(op, dy, x)
    dx = _kept(op, wide_dy, axes, **how) * _others(op, wide_x, axes, how["noop_with_empty_axes"])
    return (op.cast(dx, x.dtype),)


def _others(op: Builder, x: Var, axes: Var | None, noop: int) -> Var:
    """Return, for each element, the product of the other elements along the axes, without division by zero.

    This is the product of the other nonzero elements times a factor for zeros among the others: 1 if there are none, 0
    for two or more. For one zero, the factor is that element itself, so that the second derivative is correct, too.
    (The third derivative is 0 if a slice has two zeros.)
    """
    is_zero = op.Equal(x, 0.0)
    one_for_zero = op.Where(is_zero, 1.0, x)
    product = op.ReduceProd(one_for_zero, axes, keepdims=1, noop_with_empty_axes=noop)
    zero = op.cast(is_zero, x.dtype)
    zeros = _total(op, zero, axes, noop) - zero
    only_zeros = op.Where(is_zero, x, 0.0)
    lone = _total(op, only_zeros, axes, noop) - only_zeros
    nonzero = product / one_for_zero
    largest = float(np.finfo(x.dtype.numpy()).max)
    bounded = op.Clip(nonzero, -largest, largest)  # 0 times an overflow is 0
    return op.Where(op.Equal(zeros, 0.0), nonzero, bounded * op.Where(op.Equal(zeros, 1.0), lone, 0.0))

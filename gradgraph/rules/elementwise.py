"""Gradient rules of elementwise operators: arithmetic, elementary functions, and choices such as Max, Where and Clip.

Notation: ``z = f(x, y)``; ``dz`` is the cotangent of ``z``. Kinks and ties follow PyTorch: the gradient is 0 for Abs at
0, passes through Clip on the closed interval, and is shared equally among the ties of Min and Max.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np

from gradgraph.graph.builder import Builder, Var
from gradgraph.graph.marks import is_marked_constant
from gradgraph.rules.named_operators import named_operator
from gradgraph.rules.registry import (
    Gradients,
    boolean,
    case,
    distinct,
    no_gradient,
    point,
    positive,
    real,
    uniform,
    vjp,
)
from gradgraph.rules.rounding import all_wide, back

INF, NAN = math.inf, math.nan
STAIRS = np.array([-1, 0, 0.5, 1, 6, 7], np.float32)

no_gradient("piecewise constant", "Floor", "Ceil", "Round", "Sign")
no_gradient("it reads the bits of a number, not the number", "BitCast")


def fixed(x: Var) -> np.ndarray | None:
    """Return the value of ``x`` if it is a constant, else None. Initializers may be trained and do not count."""
    return x.const if is_marked_constant(x.value) else None


# --- arithmetic ----------------------------------------------------------------------------------------


@vjp(
    "Add",
    case(real(2, 3), real(2, 3)),
    case(real(2, 1, 3), real(4, 1)),
    case(real(1), real()),
    case(real(0, 3), real(3)),
    broadcasts=True,
)
def add(op: Builder, dz: Var, z: Var, x: Var, y: Var) -> Gradients:
    return dz, dz


@vjp("Sub", case(real(2, 3), real(2, 3)), case(real(3), real(2, 1)), case(real(0, 1), real(1, 3)), broadcasts=True)
def sub(op: Builder, dz: Var, z: Var, x: Var, y: Var) -> Gradients:
    return dz, -dz


@vjp(
    "Mul",
    case(real(2, 3), real(2, 3)),
    case(real(2, 1, 3), real(4, 1)),
    case(real(0, 3), real()),
    broadcasts=True,
)
def mul(op: Builder, dz: Var, z: Var, x: Var, y: Var) -> Gradients:
    dx = dz * y
    return dx, dx if x.value is y.value else dz * x


@vjp(
    "Div",
    case(real(2, 3), real(2, 3)),
    case(real(2, 1, 3), real(4, 1)),
    case(real(), real(3)),
    case(real(0, 3), real(3)),
    point([1.0, 0.0], [2.0, -4.0], gives=[[0.5, -0.25], [-0.25, 0.0]]),
    broadcasts=True,
)
def div(op: Builder, dz: Var, z: Var, x: Var, y: Var) -> Gradients:
    dx = dz / y
    return dx, -(dx * z)


@vjp("Neg", case(real(2, 3)), case(real()), case(real(0)))
def neg(op: Builder, dy: Var, y: Var, x: Var) -> Gradients:
    return (-dy,)


@vjp(
    "Reciprocal", case(real(2, 3)), case(real()), case(real(0)), point([4.0, -0.5, 0.0], gives=[[-0.0625, -4.0, -INF]])
)
def reciprocal(op: Builder, dy: Var, y: Var, x: Var) -> Gradients:
    return (-(dy * y * y),)


@vjp(
    "Abs",
    case(real(2, 3)),
    case(real()),
    case(real(0)),
    point([0.0, -0.0, 3.0, -3.0, NAN], gives=[[0.0, 0.0, 1.0, -1.0, NAN]]),
)
def abs_(op: Builder, dy: Var, y: Var, x: Var) -> Gradients:
    return (dy * op.Sign(x),)


def stepped_sign(op: Builder, x: Var) -> Var:
    """Return ``Sign(x)`` computed by Clip, Ceil, Floor and Add.

    After clipping to [-½, ½], Ceil returns 1 where x > 0 (else 0), and Floor returns -1 where x < 0 (else 0).
    onnxruntime's CPU kernels vectorise these four operators, but not Sign. In other runtimes, Sign would be faster.
    """
    near = op.Clip(x, -0.5, 0.5)
    return op.Ceil(near) + op.Floor(near)


@vjp("Sum", case(real(2, 3)), case(real(2, 3), real(3)), case(real(2, 1), real(), real(1, 3)), broadcasts=True)
def sum_(op: Builder, dz: Var, z: Var, *xs: Var) -> Gradients:
    return (dz,) * len(xs)


@vjp("Mean", case(real(2, 3)), case(real(2, 3), real(3)), case(real(2, 1), real(), real(1, 3)), broadcasts=True)
def mean(op: Builder, dz: Var, z: Var, *xs: Var) -> Gradients:
    return (dz * (1.0 / len(xs)),) * len(xs)


@vjp(
    "Mod",
    case(uniform(4.2, 4.8, 2, 3), uniform(1.5, 1.6, 3), fmod=1),
    case(uniform(-4.8, -4.7, 3), uniform(1.5, 1.55, 2, 1), fmod=1),
    case(uniform(4.7, 4.8, 3), uniform(-1.55, -1.5), fmod=1),
    case(uniform(0.2, 0.8, 0, 3), positive(3), fmod=1),
    point([4.0, -7.0, 1.0], [2.0, 3.0, -INF], gives=[[1.0, 1.0, 1.0], [-2.0, 2.0, 0.0]], fmod=1),
    broadcasts=True,
)
def mod(op: Builder, dz: Var, z: Var, x: Var, y: Var, **_: int) -> Gradients:
    quotient = op.Round((x - z) / y)  # the integer in x = quotient * y + z, however x and z were rounded
    return dz, -(dz * quotient)


# --- powers, exponentials and logarithms -----------------------------------------------------------------


@vjp(
    "Pow",
    case(positive(2, 3), real(3)),
    case(positive(3), positive(2, 1)),
    case(real(4), [2.0, 3.0, 1.0, 0.0]),
    case(real(2, 3), 2.0),
    case(real(2, 3), 3),  # an exponent of integer type
    case(real(5), [-2, -1, 0, 1, 3]),
    case([2.0, 0.5], real(3, 2)),
    case(positive(0, 3), real(3)),
    # x: 0**0 and 0**y are flat in y, 0**-1 has an infinite slope; y is constant over negative bases
    point(
        [0.0, 0.0, 0.0, 0.0, -2.0, -2.0, 3.0],
        [0.0, 1.0, 2.0, -1.0, 2.0, -1.0, 0.0],
        gives=[[0.0, 1.0, 0.0, -INF, -4.0, -0.25, 0.0], [0.0, 0.0, 0.0, -INF, 0.0, 0.0, math.log(3.0)]],
    ),
    point([0.0, -2.0, 0.0, 0.0], [0, 3, 1, 2], gives=[[0.0, 12.0, 1.0, 0.0], None]),
    point([0.0, 4.0], 0.5, gives=[[INF, 0.25], None]),
    # constant exponents
    *(
        case(positive(2, 3), graph=f"c = Constant<value_float = {c}>()  y0 = Pow(x0, c)")
        for c in (-1.0, 0.0, 0.5, 1.0, 2.0, 3.0)
    ),
    point([0.0, 2.0], gives=[[0.0, 0.0]], graph="c = Constant<value_float = 0.0>()  y0 = Pow(x0, c)"),
    point([0.0, 0.0], gives=[[0.0, 1.0]], graph="c = Constant<value_floats = [0.0, 1.0]>()  y0 = Pow(x0, c)"),
    broadcasts=True,
)
def pow(op: Builder, dz: Var, z: Var, x: Var, y: Var) -> Gradients:
    wide_dz, base, power = all_wide(op, dz, x, z)
    e = op.cast(y, base.dtype)
    logged = (base > 0.0) | (op.Equal(base, 0.0) & (e < 0.0))
    dy = wide_dz * power * op.Log(op.Where(logged, base, 1.0))
    return back(op, [_power_slope(op, wide_dz, base, e, fixed(y)), dy], (x, y))


def _power_slope(op: Builder, dz: Var, x: Var, e: Var, known: np.ndarray | None) -> Var:
    """Return the gradient of a power's base, dz * e * x**(e - 1); ``known`` is the exponent if it is constant."""
    if known is not None and known.size == 1:
        c = float(known.item())
        if c in (0.0, 1.0):
            return dz if c == 1.0 else op.zeros_like(dz)
        return dz * (x if c == 2.0 else x ** (c - 1.0)) * c
    down = e - 1.0
    if known is None or not known.all():
        tiny = op.Abs(x) < float(np.finfo(x.dtype.numpy()).tiny)  # where 1/x overflows
        down += op.cast(tiny & op.Equal(e, 0.0), x.dtype)  # 0 * 0**-1 is NaN, 0 * 0**0 is not
    return dz * e * x**down


@vjp("Exp", case(real(2, 3)), case(real()), case(real(0)), point([0.0, -200.0], gives=[[1.0, math.exp(-200.0)]]))
def exp(op: Builder, dy: Var, y: Var, x: Var) -> Gradients:
    return (dy * y,)


@vjp("Log", case(positive(2, 3)), case(positive()), case(positive(0)), point([0.0, 4.0], gives=[[INF, 0.25]]))
def log(op: Builder, dy: Var, y: Var, x: Var) -> Gradients:
    return (dy / x,)


@vjp("Sqrt", case(positive(2, 3)), case(positive()), case(positive(0)), point([0.0, 4.0], gives=[[INF, 0.25]]))
def sqrt(op: Builder, dy: Var, y: Var, x: Var) -> Gradients:
    return (dy * 0.5 / y,)


# --- trigonometry ----------------------------------------------------------------------------------------


@vjp("Sin", case(real(2, 3)), case(real()), case(real(0)), point([0.0], gives=[[1.0]]))
def sin(op: Builder, dy: Var, y: Var, x: Var) -> Gradients:
    return (dy * op.Cos(x),)


@vjp("Cos", case(real(2, 3)), case(real()), case(real(0)), point([0.0], gives=[[0.0]]))
def cos(op: Builder, dy: Var, y: Var, x: Var) -> Gradients:
    return (-(dy * op.Sin(x)),)


@vjp("Tan", case(uniform(-1.2, 1.2, 2, 3)), case(uniform(-1.2, 1.2)), case(real(0)), point([0.0], gives=[[1.0]]))
def tan(op: Builder, dy: Var, y: Var, x: Var) -> Gradients:
    return (dy * (y * y + 1.0),)


@vjp("Asin", case(uniform(-0.9, 0.9, 2, 3)), case(real(0)), point([0.0, 1.0, -1.0], gives=[[1.0, INF, INF]]))
def asin(op: Builder, dy: Var, y: Var, x: Var) -> Gradients:
    return (dy / op.Sqrt(_one_minus_square(x)),)


@vjp("Acos", case(uniform(-0.9, 0.9, 2, 3)), case(real(0)), point([0.0, 1.0, -1.0], gives=[[-1.0, -INF, -INF]]))
def acos(op: Builder, dy: Var, y: Var, x: Var) -> Gradients:
    return (-(dy / op.Sqrt(_one_minus_square(x))),)


@vjp("Atan", case(real(2, 3)), case(real(0)), point([0.0, 3.0, 1e30], gives=[[1.0, 0.1, 0.0]]))
def atan(op: Builder, dy: Var, y: Var, x: Var) -> Gradients:
    return (dy / (x * x + 1.0),)


def _one_minus_square(x: Var) -> Var:
    return (1.0 - x) * (1.0 + x)  # 1 - x*x would lose all digits near x = ±1


# --- hyperbolic functions ----------------------------------------------------------------------------------


@vjp("Sinh", case(real(2, 3)), case(real(0)), point([0.0], gives=[[1.0]]))
def sinh(op: Builder, dy: Var, y: Var, x: Var) -> Gradients:
    return (dy * op.Cosh(x),)


@vjp("Cosh", case(real(2, 3)), case(real(0)), point([0.0], gives=[[0.0]]))
def cosh(op: Builder, dy: Var, y: Var, x: Var) -> Gradients:
    return (dy * op.Sinh(x),)


@vjp("Tanh", case(real(2, 3)), case(real()), case(real(0)), point([0.0, 100.0, -200.0], gives=[[1.0, 0.0, 0.0]]))
def tanh(op: Builder, dy: Var, y: Var, x: Var) -> Gradients:
    return (dy * (1.0 - y * y),)


@vjp("Asinh", case(real(2, 3)), case(real(0)), point([0.0, 100.0], gives=[[1.0, 1.0 / math.sqrt(10001.0)]]))
def asinh(op: Builder, dy: Var, y: Var, x: Var) -> Gradients:
    return (dy / op.Sqrt(x * x + 1.0),)


@vjp("Acosh", case(uniform(1.2, 3.0, 2, 3)), case(positive(0)), point([1.0], gives=[[INF]]))
def acosh(op: Builder, dy: Var, y: Var, x: Var) -> Gradients:
    return (dy / op.Sqrt((x - 1.0) * (x + 1.0)),)


@vjp("Atanh", case(uniform(-0.9, 0.9, 2, 3)), case(real(0)), point([0.0, 1.0, -1.0], gives=[[1.0, INF, INF]]))
def atanh(op: Builder, dy: Var, y: Var, x: Var) -> Gradients:
    return (dy / _one_minus_square(x),)


@vjp(
    "Erf",
    case(real(2, 3)),
    case(real()),
    case(real(0)),
    point([0.0, 100.0, -200.0], gives=[[2.0 / math.sqrt(math.pi), 0.0, 0.0]]),
)
def erf(op: Builder, dy: Var, y: Var, x: Var) -> Gradients:
    return (dy * op.Exp(math.log(2.0 / math.sqrt(math.pi)) - x * x),)  # the factor 2/√π is moved into the exponential


# --- choices -------------------------------------------------------------------------------------------------

_TIES = (
    case(distinct(2, 3)),
    case(distinct(2, 3), uniform(-0.02, 0.02, 3)),
    case(distinct(3), [0.05, -0.05, 0.02]),
    case(distinct(2, 1), uniform(-0.02, 0.02), distinct(2, 3)),
    case(distinct(0, 3), real(3)),
)


@vjp(
    "Max",
    *_TIES,
    point([1.0, 2.0, 3.0], [3.0, 2.0, 1.0], gives=[[0.0, 0.5, 1.0], [1.0, 0.5, 0.0]]),
    point([NAN, 1.0, 1.0], [1.0, NAN, 1.0], gives=[[NAN, NAN, 0.5], [NAN, NAN, 0.5]]),
    point(
        [1.0, INF, -INF],
        [1.0, INF, -INF],
        [1.0, 0.0, -INF],
        gives=[[1 / 3, 0.5, 1 / 3], [1 / 3, 0.5, 1 / 3], [1 / 3, 0.0, 1 / 3]],
    ),
    broadcasts=True,
)
def maximum(op: Builder, dz: Var, z: Var, *xs: Var) -> Gradients:
    return _extremum(op, dz, xs, op.Max)


@vjp(
    "Min",
    *_TIES,
    point([1.0, 2.0, 3.0], [3.0, 2.0, 1.0], gives=[[1.0, 0.5, 0.0], [0.0, 0.5, 1.0]]),
    point([NAN, 1.0, 1.0], [1.0, NAN, 1.0], gives=[[NAN, NAN, 0.5], [NAN, NAN, 0.5]]),
    point([1.0, 1.0], [1.0], [1.0, 0.0], gives=[[1 / 3, 0.0], [1 / 3], [1 / 3, 1.0]]),
    broadcasts=True,
)
def minimum(op: Builder, dz: Var, z: Var, *xs: Var) -> Gradients:
    return _extremum(op, dz, xs, op.Min)


def _extremum(op: Builder, dz: Var, xs: Sequence[Var], choose: Callable[..., Var]) -> Gradients:
    if len(xs) == 1:
        return (dz,)
    dz, *same = all_wide(op, dz, *xs)
    z = choose(*same)
    chosen = [op.cast(op.Equal(x, z), z.dtype) for x in same]
    share = dz / op.sum_of(chosen)
    return back(op, [share * c for c in chosen], xs)


@vjp(
    "Where",
    case(boolean(2, 3), real(2, 3), real(2, 3)),
    case(boolean(4, 1, 1), real(2, 1), real(3)),
    case([True, False, True], real(), real(3)),
    case(boolean(0, 3), real(3), real(1)),
    point([True, False], [1.0, INF], [INF, 1.0], gives=[None, [1.0, 0.0], [0.0, 1.0]]),
    broadcasts=True,
)
def where(op: Builder, dz: Var, z: Var, condition: Var, x: Var, y: Var) -> Gradients:
    return None, op.Where(condition, dz, 0.0), op.Where(condition, 0.0, dz)


@vjp(
    "Clip",
    case(real(2, 3)),
    case(real(4, 3), -0.7, 0.9),
    case(real(4, 3), None, 0.1),
    case(real(4, 3), 0.1),
    case(real(4, 3), uniform(-0.19, 0.19), uniform(0.5, 0.6)),
    case(real(4, 3), uniform(-0.19, 0.19), None),
    case(real(4, 3), None, uniform(-0.19, 0.19)),
    case(real(4, 3), uniform(0.15, 0.19), uniform(-0.15, -0.1)),
    case(real(0, 3), -0.5, 0.5),
    case(real(), -0.1, 0.1),
    # closed interval: x passes at both bounds, and the bounds get nothing there
    point([-2.0, -1.0, 0.0, 1.0, 2.0], -1.0, 1.0, gives=[[0.0, 1.0, 1.0, 1.0, 0.0], 1.0, 1.0]),
    point([-2.0, -1.0, 0.0], -1.0, gives=[[0.0, 1.0, 1.0], 1.0]),
    point([0.0, 1.0, 2.0], None, 1.0, gives=[[1.0, 1.0, 0.0], None, 1.0]),
    # a NaN in x gets no gradient, and neither does x if a bound is NaN; then only the other bound gets one
    point([NAN, -2.0, 0.0, 2.0], -1.0, 1.0, gives=[[0.0, 0.0, 1.0, 0.0], 1.0, 1.0]),
    point([NAN, -2.0, 0.0, 2.0], NAN, 1.0, gives=[[0.0] * 4, 0.0, 1.0]),
    point([0.0, 1.0, 2.0], 1.0, 1.0, gives=[[0.0, 1.0, 0.0], 0.0, 1.0]),  # min = max: nothing below counts as min
    # min > max: everything counts as max
    point([-2.0, -1.0, 0.0, 1.0, 2.0], 1.0, -1.0, gives=[[0.0] * 5, 0.0, 5.0]),
    broadcasts=True,
)
def clip(op: Builder, dy: Var, y: Var, x: Var, low: Var | None = None, high: Var | None = None) -> Gradients:
    if low is None and high is None:
        return (dy,)
    given = (x, low, high)
    a, b = (None if bound is None else fixed(bound) for bound in (low, high))
    ordered = a is not None and b is not None and bool((a <= b).all())
    dy, x, low, high = all_wide(op, dy, *given)
    return back(op, _clip_gradients(op, dy, x, low, high, ordered), given)


def _clip_gradients(op: Builder, dy: Var, x: Var, low: Var | None, high: Var | None, ordered: bool) -> Gradients:
    def where(mask: Var) -> Var:
        return dy * op.cast(mask, dy.dtype)

    y = op.Clip(x, low, high)
    if high is None:
        return clip_gradient(op, dy, x, y), where(x < low), None
    if low is None:
        return clip_gradient(op, dy, x, y), None, where(x > high)
    dx = clip_gradient(op, dy, x, y) if ordered else where(op.Equal(x, y) & (low <= high))
    return dx, where((x < low) & (low < high)), where((x > high) | (low > high))


@named_operator(
    "ClipGrad",
    case(real(6), STAIRS, np.clip(STAIRS, 0, 6)),
    case(real(6), STAIRS, np.maximum(STAIRS, 0.5)),
    case(real(0), real(0), real(0)),
    like=[1],
)
def clip_gradient(op: Builder, dy: Var, x: Var, y: Var) -> Var:
    """Return ``dy`` where y = Clip(x) equals x, and 0 elsewhere; the bounds must be in order (min ≤ max)."""
    return dy * op.cast(op.Equal(x, y), dy.dtype)


# --- copies ----------------------------------------------------------------------------------------------


@vjp("Identity", case(real(2, 3)), case(real()), case(real(0)))
def identity(op: Builder, dy: Var, y: Var, x: Var) -> Gradients:
    return (dy,)


@vjp("Cast", case(real(2, 3), to=11), case(real(), to=11), case(real(0), to=11))
def cast(op: Builder, dy: Var, y: Var, x: Var, *, to: int, saturate: int = 1) -> Gradients:
    return (op.cast(dy, x.dtype),)

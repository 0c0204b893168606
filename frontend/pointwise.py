"""Element-wise functions, under PyTorch's names: arithmetic, logarithms, comparisons, activations."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx_ir as ir

from gradgraph.errors import ModelError
from gradgraph.frontend.trace import TensorLike, Value, as_dtype, op, tensor, tensors

if TYPE_CHECKING:
    from gradgraph.frontend.tensor import Tensor

__all__ = [
    "abs",
    "acos",
    "acosh",
    "add",
    "addcdiv",
    "addcmul",
    "asin",
    "asinh",
    "atan",
    "atanh",
    "cast",
    "ceil",
    "clamp",
    "clip",
    "cos",
    "cosh",
    "div",
    "eq",
    "erf",
    "erfc",
    "exp",
    "exp2",
    "expm1",
    "floor",
    "floor_divide",
    "fmod",
    "frac",
    "ge",
    "gt",
    "isfinite",
    "isinf",
    "isnan",
    "le",
    "lerp",
    "log",
    "log1p",
    "log2",
    "log10",
    "logaddexp",
    "logical_and",
    "logical_not",
    "logical_or",
    "logical_xor",
    "logit",
    "lt",
    "masked_fill",
    "maximum",
    "minimum",
    "mul",
    "nan_to_num",
    "ne",
    "neg",
    "pow",
    "reciprocal",
    "remainder",
    "round",
    "rsqrt",
    "sign",
    "sin",
    "sinh",
    "sqrt",
    "square",
    "sub",
    "tan",
    "tanh",
    "trunc",
    "where",
]


def real(x: TensorLike) -> Tensor:
    """Return ``x`` as a floating-point tensor (integers and booleans become float32)."""
    x = tensor(x)
    return x if x.is_floating_point() else cast(x, ir.DataType.FLOAT)


def cast(x: TensorLike, dtype: Any) -> Tensor:
    """Cast ``x`` to another element type. A cast to integers truncates fractions."""
    return tensor(x, as_dtype(dtype)) if isinstance(x, Value) else tensor(tensor(x), as_dtype(dtype))


def numbers_like(weight: TensorLike, x: Tensor) -> Tensor:
    """Return ``weight``, numbers or a tensor, as a tensor with the element type of ``x``."""
    return tensor(weight if isinstance(weight, Value) else np.asarray(weight, x.dtype.numpy()), x.dtype)


def unary(op_type: str, doc: str, operand: Callable[[TensorLike], Tensor] = real) -> Callable[[TensorLike], Tensor]:
    """Return the function of one tensor that a node of ``op_type`` computes, named after the operator in lower case."""

    def function(x: TensorLike) -> Tensor:
        return op.emit(op_type, operand(x))

    function.__name__ = function.__qualname__ = op_type.lower()
    function.__doc__ = doc
    return function


def binary(
    name: str, op_type: str, doc: str, operands: Callable[[TensorLike, TensorLike], list[Tensor]] = tensors
) -> Callable[[TensorLike, TensorLike], Tensor]:
    """Return the function of two tensors that a node of ``op_type`` computes; ``operands`` promotes their types."""

    def function(x: TensorLike, y: TensorLike) -> Tensor:
        return op.emit(op_type, *operands(x, y))

    function.__name__ = function.__qualname__ = name
    function.__doc__ = doc
    return function


def _as_booleans(x: TensorLike, y: TensorLike) -> list[Tensor]:
    return [cast(x, "bool"), cast(y, "bool")]


# --- arithmetic ----------------------------------------------------------------------------------


def add(x: TensorLike, y: TensorLike, *, alpha: float = 1) -> Tensor:
    """``x + alpha·y``."""
    a, b = tensors(x, y if alpha == 1 else mul(y, alpha))
    return op.Or(a, b) if a.is_bool() else op.Add(a, b)


def sub(x: TensorLike, y: TensorLike, *, alpha: float = 1) -> Tensor:
    """``x − alpha·y``."""
    a, b = tensors(x, y if alpha == 1 else mul(y, alpha))
    if a.is_bool():
        raise ModelError("booleans cannot be subtracted; use logical_xor or convert one of them with .float()")
    return op.Sub(a, b)


def mul(x: TensorLike, y: TensorLike) -> Tensor:
    """``x·y``."""
    a, b = tensors(x, y)
    return op.And(a, b) if a.is_bool() else op.Mul(a, b)


def div(x: TensorLike, y: TensorLike, *, rounding_mode: str | None = None) -> Tensor:
    """``x / y``, floating-point by default; with ``rounding_mode`` "floor" or "trunc", integers remain integers."""
    a, b = tensors(x, y)
    if rounding_mode == "floor":
        return floor_divide(a, b)
    if rounding_mode == "trunc":
        return trunc(op.Div(a, b)) if a.is_floating_point() else op.Div(a, b)
    if rounding_mode is not None:
        raise ModelError(f"div has no rounding_mode {rounding_mode!r}; use None, 'floor' or 'trunc'")
    return op.Div(real(a), real(b))


def floor_divide(x: TensorLike, y: TensorLike) -> Tensor:
    """``⌊x / y⌋``."""
    a, b = tensors(x, y)
    if a.is_floating_point():
        return op.Floor(op.Div(a, b))
    return op.Div(op.Sub(a, op.Mod(a, b)), b)  # ONNX rounds integer division towards zero


def remainder(x: TensorLike, y: TensorLike) -> Tensor:
    """The remainder of ``x / y`` with the sign of ``y``, as Python's ``%``."""
    a, b = tensors(x, y)
    return a - floor_divide(a, b) * b if a.is_floating_point() else op.Mod(a, b)


def fmod(x: TensorLike, y: TensorLike) -> Tensor:
    """The remainder of ``x / y`` with the sign of ``x``, as C's ``fmod``."""
    a, b = tensors(x, y)
    return op.Mod(a, b, fmod=1)


neg = unary("Neg", "``−x``.", tensor)
abs = unary("Abs", "``|x|``.", tensor)
sign = unary("Sign", "−1, 0 or 1.", tensor)


def pow(x: TensorLike, exponent: TensorLike) -> Tensor:
    """``x ** exponent``; both may be numbers or tensors."""
    a, b = tensors(x, exponent)
    return op.Pow(a, b)


def square(x: TensorLike) -> Tensor:
    """``x²``."""
    x = tensor(x)
    return x * x


sqrt = unary("Sqrt", "``√x``.")
reciprocal = unary("Reciprocal", "``1/x``.")


def rsqrt(x: TensorLike) -> Tensor:
    """``1/√x``."""
    return op.Reciprocal(op.Sqrt(real(x)))


def addcmul(x: TensorLike, a: TensorLike, b: TensorLike, *, value: float = 1) -> Tensor:
    """``x + value·a·b``."""
    return tensor(x) + mul(mul(a, b), value)


def addcdiv(x: TensorLike, a: TensorLike, b: TensorLike, *, value: float = 1) -> Tensor:
    """``x + value·a/b``."""
    return tensor(x) + mul(div(a, b), value)


def lerp(start: TensorLike, end: TensorLike, weight: TensorLike) -> Tensor:
    """``start + weight·(end − start)``."""
    start = tensor(start)
    return start + mul(weight, sub(end, start))


# --- rounding ------------------------------------------------------------------------------------


floor = unary("Floor", "The greatest integer that is at most ``x``.")
ceil = unary("Ceil", "The least integer that is at least ``x``.")
round = unary("Round", "Round to the nearest integer, halves to even.")


def trunc(x: TensorLike) -> Tensor:
    """``x`` without its fractional part."""
    x = real(x)
    return op.Sign(x) * op.Floor(op.Abs(x))


def frac(x: TensorLike) -> Tensor:
    """The fractional part, with the sign of ``x``."""
    x = real(x)
    return x - trunc(x)


# --- exponentials and logarithms -----------------------------------------------------------------


exp = unary("Exp", "``eˣ``.")
log = unary("Log", "The natural logarithm.")


def exp2(x: TensorLike) -> Tensor:
    """``2ˣ``."""
    return op.Exp(real(x) * math.log(2.0))


def expm1(x: TensorLike) -> Tensor:
    """``exp(x) - 1``, accurate near 0: ``tanh(x/2) * (exp(x) + 1)``."""
    x = real(x)
    return op.Tanh(x * 0.5) * (op.Exp(x) + 1.0)


def log2(x: TensorLike) -> Tensor:
    """The logarithm to base 2."""
    return op.Log(real(x)) * (1.0 / math.log(2.0))


def log10(x: TensorLike) -> Tensor:
    """The logarithm to base 10."""
    return op.Log(real(x)) * (1.0 / math.log(10.0))


def log1p(x: TensorLike) -> Tensor:
    """``log(1 + x)``, accurate near 0: the rounding error of ``u = 1 + x`` is corrected to first order."""
    x = real(x)
    u = x + 1.0
    return op.Log(u) + (x - (u - 1.0)) / u


def logaddexp(x: TensorLike, y: TensorLike) -> Tensor:
    """``log(exp(x) + exp(y))``."""
    a, b = tensors(real(x), real(y))
    return op.Max(a, b) + op.Softplus(op.Neg(op.Abs(a - b)))


def logit(x: TensorLike, eps: float | None = None) -> Tensor:
    """``log(x / (1 − x))``; with ``eps``, ``x`` is clamped to ``[eps, 1 − eps]`` first."""
    x = real(x) if eps is None else clamp(real(x), eps, 1.0 - eps)
    return op.Log(x / (1.0 - x))


# --- trigonometry --------------------------------------------------------------------------------


sin = unary("Sin", "The sine of an angle in radians.")
cos = unary("Cos", "The cosine of an angle in radians.")
tan = unary("Tan", "The tangent of an angle in radians.")
asin = unary("Asin", "The angle between −π/2 and π/2 whose sine is ``x``.")
acos = unary("Acos", "The angle between 0 and π whose cosine is ``x``.")
atan = unary("Atan", "The angle between −π/2 and π/2 whose tangent is ``x``.")
sinh = unary("Sinh", "``(eˣ − e⁻ˣ) / 2``.")
cosh = unary("Cosh", "``(eˣ + e⁻ˣ) / 2``.")
tanh = unary("Tanh", "``(eˣ − e⁻ˣ) / (eˣ + e⁻ˣ)``.")
asinh = unary("Asinh", "The number whose hyperbolic sine is ``x``.")
acosh = unary("Acosh", "The non-negative number whose hyperbolic cosine is ``x``.")
atanh = unary("Atanh", "The number whose hyperbolic tangent is ``x``.")
erf = unary("Erf", "``2/√π · ∫ e^(−t²) dt`` from 0 to ``x``.")


def erfc(x: TensorLike) -> Tensor:
    """``1 − erf(x)``."""
    return 1.0 - op.Erf(real(x))


# --- bounds and choices --------------------------------------------------------------------------


def clamp(x: TensorLike, min: TensorLike | None = None, max: TensorLike | None = None) -> Tensor:
    """``x`` clamped to two bounds, each optional, a number or a tensor."""
    if min is None and max is None:
        raise ModelError("clamp got neither min nor max; pass at least one bound")
    bounds = [b for b in (min, max) if b is not None]
    x = tensors(x, *bounds)[0]
    if any(isinstance(b, Value) and b.traced.rank > 0 for b in bounds):
        x = x if min is None else maximum(x, min)
        return x if max is None else minimum(x, max)
    return op.Clip(x, *(None if b is None else tensor(b, x.dtype) for b in (min, max)), shape=x.shape)


clip = clamp


maximum = binary("maximum", "Max", "The element-wise maximum.")
minimum = binary("minimum", "Min", "The element-wise minimum.")


def where(condition: TensorLike, x: TensorLike, y: TensorLike) -> Tensor:
    """``x`` where the condition is true, else ``y``; the three broadcast."""
    a, b = tensors(x, y)
    return op.Where(cast(condition, ir.DataType.BOOL), a, b)


def masked_fill(x: TensorLike, mask: TensorLike, value: TensorLike) -> Tensor:
    """``value`` where the mask is true, else ``x``; the element type is that of ``x``."""
    x = tensor(x)
    return op.Where(cast(mask, ir.DataType.BOOL), tensor(value, x.dtype), x)


def nan_to_num(x: TensorLike, nan: float = 0.0, posinf: float | None = None, neginf: float | None = None) -> Tensor:
    """``x`` with NaN and infinities replaced; infinities by default with the largest and smallest finite number."""
    x = real(x)
    limits = ir.DataType(x.dtype).numpy()
    top = float(np.finfo(limits).max)
    x = op.Where(op.IsNaN(x), tensor(nan, x.dtype), x)
    x = op.Where(op.IsInf(x, detect_negative=0), tensor(top if posinf is None else posinf, x.dtype), x)
    return op.Where(op.IsInf(x, detect_positive=0), tensor(-top if neginf is None else neginf, x.dtype), x)


# --- comparisons and logic -----------------------------------------------------------------------


eq = binary("eq", "Equal", "True where ``x = y``.")
lt = binary("lt", "Less", "True where ``x < y``.")
le = binary("le", "LessOrEqual", "True where ``x ≤ y``.")
gt = binary("gt", "Greater", "True where ``x > y``.")
ge = binary("ge", "GreaterOrEqual", "True where ``x ≥ y``.")


def ne(x: TensorLike, y: TensorLike) -> Tensor:
    """True where ``x ≠ y``."""
    return op.Not(eq(x, y))


isnan = unary("IsNaN", "True where ``x`` is NaN.")
isinf = unary("IsInf", "True where ``x`` is infinite.")


def isfinite(x: TensorLike) -> Tensor:
    """True where ``x`` is neither infinite nor NaN."""
    return op.Not(op.Or(isnan(x), isinf(x)))


logical_and = binary("logical_and", "And", "True where ``x`` and ``y`` are true.", _as_booleans)
logical_or = binary("logical_or", "Or", "True where ``x`` or ``y`` is true, or both.", _as_booleans)
logical_xor = binary("logical_xor", "Xor", "True where either ``x`` or ``y`` is true, but not both.", _as_booleans)


def logical_not(x: TensorLike) -> Tensor:
    """True where ``x`` is false."""
    return op.Not(cast(x, "bool"))


def bitwise(op_type: str) -> Callable[[TensorLike, TensorLike], Tensor]:
    """Return the function of Python's operator ``&``, ``|`` or ``^``, for booleans and, bit by bit, for integers.

    Args:
        op_type: "And", "Or" or "Xor".
    """

    def operator(x: TensorLike, y: TensorLike) -> Tensor:
        a, b = tensors(x, y)
        return op.emit(op_type if a.is_bool() else f"Bitwise{op_type}", a, b)

    return operator


def invert(x: TensorLike) -> Tensor:
    x = tensor(x)
    return op.Not(x) if x.is_bool() else op.BitwiseNot(x)

"""BitCast (opset 26) between floats and integers, in exact arithmetic on sign, exponent and fraction.

A float with f fraction bits and exponent bias b is ``±(1 + M / 2ᶠ) · 2^(E - b)``, stored as its sign, the exponent
field E and the fraction M. If E is 0, it is subnormal, ``±M / 2ᶠ · 2^(1 - b)``; if E is the largest exponent field, it
is infinite (M = 0) or NaN. Arithmetic does not preserve the bit pattern of a NaN: every NaN becomes the positive quiet
NaN.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from gradgraph.graph.builder import Builder, Var

INT64 = ir.DataType.INT64


@dataclass(frozen=True)
class Format:
    """A floating-point type: its bits, its fraction bits, and the ``wide`` type for the arithmetic."""

    bits: int
    fraction: int
    wide: ir.DataType

    @property
    def bias(self) -> int:
        return (1 << (self.bits - self.fraction - 2)) - 1

    @property
    def top(self) -> int:
        """The exponent field of infinity and NaN."""
        return 2 * self.bias + 1

    @property
    def sign(self) -> int:
        """The lowest signed integer: only the sign bit is set."""
        return -(1 << (self.bits - 1))

    def powers(self) -> np.ndarray:
        """Return 2^(E − b) for every exponent field E, and 2^(1 − b) for E = 0, the field of subnormal numbers."""
        exponents = np.maximum(np.arange(self.top + 1), 1) - self.bias
        with np.errstate(over="ignore"):
            return np.asarray(np.ldexp(np.ones(self.top + 1, self.wide.numpy()), exponents))


FORMATS = {
    ir.DataType.FLOAT16: Format(16, 10, ir.DataType.FLOAT),
    ir.DataType.FLOAT: Format(32, 23, ir.DataType.FLOAT),
    ir.DataType.DOUBLE: Format(64, 52, ir.DataType.DOUBLE),
}


def reinterpreted(op: Builder, x: Var, to: ir.DataType) -> Var | None:
    """Compute BitCast; ``None`` for types without a form: 8 bits and less, bfloat16, complex.

    Between signed and unsigned integers Cast preserves the bits, and a boolean is 0 or 1.
    """
    if x.dtype == to:
        return op.Identity(x)
    before, after = x.dtype, to
    known = (t in FORMATS or t == ir.DataType.BOOL or (t.is_integer() and t.bitwidth >= 8) for t in (before, after))
    if before.bitwidth != after.bitwidth or not all(known):
        return None
    whole = _bits(op, x, FORMATS[before]) if before in FORMATS else x
    if after not in FORMATS:
        return op.cast(whole, after) if whole is x else _as_integer(op, whole, after)
    return op.cast(_number(op, _signed(op, whole), FORMATS[after]), after)


# --- from floats to bits -----------------------------------------------------------------------------------------


def _bits(op: Builder, x: Var, f: Format) -> Var:
    """Return the bits of ``x`` as int64, negative where the sign bit is set."""
    x = op.cast(x, f.wide)
    a = op.Abs(x)
    finite = a < math.inf
    size = op.Where(finite, a, 1.0)
    field = _exponent_field(op, size, f)
    # scaled is 2ᶠ + M, or M for subnormal numbers (field 1), so (field − 1) · 2ᶠ + scaled is E · 2ᶠ + M
    scaled = size / op.Gather(f.powers(), field) * 2.0**f.fraction
    positive = (field - 1) * 2**f.fraction + op.cast(scaled, INT64)
    infinity = f.top * 2**f.fraction
    special = op.Where(op.IsNaN(x), op.const(infinity + 2 ** (f.fraction - 1)), op.const(infinity))
    positive = op.Where(finite, positive, special)
    negative = (x < 0.0) | (op.Reciprocal(x) < 0.0)  # also for minus zero
    return op.Where(negative, positive + f.sign, positive)


def _exponent_field(op: Builder, size: Var, f: Format) -> Var:
    """Return the exponent field E (1 for subnormal numbers) by a logarithm, corrected where it was rounded wrongly."""
    powers = op.const(f.powers())
    estimate = op.Floor(op.Log(size) * math.log2(math.e)) + float(f.bias)
    field = op.cast(op.Clip(estimate, 1.0, float(f.top - 1)), INT64)
    power = op.Gather(powers, field)
    lower, higher = (op.cast(v, INT64) for v in (size < power, size >= 2.0 * power))
    return op.Max(field - lower + higher, 1)


def _as_integer(op: Builder, bits: Var, to: ir.DataType) -> Var:
    if to.is_signed() or to.bitwidth == 64:  # where Cast preserves the bits
        return op.cast(bits, to)
    return op.cast(op.Where(bits < 0, bits + 2**to.bitwidth, bits), to)


# --- from bits to floats -----------------------------------------------------------------------------------------


def _signed(op: Builder, whole: Var) -> Var:
    """Convert ``whole`` to int64, negative where its highest bit is set."""
    width, wide = whole.dtype.bitwidth, op.cast(whole, INT64)
    if whole.dtype.is_signed() or width == 64:
        return wide
    return op.Where(wide >= 2 ** (width - 1), wide - 2**width, wide)


def _number(op: Builder, bits: Var, f: Format) -> Var:
    negative = bits < 0
    positive = op.Where(negative, bits - f.sign, bits)
    field = op.Div(positive, 2**f.fraction)
    rest = op.cast(positive - field * 2**f.fraction, f.wide) * 2.0**-f.fraction
    normal = op.Where(field > 0, op.const(1.0, f.wide), 0.0)
    finite = (normal + rest) * op.Gather(f.powers(), field)
    special = op.Where(rest > 0.0, op.const(math.nan, f.wide), math.inf)
    size = op.Where(op.Equal(field, f.top), special, finite)
    # a product, as onnxruntime's Where loses the sign of zero
    return size * op.Where(negative, op.const(-1.0, f.wide), 1.0)

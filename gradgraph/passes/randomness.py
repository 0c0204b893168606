"""Random numbers as a function of (seed, step, place): a counter-based generator in standard integer operators.

The operators Dropout and RandomUniform keep their state inside a session, so a run could not be resumed bit for bit,
and would differ between runtimes. Here bit ``i`` of a mask is a hash of a key and ``i``. The key is a hash of the
state ``rng`` and the number of the place in the graph; within loops, also of the number of the iteration. The state is
one int64: seed · 2³² + number of the step.

The hash is a 32-bit finaliser of the multiply-xorshift kind (constants 0x7feb352d, 0x846ca68b, found by C. Wellons's
search for low avalanche bias).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

from gradgraph.builder import Builder, Var

UINT32 = ir.DataType.UINT32
FLOAT, DOUBLE = ir.DataType.FLOAT, ir.DataType.DOUBLE


class RandomSource:
    """Hands out random numbers; each call is another place in the graph, so its stream is its own.

    Args:
        op: the builder of the graph.
        state: the int64 scalar ``rng``.
    """

    def __init__(self, state: Var) -> None:
        self.state = state
        self.places = 0

    def keep(self, op: Builder, x: Var, ratio: Var) -> Var:
        """A boolean mask shaped like ``x``, true with probability ``1 − ratio`` (to 2⁻²⁴)."""
        bits = self._bits(op, op.shape(x), ())
        uniform = _whole(op, bits, 24, FLOAT)
        drawn = op.GreaterOrEqual(uniform, op.cast(ratio, FLOAT) * float(1 << 24))
        mask = op.Reshape(drawn, op.shape(x))
        return op.like(mask, x)

    def uniform(
        self, op: Builder, shape: Var, turns: Sequence[Var] = (), dtype: ir.DataType = FLOAT, digits: int = 24
    ) -> Var:
        """Numbers in [0, 1), in float64 multiples of 2⁻⁵³.

        Args:
            op: writes the nodes.
            shape: an int64 vector.
            turns: the iteration number of each Loop around this place, an int64 scalar.
            dtype: FLOAT or DOUBLE.
            digits: of float32 the numbers are multiples of 2^-digits.
        """
        bits = self._bits(op, shape, turns)
        if dtype == DOUBLE:
            high, low = _whole(op, bits, 21, DOUBLE), _whole(op, self._bits(op, shape, turns), 32, DOUBLE)
            drawn = (high * 2.0**32 + low) * 2.0**-53
        else:
            drawn = _whole(op, bits, digits, FLOAT) * 2.0**-digits
        return op.Reshape(drawn, shape)

    def normal(self, op: Builder, shape: Var, turns: Sequence[Var] = (), dtype: ir.DataType = FLOAT) -> Var:
        """Standard normal numbers (Box and Muller): at most 5.8 in float32 and 8.6 in float64, arguments as above."""
        radius = op.Sqrt(op.Log(1.0 - self.uniform(op, shape, turns, dtype)) * -2.0)  # of (0, 1]: finite
        angle = self.uniform(op, shape, turns, dtype) * (2.0 * math.pi)
        return radius * op.Cos(angle)

    def _bits(self, op: Builder, shape: Var, turns: Sequence[Var]) -> Var:
        """A new place: 32 bits for each number of that shape, as a vector."""
        self.places += 1
        count = op.ReduceProd(shape, keepdims=0)
        index = op.Cast(op.Range(op.const(np.int64(0)), count, op.const(np.int64(1))), to=int(UINT32))
        return mix(op, op.BitwiseXor(mix(op, index), self._place_key(op, turns)))

    def _place_key(self, op: Builder, turns: Sequence[Var]) -> Var:
        low = op.Cast(op.Mod(self.state, 1 << 32), to=int(UINT32))
        high = op.Cast(op.Div(self.state, 1 << 32), to=int(UINT32))
        key = op.Add(mix(op, low), mix(op, op.Add(high, _u32(op, 0x9E3779B9))))
        key = mix(op, op.Add(key, _u32(op, self.places * 0x85EBCA6B & 0xFFFFFFFF)))
        for turn in turns:
            key = mix(op, op.Add(key, mix(op, op.Cast(turn + 1, to=int(UINT32)))))
        return key


def _whole(op: Builder, bits: Var, digits: int, dtype: ir.DataType) -> Var:
    """The first ``digits`` of 32 bits, as whole numbers below 2^digits: exact."""
    kept = bits if digits == 32 else op.BitShift(bits, _u32(op, 32 - digits), direction="RIGHT")
    return op.Cast(kept, to=int(dtype))


def mix(op: Builder, x: Var) -> Var:
    """The 32-bit hash; multiplication wraps around."""
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B)):
        x = op.BitwiseXor(x, op.BitShift(x, _u32(op, shift), direction="RIGHT"))
        x = op.Mul(x, _u32(op, factor))
    return op.BitwiseXor(x, op.BitShift(x, _u32(op, 16), direction="RIGHT"))


def advance(state: Var) -> Var:
    """The state of the next step."""
    return state + 1


def initial_state(seed: int) -> np.ndarray:
    return np.array((seed & 0x7FFFFFFF) << 32, np.int64)


def _u32(op: Builder, number: int) -> Var:
    return op.const(np.uint32(number))

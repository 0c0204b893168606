"""Random numbers as a function of (seed, step, place in the graph): a counter-based generator in standard operators.

The operators Dropout and RandomUniform keep their state inside a session, so that a run could not be resumed bit for
bit, and would differ between runtimes. Here, number ``i`` of a mask is a hash of a key and ``i``. The key is a hash of
the state ``rng`` and the index of the place in the graph; within loops, also of the iteration number. The state
consists of three int64 numbers: the seed's lower and upper 16 bits, and the step number.

Few runtimes have 32-bit integers that wrap around, so the hash is computed in float32 on whole numbers below 2²⁴. It
follows the scheme of learning with rounding (LWR): a round multiplies a vector of 16 bytes by a fixed random matrix,
modulo 2¹¹, and keeps the upper 8 bits of each entry. Two rounds absorb a 24-bit number. The last product, of 16
five-bit numbers and a table of 256 columns, yields 256 numbers modulo 2¹⁶ at once. A mask thus costs a narrow product
and three passes over its elements. Factors have at most 11 bits and are exact in TensorFloat-32, too.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

from gradgraph.graph.builder import Builder, Var

FLOAT, DOUBLE = ir.DataType.FLOAT, ir.DataType.DOUBLE

LANES = 16  # bytes of a key
COLUMNS = 256  # numbers drawn per key
PIECE = 12  # numbers are drawn in pieces of at most this many bits
_HALF_WORD = 1 << 16
_BYTES_OF_WORD = np.array([2.0**-8, 2.0**-16], np.float32)
_BYTES_OF_NUMBER = np.array([2.0**-8, 2.0**-16, 2.0**-24], np.float32)


@functools.cache
def tables() -> dict[str, np.ndarray]:
    """Return the fixed random matrices by name, scaled by powers of two so that products are taken modulo 1."""
    raw = np.random.PCG64(0x9E3779B97F4A7C15)  # the numbers are part of the file format: masks must never change

    def numbers(rows: int, columns: int, bits: int) -> np.ndarray:
        return (raw.random_raw((rows, columns)) >> np.uint64(64 - bits)).astype(np.float32)

    shift = np.float32(2.0**-11)
    made = {
        "state": numbers(12, LANES, 11) * shift,
        "number": numbers(3, LANES, 11) * shift,
        "key": numbers(LANES, LANES, 11) * shift,
        "mix": numbers(LANES, LANES, 11) * shift,
        "columns": numbers(LANES, COLUMNS, 8) * np.float32(2.0**-16),
    }
    made["columns"][LANES // 2 :] *= 256
    return made


class RandomSource:
    """A source of random numbers computed from an int64 state; each call has its own stream."""

    def __init__(self, state: Var) -> None:
        self.state = state
        self.places = 0
        self._tables: dict[str, Var] = {}

    def keep(self, op: Builder, x: Var, ratio: Var) -> Var:
        """Draw a boolean mask shaped like ``x``, true with probability ``1 − ratio`` (to 2⁻¹⁷)."""
        shape = op.shape(x)
        count = op.ReduceProd(shape, keepdims=1)
        drawn = op.GreaterOrEqual(self._fractions(op, count, ()), op.cast(ratio, FLOAT) - 2.0**-17)
        return op.like(op.Reshape(_first(op, drawn, count), shape), x)

    def uniform(
        self, op: Builder, shape: Var, turns: Sequence[Var] = (), dtype: ir.DataType = FLOAT, digits: int = 24
    ) -> Var:
        """Draw uniform numbers in [0, 1).

        Args:
            shape: the shape of the result, an int64 vector.
            turns: the iteration numbers of the Loops around this place, int64 scalars.
            dtype: FLOAT or DOUBLE.
            digits: the bits of a number: float32 numbers are multiples of 2^-digits, float64 numbers always of 2⁻⁵³.
        """
        digits = 53 if dtype == DOUBLE else digits
        ends = [*range(PIECE, digits, PIECE), digits]
        bits = np.diff([0, *ends])
        count = op.ReduceProd(shape, keepdims=1)
        whole = op.Mul(count, len(ends))
        drawn = op.Reshape(_first(op, self._fractions(op, whole, turns), whole), [len(ends), -1])
        pieces = op.cast(op.Floor(drawn * _column(op, 2.0**bits, FLOAT)), dtype)
        total = op.ReduceSum(pieces * _column(op, 0.5 ** np.array(ends), dtype), [0], keepdims=0)
        return op.Reshape(total, shape)

    def normal(self, op: Builder, shape: Var, turns: Sequence[Var] = (), dtype: ir.DataType = FLOAT) -> Var:
        """Draw standard normal numbers (Box-Muller); arguments as for ``uniform``.

        Magnitudes are at most 5.8 in float32, and 8.6 in float64.
        """
        radius = op.Sqrt(op.Log(1.0 - self.uniform(op, shape, turns, dtype)) * -2.0)  # in (0, 1]
        angle = self.uniform(op, shape, turns, dtype) * (2.0 * math.pi)
        return radius * op.Cos(angle)

    def _fractions(self, op: Builder, count: Var, turns: Sequence[Var]) -> Var:
        """Draw at least ``count`` multiples of 2⁻¹⁶ in [0, 1) for a new place, in rows of ``COLUMNS``."""
        self.places += 1
        rows = op.Squeeze(op.Div(op.Add(count, COLUMNS - 1), COLUMNS), [0])
        numbers = op.Range(op.const(np.int64(0)), rows, op.const(np.int64(1)))
        key = self._absorb(op, self._place_key(op, turns), op.Unsqueeze(numbers, [1]))
        drawn = op.MatMul(_round(op, op.MatMul(key, self._table(op, "mix")), 32), self._table(op, "columns"))
        return drawn - op.Floor(drawn)

    def _place_key(self, op: Builder, turns: Sequence[Var]) -> Var:
        high = op.Div(self.state, _HALF_WORD)
        words = op.cast(op.Concat(self.state - high * _HALF_WORD, high, axis=0), FLOAT)
        parts = op.Reshape(_round(op, op.Unsqueeze(words, [1]) * op.const(_BYTES_OF_WORD), 256), [1, 12])
        key = _round(op, op.MatMul(parts, self._table(op, "state")), 256)
        key = self._absorb(op, key, op.const(np.array([[self.places]], np.int64)))
        for turn in turns:
            key = self._absorb(op, key, op.Reshape(turn, [1, 1]))
        return key

    def _absorb(self, op: Builder, key: Var, numbers: Var) -> Var:
        """Derive keys [n, 16] from ``key`` [1, 16] and each of ``numbers`` [n, 1], int64 below 2²⁴."""
        parts = _round(op, op.cast(numbers, FLOAT) * op.const(_BYTES_OF_NUMBER), 256)
        before = op.MatMul(key, self._table(op, "key"))
        return _round(op, op.MatMul(parts, self._table(op, "number")) + before, 256)

    def _table(self, op: Builder, name: str) -> Var:
        if name not in self._tables:
            self._tables[name] = op.const(tables()[name])
        return self._tables[name]


def _round(op: Builder, x: Var, kinds: int) -> Var:
    return op.Floor((x - op.Floor(x)) * float(kinds))


def _first(op: Builder, x: Var, count: Var) -> Var:
    return op.Slice(op.Reshape(x, [-1]), [0], count, [0])


def _column(op: Builder, numbers: np.ndarray, dtype: ir.DataType) -> Var:
    return op.const(numbers.astype(dtype.numpy()).reshape(-1, 1))


def advance(op: Builder, state: Var) -> Var:
    """Return the generator's state for the next step."""
    return op.Add(state, op.const(np.array([0, 0, 1], np.int64)))


def initial_state(seed: int) -> np.ndarray:
    return np.array([seed % _HALF_WORD, (seed & 0x7FFFFFFF) // _HALF_WORD, 0], np.int64)

"""Random masks as a function of (seed, step, place): a counter-based generator in standard integer operators.

The operators Dropout and RandomUniform keep their state inside a session, so a run could not be resumed bit for bit,
and would differ between runtimes. Here bit ``i`` of a mask is a hash of a key and ``i``, the key a hash of the state
``rng`` and the number of the place in the graph. The state is one int64: seed · 2³² + number of the step.

The hash is a 32-bit finaliser of the multiply-xorshift kind (constants 0x7feb352d, 0x846ca68b, found by C. Wellons's
search for low avalanche bias).
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from gradgraph.builder import Builder, Var

UINT32 = ir.DataType.UINT32


class MaskSource:
    """Hands out masks; each call is another place in the graph, so its stream is its own.

    Args:
        op: the builder of the graph.
        state: the int64 scalar ``rng``.
    """

    def __init__(self, state: Var) -> None:
        self.state = state
        self.places = 0
        self._key: Var | None = None

    def keep(self, op: Builder, x: Var, ratio: Var) -> Var:
        """A boolean mask shaped like ``x``, true with probability ``1 − ratio`` (to 2⁻²⁴)."""
        self.places += 1
        count = op.ReduceProd(op.shape(x), keepdims=0)
        index = op.Cast(op.Range(op.const(np.int64(0)), count, op.const(np.int64(1))), to=int(UINT32))
        bits = mix(op, op.BitwiseXor(mix(op, index), self._place_key(op)))
        uniform = op.Cast(
            op.BitShift(bits, _u32(op, 8), direction="RIGHT"), to=int(ir.DataType.FLOAT)
        )  # 24 bits, exact
        drawn = op.GreaterOrEqual(uniform, op.cast(ratio, ir.DataType.FLOAT) * float(1 << 24))
        mask: Var = op.Reshape(drawn, op.shape(x))
        return op.like(mask, x)

    def _place_key(self, op: Builder) -> Var:
        low = op.Cast(op.Mod(self.state, 1 << 32), to=int(UINT32))
        high = op.Cast(op.Div(self.state, 1 << 32), to=int(UINT32))
        key = op.Add(mix(op, low), mix(op, op.Add(high, _u32(op, 0x9E3779B9))))
        place: Var = mix(op, op.Add(key, _u32(op, self.places * 0x85EBCA6B & 0xFFFFFFFF)))
        return place


def mix(op: Builder, x: Var) -> Var:
    """The 32-bit hash; multiplication wraps around."""
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B)):
        x = op.BitwiseXor(x, op.BitShift(x, _u32(op, shift), direction="RIGHT"))
        x = op.Mul(x, _u32(op, factor))
    hashed: Var = op.BitwiseXor(x, op.BitShift(x, _u32(op, 16), direction="RIGHT"))
    return hashed


def advance(state: Var) -> Var:
    """The state of the next step."""
    return state + 1


def initial_state(seed: int) -> np.ndarray:
    return np.array((seed & 0x7FFFFFFF) << 32, np.int64)


def _u32(op: Builder, number: int) -> Var:
    return op.const(np.uint32(number))

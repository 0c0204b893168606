"""Gradient rules of quantization operators: the scale of DequantizeLinear has a gradient, but integers have none."""

from __future__ import annotations

import numpy as np

from gradgraph.graph.builder import Builder, Var
from gradgraph.rules.broadcasting import unbroadcast
from gradgraph.rules.registry import Gradients, case, no_gradient, positive, vjp
from gradgraph.rules.rounding import all_wide

no_gradient(
    "rounded to integers, hence piecewise constant (gradgraph.extend.straight_through() passes gradients through)",
    "QuantizeLinear",
    "DynamicQuantizeLinear",
)
no_gradient("integer arithmetic", "ConvInteger", "MatMulInteger", "QLinearConv", "QLinearMatMul", "BitShift")

_NUMBERS = np.array([[3, -5, 7, 0, 12], [-128, 127, 1, -2, 4], [9, 8, -7, 6, 5]], np.int8)
_BYTES = np.array([[3, 250, 7], [0, 255, 128]], np.uint8)


@vjp(
    "DequantizeLinear",
    case(_NUMBERS, positive()),
    case(_NUMBERS, positive(1), np.array([3], np.int8)),
    case(_BYTES, positive(), np.array(128, np.uint8)),
    case(_BYTES, positive(3), np.array([0, 128, 7], np.uint8)),
    case(_BYTES, positive(2), axis=0),
    case(_NUMBERS, positive(3), np.array([1, 0, -3], np.int8), axis=-2),
    case(_NUMBERS.reshape(1, 3, 5), positive(3), axis=1),
    case(np.array([[1000, -70000]], np.int32), positive()),
    case(np.array([[1000, 65535]], np.uint16), positive(), np.array(9, np.uint16)),
    case(_NUMBERS, positive(3, 3), block_size=2, axis=1),
    case(_NUMBERS, positive(2, 5), np.array([[1, 0, -3, 5, 6]] * 2, np.int8), block_size=2, axis=0),
    case(_NUMBERS, positive(3, 1), block_size=5, axis=-1),
    case(np.zeros((0, 3), np.int8), positive(3)),
    case(np.array(5, np.int8), positive()),
)
def dequantize_linear(
    op: Builder,
    dy: Var,
    y: Var,
    x: Var,
    scale: Var,
    zero_point: Var | None = None,
    *,
    axis: int = 1,
    block_size: int = 0,
) -> Gradients:
    """Return the gradient of the scale: ``dy · (x - zero_point)``, summed over the elements that share a scale."""
    wide_dy, steps = all_wide(op, dy, scale)  # float16 overflows before 70,000
    terms = wide_dy * op.DequantizeLinear(x, op.ones_like(steps), zero_point, axis=axis, block_size=block_size)
    return None, op.cast(_sums(op, terms, x, steps, axis, block_size), scale.dtype)


def _sums(op: Builder, terms: Var, x: Var, scale: Var, axis: int, block: int) -> Var:
    """Return the sums of the terms that share a scale, in the shape of ``scale``."""
    if block:
        return _block_sums(op, terms, scale, axis % scale.rank, block)
    if scale.rank == 0:
        return op.ReduceSum(terms, keepdims=0)
    others = [a for a in range(x.rank) if a != axis % x.rank]
    sums = op.ReduceSum(terms, others, keepdims=0) if others else terms
    return unbroadcast(op, sums, sums, scale)  # a single scale, of shape [1], for all


def _block_sums(op: Builder, terms: Var, scale: Var, axis: int, block: int) -> Var:
    """Return sums of the terms within blocks; a short last block is padded with zeros."""
    blocks = op.dim(scale, axis)
    missing = op.Sub(op.Mul(blocks, block), op.dim(terms, axis))
    full = op.Pad(terms, op.Concat([0], missing, axis=0), None, [axis])
    parts = [op.dim(scale, a) for a in range(scale.rank)]
    split = op.Reshape(full, op.Concat(*parts[: axis + 1], [block], *parts[axis + 1 :], axis=0), allowzero=1)
    return op.ReduceSum(split, [axis + 1], keepdims=0)

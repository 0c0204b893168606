"""Normalization backwards: sums by matrix products, few passes over large tensors.

Measured with onnxruntime 1.31 on two AVX512 cores, float32.
"""

from __future__ import annotations

import math

import onnx_ir as ir

from gradgraph.builder import Builder, Var
from gradgraph.passes.lower.table import ORT_CPU, form


@form("LayerNormalizationGrad", target=ORT_CPU)
def products_with_scale(
    op: Builder, dy: Var, x: Var, scale: Var, mean: Var, inv: Var, *, axis: int
) -> tuple[Var, Var] | None:
    """``dx = inv·(dy·s − m − c·inv²·r)`` with ``c = x − mean``, ``m = dy s / D`` and ``r = (dy·c) s / D``.

    The two sums over each row are one vector of products each, and so is dscale: 7 passes instead of 13.
    """
    sizes = None if x.shape is None or scale.shape is None else x.shape[axis:]
    if not sizes or sizes != scale.shape or not all(isinstance(d, int) and d for d in sizes):
        return None
    if x.value.dtype != ir.DataType.FLOAT:
        return None
    centred = x - mean
    t = dy * centred
    row = op.Reshape(scale * (1 / math.prod(d for d in sizes if isinstance(d, int))), [1, -1])

    def times_scale(v: Var) -> Var:
        """The sum over each row of v, weighed by ``scale``, as a column."""
        column: Var = op.Reshape(op.Gemm(row, op.Flatten(v, axis=axis), transB=1), op.shape(mean), allowzero=1)
        return column

    along = centred * (times_scale(t) * (inv * inv))
    dx = (dy * scale - (along + times_scale(dy))) * inv
    dscale = op.Reshape(op.Flatten(inv, axis=0) @ op.Flatten(t, axis=axis), list(sizes))
    return dx, dscale

"""Forms of fused products of com.microsoft, and of those with quantized weights (see ``contrib``)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import onnx_ir as ir

from gradgraph.graph.builder import Builder, Var
from gradgraph.passes.normal.dialects.contrib import fast_gelu, fused, mat_mul_n_bits, reads_output, refuse, unpacked
from gradgraph.passes.normal.opsets.downgrade import rms_normalization

_FLOAT, _INT32, _INT64 = ir.DataType.FLOAT, ir.DataType.INT32, ir.DataType.INT64


@fused("GemmFastGelu")
def gemm_fast_gelu(op: Builder, node: ir.Node, x: Var, w: Var, bias: Var | None = None) -> Any:
    return fast_gelu(op, node, x @ w, bias)


@fused("GemmaRotaryEmbedding")
def gemma_rotary_embedding(op: Builder, node: ir.Node, angles: Var, q: Var, q_rot: Var, k: Var, k_rot: Var) -> Any:
    """Rotate queries and keys [batch, heads, length, size]; ``q_rot`` and ``k_rot`` are they with halves swapped."""
    sin, cos = (op.Unsqueeze(op.cast(f(angles), q.dtype), [1]) for f in (op.Sin, op.Cos))
    return q * cos + q_rot * sin, k * cos + k_rot * sin


@fused("BitmaskDropout")
def bitmask_dropout(
    op: Builder,
    node: ir.Node,
    x: Var,
    ratio: Var | None = None,
    training: Var | None = None,
    *,
    seed: int | None = None,
) -> Any:
    if reads_output(node, 1):
        raise refuse(node, "returns its mask as single bits")
    return op.Dropout(x, ratio, training, seed=seed)


@fused("BitmaskBiasDropout")
def bitmask_bias_dropout(
    op: Builder, node: ir.Node, x: Var, bias: Var, residual: Var | None = None, *rest: Var | None, **attrs: Any
) -> Any:
    y = bitmask_dropout(op, node, x + bias, *rest, **attrs)
    return y if residual is None else y + residual


# --- weights of 4 and 8 bits -------------------------------------------------------------------------------

# values of the codes of bitsandbytes' types, as in onnxruntime's kernel
_FP4 = [0, 5.208333333e-03, 0.66666667, 1, 0.33333333, 0.5, 0.16666667, 0.25]
_NF4 = [
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
]  # fmt: skip
_BNB = {0: [*_FP4, *(-x for x in _FP4)], 1: _NF4}


@fused("MatMulBnb4")
def mat_mul_bnb4(
    op: Builder,
    node: ir.Node,
    a: Var,
    packed: Var,
    absmax: Var,
    *,
    K: int,
    N: int,
    block_size: int,
    quant_type: int,
    transB: int = 1,
    training_mode: int = 0,
) -> Any:
    """Compute A · Wᵀ (or A · W if ``transB`` is 0) with W [N, K] in bitsandbytes' FP4 or NF4."""
    if quant_type not in _BNB:
        raise refuse(node, f"has weights of the type {quant_type}")
    blocks = -(-N * K // block_size)
    codes = _high_first(op, node, packed)
    values = op.Gather(op.const(_BNB[quant_type], a.dtype), op.cast(codes, _INT32))
    values = op.Slice(values, [0], [N * K], [0]) if N * K % 2 else values
    missing = blocks * block_size - N * K
    values = op.Pad(values, [0, missing]) if missing else values
    scaled = op.Reshape(values, [blocks, block_size]) * op.Reshape(absmax, [blocks, 1])
    flat = op.Reshape(scaled, [-1])
    w = op.Reshape(op.Slice(flat, [0], [N * K], [0]) if missing else flat, [N, K])
    return a @ (op.Transpose(w, perm=[1, 0]) if transB else w)


def _high_first(op: Builder, node: ir.Node, packed: Var) -> Var:
    """Return the 4-bit codes in ``packed``, two per byte, the high bits first."""
    size = packed.dim(0)
    if not isinstance(size, int):
        raise refuse(node, "has a weight of unknown size")
    pairs = unpacked(op, node, packed, 4, [size, 1, 2])
    low, high = op.Split(op.Reshape(pairs, [size, 2]), axis=1, num_outputs=2, outputs=2)
    return op.Reshape(op.Concat(high, low, axis=1), [-1])


@fused("MatMulNBitsMlp")
def mat_mul_n_bits_mlp(
    op: Builder,
    node: ir.Node,
    a: Var,
    skip: Var | None,
    norm_scale: Var | None,
    gate: Var,
    gate_scales: Var,
    gate_bias: Var | None,
    up: Var,
    up_scales: Var,
    up_bias: Var | None = None,
    *,
    activation: str,
    N: int,
    K: int,
    epsilon: float = 1e-5,
    **attrs: Any,
) -> Any:
    """Compute activation(a · gateᵀ) · (a · upᵀ) of one input, which is normalised first if there is a scale."""
    if activation not in ("silu", "swish"):
        raise refuse(node, f"has the activation '{activation}'")
    total, x = _normed(op, node, a, skip, norm_scale, epsilon)
    gated, y = (
        _by_bits(op, node, x, *weight, N=N, K=K, **attrs)
        for weight in ((gate, gate_scales, gate_bias), (up, up_scales, up_bias))
    )
    return gated * op.Sigmoid(gated) * y, total


@fused("MatMulNBitsQkv")
def mat_mul_n_bits_qkv(
    op: Builder,
    node: ir.Node,
    a: Var,
    skip: Var | None,
    norm_scale: Var,
    *weights: Var | None,
    Nq: int,
    Nkv: int,
    K: int,
    epsilon: float = 1e-6,
    **attrs: Any,
) -> Any:
    """Normalise a, and project it to queries, keys and values; each has a weight, its scales and maybe a bias."""
    total, x = _normed(op, node, a, skip, norm_scale, epsilon)
    padded = [*weights, *[None] * (9 - len(weights))]
    rows = (Nq, Nkv, Nkv)
    return *(_by_bits(op, node, x, *padded[3 * i : 3 * i + 3], N=n, K=K, **attrs) for i, n in enumerate(rows)), total


def _normed(
    op: Builder, node: ir.Node, a: Var, skip: Var | None, scale: Var | None, epsilon: float
) -> tuple[Var | None, Var]:
    """Return the sum of ``a`` and ``skip`` if there is one, and its norm."""
    total = None if skip is None else a + skip
    x = a if total is None else total
    return total, x if scale is None else rms_normalization(op, node, x, scale, epsilon=epsilon)


def _by_bits(op: Builder, node: ir.Node, x: Var, packed: Any, scales: Any, bias: Var | None, **attrs: Any) -> Var:
    y: Var = mat_mul_n_bits(op, node, x, packed, scales, bias=bias, **attrs)
    return y


# --- weights in floats of 4 and 8 bits ---------------------------------------------------------------------


@fused("MatMulBlockQuantizedFp8Weight")
def mat_mul_fp8(
    op: Builder,
    node: ir.Node,
    a: Var,
    b: Var,
    scales: Var,
    a_scale: Var | None = None,
    bias: Var | None = None,
    *,
    block_size: int = 128,
) -> Any:
    """Compute A · Wᵀ + bias with W [N, K] in float8e4m3fn and one scale per block of ``block_size`` columns."""
    if a_scale is not None:
        raise refuse(node, "rounds its input to 8-bit floats")
    return _scaled_product(op, node, a, lambda: op.cast(b, _FLOAT), (b.dim(0), b.dim(1)), scales, bias, block_size)


@fused("MatMulBlockQuantizedFp4Weight")
def mat_mul_fp4(
    op: Builder,
    node: ir.Node,
    a: Var,
    b: Var,
    scales: Var,
    scale: Var,
    input_scale: Var | None = None,
    bias: Var | None = None,
    *,
    block_size: int = 16,
) -> Any:
    """Compute A · Wᵀ + bias with W [N, K] in float4e2m1, two per byte, scaled by ``scale`` and a float8 per block.

    ``input_scale`` is not used, as specified.
    """
    rows, half = b.dim(0), b.dim(1)
    if not (isinstance(rows, int) and isinstance(half, int)):
        raise refuse(node, "has a weight of unknown size")

    def values() -> Var:
        codes = op.cast(unpacked(op, node, b, 4, [rows, 1, 2 * half]), _INT32)
        return op.Reshape(op.Gather(op.const(_every(ml_dtypes.float4_e2m1fn, 16)), codes), [rows, 2 * half])

    bytes_of_scales = op.Gather(op.const(_every(ml_dtypes.float8_e4m3fn, 256)), op.cast(scales, _INT32))
    return _scaled_product(op, node, a, values, (rows, 2 * half), bytes_of_scales * scale, bias, block_size)


def _every(dtype: Any, count: int) -> np.ndarray:
    """Return the value of each of the ``count`` codes of a narrow type, in float32; NaN is 0."""
    values: np.ndarray = np.arange(count, dtype=np.uint8).view(dtype).astype(np.float32)
    values[np.isnan(values)] = 0
    return values


def _scaled_product(
    op: Builder,
    node: ir.Node,
    a: Var,
    values: Callable[[], Var],
    sizes: tuple[Any, Any],
    scales: Var,
    bias: Var | None,
    block_size: int,
) -> Var:
    rows, columns = sizes
    if not (isinstance(rows, int) and isinstance(columns, int)):
        raise refuse(node, "has a weight of unknown size")
    blocks = -(-columns // block_size)
    by_column = op.Reshape(op.Expand(op.Unsqueeze(scales, [2]), [rows, blocks, block_size]), [rows, -1])
    by_column = by_column if blocks * block_size == columns else op.Slice(by_column, [0], [columns], [1])
    w = op.cast(values() * by_column, a.dtype)
    y = a @ op.Transpose(w, perm=[1, 0])
    return y if bias is None else y + bias

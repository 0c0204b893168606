"""MoE and QMoE of com.microsoft: each token goes through the top k experts of a router.

In the rewritten form, every expert processes every token in one batched product, and experts that were not chosen
have a gate of 0:

y[t] = Σ_e gate[t, e] · (act(x[t] · W1[e]ᵀ + b1[e]) · W2[e]ᵀ + b2[e])

This costs (experts / k) times the work of onnxruntime's kernel, but needs no data-dependent sizes. The gates are the
softmax of the router's scores, with 0 for all but the k largest; for a sparse mixer see :func:`_sparsely_mixed`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import onnx_ir as ir

from gradgraph.errors import ModelError
from gradgraph.graph.builder import Builder, Var
from gradgraph.graph.checks import describe
from gradgraph.passes.normal.dialects.contrib import dequantized, fused, refuse, unpacked

_MIXED = 2  # the number of experts that a sparse mixer chooses
_JITTER = 0.01  # ε of a sparse mixer, as in onnxruntime's kernel and PhiMoE's configuration

_SIMPLE: dict[str, Callable[[Builder, Var], Var]] = {
    "relu": lambda op, x: op.Relu(x),
    "gelu": lambda op, x: op.Gelu(x, approximate="tanh"),  # as in the kernel
    "silu": lambda op, x: x * op.Sigmoid(x),
    "identity": lambda op, x: x,
}


@fused("MoE")
def mixture_of_experts(
    op: Builder,
    node: ir.Node,
    x: Var,
    router: Var,
    w1: Var,
    b1: Var | None,
    w2: Var,
    b2: Var | None = None,
    w3: Var | None = None,
    b3: Var | None = None,
    *,
    k: int = 1,
    normalize_routing_weights: int = 0,
    use_sparse_mixer: int = 0,
    **activation: Any,
) -> Any:
    """Mix the experts by the router: ``x`` [..., hidden], ``router`` [tokens, experts], weights [experts, out, in]."""
    if use_sparse_mixer and k != _MIXED:
        raise refuse(node, f"chooses {k} experts by a sparse mixer, which chooses {_MIXED}")
    rows = op.Unsqueeze(op.Reshape(x, op.Concat([-1], op.dim(x, -1), axis=0)), [0])  # [1, tokens, hidden]
    first = _linear(op, rows, w1, b1)
    third = None if w3 is None else _linear(op, rows, w3, b3)
    y = _linear(op, _activated(op, node, first, third, **activation), w2, b2)  # [experts, tokens, hidden]
    chosen = _sparsely_mixed(op, router) if use_sparse_mixer else _gates(op, router, k, bool(normalize_routing_weights))
    gates = op.Unsqueeze(op.Transpose(chosen, perm=[1, 0]), [2])
    return op.Reshape(op.ReduceSum(y * gates, [0], keepdims=0), op.shape(x))


@fused("QMoE")
def quantized_mixture_of_experts(
    op: Builder,
    node: ir.Node,
    x: Var,
    router: Var,
    q1: Var,
    s1: Var | None,
    b1: Var | None,
    q2: Var,
    s2: Var | None,
    b2: Var | None = None,
    q3: Var | None = None,
    s3: Var | None = None,
    b3: Var | None = None,
    z1: Var | None = None,
    z2: Var | None = None,
    z3: Var | None = None,
    *unsupported: Var | None,
    expert_weight_bits: int = 4,
    fc1_expert_weight_bits: int | None = None,
    fc2_expert_weight_bits: int | None = None,
    fc3_expert_weight_bits: int | None = None,
    block_size: int = 0,
    quant_type: str = "int",
    weights_prepacked: int = -1,
    accuracy_level: int = 0,
    normalize_routing_weights: int = 0,
    use_sparse_mixer: int = 0,
    **options: Any,
) -> Any:
    """Dequantize the weights as in MatMulNBits; reject weights that are prepacked for one kind of processor.

    The CPU kernel always normalizes the routing weights of the chosen experts, whatever the attribute says, so a model
    without this would train otherwise than it runs: it is rejected, too.
    """
    if not (normalize_routing_weights or use_sparse_mixer):
        raise ModelError(
            f"{describe(node)} does not normalize its routing weights, but onnxruntime's CPU kernel does",
            remedy="set normalize_routing_weights=1 if the network was trained so, or use experts stored as floats",
        )
    options |= {"normalize_routing_weights": normalize_routing_weights, "use_sparse_mixer": use_sparse_mixer}
    if quant_type != "int" or weights_prepacked > 0 or any(v is not None for v in unsupported):
        raise _packed(node)

    def weight(q: Var, s: Var | None, z: Var | None, bits: int | None) -> Var:
        return _dequantized_experts(op, node, q, s, z, bits or expert_weight_bits, block_size, x.dtype)

    w1 = weight(q1, s1, z1, fc1_expert_weight_bits)
    w2 = weight(q2, s2, z2, fc2_expert_weight_bits)
    w3 = None if q3 is None else weight(q3, s3, z3, fc3_expert_weight_bits)
    hidden = x.dim(-1)
    if isinstance(hidden, int) and (w1.dim(2), w2.dim(1)) != (hidden, hidden):
        raise _packed(node)  # files for CUDA are prepacked by default
    return mixture_of_experts(op, node, x, router, w1, b1, w2, b2, w3, b3, **options)


def _packed(node: ir.Node) -> ModelError:
    return ModelError(
        f"{describe(node)} has experts that are prepacked for one kind of processor, or a router with two outputs",
        remedy="let onnxruntime-genai's builder write the file with qmoe_weights_prepacked=0",
    )


def _dequantized_experts(
    op: Builder,
    node: ir.Node,
    packed: Var,
    scales: Var | None,
    zero_points: Var | None,
    bits: int,
    block_size: int,
    dtype: ir.DataType,
) -> Var:
    """Dequantize the weights of all experts to [experts, outputs, inputs]; without a block size a row is one block."""
    experts, outputs, width = (packed.dim(axis) for axis in range(3))
    if scales is None or not (isinstance(experts, int) and isinstance(outputs, int) and isinstance(width, int)):
        raise refuse(node, "has quantized experts without scales, or of unknown sizes")
    inputs = width * 8 // bits
    sizes = (experts * outputs, inputs)
    wanted = [experts, outputs, -(-inputs // block_size)] if block_size else [experts, outputs]
    if list(scales.shape or wanted) != wanted:
        raise _packed(node)
    if zero_points is not None and not block_size:  # one zero point per row, packed along the rows of an expert
        numbers = unpacked(op, node, zero_points, bits, [experts, outputs, 1])
        zero_points = op.cast(op.Reshape(numbers, [experts * outputs, 1]), dtype)
    w = dequantized(op, node, packed, scales, zero_points, sizes, bits, block_size or inputs, dtype)
    return op.Reshape(w, [experts, outputs, inputs])


def _linear(op: Builder, x: Var, weight: Var, bias: Var | None) -> Var:
    y = x @ op.Transpose(weight, perm=[0, 2, 1])
    return y if bias is None else y + op.Unsqueeze(bias, [1])


def _gates(op: Builder, router: Var, k: int, normalized: bool) -> Var:
    """Return the gates [tokens, experts]: the probabilities of the ``k`` best experts, and 0 for other experts."""
    chosen, places = op.TopK(op.Softmax(router, axis=-1), [k], axis=-1, outputs=2)
    if normalized:
        chosen = chosen / op.ReduceSum(chosen, [-1], keepdims=1)
    return op.ScatterElements(op.zeros_like(router), places, chosen, axis=1)


def _sparsely_mixed(op: Builder, router: Var) -> Var:
    """Return the gates [tokens, experts] of the sparse mixer of PhiMoE (GRIN, Liu et al. 2024, arXiv:2409.12136).

    The best expert e by the scores s has the gate 1/Σ exp(sⱼ − sₑ), summed over the experts j with near scores:
    sₑ − sⱼ ≤ 2ε·max(|sⱼ|, sₑ). The second expert is chosen in the same way among the others. As in inference, nothing
    is sampled, and the gradient is that of this formula; PhiMoE's own training samples experts and uses another
    gradient estimator.
    """
    gates, left = op.zeros_like(router), router
    none = op.const(-math.inf, router.dtype)
    for _ in range(_MIXED):
        best, place = op.TopK(left, [1], axis=-1, outputs=2)
        near = op.LessOrEqual(best - left, op.Max(op.Abs(router), best) * (2 * _JITTER))
        gate = op.GatherElements(op.Softmax(op.Where(near, router, none), axis=-1), place, axis=1)
        gates = op.ScatterElements(gates, place, gate, axis=1)
        left = op.ScatterElements(left, place, op.Expand(none, op.shape(place)), axis=1)
    return gates


def _activated(
    op: Builder,
    node: ir.Node,
    x: Var,
    third: Var | None,
    *,
    activation_type: str = "relu",
    activation_alpha: float = 1.0,
    activation_beta: float = 0.0,
    swiglu_fusion: int = 0,
    swiglu_limit: float | None = None,
    swiglu_limit_after_activation: int = 0,
) -> Var:
    """Apply the activation of an expert to ``x``, its first product, gated by ``third``, its optional third product.

    SwiGLU is G · σ(α · G) · (L + β), with G = min(g, limit) and L = clip(l, ±limit), where g is the gate and l the
    linear half. Other activations are act(x), multiplied by ``third``.
    """
    if activation_type in _SIMPLE:
        y = _SIMPLE[activation_type](op, x)
        return y if third is None else y * third
    if activation_type != "swiglu" or swiglu_limit_after_activation:
        raise refuse(node, f"has the activation '{activation_type}', which the CPU kernel does not support")
    if third is not None:
        gate, linear = x, third
    elif swiglu_fusion == 1:  # interleaved
        halves = op.Reshape(x, op.Concat(op.Slice(op.shape(x), [0], [2], [0]), [-1, 2], axis=0))
        gate, linear = (op.Squeeze(h, [3]) for h in op.Split(halves, axis=3, num_outputs=2, outputs=2))
    elif swiglu_fusion == 2:
        gate, linear = op.Split(x, axis=2, num_outputs=2, outputs=2)
    else:
        raise refuse(node, "has a SwiGLU without its second half")
    if swiglu_limit is not None:
        gate, linear = op.Min(gate, swiglu_limit), op.Clip(linear, -swiglu_limit, swiglu_limit)
    return gate * op.Sigmoid(gate * activation_alpha) * (linear + activation_beta)

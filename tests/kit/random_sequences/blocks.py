"""Mixtures of experts, recurrences and mixers, and the list of all blocks from which a network is drawn."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from onnx import numpy_helper

from tests.kit.random_sequences.attention_spellings import attention, new_attention
from tests.kit.random_sequences.layer_spellings import LAST, activation, feed_forward, linear, norm, residual
from tests.kit.random_sequences.sequence_draft import Draft


def mixture(net: Draft, x: str) -> str:
    """Append a mixture of experts that a router selects."""
    experts, chosen = net.one_of([2, 3, 4]), net.one_of([1, 2])
    p = net.op("Softmax", linear(net, x, net.width, experts), axis=-1)
    gates, places = net.op("TopK", p, np.array([chosen]), outputs=2, axis=-1)
    if net.chance(0.5):
        gates = net.op("Div", gates, net.op("ReduceSum", gates, LAST, keepdims=1))
    how = net.one_of([every_expert, weights_of_tokens, one_hot_experts, tokens_of_experts])
    return residual(net, x, how(net, x, gates, places, experts))


def gated_sum(net: Draft, each: str, gates: str) -> str:
    gated = net.op("Mul", each, net.op("Unsqueeze", gates, LAST))
    return net.op("ReduceSum", gated, np.array([2]), keepdims=0)


def zeros_like(net: Draft, x: str) -> str:
    return net.op("ConstantOfShape", net.op("Shape", x), value=numpy_helper.from_array(np.zeros(1, np.float32)))


def every_expert(net: Draft, x: str, gates: str, places: str, experts: int) -> str:
    """Compute all experts for each token, and weight them by the gates, with 0 for the others."""
    d = net.width
    w = net.weight(d, experts * d, name="experts")
    each = activation(net, net.reshape(net.op("MatMul", x, w), "B", "S", experts, d), d)
    first = net.op("Slice", each, np.array([0]), np.array([1]), np.array([3]))
    zeros = zeros_like(net, net.op("Squeeze", first, np.array([3])))
    return gated_sum(net, each, net.op("ScatterElements", zeros, places, gates, axis=-1))


def weights_of_tokens(net: Draft, x: str, gates: str, places: str, experts: int) -> str:
    """Gather the weights of the selected experts for each token."""
    w = net.weight(experts, net.width, net.width, spread=net.width**-0.5, name="experts")
    each = net.op("MatMul", net.op("Unsqueeze", x, np.array([2, 3])), net.op("Gather", w, places, axis=0))
    return gated_sum(net, net.op("Squeeze", each, np.array([3])), gates)


def one_hot_experts(net: Draft, x: str, gates: str, places: str, experts: int) -> str:
    hot = net.op("OneHot", places, np.int64(experts), np.array([0, 1], np.float32), axis=-1)
    return net.op("MatMul", gated_sum(net, hot, gates), net.weight(experts, net.width, name="experts"))


def tokens_of_experts(net: Draft, x: str, gates: str, places: str, experts: int) -> str:
    """Gather the tokens of each expert, apply the expert, and scatter the results."""
    flat = net.op("Reshape", x, np.array([-1, net.width]))
    gates, places = (
        net.op("Reshape", t, net.op("Concat", LAST, net.op("Shape", t, start=2), axis=0)) for t in (gates, places)
    )
    total = zeros_like(net, flat)
    for expert in range(experts):
        hit = net.op("NonZero", net.op("Equal", places, np.int64(expert)))
        rows = net.op("Split", hit, outputs=2, axis=0, num_outputs=2)[0]
        tokens = net.op("Gather", flat, net.op("Squeeze", rows, np.array([0])), axis=0)
        done = activation(net, linear(net, tokens, net.width, net.width, rank=2), net.width)
        gate = net.op("GatherND", gates, net.op("Transpose", hit, perm=[1, 0]))
        done = net.op("Mul", done, net.op("Unsqueeze", gate, np.array([1])))
        rows = net.op("Transpose", rows, perm=[1, 0])
        if net.chance(0.5):
            total = net.op("ScatterND", total, rows, done, reduction="add")
        else:
            index = net.op("Expand", rows, net.op("Shape", done))
            total = net.op("ScatterElements", total, index, done, axis=0, reduction="add")
    return net.reshape(total, "B", "S", net.width)


def recurrence(net: Draft, x: str) -> str:
    d = net.width
    kind = net.one_of(["GRU", "LSTM", "RNN"])
    gates = {"GRU": 3, "LSTM": 4, "RNN": 1}[kind]
    w, r = net.weight(1, gates * d, d, spread=d**-0.5), net.weight(1, gates * d, d, spread=d**-0.5)
    b = [net.weight(1, 2 * gates * d, spread=0.1, name="bias")] if net.chance(0.7) else []
    attrs = {"linear_before_reset": 1} if kind == "GRU" and net.chance(0.7) else {}
    turned = net.op("Transpose", x, perm=[1, 0, 2])
    out = net.op(kind, turned, w, r, *b, outputs=2, hidden_size=d, **attrs)[0]
    return residual(net, x, net.op("Transpose", net.op("Squeeze", out, np.array([1])), perm=[1, 0, 2]))


def mixer(net: Draft, x: str) -> str:
    """Append a network along the sequence (MLP-Mixer) if the length is known, else a gated cumulative sum."""
    d = net.width
    if "S" in net.open:
        seen = net.op("CumSum", x, np.int64(1))
        return residual(net, x, net.op("Mul", net.op("Tanh", seen), net.op("Sigmoid", linear(net, x, d, d))))
    y = net.op("Transpose", norm(net, x), perm=[0, 2, 1])
    y = net.op("MatMul", activation(net, net.op("MatMul", y, net.weight(net.length, 7)), 7), net.weight(7, net.length))
    return residual(net, x, net.op("Transpose", y, perm=[0, 2, 1]))


def shift(net: Draft, x: str) -> str:
    """Append a mix of each token with the one before, as in RWKV: by a Pad with a negative pad, or by Concat."""
    if net.chance(0.5):
        y = net.op("Pad", x, np.array([0, 1, 0, 0, -1, 0]))
    else:
        zeros = net.op("Mul", net.op("Slice", x, np.array([0]), np.array([1]), np.array([1])), 0.0)
        y = net.op("Concat", zeros, net.op("Slice", x, np.array([0]), np.array([-1]), np.array([1])), axis=1)
    mix = net.op("Sigmoid", net.weight(net.width, name="mix"))
    return net.op("Add", net.op("Mul", x, mix), net.op("Mul", y, net.op("Sub", 1.0, mix)))


BLOCKS: list[Callable[[Draft, str], str]] = [
    attention, attention, attention, feed_forward, feed_forward, feed_forward, new_attention, mixture, recurrence,
    mixer, shift,
]  # fmt: skip

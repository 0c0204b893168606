"""Attention with heads, rotary positions and masks, in several nodes or as one operator."""

from __future__ import annotations

from typing import Any

import numpy as np
from onnx import TensorProto, numpy_helper

from tests.kit.random_sequences.layer_spellings import dropout, linear, norm, residual
from tests.kit.random_sequences.sequence_draft import LONGEST, Draft


def attention(net: Draft, x: str) -> str:
    d = net.width
    y = norm(net, x) if net.chance(0.6) else x
    heads = net.one_of([h for h in (1, 2, 4) if d % h == 0])
    shared = net.one_of([g for g in (1, 2, 4) if heads % g == 0]) if net.chance(0.3) else heads  # heads of keys, values
    size = d // heads
    memory = net.op("Add", y, net.weight(d, name="memory")) if net.chance(0.15) else y
    q, k, v = projections(net, y, memory, heads, shared, size)
    if net.chance(0.2):
        q, k = norm(net, q, size), norm(net, k, size)
    if net.chance(0.25) and size % 2 == 0:
        q, k = rotary(net, q, size), rotary(net, k, size)
    if shared != heads:
        k, v = (repeated(net, t, shared, heads, size) for t in (k, v))
    out = weighed(net, q, k, v, heads, size)
    out = net.op("Transpose", out, perm=[0, 2, 1, 3])
    out = net.reshape(out, "B", "S", d)
    return residual(net, x, dropout(net, linear(net, out, d, d)))


def projections(net: Draft, y: str, memory: str, heads: int, shared: int, size: int) -> list[str]:
    """Append projections to queries, keys and values, each of shape [B, heads, S, size]."""
    d = net.width
    how = net.one_of(["apart", "split", "five", "same"])
    if how == "same":  # q = k = v
        return (
            [split_heads(net, t, h, size) for t, h in ((y, heads), (memory, heads), (memory, heads))]
            if shared == heads
            else projections(net, y, memory, heads, shared, size)
        )
    if how == "five" and shared == heads and memory == y:
        packed = net.reshape(linear(net, y, d, 3 * d), "B", "S", 3, heads, size)
        packed = net.op("Transpose", packed, perm=[2, 0, 3, 1, 4])
        if net.chance(0.5):
            return [net.op("Gather", packed, np.int64(i), axis=0) for i in range(3)]
        parts = net.op("Split", packed, outputs=3, axis=0, num_outputs=3)
        return [net.op("Squeeze", p, np.array([0])) for p in parts]
    inner = shared * size
    if how == "split" and memory == y:
        packed = linear(net, y, d, d + 2 * inner)
        parts = net.op("Split", packed, np.array([d, inner, inner]), outputs=3, axis=2)
    else:
        parts = [linear(net, y, d, d), linear(net, memory, d, inner), linear(net, memory, d, inner)]
    return [split_heads(net, t, h, size) for t, h in zip(parts, (heads, shared, shared), strict=True)]


def split_heads(net: Draft, x: str, heads: int, size: int) -> str:
    if net.chance(0.3):
        y = net.op("Reshape", x, np.array([0, 0, heads, size]))
    else:
        y = net.reshape(x, "B", "S", heads, size)
    return net.op("Transpose", y, perm=[0, 2, 1, 3])


def repeated(net: Draft, x: str, shared: int, heads: int, size: int) -> str:
    """Repeat the heads of keys or values, [B, shared, S, size], to the number of query heads."""
    if net.chance(0.3):
        places = np.repeat(np.arange(shared), heads // shared)
        return net.op("Gather", x, places, axis=1)
    y = net.op("Unsqueeze", x, np.array([2]))
    y = net.op("Expand", y, net.sizes(["B", shared, heads // shared, "S", size]))
    return net.reshape(y, "B", heads, "S", size)


def rotary(net: Draft, x: str, size: int) -> str:
    """Append rotary positions, which rotate pairs of halves or of neighbouring features."""
    t = np.arange(LONGEST)[:, None] * 10.0 ** -np.arange(size // 2)
    halves = net.chance(0.6)
    t = np.concatenate([t, t], 1) if halves else np.repeat(t, 2, 1)
    end = net.dim("S")
    end = end if isinstance(end, str) else np.array([end])
    cos, sin = (net.op("Slice", f(t).astype(np.float32), np.array([0]), end, np.array([0])) for f in (np.cos, np.sin))
    half, last = size // 2, np.array([-1])
    if halves:
        if net.chance(0.5):
            a, b = net.op("Split", x, outputs=2, axis=-1, num_outputs=2)
        else:
            a = net.op("Slice", x, np.array([0]), np.array([half]), last)
            b = net.op("Slice", x, np.array([half]), np.array([2**63 - 1]), last)
        turned = net.op("Concat", net.op("Neg", b), a, axis=-1)
    else:
        a = net.op("Slice", x, np.array([0]), np.array([2**31]), last, np.array([2]))
        b = net.op("Slice", x, np.array([1]), np.array([2**31]), last, np.array([2]))
        pairs = [net.op("Unsqueeze", t, last) for t in (net.op("Neg", b), a)]
        turned = net.op("Reshape", net.op("Concat", *pairs, axis=-1), net.op("Shape", x))
    return net.op("Add", net.op("Mul", x, cos), net.op("Mul", turned, sin))


def weighed(net: Draft, q: str, k: str, v: str, heads: int, size: int) -> str:
    """Append Softmax(q kᵀ + mask) v, or a variant of it."""
    how = net.one_of(["plain", "plain", "plain", "flat", "linear", "sigmoid", "einsum"])
    if how == "linear":  # (elu(q) + 1)((elu(k) + 1)ᵀ v), normalised
        q, k = (net.op("Add", net.op("Elu", t), 1.0) for t in (q, k))
        state = net.op("MatMul", net.swap(k, 4), v)
        below = net.op("MatMul", q, net.swap(net.op("ReduceSum", k, np.array([2]), keepdims=1), 4))
        return net.op("Div", net.op("MatMul", q, state), below)
    scale = net.one_of(["div", "mul q", "both", "mul"])
    if scale == "mul q":
        q = net.op("Mul", q, size**-0.5)
    if scale == "both":
        q, k = (net.op("Mul", t, size**-0.25) for t in (q, k))
    if how == "einsum":
        scores = net.op("Einsum", q, k, equation="bhqd,bhkd->bhqk")
    elif how == "flat":  # as nn.MultiheadAttention is exported
        q, k = (
            net.op("Reshape", t, np.array([-1, net.dim("S"), size])) if not isinstance(net.dim("S"), str) else t
            for t in (q, k)
        )
        rank = 4 if isinstance(net.dim("S"), str) else 3
        scores = net.op("MatMul", q, net.swap(k, rank))
        scores = net.reshape(scores, "B", heads, "S", "S")
    else:
        scores = net.op("MatMul", q, net.swap(k, 4))
    if scale in ("div", "mul"):
        scores = net.op("Div", scores, size**0.5) if scale == "div" else net.op("Mul", scores, size**-0.5)
    if net.chance(0.1):
        scores = net.op("Mul", net.op("Tanh", net.op("Div", scores, 5.0)), 5.0)
    if net.chance(0.15) and "S" not in net.open:  # biases by distance, as in T5
        distance = np.clip(np.arange(net.length)[:, None] - np.arange(net.length) + 3, 0, 6)
        bias = net.op("Gather", net.weight(7, heads, spread=0.3, name="relative"), distance)
        scores = net.op("Add", scores, net.op("Unsqueeze", net.op("Transpose", bias, perm=[2, 0, 1]), np.array([0])))
    if how == "sigmoid":
        return net.op("MatMul", net.op("Sigmoid", scores), v)
    scores, allowed = masked(net, scores)
    weights = net.op("Softmax", scores, axis=net.one_of([-1, 3]))
    if allowed is not None:  # a fully masked row is NaN
        if net.chance(0.5):
            weights = net.op("Where", net.op("IsNaN", weights), 0.0, weights)
        else:
            weights = net.op("Where", allowed, weights, 0.0)
    weights = dropout(net, weights)
    if how == "einsum":
        return net.op("Einsum", weights, v, equation="bhqk,bhkd->bhqd")
    return net.op("MatMul", weights, v)


def masked(net: Draft, scores: str) -> tuple[str, str | None]:
    """Append a mask to scores; return the masked scores, and the mask if it may have fully masked rows."""
    emptied: str | None = None
    if net.causal:
        scores = net.op(*causal(net, scores))
    if net.chance(0.5 if net.is_ids else 0.3):
        inside = padding_mask(net)
        how = net.one_of(["where", "add", "ten thousand", "inf"])
        wide = net.op("Unsqueeze", inside, np.array([1, 2]))
        if how == "where":
            scores = net.op("Where", wide, scores, net.one_of([-1e9, -3.4028234663852886e38, -1e4]))
        elif how == "inf":
            scores = net.op("Where", wide, scores, -np.inf)
        else:
            outside = net.op("Sub", 1.0, net.op("Cast", wide, to=TensorProto.FLOAT))
            scores = net.op("Add", scores, net.op("Mul", outside, {"add": -1e9}.get(how, -1e4)))
    if net.chance(0.15) and "S" not in net.open:  # a mask with fully masked rows
        mask = net.rng.random((net.length, net.length)) < 0.6
        mask[0] = False
        emptied = net.constant(mask)
        scores = net.op("Where", emptied, scores, -np.inf)
    return scores, emptied


def padding_mask(net: Draft) -> str:
    """Return the padding mask, boolean [B, S]."""
    if "inside" not in net._masks:
        if net.is_ids and net.chance(0.6):
            net._masks["inside"] = net.op("Not", net.op("Equal", "ids", np.int64(0)))
        else:
            kind = net.one_of([TensorProto.INT64, TensorProto.BOOL, TensorProto.FLOAT])
            net.inputs.append(("mask", kind, ["B", "S"]))
            net._masks["inside"] = "mask" if kind == TensorProto.BOOL else net.op("Cast", "mask", to=TensorProto.BOOL)
    return net._masks["inside"]


def causal(net: Draft, scores: str) -> list[Any]:
    how = net.one_of(["trilu", "range", "slice", "add"])
    square = net.sizes(["S", "S"])
    lowest = net.one_of([-np.inf, -1e9, -3.4028234663852886e38])
    if how == "add":
        filled = net.op("ConstantOfShape", square, value=numpy_helper.from_array(np.array([lowest], np.float32)))
        return ["Add", scores, net.op("Trilu", filled, np.int64(1), upper=1)]
    if how == "range":
        end = net.dim("S")
        end = net.op("Squeeze", end, np.array([0])) if isinstance(end, str) else np.int64(end)
        places = net.op("Range", np.int64(0), end, np.int64(1))
        mask = net.op(
            "GreaterOrEqual", net.op("Unsqueeze", places, np.array([1])), net.op("Unsqueeze", places, np.array([0]))
        )
    elif how == "slice":
        end = net.dim("S")
        end = end if isinstance(end, str) else np.array([end])
        table = np.tril(np.ones((1, 1, LONGEST, LONGEST), bool))
        mask = net.op("Slice", table, np.array([0]), end, np.array([2]))
        mask = net.op("Slice", mask, np.array([0]), end, np.array([3]))
    else:
        ones = net.op("ConstantOfShape", square, value=numpy_helper.from_array(np.array([1], np.float32)))
        mask = net.op("Cast", net.op("Trilu", ones, upper=0), to=TensorProto.BOOL)
    return ["Where", mask, scores, lowest]


def new_attention(net: Draft, x: str) -> str:
    """Append attention with ONNX's own operators of opset 23."""
    net.opset = max(net.opset, 23)
    d = net.width
    heads = net.one_of([h for h in (1, 2, 4) if d % h == 0])
    shared = net.one_of([g for g in (1, 2, 4) if heads % g == 0])
    size = d // heads
    y = net.op("RMSNormalization", x, net.weight(d, around=1.0, spread=0.2, name="scale")) if net.chance(0.5) else x
    q, k, v = linear(net, y, d, d), linear(net, y, d, shared * size), linear(net, y, d, shared * size)
    four = net.chance(0.5)
    attrs: dict[str, Any] = {} if four else {"q_num_heads": heads, "kv_num_heads": shared}
    if four:
        q, k, v = split_heads(net, q, heads, size), split_heads(net, k, shared, size), split_heads(net, v, shared, size)
    mask = None
    if net.chance(0.4):
        mask = net.op("Unsqueeze", padding_mask(net), np.array([1, 2]))
        mask = net.op("Expand", mask, net.sizes(["B", 1, "S", "S"]))
        if net.chance(0.5):
            mask = net.op("Where", mask, 0.0, net.one_of([-1e9, -1e4]))
    if net.chance(0.3):
        attrs["softcap"] = 3.0
    if net.chance(0.3):
        attrs["scale"] = 0.3
    out = net.op("Attention", q, k, v, *([mask] if mask else []), is_causal=int(net.causal), **attrs)
    if four:
        out = net.reshape(net.op("Transpose", out, perm=[0, 2, 1, 3]), "B", "S", d)
    return residual(net, x, linear(net, out, d, d))

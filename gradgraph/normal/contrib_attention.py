"""Fused attention of com.microsoft; see ``contrib`` for what a form is, and ``attention`` for the formula."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import onnx_ir as ir

from gradgraph.builder import Builder, Var
from gradgraph.normal.attention import (
    Masks,
    attend,
    in_heads,
    merge_heads,
    rotate,
    shorter_than,
    split_heads,
    visible,
)
from gradgraph.normal.contrib import fused, reads_output, refuse

_INT64 = ir.DataType.INT64


@fused("Attention")
def attention(
    op: Builder,
    node: ir.Node,
    x: Var,
    weights: Var,
    bias: Var | None = None,
    mask: Var | None = None,
    past: Var | None = None,
    attention_bias: Var | None = None,
    past_length: Var | None = None,
    *,
    num_heads: int,
    unidirectional: int = 0,
    scale: float = 0.0,
    mask_filter_value: float = -10000.0,
    qkv_hidden_sizes: Sequence[int] = (),
    do_rotary: int = 0,
    past_present_share_buffer: int = 0,
    rotary_embedding_dim: int = 0,
) -> Any:
    """One product gives queries, keys and values; ``past`` and ``present`` stack keys and values along axis 0."""
    if do_rotary or past_present_share_buffer:
        raise refuse(
            node, "has rotary embeddings of its own" if do_rotary else "shares the buffers of past and present"
        )
    projected = x @ weights
    projected = projected if bias is None else projected + bias
    sizes = {"split": op.const(list(qkv_hidden_sizes))} if qkv_hidden_sizes else {}
    parts = op.Split(projected, *sizes.values(), axis=-1, num_outputs=None if sizes else 3, outputs=3)
    q, k, v = (split_heads(op, part, num_heads) for part in parts)
    offset: Var | int = 0
    if past is not None:
        past_k, past_v = (op.Squeeze(p, [0]) for p in op.Split(past, axis=0, num_outputs=2, outputs=2))
        k, v = op.Concat(past_k, k, axis=2), op.Concat(past_v, v, axis=2)
        offset = op.dim(past_k, 2)
    bias_terms = [] if mask is None else [_mask_bias(op, node, mask, q, k, mask_filter_value)]
    bias_terms += [] if attention_bias is None else [attention_bias]
    masks = _masks(op, bias_terms, visible(op, q, k, offset, right=0) if unidirectional else None)
    y = merge_heads(op, attend(op, q, k, v, masks, scale=scale).y)
    if not reads_output(node, 1):
        return y
    return y, op.Concat(op.Unsqueeze(k, [0]), op.Unsqueeze(v, [0]), axis=0)


@fused("MultiHeadAttention")
def multi_head_attention(
    op: Builder,
    node: ir.Node,
    query: Var,
    key: Var | None = None,
    value: Var | None = None,
    bias: Var | None = None,
    key_mask: Var | None = None,
    attention_bias: Var | None = None,
    past_key: Var | None = None,
    past_value: Var | None = None,
    past_length: Var | None = None,
    beams: Var | None = None,
    *,
    num_heads: int,
    unidirectional: int = 0,
    scale: float = 0.0,
    mask_filter_value: float = -10000.0,
) -> Any:
    """Keys and values come packed with the query, or as [batch, length, hidden], or in heads (cross attention)."""
    if past_length is not None or beams is not None:
        raise refuse(node, "shares the buffers of past and present")
    q, k, v = _heads_of(op, query, key, value, bias, num_heads)
    offset: Var | int = 0
    if past_key is not None and past_value is not None:
        offset = op.dim(past_key, 2)
        k, v = op.Concat(past_key, k, axis=2), op.Concat(past_value, v, axis=2)
    bias_terms = [] if key_mask is None else [_mask_bias(op, node, key_mask, q, k, mask_filter_value)]
    bias_terms += [] if attention_bias is None else [attention_bias]
    masks = _masks(op, bias_terms, visible(op, q, k, offset, right=0) if unidirectional else None)
    result = attend(op, q, k, v, masks, scale=scale)
    return merge_heads(op, result.y), k, v, result.probabilities


def _heads_of(
    op: Builder, query: Var, key: Var | None, value: Var | None, bias: Var | None, heads: int
) -> tuple[Var, Var, Var]:
    """Queries, keys and values as [batch, heads, length, size], each with its part of the bias."""
    if query.rank == 5:  # [batch, length, heads, 3, size]
        parts = [op.Squeeze(p, [3]) for p in op.Split(query, axis=3, num_outputs=3, outputs=3)]
    elif key is not None and key.rank == 5:
        keys = [op.Squeeze(p, [3]) for p in op.Split(key, axis=3, num_outputs=2, outputs=2)]
        parts = [in_heads(op, query, heads), *keys]
    elif key is not None and value is not None:
        parts = [x if x.rank == 4 else in_heads(op, x, heads) for x in (query, key, value)]
    else:
        raise TypeError("it has no keys and values")
    in_place = [x is not None and x.rank == 4 for x in (query, key, value)]
    if bias is not None:
        parts = _with_bias(op, parts, in_place, bias, heads)
    moved = [x if done else op.Transpose(x, perm=[0, 2, 1, 3]) for x, done in zip(parts, in_place, strict=True)]
    return moved[0], moved[1], moved[2]


def _with_bias(op: Builder, parts: list[Var], in_place: list[bool], bias: Var, heads: int) -> list[Var]:
    """The bias holds those of queries, keys and values; what is in heads already has had its own."""
    size = op.dim(parts[0], -1) * heads
    lengths = op.Concat(size, size, op.dim(bias, 0) - size * 2, axis=0)
    biases = op.Split(bias, lengths, axis=0, outputs=3)
    return [x if done else x + op.Reshape(b, [heads, -1]) for x, b, done in zip(parts, biases, in_place, strict=True)]


def _mask_bias(op: Builder, node: ir.Node, mask: Var, q: Var, k: Var, hidden: float) -> Var:
    """What a mask adds to the scores [batch, heads, queries, keys]: 0, or ``hidden`` where it is 0.

    [batch]: the number of keys; [2 · batch]: their ends, then their starts; [batch, keys], [batch, queries, keys] and
    [batch, 1, maximum, maximum] hold 1 and 0.
    """
    if mask.rank == 1:
        seen = _between(op, node, mask, q, k)
    elif mask.rank == 4:
        past = op.dim(k, 2) - op.dim(q, 2)
        ends = op.Concat(op.dim(k, 2), op.dim(k, 2), axis=0)
        seen = op.Slice(mask, op.Concat(past, [0], axis=0), ends, [2, 3]) > 0
    else:
        seen = op.Unsqueeze(mask, [1, 2] if mask.rank == 2 else [1]) > 0
    return op.Where(seen, op.const(0.0, q.dtype), op.const(hidden, q.dtype))


def _between(op: Builder, node: ir.Node, ends: Var, q: Var, k: Var) -> Var:
    batch, length = (None if x.shape is None else x.shape[0] for x in (q, ends))
    key = op.Range(0, op.Squeeze(op.dim(k, 2), [0]), 1)
    if length is not None and length == batch:
        return key < op.Reshape(op.cast(ends, _INT64), [-1, 1, 1, 1])
    if not isinstance(length, int) or not isinstance(batch, int) or length != 2 * batch:
        raise refuse(node, "has a mask of one axis with neither one nor two known entries for each sample")
    last, first = (op.Reshape(p, [-1, 1, 1, 1]) for p in _halves(op, op.cast(ends, _INT64)))
    return (key < last) & (key >= first)


def _halves(op: Builder, x: Var) -> tuple[Var, Var]:
    result: tuple[Var, Var] = op.Split(x, axis=0, num_outputs=2, outputs=2)
    return result


def _masks(op: Builder, bias_terms: list[Var], allowed: Var | None) -> Masks:
    """Hidden keys keep a finite score (``mask_filter_value``), so every query sees some."""
    total = None
    for term in bias_terms:
        total = term if total is None else total + term
    return Masks(total, allowed)


@fused("RotaryEmbedding")
def rotary_embedding(
    op: Builder,
    node: ir.Node,
    x: Var,
    positions: Var,
    cos: Var,
    sin: Var,
    *,
    num_heads: int = 0,
    rotary_embedding_dim: int = 0,
    interleaved: int = 0,
    is_packed_batching: int = 0,
    scale: float = 1.0,
) -> Any:
    """One position: that of the first token of every sample. Without a number of heads, the tables tell it."""
    length = op.dim(x, 1 if x.rank == 3 else 2)
    if positions.rank == 1:
        positions = op.Unsqueeze(positions + op.Range(0, op.Squeeze(length, [0]), 1), [0])
    split = x if x.rank == 4 else _in_rotary_heads(op, node, x, cos, num_heads, rotary_embedding_dim)
    axis = 2 if x.rank == 3 else 1
    cos, sin = (op.Unsqueeze(op.Gather(table, positions), [axis]) for table in (cos, sin))
    y = rotate(op, split, cos, sin, rotary_embedding_dim, bool(interleaved))
    return op.Reshape(y, op.shape(x)) if x.rank == 3 else y


def _in_rotary_heads(op: Builder, node: ir.Node, x: Var, cos: Var, heads: int, size: int) -> Var:
    if heads:
        return in_heads(op, x, heads)
    half = None if cos.shape is None else cos.shape[-1]
    if size or not isinstance(half, int):
        raise refuse(node, "does not tell its number of heads")
    result: Var = op.Reshape(x, [0, 0, -1, 2 * half])
    return result


@fused("GroupQueryAttention")
def group_query_attention(
    op: Builder,
    node: ir.Node,
    query: Var,
    key: Var | None,
    value: Var | None,
    past_key: Var | None,
    past_value: Var | None,
    last_places: Var,
    total_length: Var,
    cos: Var | None = None,
    sin: Var | None = None,
    positions: Var | None = None,
    attention_bias: Var | None = None,
    *unsupported: Var | None,
    num_heads: int,
    kv_num_heads: int,
    scale: float = 0.0,
    softcap: float = 0.0,
    do_rotary: int = 0,
    rotary_interleaved: int = 0,
    local_window_size: int = -1,
    causal: int = 1,
    **attrs: Any,
) -> Any:
    """Sample b holds ``last_places[b] + 1`` tokens: those of the past, then the new ones.

    A first prompt (as many new tokens as there are at all) has no past, whatever ``past_key`` holds.
    """
    _check_options(node, unsupported, attrs)
    heads = (num_heads, kv_num_heads, kv_num_heads)
    parts = [query, key, value] if key is not None else _split_packed(op, query, heads)
    q, k, v = (in_heads(op, x, n) for x, n in zip(parts, heads, strict=True) if x is not None)
    earlier = _earlier(op, q, last_places, total_length)
    steps = op.Unsqueeze(op.Range(0, op.Squeeze(op.dim(q, 1), [0]), 1), [0])
    places = steps if past_key is None else steps + op.Unsqueeze(earlier, [1])  # [batch or 1, new tokens]
    if do_rotary and cos is not None and sin is not None:
        angles = [op.Unsqueeze(op.Gather(t, places if positions is None else positions), [2]) for t in (cos, sin)]
        size = _rotated_size(cos)
        q, k = (rotate(op, x, angles[0], angles[1], size, bool(rotary_interleaved)) for x in (q, k))
    q, k, v = (op.Transpose(x, perm=[0, 2, 1, 3]) for x in (q, k, v))
    if past_key is not None and past_value is not None:
        k, v = (_append(op, p, x, places, total_length) for p, x in ((past_key, k), (past_value, v)))
    offset: Var | int = 0 if past_key is None else op.Reshape(earlier, [-1, 1, 1, 1])
    if causal:
        allowed = visible(op, q, k, offset, left=local_window_size - 1 if local_window_size > 0 else -1, right=0)
    else:
        allowed = shorter_than(op, k, op.cast(last_places, _INT64) + 1)
    masks = Masks(attention_bias, allowed)
    result = attend(op, q, k, v, masks, scale=scale, softcap=softcap)
    return merge_heads(op, result.y), k, v


def _check_options(node: ir.Node, inputs: tuple[Var | None, ...], attrs: dict[str, Any]) -> None:
    if any(x is not None for x in inputs):
        raise refuse(node, "has attention sinks, a quantized cache or normalized heads")
    if attrs.get("smooth_softmax", -1) > 0 or attrs.get("sliding_window_cache") or reads_output(node, 3):
        raise refuse(node, "has a smooth softmax, a cache that slides or shows its scores")


def _split_packed(op: Builder, packed: Var, heads: tuple[int, int, int]) -> list[Var]:
    size = op.Div(op.dim(packed, 2), [sum(heads)])
    lengths = op.Concat(*(size * n for n in heads), axis=0)
    return list(op.Split(packed, lengths, axis=-1, outputs=3))


def _earlier(op: Builder, q: Var, last_places: Var, total_length: Var) -> Var:
    """The number of earlier tokens of each sample, int64 [batch]."""
    new = op.dim(q, 1)
    first_prompt = op.Equal(op.Reshape(op.cast(total_length, _INT64), [1]), new)
    return op.Where(first_prompt, 0, op.Reshape(op.cast(last_places, _INT64), [-1]) + 1 - new)


def _rotated_size(cos: Var) -> int:
    half = None if cos.shape is None else cos.shape[-1]
    return 2 * half if isinstance(half, int) else 0


def _append(op: Builder, past: Var, new: Var, places: Var, total_length: Var) -> Var:
    """``new`` [batch, heads, tokens, size] at its places in a cache that holds all tokens."""
    missing = op.Max(op.Reshape(op.cast(total_length, _INT64), [1]) - op.dim(past, 2), [0])
    cache = op.Pad(past, op.Concat([0, 0, 0, 0, 0, 0], missing, [0], axis=0))
    return op.ScatterElements(cache, op.Expand(op.Unsqueeze(places, [1, 3]), op.shape(new)), new, axis=2)

"""Forms of the fused attention operators of com.microsoft (see ``contrib``), using ``attention_formula``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import onnx_ir as ir

from gradgraph.graph.builder import Builder, Var
from gradgraph.passes.normal.dialects.contrib import fused, reads_output, refuse
from gradgraph.passes.normal.dialects.sliding_cache import SlidingCache
from gradgraph.passes.normal.opsets.attention_formula import (
    Attended,
    Masks,
    attend,
    in_heads,
    merge_heads,
    rotate,
    rotate_heads,
    shorter_than,
    split_heads,
    visible,
)
from gradgraph.passes.normal.opsets.downgrade import rms_normalization

_INT64 = ir.DataType.INT64
_Change = Callable[[Var], Var]


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
    """Convert Attention of com.microsoft: project queries, keys and values in one product, and attend.

    ``past`` and ``present`` stack keys and values along axis 0.
    """
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
    score_bias = _score_bias(op, node, q, k, mask, attention_bias, mask_filter_value)
    masks = Masks(score_bias, visible(op, q, k, offset, right=0) if unidirectional else None)
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
    """Compute attention; keys and values may be packed with the query, [batch, length, hidden], or split into heads.

    With ``past_length``, past and present are buffers of equal length, which may be longer than the number of tokens.
    """
    if beams is not None and past_length is None:
        raise refuse(node, "has a cache_indirection, but no past_sequence_length")
    q, new_k, new_v = _heads_of(op, query, key, value, bias, num_heads)
    offset: Var | int = 0
    k, v = present = new_k, new_v
    if past_key is not None and past_value is not None and past_length is not None:
        offset = held = op.Reshape(op.cast(past_length, _INT64), [1])
        present = _put_from(op, past_key, k, held), _put_from(op, past_value, v, held)
        k, v = (op.Slice(x, [0], op.dim(q, 2) + held, [2]) for x in present)
        k, v = _of_beams(op, node, k, v, q, held, beams)
    elif past_key is not None and past_value is not None:
        offset = op.dim(past_key, 2)
        k, v = present = op.Concat(past_key, k, axis=2), op.Concat(past_value, v, axis=2)
    score_bias = _score_bias(op, node, q, k, key_mask, attention_bias, mask_filter_value)
    masks = Masks(score_bias, _causal(op, q, k, offset, new_k) if unidirectional else None)
    result = attend(op, q, k, v, masks, scale=scale)
    scores = None
    if reads_output(node, 3):
        scores = _where_seen(op, masks, result.masked, float(q.dtype.min))
    return merge_heads(op, result.y), *present, scores


@fused("DecoderMaskedMultiHeadAttention")
def decoder_masked_multi_head_attention(
    op: Builder,
    node: ir.Node,
    query: Var,
    key: Var,
    value: Var,
    mask: Var | None = None,
    attention_bias: Var | None = None,
    past_key: Var | None = None,
    past_value: Var | None = None,
    past_length: Var | None = None,
    beam_width: Var | None = None,
    beams: Var | None = None,
    bias: Var | None = None,
    *,
    num_heads: int,
    scale: float = 0.0,
    mask_filter_value: float = -10000.0,
    past_present_share_buffer: int = 0,
    output_qk: int = 0,
) -> Any:
    """Convert DecoderMaskedMultiHeadAttention: MultiHeadAttention for one new token, with reordered inputs.

    ``beam_width`` is ignored; the beam width is read from the shape of ``beams``.
    """
    if past_key is not None and not past_present_share_buffer:
        raise refuse(node, "has a past that is not a shared buffer, for which onnxruntime has no kernel")
    inputs = (query, key, value, bias, mask, attention_bias, past_key, past_value, past_length, beams)
    return multi_head_attention(
        op, node, *inputs, num_heads=num_heads, scale=scale, mask_filter_value=mask_filter_value
    )


def _where_seen(op: Builder, masks: Masks, scores: Var, hidden: float) -> Var:
    return scores if masks.allowed is None else op.Where(masks.allowed, scores, hidden)


def _causal(op: Builder, q: Var, k: Var, offset: Var | int, new: Var) -> Var:
    """Return a causal mask, true where a query sees a key: a query sees the keys up to its own position.

    With more ``new`` keys than queries, the last query sees all keys, as in onnxruntime's kernel; the specification
    assumes as many new keys as queries.
    """
    allowed = visible(op, q, k, offset, right=0)
    if q.dim(2) is not None and q.dim(2) == new.dim(2):
        return allowed
    return allowed | op.Unsqueeze(op.Equal(op.arange(op.dim(q, 2)), op.dim(q, 2) - 1), [1])


def _of_beams(op: Builder, node: ir.Node, k: Var, v: Var, q: Var, past: Var, beams: Var | None) -> tuple[Var, Var]:
    """Return ``k`` and ``v``, whose batch axis has all beams of each sample, with past tokens gathered by ``beams``.

    ``beams`` [batch, width, maximum] contains the beam that computed each past token; onnxruntime requires a single new
    token.
    """
    new = q.dim(2)
    if beams is None or (isinstance(new, int) and new > 1):
        return k, v
    if new != 1:
        raise refuse(node, "has a cache_indirection and an unknown number of new tokens")
    own = op.arange(op.dim(q, 0))
    width = op.dim(beams, 1)
    source = op.Reshape(op.cast(beams, _INT64), op.Concat([-1], op.dim(beams, 2), axis=0))
    source = op.Slice(source, [0], past + 1, [1]) + op.Unsqueeze(op.Div(own, width) * width, [1])
    rows = op.Where(op.Less(op.arange(past + 1), past), source, op.Unsqueeze(own, [1]))
    rows = op.Unsqueeze(rows, [1, 3])
    k, v = (op.GatherElements(x, op.Expand(rows, op.shape(x)), axis=0) for x in (k, v))
    return k, v


def _heads_of(
    op: Builder, query: Var, key: Var | None, value: Var | None, bias: Var | None, heads: int
) -> tuple[Var, Var, Var]:
    """Return queries, keys and values as [batch, heads, length, size], each with its slice of the bias added."""
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
    """Return ``parts`` with the slices of ``bias`` added, except to parts that are already split into heads."""
    size = op.dim(parts[0], -1) * heads
    lengths = op.Concat(size, size, op.dim(bias, 0) - size * 2, axis=0)
    biases = op.Split(bias, lengths, axis=0, outputs=3)
    return [x if done else x + op.Reshape(b, [heads, -1]) for x, b, done in zip(parts, biases, in_place, strict=True)]


def _score_bias(
    op: Builder, node: ir.Node, q: Var, k: Var, mask: Var | None, bias: Var | None, hidden: float
) -> Var | None:
    """Return the sum of ``bias`` and the term of ``mask``; a term leaves finite scores, so no query lacks keys."""
    term = None if mask is None else _mask_bias(op, node, mask, q, k, hidden)
    return bias if term is None else term if bias is None else term + bias


def _mask_bias(op: Builder, node: ir.Node, mask: Var, q: Var, k: Var, hidden: float) -> Var:
    """Return the term that a mask adds to the scores [batch, heads, queries, keys]: ``hidden`` for masked keys, else 0.

    The mask has one of these shapes:

    - [batch]: the number of visible keys of each sample;
    - [3 · batch + 2]: first these numbers, then numbers that only other runtimes read;
    - [2 · batch]: the end of the visible keys of each sample, and then their start;
    - [batch, keys], [batch, queries, keys] or [batch, 1, maximum, maximum]: 1 for visible and 0 for masked keys.
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
    """Return a boolean mask [batch, 1, 1, keys] that is true from each sample's first key to its last.

    ``ends`` has one axis: the end of each sample's keys [batch], also followed by their starts [2 · batch], or by
    cumulative lengths that are not needed [3 · batch + 2]. If its length is unknown, the form is selected at run time.
    """
    batch, length = q.dim(0), ends.dim(0)
    key = op.arange(op.dim(k, 2))
    ends = op.cast(ends, _INT64)
    if length is not None and length == batch:
        return key < op.Reshape(ends, [-1, 1, 1, 1])
    if isinstance(length, int) and isinstance(batch, int) and length not in (2 * batch, 3 * batch + 2):
        raise refuse(node, "has a mask of one axis whose length is not batch, 2 · batch or 3 · batch + 2")
    samples = op.dim(q, 0)
    last, second = (op.Slice(ends, start, start + samples, [0]) for start in (op.const([0]), samples))
    has_starts = op.Equal(op.dim(ends, 0), samples * 2)
    first = op.Where(has_starts, op.Pad(second, op.Concat([0], samples - op.dim(second, 0), axis=0)), 0)
    return (key < op.Reshape(last, [-1, 1, 1, 1])) & (key >= op.Reshape(first, [-1, 1, 1, 1]))


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
    """Apply rotary position embeddings to ``x``.

    ``positions`` has shape [batch, length], or [1] for the position of the first token of every sample. If
    ``num_heads`` is 0, the number of heads is derived from the tables ``cos`` and ``sin``.
    """
    if x.rank not in (3, 4):
        raise refuse(node, f"rotates a tensor of rank {x.rank}, but the operator takes [batch, length, hidden]")
    length = op.dim(x, 1 if x.rank == 3 else 2)
    if positions.rank == 1:
        positions = op.Unsqueeze(positions + op.arange(length), [0])
    split = x if x.rank == 4 else _in_rotary_heads(op, node, x, cos, num_heads, rotary_embedding_dim)
    angles = op.Gather(cos, positions), op.Gather(sin, positions)
    return rotate_heads(op, x, split, angles, rotary_embedding_dim, bool(interleaved))


@fused("MRotaryEmbedding")
def multimodal_rotary_embedding(
    op: Builder,
    node: ir.Node,
    x: Var,
    positions: Var,
    cos: Var,
    sin: Var,
    *,
    mrope_section: Sequence[int],
    num_heads: int = 0,
    rotary_embedding_dim: int = 0,
    interleaved: int = 0,
    mrope_layout: int = 0,
    is_packed_batching: int = 0,
    scale: float = 1.0,
) -> Any:
    """Apply rotary embeddings with ``positions`` [3, batch, length]: time, height and width.

    Each column of the tables ``cos`` and ``sin`` uses one of the three positions. The result is multiplied by
    ``scale``, which onnxruntime's RotaryEmbedding ignores.
    """
    owner = _owners(mrope_section, interleaved=bool(mrope_layout))
    split = x if x.rank == 4 else _in_rotary_heads(op, node, x, cos, num_heads, rotary_embedding_dim)
    angles = [_of_owners(op, op.Gather(table, positions), owner) for table in (cos, sin)]
    angles = angles if scale == 1.0 else [angle * scale for angle in angles]
    return rotate_heads(op, x, split, angles, rotary_embedding_dim, bool(interleaved))


def _owners(sections: Sequence[int], interleaved: bool) -> list[int]:
    """Return, for each column of the rotary tables, the position that it uses: 0 for time, 1 for height, 2 for width.

    Sections are runs of columns; if ``interleaved``, height uses every third column from 1, width from 2.
    """
    if not interleaved:
        return [which for which, count in enumerate(sections) for _ in range(count)]
    owner = [0] * sum(sections)
    for which in (1, 2):
        owner[which : sections[which] * 3 : 3] = [which] * len(range(which, min(sections[which] * 3, len(owner)), 3))
    return owner


def _of_owners(op: Builder, angles: Var, owner: Sequence[int]) -> Var:
    """Select from ``angles`` [3, batch, length, columns], for each column i, the angles of position ``owner[i]``."""
    picked = [op.Squeeze(part, [0]) for part in op.Split(angles, axis=0, num_outputs=3, outputs=3)]
    result = picked[0]
    for which in (1, 2):
        result = op.Where(op.const([o == which for o in owner]), picked[which], result)
    return result


def _in_rotary_heads(op: Builder, node: ir.Node, x: Var, cos: Var, heads: int, size: int) -> Var:
    if heads:
        return in_heads(op, x, heads)
    half = cos.dim(-1)
    if size or not isinstance(half, int):
        raise refuse(node, "has an unknown number of heads")
    return op.Reshape(x, [0, 0, -1, 2 * half])


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
    head_sink: Var | None = None,
    k_scale: Var | None = None,
    v_scale: Var | None = None,
    q_norm_weight: Var | None = None,
    k_norm_weight: Var | None = None,
    *unsupported: Var | None,
    num_heads: int,
    kv_num_heads: int,
    scale: float = 0.0,
    softcap: float = 0.0,
    do_rotary: int = 0,
    rotary_interleaved: int = 0,
    local_window_size: int = -1,
    causal: int = 1,
    smooth_softmax: int = 0,
    qk_output: int = 0,
    sliding_window_cache: int = 0,
    qk_norm_epsilon: float = 1e-6,
    q_norm_epsilon: float | None = None,
    k_norm_epsilon: float | None = None,
    **quantization: Any,
) -> Any:
    """Attend with grouped key and value heads and a cache of past keys and values.

    Sample b has ``last_places[b] + 1`` tokens: the past ones and then the new ones. A first prompt (all tokens are new)
    has no past, whatever ``past_key`` contains.
    """
    if any(x is not None for x in (k_scale, v_scale, *unsupported)):
        raise refuse(node, "has a quantized cache or queries of several lengths")
    heads = (num_heads, kv_num_heads, kv_num_heads)
    parts = [query, key, value] if key is not None else split_packed(op, query, heads)
    q, k, v = (in_heads(op, x, n) for x, n in zip(parts, heads, strict=True) if x is not None)
    if q_norm_weight is not None and k_norm_weight is not None:  # over the head dimension
        q = rms_normalization(op, node, q, q_norm_weight, epsilon=q_norm_epsilon or qk_norm_epsilon)
        k = rms_normalization(op, node, k, k_norm_weight, epsilon=k_norm_epsilon or qk_norm_epsilon)
    first = op.Equal(op.Reshape(op.cast(total_length, _INT64), [1]), op.dim(q, 1))  # whether this is a first prompt
    lengths = op.Reshape(op.cast(last_places, _INT64), [-1]) + 1
    earlier = op.Where(first, 0, lengths - op.dim(q, 1))  # tokens of each sample before the new ones
    steps = op.Unsqueeze(op.arange(op.dim(q, 1)), [0])
    places = steps if past_key is None else steps + op.Unsqueeze(earlier, [1])  # [batch or 1, new tokens]
    if do_rotary and cos is not None and sin is not None:
        turned = places if positions is None else _turning_places(op, positions, first, steps)
        angles = [op.Unsqueeze(op.Gather(t, turned), [2]) for t in (cos, sin)]
        half = cos.dim(-1)
        size = 2 * half if isinstance(half, int) else 0
        q, k = (rotate(op, x, angles[0], angles[1], size, bool(rotary_interleaved)) for x in (q, k))
    q, k, v = (op.Transpose(x, perm=[0, 2, 1, 3]) for x in (q, k, v))
    if sliding_window_cache and (local_window_size <= 0 or (past_key is None and reads_output(node, 1))):
        raise refuse(node, "has a sliding cache, but no cache or no window")
    if sliding_window_cache and past_key is not None and past_value is not None:
        cache = SlidingCache(op, op.dim(past_key, 2), local_window_size, earlier, lengths)
        (k, v), present, masks = cache.slide((past_key, past_value), (k, v), places, attention_bias)
    else:
        if past_key is not None and past_value is not None:
            k, v = (_appended(op, p, x, places, total_length) for p, x in ((past_key, k), (past_value, v)))
        present = k, v
        masks = _grouped_masks(op, q, k, past_key, earlier, lengths, attention_bias, bool(causal), local_window_size)
    before, behind = sink_changes(op, q, head_sink, smooth_softmax == 1)
    result = attend(op, q, k, v, masks, scale=scale, softcap=softcap, score_mod=before, prob_mod=behind)
    if sliding_window_cache and reads_output(node, 3):
        raise refuse(node, "outputs the scores of a sliding cache")
    return merge_heads(op, result.y), *present, _grouped_scores(op, node, result, masks, qk_output)


def _turning_places(op: Builder, positions: Var, first: Var, steps: Var) -> Var:
    """Return the rotary positions: ``steps + positions[0]`` for a first prompt, otherwise ``positions``."""
    start = op.Slice(op.Reshape(positions, [-1]), [0], [1], [0])
    return op.Where(first, steps + start, positions)


def _grouped_masks(
    op: Builder,
    q: Var,
    k: Var,
    past: Var | None,
    earlier: Var,
    lengths: Var,
    bias: Var | None,
    causal: bool,
    window: int,
) -> Masks:
    """Return the masks for samples of different lengths; with a window, queries in the padding may see no key."""
    if not causal:
        return Masks(bias, shorter_than(op, k, lengths))
    offset: Var | int = 0 if past is None else op.Reshape(earlier, [-1, 1, 1, 1])
    allowed = visible(op, q, k, offset, left=window - 1 if window > 0 else -1, right=0)
    if q.dim(2) == 1:
        return Masks(bias, allowed)
    return Masks(bias, allowed & shorter_than(op, k, lengths), empty_rows=window > 0)


def sink_changes(op: Builder, q: Var, head_sink: Var | None, smooth: bool) -> tuple[_Change | None, _Change | None]:
    """Return functions that add and remove an attention sink, a key without a value in every softmax, or two None.

    The first appends its score to the scores, ``head_sink`` of the head or 0; the second removes its probability.
    """
    if head_sink is None and not smooth:
        return None, None
    score = op.const(0.0, q.dtype) if head_sink is None else op.Reshape(head_sink, [1, -1, 1, 1])

    def add_score(scores: Var) -> Var:
        column = op.Concat(op.dim(scores, 0), op.dim(scores, 1), op.dim(scores, 2), [1], axis=0)
        return op.Concat(scores, op.Expand(score, column), axis=-1)

    def drop_probability(probabilities: Var) -> Var:
        return op.Slice(probabilities, [0], [-1], [-1])

    return add_score, drop_probability


def _grouped_scores(op: Builder, node: ir.Node, result: Attended, masks: Masks, mode: int) -> Var | None:
    """Return the scores before (``mode`` 1) or after (2) the softmax, 0 for masked keys; None if nothing reads them."""
    if not reads_output(node, 3):
        return None
    if mode not in (1, 2):
        raise refuse(node, f"outputs its scores with qk_output={mode}")
    return _where_seen(op, masks, result.probabilities if mode == 2 else result.masked, 0.0)


def split_packed(op: Builder, packed: Var, heads: tuple[int, int, int]) -> list[Var]:
    """Split queries, keys and values, packed along the last axis, by their numbers of heads."""
    size = op.Div(op.dim(packed, packed.rank - 1), [sum(heads)])
    lengths = op.Concat(*(size * n for n in heads), axis=0)
    return list(op.Split(packed, lengths, axis=-1, outputs=3))


def _appended(op: Builder, past: Var, new: Var, places: Var, total_length: Var) -> Var:
    """Write ``new`` [batch, heads, tokens, size] at ``places`` into the cache ``past``, enlarged if too short."""
    missing = op.Max(op.Reshape(op.cast(total_length, _INT64), [1]) - op.dim(past, 2), [0])
    cache = op.Pad(past, op.Concat([0, 0, 0, 0, 0, 0], missing, [0], axis=0))
    return _put_at(op, cache, new, places)


def _put_from(op: Builder, cache: Var, new: Var, start: Var) -> Var:
    """Write ``new`` into ``cache`` at consecutive positions, starting at ``start`` [1]."""
    return _put_at(op, cache, new, op.Unsqueeze(op.arange(op.dim(new, 2)) + start, [0]))


def _put_at(op: Builder, cache: Var, new: Var, places: Var) -> Var:
    """Write ``new`` into ``cache`` [batch, heads, length, size] at positions ``places`` [batch or 1, tokens]."""
    where = op.Expand(op.Unsqueeze(places, [1, 3]), op.shape(new))
    return op.ScatterElements(cache, where, new, axis=2)

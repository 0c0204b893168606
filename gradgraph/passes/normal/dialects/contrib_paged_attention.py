"""Form of PagedAttention of com.microsoft: packed tokens attend to keys and values that lie in pages."""

from __future__ import annotations

from typing import Any

import onnx_ir as ir

from gradgraph.graph.builder import Builder, Var
from gradgraph.passes.normal.dialects.contrib import fused, refuse
from gradgraph.passes.normal.dialects.contrib_attention import sink_changes, split_packed
from gradgraph.passes.normal.dialects.contrib_packed import Ragged
from gradgraph.passes.normal.opsets.attention_formula import Masks, attend, merge_heads, rotate, shorter_than, visible
from gradgraph.passes.normal.opsets.downgrade import rms_normalization

_INT64 = ir.DataType.INT64
_UNQUANTISED = ("", "NONE", "float16", "bfloat16")


@fused("PagedAttention")
def paged_attention(
    op: Builder,
    node: ir.Node,
    query: Var,
    key: Var | None,
    value: Var | None,
    key_cache: Var,
    value_cache: Var | None,
    cumulative: Var,
    past: Var,
    table: Var,
    cos: Var | None = None,
    sin: Var | None = None,
    slots: Var | None = None,
    head_sink: Var | None = None,
    q_norm_weight: Var | None = None,
    k_norm_weight: Var | None = None,
    k_scale: Var | None = None,
    v_scale: Var | None = None,
    bounds: Var | None = None,
    *unsupported: Var | None,
    num_heads: int,
    kv_num_heads: int,
    scale: float = 0.0,
    softcap: float = 0.0,
    do_rotary: int = 0,
    rotary_interleaved: int = 0,
    rotary_offset: int = 0,
    local_window_size: int = -1,
    is_causal: int = 1,
    smooth_softmax: int = 0,
    qk_norm_epsilon: float = 1e-6,
    v_head_size: int = 0,
    kv_cache_layout: str = "SEPARATE",
    **quantization: Any,
) -> Any:
    """Attend with queries, keys and values [tokens, hidden] of several sequences, the new tokens after the past ones.

    New keys and values are written into the caches [pages, page size, heads, head size], the token at position p of a
    sequence into the page ``table[sequence, p // page size]``, or to ``slots[token]``, unless that is −1. Sequence b
    then attends to its ``past[b]`` earlier tokens and its new ones. With the layout LATENT, the values are the first
    ``v_head_size`` channels of the keys. ``bounds`` only help onnxruntime's kernels.
    """
    given = [x for x in (k_scale, v_scale, *unsupported) if x is not None]
    if given or any(kind not in _UNQUANTISED for kind in quantization.values()):
        raise refuse(node, "has a quantized cache")
    heads = (num_heads, kv_num_heads, kv_num_heads)
    if key is None:
        query, key, value = split_packed(op, query, heads)
    q, k = (op.Reshape(x, [0, n, -1]) for x, n in ((query, num_heads), (key, kv_num_heads)))
    if q_norm_weight is not None and k_norm_weight is not None:
        q = rms_normalization(op, node, q, q_norm_weight, epsilon=qk_norm_epsilon)
        k = rms_normalization(op, node, k, k_norm_weight, epsilon=qk_norm_epsilon)
    batch, earlier = Ragged.of(op, cumulative), op.cast(past, _INT64)
    own, place = batch.places(op.dim(query, 0))
    position = place + op.Gather(earlier, own)
    if do_rotary and cos is not None and sin is not None:
        angles = op.Unsqueeze(op.Gather(cos, position), [1]), op.Unsqueeze(op.Gather(sin, position), [1])
        q, k = (_rotated_behind(op, x, angles, rotary_offset, bool(rotary_interleaved)) for x in (q, k))
    table = op.cast(table, _INT64)
    where = _slots(op, table, own, position, op.dim(key_cache, 1)) if slots is None else op.cast(slots, _INT64)
    lengths = earlier + batch.lengths
    keys = _written(op, key_cache, where, k, may_skip=slots is not None)
    all_k = _read(op, keys, table, lengths)
    if kv_cache_layout == "LATENT":
        values, all_v = None, op.Slice(all_k, [0], [v_head_size or 2**62], [-1])
    else:
        assert value is not None and value_cache is not None
        new_v = op.Reshape(value, [0, kv_num_heads, -1])
        values = _written(op, value_cache, where, new_v, may_skip=slots is not None)
        all_v = _read(op, values, table, lengths)
    q, k, v = (op.Transpose(x, perm=[0, 2, 1, 3]) for x in (batch.padded(q), all_k, all_v))
    seen = shorter_than(op, k, lengths)
    if is_causal or local_window_size > 0:
        offset = op.Reshape(earlier, [-1, 1, 1, 1])
        seen &= visible(op, q, k, offset, left=max(local_window_size, 0) - 1, right=0 if is_causal else -1)
    before, behind = sink_changes(op, q, head_sink, smooth_softmax == 1)
    masks = Masks(None, seen, empty_rows=True)  # of a sequence without tokens, and of padding with a window
    y = attend(op, q, k, v, masks, scale=scale, softcap=softcap, score_mod=before, prob_mod=behind).y
    return batch.packed(merge_heads(op, y), op.dim(query, 0)), keys, values


def _rotated_behind(op: Builder, x: Var, angles: tuple[Var, Var], offset: int, interleaved: bool) -> Var:
    """Rotate x [tokens, heads, head size], except for the first ``offset`` channels."""
    half = angles[0].dim(-1)
    size = 2 * half if isinstance(half, int) else 0
    if not offset:
        return rotate(op, x, *angles, size, interleaved)
    kept, turned = op.Slice(x, [0], [offset], [-1]), op.Slice(x, [offset], [2**62], [-1])
    return op.Concat(kept, rotate(op, turned, *angles, size, interleaved), axis=-1)


def _slots(op: Builder, table: Var, own: Var, position: Var, size: Var) -> Var:
    """Return the place of each token in a cache whose pages are joined, from its sequence and its position in it."""
    page = position / size
    of_table = op.GatherND(table, op.Concat(op.Unsqueeze(own, [1]), op.Unsqueeze(page, [1]), axis=1))
    return of_table * size + (position - page * size)


def _written(op: Builder, cache: Var, slots: Var, new: Var, may_skip: bool) -> Var:
    """Write ``new`` [tokens, heads, head size] into ``cache``; if tokens may be skipped, not those with slot −1."""
    flat = op.Reshape(cache, op.Concat([-1], op.dims(cache, 2), axis=0))
    count = op.dim(flat, 0)
    if may_skip:  # into a further row, which is cut off
        flat = op.Concat(flat, op.Slice(flat, [0], [1], [0]), axis=0)
        slots = op.Where(slots < 0, count, slots)
    written = op.ScatterND(flat, op.Unsqueeze(slots, [1]), new)
    written = op.Slice(written, [0], count, [0]) if may_skip else written
    return op.Reshape(written, op.shape(cache))


def _read(op: Builder, cache: Var, table: Var, lengths: Var) -> Var:
    """Return the keys or values of each sequence, [batch, length, heads, head size], 0 from ``lengths`` on."""
    pages = op.Gather(cache, op.Min(op.Max(table, 0), op.dim(cache, 0) - 1))
    joined = op.Reshape(pages, op.Concat(op.dim(table, 0), [-1], op.dims(cache, 2), axis=0))
    step = op.arange(op.dim(joined, 1))
    within = op.Less(op.Unsqueeze(step, [0]), op.Unsqueeze(lengths, [1]))
    return op.Where(op.Unsqueeze(within, [2, 3]), joined, 0.0)

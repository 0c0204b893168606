"""Forms of operators of com.microsoft for packed batches: sequences of several lengths, one after another.

A packed tensor has shape [tokens, ...]; ``cumulative`` [batch + 1] contains the position of the first token of each
sequence, and the number of tokens. Attention and recurrences are computed for a padded batch [batch, length, ...].
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import onnx_ir as ir

from gradgraph.graph.builder import Builder, Var
from gradgraph.passes.normal.dialects.contrib import fused, refuse
from gradgraph.passes.normal.opsets import linear_attention as formulas
from gradgraph.passes.normal.opsets.attention_formula import Masks, attend, in_heads, merge_heads, shorter_than

_FLOAT, _INT32, _INT64 = ir.DataType.FLOAT, ir.DataType.INT32, ir.DataType.INT64


@dataclass(frozen=True)
class Ragged:
    """A packed batch: the start and the length of each sequence [batch], and the padded length [1]."""

    op: Builder
    starts: Var
    lengths: Var
    longest: Var

    @staticmethod
    def of(op: Builder, cumulative: Var, longest: Var | None = None) -> Ragged:
        """Return the batch; sequences are padded to ``longest``, by default the length of the longest one."""
        ends = op.cast(cumulative, _INT64)
        starts = op.Slice(ends, [0], [-1], [0])
        lengths = op.Slice(ends, [1], [2**62], [0]) - starts
        return Ragged(op, starts, lengths, op.ReduceMax(lengths, [0], keepdims=1) if longest is None else longest)

    def padded(self, x: Var) -> Var:
        """Return x [tokens, ...] as [batch, length, ...], with zeros behind the end of each sequence."""
        op = self.op
        steps = op.Unsqueeze(op.arange(self.longest), [0])  # [1, length]
        within = op.Less(steps, op.Unsqueeze(self.lengths, [1]))
        rows = op.Gather(x, op.Where(within, op.Unsqueeze(self.starts, [1]) + steps, 0))
        return op.Where(op.Unsqueeze(within, list(range(2, x.rank + 1))) if x.rank > 1 else within, rows, 0.0)

    def packed(self, y: Var, tokens: Var) -> Var:
        """Return y [batch, length, ...] as [tokens, ...], without what is behind the end of each sequence."""
        op = self.op
        own, place = self.places(tokens)
        flat = op.Reshape(y, op.Concat([-1], op.dims(y, 2), axis=0))
        return op.Gather(flat, own * self.longest + place)

    def places(self, tokens: Var) -> tuple[Var, Var]:
        """Return the sequence of each of ``tokens`` tokens, and its position in it."""
        op = self.op
        token = op.arange(tokens)
        begun = op.Unsqueeze(token, [1]) >= op.Unsqueeze(self.starts, [0])
        own = op.ReduceSum(op.cast(begun, _INT64), [1], keepdims=0) - 1
        return own, token - op.Gather(self.starts, own)


# --- attention -------------------------------------------------------------------------------------------


@fused("PackedAttention")
def packed_attention(
    op: Builder,
    node: ir.Node,
    x: Var,
    weights: Var,
    bias: Var,
    token_offset: Var,
    cumulative: Var,
    attention_bias: Var | None = None,
    *,
    num_heads: int,
    qkv_hidden_sizes: Sequence[int] = (),
    scale: float = 0.0,
) -> Any:
    """Project queries, keys and values of packed tokens [tokens, hidden] in one product, and attend."""
    projected = x @ weights + bias
    sizes = {"split": op.const(list(qkv_hidden_sizes))} if qkv_hidden_sizes else {}
    parts = op.Split(projected, *sizes.values(), axis=-1, num_outputs=None if sizes else 3, outputs=3)
    return _attended(op, parts, token_offset, cumulative, attention_bias, num_heads, scale)


@fused("PackedMultiHeadAttention")
def packed_multi_head_attention(
    op: Builder,
    node: ir.Node,
    query: Var,
    key: Var | None,
    value: Var | None,
    bias: Var | None,
    token_offset: Var,
    cumulative: Var,
    attention_bias: Var | None = None,
    *,
    num_heads: int,
    scale: float = 0.0,
    mask_filter_value: float = -10000.0,
) -> Any:
    """Attend with packed queries, keys and values, which may be one tensor [tokens, heads, 3, head size]."""
    if key is None or value is None:
        split = op.Split(query, axis=2, num_outputs=3, outputs=3)
        parts = [op.Flatten(part, axis=1) for part in split]
    else:
        parts = [query, key, value]
    if bias is not None:
        sizes = [op.dim(x, 1) for x in parts]
        biases = op.Split(bias, op.Concat(*sizes, axis=0), axis=0, outputs=3)
        parts = [x + b for x, b in zip(parts, biases, strict=True)]
    return _attended(op, parts, token_offset, cumulative, attention_bias, num_heads, scale)


def _attended(
    op: Builder,
    parts: Sequence[Var],
    token_offset: Var,
    cumulative: Var,
    bias: Var | None,
    heads: int,
    scale: float,
) -> Var:
    """Attend within each sequence; ``parts`` are queries, keys and values [tokens, hidden]."""
    batch = Ragged.of(op, cumulative, op.dim(token_offset, 1))
    q, k, v = (op.Transpose(in_heads(op, batch.padded(x), heads), perm=[0, 2, 1, 3]) for x in parts)
    y = attend(op, q, k, v, Masks(bias, shorter_than(op, k, batch.lengths)), scale=scale).y
    return batch.packed(merge_heads(op, y), op.dim(parts[0], 0))


@fused("RemovePadding")
def remove_padding(op: Builder, node: ir.Node, x: Var, counts: Var) -> Any:
    """Pack x [batch, length, hidden], of which the first ``counts`` tokens of each sample are kept.

    The further outputs are the positions of all tokens (first those of kept ones, then of padding) as [batch, length],
    the cumulated counts, and the largest count.
    """
    length = op.dim(x, 1)
    kept = op.Unsqueeze(op.arange(length), [0]) < op.Unsqueeze(op.cast(counts, _INT64), [1])
    of_kept, of_padding = (op.Squeeze(op.NonZero(op.Reshape(m, [-1])), [0]) for m in (kept, op.Not(kept)))
    y = op.Gather(op.Reshape(x, op.Concat([-1], op.dim(x, 2), axis=0)), of_kept)
    offsets = op.Reshape(op.Concat(of_kept, of_padding, axis=0), op.dims(x, 0, 2))
    sums = op.Concat([0], op.CumSum(op.cast(counts, _INT64), 0), axis=0)
    largest = op.ReduceMax(op.cast(counts, _INT64), [0], keepdims=1)
    return y, *(op.cast(z, _INT32) for z in (offsets, sums, largest))


@fused("RestorePadding")
def restore_padding(op: Builder, node: ir.Node, x: Var, offsets: Var) -> Any:
    """Unpack x [tokens, hidden] to [batch, length, hidden], with zeros at the padding."""
    places = op.Slice(op.Reshape(op.cast(offsets, _INT64), [-1]), [0], op.dim(x, 0), [0])
    shape = op.Concat(op.dim(offsets, 0), op.dim(offsets, 1), op.dim(x, 1), axis=0)
    flat = op.full(op.Concat(op.dim(offsets, 0) * op.dim(offsets, 1), op.dim(x, 1), axis=0), 0, x.dtype)
    return op.Reshape(op.ScatterND(flat, op.Unsqueeze(places, [1]), x), shape)


# --- recurrent layers ------------------------------------------------------------------------------------


@fused("VarlenCausalConvWithState")
def varlen_causal_conv_with_state(
    op: Builder,
    node: ir.Node,
    x: Var,
    weight: Var,
    cumulative: Var,
    bias: Var | None,
    state: Var,
    capture_count: Var | None = None,
    *,
    activation: str = "none",
    dilation: int = 1,
    state_update_capacity: int = 0,
) -> Any:
    """Convolve packed tokens [tokens, channels] along each sequence, after its ``state`` [batch, channels, before].

    Each tap gathers the rows that it reads from the tokens or, before the first token of a sequence, from its state.
    """
    taps = weight.dim(2)
    if state_update_capacity or not isinstance(taps, int):
        raise refuse(node, "returns the updates of its state" if state_update_capacity else "has an unknown kernel")
    batch, tokens, before = Ragged.of(op, cumulative), op.dim(x, 0), (taps - 1) * dilation
    rows = op.Transpose(state, perm=[0, 2, 1])  # [batch, before, channels]
    known = op.Concat(x, op.Reshape(rows, op.Concat([-1], op.dim(x, 1), axis=0)), axis=0)
    own, place = batch.places(tokens)
    token = op.arange(tokens)
    terms = []
    for tap in range(taps):
        back = (taps - 1 - tap) * dilation
        earlier = tokens + own * before + (before - back) + place
        read = op.Gather(known, op.Where(place >= back, token - back, earlier))
        terms.append(read * op.Squeeze(op.Slice(weight, [tap], [tap + 1], [2]), [1, 2]))
    y = op.sum_of(terms)
    y = y if bias is None else y + bias
    y = y * op.Sigmoid(y) if activation in ("silu", "swish") else y
    slots = op.Unsqueeze(op.const(range(before), _INT64), [0]) + op.Unsqueeze(batch.lengths - before, [1])
    numbers = op.Unsqueeze(op.arange(op.dim(state, 0)), [1])
    older = tokens + numbers * before + before + slots
    last = op.Gather(known, op.Where(slots >= 0, op.Unsqueeze(batch.starts, [1]) + slots, older))
    return y, op.Transpose(last, perm=[0, 2, 1])


@fused("GatedDeltaNet")
def gated_delta_net(
    op: Builder,
    node: ir.Node,
    query: Var,
    key: Var | None = None,
    value: Var | None = None,
    cumulative: Var | None = None,
    decay: Var | None = None,
    beta: Var | None = None,
    state: Var | None = None,
    a_log: Var | None = None,
    dt_bias: Var | None = None,
    *captures: Var | None,
    update_rule: str = "gated_delta",
    gate_activation: str = "none",
    beta_activation: str = "none",
    qk_l2_norm: int = 0,
    scale: float = 0.0,
    chunk_size: int = 64,
    state_update_capacity: int = 0,
) -> Any:
    """Compute linear attention of packed tokens [tokens, heads, size], or of a batch [batch, length, heads, size].

    The state [batch, heads, value size, key size] is transposed in LinearAttention, whose formula this is. Padding has
    no decay and a key of 0, so that it leaves the state as it is.
    """
    if state_update_capacity or key is None or value is None:
        raise refuse(node, "returns the updates of its state" if state_update_capacity else "has packed projections")
    decay = None if update_rule in ("linear", "delta") else _decay(op, decay, a_log, dt_bias, gate_activation)
    beta = None if update_rule in ("linear", "gated") else beta
    beta = op.Sigmoid(beta) if beta is not None and beta_activation == "sigmoid" else beta
    wide = [op.cast(x, _FLOAT) for x in (query, key)]
    q, k = (_l2_normalised(op, x) for x in wide) if qk_l2_norm else wide
    batched, batch = _batched(op, node, cumulative, state, query)
    few, many = q.dim(-2), value.dim(-2)
    if not (isinstance(few, int) and isinstance(many, int)):
        raise refuse(node, "has an unknown number of heads")
    q, k = (_repeated(op, x, many // few) for x in (q, k))
    parts = [batched(x) for x in (q, k, op.cast(value, _FLOAT))]
    gates = [None if x is None else batched(x) for x in (decay, beta)]
    merged_q, merged_k, merged_v = (op.Reshape(x, [0, 0, -1]) for x in parts)
    if gates[0] is not None and gates[0].rank == 4:
        gates[0] = op.Reshape(gates[0], [0, 0, -1])
    past = None if state is None else op.Transpose(state, perm=[0, 1, 3, 2])
    attrs: dict[str, Any] = {"q_num_heads": many, "kv_num_heads": many, "update_rule": update_rule, "scale": scale}
    y, last = formulas.linear_attention(op, node, merged_q, merged_k, merged_v, past, *gates, **attrs)
    heads = in_heads(op, y, many)
    if batch is not None:
        heads = batch.packed(heads, op.dim(query, 0))
    elif query.rank == 3:
        heads = op.Reshape(heads, op.Concat([-1], op.dims(heads, 2), axis=0))
    return op.cast(heads, query.dtype), op.Transpose(last, perm=[0, 1, 3, 2])


def _batched(op: Builder, node: ir.Node, cumulative: Var | None, state: Var | None, query: Var) -> Any:
    """Return a function that converts a packed tensor to a batch, and the batch if its sequences have own lengths."""
    if query.rank == 4:
        return (lambda x: x), None
    if cumulative is not None:
        batch = Ragged.of(op, cumulative)
        return batch.padded, batch
    if state is None:
        raise refuse(node, "has neither the lengths of its sequences nor a state")
    count = op.dim(state, 0)
    return (lambda x: op.Reshape(x, op.Concat(count, [-1], op.dims(x, 1), axis=0))), None


def _decay(op: Builder, decay: Var | None, a_log: Var | None, bias: Var | None, activation: str) -> Var | None:
    """Return the decay; ``activation`` 'qwen' computes −exp(a_log) · softplus(decay + bias)."""
    if activation != "qwen" or decay is None or a_log is None:
        return decay
    return -op.Exp(a_log) * op.Softplus(decay if bias is None else decay + bias)


def _l2_normalised(op: Builder, x: Var) -> Var:
    return x / op.Sqrt(op.ReduceSumSquare(x, [-1], keepdims=1) + _SMALL)


_SMALL = 1e-6  # ε of the norm of queries and keys, as in Qwen's models


def _repeated(op: Builder, x: Var, times: int) -> Var:
    """Repeat each head of x [..., heads, size] ``times`` times, one copy after the other."""
    if times == 1:
        return x
    axis = x.rank - 1
    copies = op.Concat(*[op.Unsqueeze(x, [axis])] * times, axis=axis)  # [..., heads, times, size]
    return op.Reshape(copies, [*[0] * (axis - 1), -1, x.dim(-1) if isinstance(x.dim(-1), int) else 0])

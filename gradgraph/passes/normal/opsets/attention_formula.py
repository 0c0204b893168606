"""Attention as matrix products, a softmax and masks.

``attend`` implements the formula ``softmax(scale · Q Kᵀ + masks) V``. The forms of ONNX's operators (below) and of
onnxruntime's fused operators (``contrib_attention``) convert their inputs and call it. Only the scores and their later
stages have the size [queries, keys]: masks are not expanded, and grouped queries share keys and values without a copy.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_ir as ir

from gradgraph.errors import ModelError
from gradgraph.graph.builder import Builder, Var
from gradgraph.graph.checks import describe
from gradgraph.graph.marks import is_marked_constant
from gradgraph.passes.normal.edit import is_wanted
from gradgraph.passes.normal.opsets.downgrade import since

_INF = float("inf")


@dataclass(frozen=True)
class Masks:
    """Masks of the keys that a query may attend to; they broadcast against [batch, heads, queries, keys]."""

    bias: Var | None = None  # added to the scores; −∞ hides a key
    allowed: Var | None = None  # boolean
    empty_rows: bool = False  # whether a query may see no key; its output is then zero

    def apply(self, op: Builder, scores: Var, hidden: float) -> Var:
        """Add the bias to ``scores``, and replace the scores of masked keys with ``hidden`` (or less)."""
        if self.bias is not None:
            bias = op.cast(self.bias, scores.dtype)
            scores = scores + (bias if math.isinf(hidden) else op.Max(bias, hidden))
        return scores if self.allowed is None else op.Where(self.allowed, scores, hidden)

    def rows(self, op: Builder) -> Var:
        """Return booleans [..., queries, 1]: true for each query that sees at least one key."""
        if self.bias is not None:
            bias = self.bias if self.allowed is None else op.Where(self.allowed, self.bias, -_INF)
            return op.ReduceMax(bias, [-1], keepdims=1) > -_INF
        assert self.allowed is not None  # not called without a mask
        return op.ReduceMax(op.cast(self.allowed, ir.DataType.INT32), [-1], keepdims=1) > 0


@dataclass(frozen=True)
class Attended:
    """The output of attention, ``y`` [batch, heads, queries, head size], and the stages of the scores before it."""

    y: Var
    raw: Var
    capped: Var
    masked: Var
    probabilities: Var


def attend(
    op: Builder,
    q: Var,
    k: Var,
    v: Var,
    masks: Masks,
    *,
    scale: float | None = None,
    softcap: float = 0.0,
    precision: ir.DataType | None = None,
    score_mod: Callable[[Var], Var] | None = None,
    prob_mod: Callable[[Var], Var] | None = None,
) -> Attended:
    """Compute ``softmax(scale · q kᵀ + masks) v`` for tensors [batch, heads, length, head size].

    Args:
        q, k, v: queries, keys and values; k and v may have fewer heads, each shared by consecutive heads of q.
        masks: the keys that a query sees.
        scale: the factor of the scores; 1/√(head size) by default.
        softcap: if not 0, scores pass through ``softcap · tanh(scores / softcap)``.
        precision: the element type of the softmax; by default that of q.
        score_mod, prob_mod: functions applied to the input and the output of the softmax, in its element type.
    """
    groups = _Groups.of(op, q, k)
    q, k = _scaled_factors(op, q, k, scale)
    raw = groups.join(groups.split(q) @ op.Transpose(k, perm=[0, 1, 3, 2]))
    capped = op.Tanh(raw / softcap) * softcap if softcap else raw
    # far below any score, yet finite, so that a softmax over masked keys only is not 0/0
    hidden = float(q.dtype.min) / 2 if masks.empty_rows else -_INF
    masked = masks.apply(op, capped, hidden)
    biased = op.cast(masked, precision or q.dtype)
    softmax = op.Softmax(biased if score_mod is None else score_mod(biased), axis=-1)
    probabilities = op.cast(softmax if prob_mod is None else prob_mod(softmax), q.dtype)
    y = groups.join(groups.split(probabilities) @ v)
    if masks.empty_rows:
        y = op.Where(masks.rows(op), y, 0.0)
    return Attended(y, raw, capped, masked, probabilities)


def _scaled_factors(op: Builder, q: Var, k: Var, scale: float | None) -> tuple[Var, Var]:
    """Return q · scale and k; in types below 32 bits, q and k times √scale each, as specified, to avoid overflow."""
    narrow = q.dtype.bitwidth < 32
    wide = ir.DataType.FLOAT if narrow else q.dtype
    size = op.dim(q, -1)
    if not scale and size.const is not None:
        scale = 1 / math.sqrt(size.const.item())
    factor = op.const(scale, wide) if scale else op.Reciprocal(op.Sqrt(op.cast(size, wide)))
    if not narrow:
        return q * factor, k
    root = op.cast(op.Sqrt(factor), q.dtype)
    return q * root, k * root


@dataclass(frozen=True)
class _Groups:
    """The folding of g heads of q, which share one head of k and v, into one matrix: [b, h, s, d] → [b, h/g, g·s, d].

    ``heads`` and ``kv_heads``, the numbers of heads of q and of k, are None if they are equal; then nothing is folded.
    """

    op: Builder
    heads: Var | None
    kv_heads: Var | None
    length: Var

    @staticmethod
    def of(op: Builder, q: Var, k: Var) -> _Groups:
        many, few = (x.dim(1) for x in (q, k))
        if many == few and many is not None:
            return _Groups(op, None, None, op.dim(q, 2))
        return _Groups(op, op.dim(q, 1), op.dim(k, 1), op.dim(q, 2))

    def split(self, x: Var) -> Var:
        return self._with_heads(x, self.kv_heads, [-1])

    def join(self, x: Var) -> Var:
        return self._with_heads(x, self.heads, self.length)

    def _with_heads(self, x: Var, heads: Var | None, length: Any) -> Var:
        return x if heads is None else self.op.Reshape(x, self.op.Concat([0], heads, length, [0], axis=0))


# --- masks ---------------------------------------------------------------------------------------------


def visible(op: Builder, q: Var, k: Var, offset: Var | int, *, left: int = -1, right: int = -1) -> Var:
    """Return a boolean mask: query i at position p = i + offset sees the keys p − left … p + right; −1 is no limit."""
    position = op.Unsqueeze(op.arange(op.dim(q, 2)), [1]) + offset
    key = op.Unsqueeze(op.arange(op.dim(k, 2)), [0])
    sides = [key <= (position + right if right else position)] if right >= 0 else []
    sides += [key >= (position - left if left else position)] if left >= 0 else []
    return functools.reduce(operator.and_, sides)


def shorter_than(op: Builder, k: Var, lengths: Var) -> Var:
    """Return a boolean mask [batch, 1, 1, keys] that is true for the first ``lengths[batch]`` keys."""
    key = op.arange(op.dim(k, 2))
    return key < op.Reshape(op.cast(lengths, ir.DataType.INT64), [-1, 1, 1, 1])


def _padded_mask(op: Builder, mask: Var, k: Var, hide: bool | float) -> Var:
    """Pad ``mask`` to the number of keys with ``hide``, the value that masks a key, unless it broadcasts over keys."""
    ends = [mask.dim(-1), k.dim(2)]
    if ends[0] == 1 or (ends[0] == ends[1] and ends[0] is not None):
        return mask
    missing = op.dim(k, 2) - op.dim(mask, -1)
    if not isinstance(ends[0], int):
        missing = op.Where(op.Equal(op.dim(mask, -1), 1), 0, missing)
    before = op.const(np.zeros(2 * mask.rank - 1, np.int64))
    return op.Pad(mask, op.Concat(before, missing, axis=0), hide)


def _has_empty_row(mask: Var) -> bool:
    """Whether a query may see no key; False only for constant masks."""
    known = mask.const if not mask.is_float or is_marked_constant(mask.value) else None
    if known is None:
        return True
    return not bool((known if known.dtype == bool else known > -np.inf).any(-1).all())


# --- heads ---------------------------------------------------------------------------------------------


def split_heads(op: Builder, x: Var, heads: int) -> Var:
    """Reshape [batch, length, heads · size] to [batch, heads, length, size]."""
    return op.Transpose(in_heads(op, x, heads), perm=[0, 2, 1, 3])


def in_heads(op: Builder, x: Var, heads: int) -> Var:
    """Reshape [batch, length, heads · size] to [batch, length, heads, size]."""
    hidden = x.dim(-1)
    return op.Reshape(x, [0, 0, heads, hidden // heads if isinstance(hidden, int) else -1])


def merge_heads(op: Builder, x: Var) -> Var:
    """Reshape [batch, heads, length, size] to [batch, length, heads · size]."""
    heads, size = x.dim(1), x.dim(3)
    hidden = heads * size if isinstance(heads, int) and isinstance(size, int) else -1
    return op.Reshape(op.Transpose(x, perm=[0, 2, 1, 3]), [0, 0, hidden])


# --- operators of ONNX -----------------------------------------------------------------------------------


@since(23, "Attention")
def attention(
    op: Builder,
    node: ir.Node,
    q: Var,
    k: Var,
    v: Var,
    mask: Var | None = None,
    past_key: Var | None = None,
    past_value: Var | None = None,
    kv_length: Var | None = None,
    *,
    is_causal: int = 0,
    kv_num_heads: int = 0,
    q_num_heads: int = 0,
    left_window_size: int = -1,
    qk_matmul_output_mode: int = 0,
    right_window_size: int = -1,
    scale: float | None = None,
    softcap: float = 0.0,
    softmax_precision: int = 0,
) -> Any:
    """Convert Attention of opsets 23 to 25, whose versions differ only in optional inputs and attributes."""
    packed = q.rank == 3
    if packed:
        if not q_num_heads or not kv_num_heads:
            raise ModelError(f"{describe(node)} has inputs of rank 3, but no number of heads; export the model again")
        q, k, v = split_heads(op, q, q_num_heads), split_heads(op, k, kv_num_heads), split_heads(op, v, kv_num_heads)
    incoming = k
    if past_key is not None and past_value is not None:
        k, v = op.Concat(past_key, k, axis=2), op.Concat(past_value, v, axis=2)
    offset: Var | int = 0
    if past_key is not None:
        offset = op.dim(past_key, 2)
    elif kv_length is not None:
        offset = op.Reshape(op.cast(kv_length, ir.DataType.INT64), [-1, 1, 1, 1]) - op.dim(q, 2)
    right = 0 if is_causal else right_window_size
    masks = _masks(op, q, k, incoming, mask, kv_length, offset, left_window_size, right)
    precision = ir.DataType(softmax_precision) if softmax_precision else None
    result = attend(op, q, k, v, masks, scale=scale, softcap=softcap, precision=precision)
    y = merge_heads(op, result.y) if packed else result.y
    wanted = len(node.outputs) > 3 and is_wanted(node.outputs[3])
    return y, k, v, _asked_scores(op, result, masks, qk_matmul_output_mode) if wanted else None


def _masks(
    op: Builder,
    q: Var,
    k: Var,
    incoming: Var,
    mask: Var | None,
    kv_length: Var | None,
    offset: Var | int,
    left: int,
    right: int,
) -> Masks:
    conditions = [visible(op, q, k, offset, left=left, right=right)] if left >= 0 or right >= 0 else []
    conditions += [shorter_than(op, k, kv_length)] if kv_length is not None else []
    queries, keys = q.dim(2), incoming.dim(2)
    # without cached lengths a query sees at least key 0, or itself if there are as many keys as queries
    empty = kv_length is not None or (left >= 0 and (queries != keys or queries is None))
    bias = None
    if mask is not None:
        empty = empty or bool(conditions) or _has_empty_row(mask)
        if mask.dtype == ir.DataType.BOOL:
            conditions.append(_padded_mask(op, mask, k, hide=False))
        else:
            bias = _padded_mask(op, op.cast(mask, q.dtype), k, hide=-_INF)
    return Masks(bias, functools.reduce(operator.and_, conditions) if conditions else None, empty)


def _asked_scores(op: Builder, result: Attended, masks: Masks, mode: int) -> Var:
    """Return the optional output of scores; ``mode`` is 0 for raw, 1 after the soft cap, 2 masked, 3 probabilities."""
    if mode == 2:
        return masks.apply(op, result.capped, -_INF)
    if mode == 3 and masks.empty_rows:
        return op.Where(masks.rows(op), result.probabilities, 0.0)
    stages = {0: result.raw, 1: result.capped, 3: result.probabilities}
    if mode not in stages:
        raise ModelError(f"qk_matmul_output_mode of an Attention is {mode}; expected 0 to 3; export the model again")
    return stages[mode]


@since(23, "RotaryEmbedding")
def rotary_embedding(
    op: Builder,
    node: ir.Node,
    x: Var,
    cos: Var,
    sin: Var,
    positions: Var | None = None,
    *,
    num_heads: int = 0,
    rotary_embedding_dim: int = 0,
    interleaved: int = 0,
) -> Any:
    if positions is not None:
        cos, sin = op.Gather(cos, positions), op.Gather(sin, positions)
    split = in_heads(op, x, num_heads) if x.rank == 3 else x
    return rotate_heads(op, x, split, (cos, sin), rotary_embedding_dim, bool(interleaved))


def rotate_heads(op: Builder, x: Var, split: Var, angles: Sequence[Var], size: int, interleaved: bool) -> Var:
    """Rotate ``split``, which is ``x`` split into heads, by angles (cosine, sine) [batch, length, columns]."""
    cos, sin = (op.Unsqueeze(angle, [2 if x.rank == 3 else 1]) for angle in angles)
    y = rotate(op, split, cos, sin, size, interleaved)
    return op.Reshape(y, op.shape(x)) if x.rank == 3 else y


def rotate(op: Builder, x: Var, cos: Var, sin: Var, size: int, interleaved: bool) -> Var:
    """Rotate pairs of entries of the last axis by the angles whose cosines and sines are ``cos`` and ``sin``.

    Only the first ``size`` entries are rotated (all if 0). A pair is two adjacent entries if ``interleaved``, otherwise
    an entry of the first half and one of the second half.
    """
    known = x.dim(-1)
    rest = None
    if size and size != known:
        x, rest = op.Split(x, op.Concat([size], op.dim(x, -1) - size, axis=0), axis=-1, outputs=2)
    if interleaved:
        last = x.dim(-1)
        pairs = op.Reshape(x, [*[0] * (x.rank - 1), last // 2 if isinstance(last, int) else -1, 2])
        turned = _rotated(op, pairs, op.Unsqueeze(cos, [-1]), op.Unsqueeze(sin, [-1]))
        turned = op.Reshape(turned, op.shape(x))
    else:
        turned = _rotated(op, x, cos, sin)
    return turned if rest is None else op.Concat(turned, rest, axis=-1)


def _rotated(op: Builder, x: Var, cos: Var, sin: Var) -> Var:
    """Rotate x = (a, b), halves along its last axis, to (a cos − b sin, a sin + b cos)."""
    a, b = op.Split(x, axis=-1, num_outputs=2, outputs=2)
    return op.Concat(a * cos - b * sin, a * sin + b * cos, axis=-1)

"""Attention, written in primitive operators with dynamic batch and sequence dimensions; embedding and dropout."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np
import onnx_ir as ir

from gradgraph.errors import ModelError
from gradgraph.frontend.dims import Extent, floor_divide
from gradgraph.frontend.pointwise import cast, logical_and, logical_not, real, where
from gradgraph.frontend.subscripts import arange, index_at
from gradgraph.frontend.trace import TensorLike, current, op, tensor

if TYPE_CHECKING:
    from gradgraph.frontend.tensor import Tensor

__all__ = ["dropout", "embedding", "scaled_dot_product_attention"]


def scaled_dot_product_attention(
    query: TensorLike,
    key: TensorLike,
    value: TensorLike,
    attn_mask: TensorLike | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
) -> Tensor:
    """``softmax(q kᵀ · scale + mask) v`` for ``q`` ``[..., L, E]``, ``k`` ``[..., S, E]``, ``v`` ``[..., S, V]``.

    A boolean mask is true where attention is allowed; the output for a query without any allowed position is zero. A
    floating-point mask is added to the scores.
    """
    return attend(query, key, value, attn_mask, dropout_p, is_causal, scale)[0]


def attend(
    query: TensorLike,
    key: TensorLike,
    value: TensorLike,
    mask: TensorLike | None,
    dropout_p: float,
    is_causal: bool,
    scale: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Return attention outputs ``[..., L, V]`` and attention probabilities ``[..., L, S]``."""
    q, k, v = real(query), real(key), real(value)
    if is_causal and mask is not None:
        raise ModelError("attention got both a mask and is_causal=True; pass a causal mask instead")
    width = q.shape[-1]
    factor = 1.0 / math.sqrt(width) if scale is None and isinstance(width, int) else scale
    if factor is None:
        raise ModelError(f"the number of features of attention is dynamic ({width}); fix it, or pass scale")
    scores = op.MatMul(q * factor, k.transpose(-2, -1), shape=[*q.shape[:-1], k.shape[-2]])
    if is_causal:
        scores = where(causal_mask(q.shape[-2], k.shape[-2]), scores, lowest(scores))
        weights = op.Softmax(scores, axis=-1)  # every row attends to position 0
    elif mask is not None and tensor(mask).is_bool():
        weights = masked_softmax(scores, tensor(mask))
    else:
        weights = op.Softmax(scores if mask is None else scores + mask, axis=-1)
    kept = dropout(weights, dropout_p)
    return op.MatMul(kept, v, shape=[*q.shape[:-1], v.shape[-1]]), weights


def masked_softmax(scores: Tensor, allowed: Tensor) -> Tensor:
    """Return the softmax of ``scores`` over allowed positions of the last axis; rows without any are zeros, not NaN."""
    return where(allowed, op.Softmax(where(allowed, scores, lowest(scores)), axis=-1), 0.0)


def lowest(x: Tensor) -> float:
    """Return the lowest finite value of the dtype of ``x``, the score of masked positions before Softmax."""
    return -3e38 if x.dtype == ir.DataType.BFLOAT16 else float(np.finfo(x.dtype.numpy()).min)


def causal_mask(rows: Extent, columns: Extent) -> Tensor:
    """Return the causal mask, boolean ``[rows, columns]``: True where column <= row. It is cached by size."""
    cache = current().cache
    key = ("causal", str(rows), str(columns))
    if key not in cache:
        cache[key] = arange(rows).unsqueeze(1) >= arange(columns).unsqueeze(0)
    return cache[key]


def multi_head_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    num_heads: int,
    allowed: Tensor | None,
    added: Tensor | None,
    dropout_p: float,
) -> tuple[Tensor, Tensor]:
    """Return multi-head attention ``[N, L, E]``, and the probabilities ``[N, heads, L, S]``.

    Args:
        query, key, value: the projected queries ``[N, L, E]``, keys and values ``[N, S, E]``.
        num_heads: the number of heads.
        allowed: a boolean mask that broadcasts to ``[N, heads, L, S]``, true where attention is allowed.
        added: a floating-point mask that broadcasts to ``[N, heads, L, S]``, and is added to the scores.
        dropout_p: the dropout probability of the attention probabilities.
    """
    q, k, v = (
        x.reshape(*x.shape[:2], num_heads, floor_divide(x.shape[2], num_heads)).transpose(1, 2)
        for x in (query, key, value)
    )
    if allowed is not None and added is not None:
        added, allowed = where(allowed, added, -math.inf), None
    mask = allowed if allowed is not None else added
    out, weights = attend(q, k, v, mask, dropout_p, is_causal=False)
    return out.transpose(1, 2).flatten(2), weights


def combined_masks(
    attn_mask: TensorLike | None, key_padding_mask: TensorLike | None, num_heads: int
) -> tuple[Tensor | None, Tensor | None]:
    """Return the arguments ``allowed`` and ``added`` of ``multi_head_attention`` for PyTorch's masks.

    PyTorch's boolean masks, unlike ``allowed``, are true where attention is *not* allowed; ``added`` is the sum of
    floating-point masks. Either is None without masks of its type.
    """
    allowed: Tensor | None = None
    added: Tensor | None = None
    masks = []
    if attn_mask is not None:
        mask = tensor(attn_mask)
        if mask.ndim == 3:  # [N * heads, L, S]
            mask = mask.reshape(floor_divide(mask.shape[0], num_heads), num_heads, *mask.shape[1:])
        masks.append(mask)
    if key_padding_mask is not None:
        masks.append(tensor(key_padding_mask).unsqueeze(1).unsqueeze(1))
    for mask in masks:
        if mask.is_bool():
            allowed = logical_not(mask) if allowed is None else logical_and(allowed, logical_not(mask))
        else:
            added = mask if added is None else added + mask
    return allowed, added


# --- embedding and dropout -----------------------------------------------------------------------


def embedding(indices: TensorLike, weight: TensorLike, padding_idx: int | None = None) -> Tensor:
    """Rows of ``weight`` ``[count, width]`` at integer ``indices`` of any shape.

    The row at ``padding_idx`` is a constant in the graph, with its current value: it is not trained.
    """
    weight, places = tensor(weight), cast(indices, ir.DataType.INT64)
    rows = index_at(weight, 0, places)
    if padding_idx is None:
        return rows
    count = weight.shape[0]
    table = weight.traced.const
    if not isinstance(count, int) or table is None or not -count <= padding_idx < count:
        raise ModelError(
            f"padding_idx is {padding_idx}, but weight has shape {weight.shape}; pass the index of a row of a parameter"
        )
    row = table[padding_idx]
    fixed = tensor(row if row.any() else np.zeros((), row.dtype), weight.dtype)
    return where((places == padding_idx % count).unsqueeze(-1), fixed, rows)


def dropout(x: TensorLike, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    """A Dropout node in inference mode (the identity); building a training step switches it on.

    With ``p=0`` or ``training=False`` no node is written, so there is no dropout in training either.
    """
    if not 0.0 <= p < 1.0:
        raise ModelError(f"dropout with p={p}: p must be at least 0 and below 1")
    x = tensor(x)
    if p == 0.0 or not training:
        return x
    return op.Dropout(x, np.array(p, np.float32), np.array(False), shape=x.shape)

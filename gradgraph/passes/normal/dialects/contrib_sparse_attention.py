"""Form of SparseAttention of com.microsoft (Phi-3-small): grouped attention whose mask consists of blocks."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx_ir as ir

from gradgraph.graph.builder import Builder, Var
from gradgraph.passes.normal.dialects.contrib import fused, refuse
from gradgraph.passes.normal.dialects.contrib_attention import group_query_attention

_INT64 = ir.DataType.INT64


@fused("SparseAttention")
def sparse_attention(
    op: Builder,
    node: ir.Node,
    query: Var,
    key: Var | None,
    value: Var | None,
    past_key: Var,
    past_value: Var,
    rows: Var,
    columns: Var,
    total_length: Var,
    lengths: Var,
    cos: Var | None = None,
    sin: Var | None = None,
    *,
    num_heads: int,
    kv_num_heads: int,
    sparse_block_size: int,
    scale: float = 0.0,
    do_rotary: int = 0,
    rotary_interleaved: int = 0,
) -> Any:
    """Convert SparseAttention to GroupQueryAttention, with the blocks as a bias of −∞ for hidden keys.

    Head h has layout h modulo the number of layouts. Past and present are buffers of equal length.
    """
    layouts = _layouts(rows, columns)
    if layouts is None:
        raise refuse(node, "computes the blocks of its mask")
    length = op.dim(query, 1)
    held = op.Reshape(op.cast(lengths, _INT64), [-1, 1])
    first = op.Equal(op.Reshape(op.cast(total_length, _INT64), [1]), length)
    steps = op.Unsqueeze(op.arange(length), [0])
    places = steps + op.Where(first, 0, held - length)  # [batch, length]
    keys = op.arange(op.dim(past_key, 2))
    blocks = layouts.shape[1] - 1
    of_queries = op.Gather(op.const(layouts), _block(op, places, sparse_block_size, blocks), axis=1)
    seen = op.Gather(of_queries, _block(op, keys, sparse_block_size, blocks), axis=3)  # [layouts, batch, length, keys]
    of_heads = op.Gather(op.Transpose(seen, perm=[1, 0, 2, 3]), [h % len(layouts) for h in range(num_heads)], axis=1)
    bias = op.Where(of_heads, op.const(0.0, query.dtype), op.const(float("-inf"), query.dtype))
    last = op.cast(lengths, _INT64) - 1
    return group_query_attention(
        op,
        node,
        *(query, key, value, past_key, past_value, last, total_length, cos, sin, None, bias),
        num_heads=num_heads,
        kv_num_heads=kv_num_heads,
        scale=scale,
        do_rotary=do_rotary,
        rotary_interleaved=rotary_interleaved,
    )


def _block(op: Builder, positions: Var, size: int, last: int) -> Var:
    return op.Min(op.Div(positions, op.const(size, _INT64)), op.const(last, _INT64))


def _layouts(rows: Var, columns: Var) -> np.ndarray | None:
    """Return booleans [layouts, blocks, blocks] from compressed rows; None unless these are constants."""
    starts, blocks = rows.const, columns.const
    if starts is None or blocks is None:
        return None
    count = starts.shape[1] - 1
    seen = np.zeros((len(starts), count, count), bool)
    for layout, (begins, held) in enumerate(zip(starts, blocks, strict=True)):
        for row in range(count):
            seen[layout, row, held[begins[row] : begins[row + 1]]] = True
    return seen

"""Forms of embeddings of com.microsoft (see ``contrib``): GatherBlockQuantized, and words from their characters."""

from __future__ import annotations

from typing import Any

import onnx_ir as ir

from gradgraph.graph.builder import Builder, Var
from gradgraph.graph.marks import is_marked_constant
from gradgraph.passes.normal.dialects.contrib import fused, refuse
from gradgraph.passes.normal.dialects.packed_weights import stored_bytes

_INT32, _INT64 = ir.DataType.INT32, ir.DataType.INT64


@fused("GatherBlockQuantized")
def gather_block_quantized(
    op: Builder,
    node: ir.Node,
    data: Var,
    indices: Var,
    scales: Var,
    zero_points: Var | None = None,
    *,
    bits: int = 4,
    block_size: int = 128,
    gather_axis: int = 0,
    quantize_axis: int = 1,
) -> Any:
    """Gather rows of a table, and dequantize only these; an index out of range returns zeros.

    A table whose scales are not trained keeps its operator, because it has no other input with a gradient.
    """
    if is_marked_constant(scales.value):
        return None
    rank = data.rank
    if gather_axis % rank or quantize_axis % rank != rank - 1:
        raise refuse(node, "has blocks along another axis than the last, or gathers along another than the first")
    dtype, width, count = data.dtype, data.dim(-1), op.Squeeze(op.dim(data, 0), [0])
    signed = dtype == ir.DataType.INT4
    stored = [None if x is None else _as_bytes(op, node, x) for x in (data, zero_points)]
    bits = bits if dtype == ir.DataType.UINT8 else 4
    wide = op.cast(indices, _INT64)
    inside = (wide >= -count) & (wide < count)
    rows = op.Where(inside, wide, 0)
    packed, points = (None if x is None else op.Gather(x, rows) for x in stored)
    by_block = op.Gather(scales, rows)  # [..., blocks]
    blocks = scales.dim(-1)
    if not (isinstance(blocks, int) and isinstance(width, int)) or packed is None:
        raise refuse(node, "has an unknown number of blocks")
    columns = width * (8 // bits) if dtype == ir.DataType.UINT8 else width
    missing = blocks * block_size - columns  # in the last block
    q = op.cast(_numbers(op, packed, bits, signed), scales.dtype)
    q = op.Pad(q, [*[0] * (2 * q.rank - 1), missing]) if missing else q
    grouped = op.Reshape(q, [*[0] * (q.rank - 1), blocks, -1])
    if dtype == ir.DataType.UINT8 and points is None:
        grouped = grouped - 2.0 ** (bits - 1)
    elif points is not None:
        zeros = op.Slice(_numbers(op, points, bits, signed), [0], [blocks], [-1])
        grouped = grouped - op.Unsqueeze(op.cast(zeros, scales.dtype), [-1])
    y = op.Reshape(grouped * op.Unsqueeze(by_block, [-1]), [*[0] * (q.rank - 1), -1])
    y = op.Slice(y, [0], [columns], [-1]) if missing else y
    return op.Where(op.Unsqueeze(inside, list(range(indices.rank, y.rank))), y, 0.0)


def _as_bytes(op: Builder, node: ir.Node, table: Var) -> Var:
    """Return a stored table of 4-bit integers as bytes; other tables of bytes as they are."""
    if table.dtype == ir.DataType.UINT8:
        return table
    found = stored_bytes(op, table) if table.dtype in (ir.DataType.INT4, ir.DataType.UINT4) else None
    if found is None:
        raise refuse(node, f"has a table in {table.dtype.name}, or of an odd number of columns")
    return found


def _numbers(op: Builder, packed: Var, bits: int, signed: bool) -> Var:
    """Return the integers in the bytes ``packed`` [..., bytes], lowest bits first, in int32."""
    steps = [2**shift for shift in range(0, 8, bits)]
    column = op.Unsqueeze(op.cast(packed, _INT32), [-1])
    split = op.Mod(op.Div(column, op.const(steps, _INT32)), 2**bits)
    flat = op.Reshape(split, [*[0] * (packed.rank - 1), -1])
    half = 2 ** (bits - 1)
    return op.Mod(flat + half, 2**bits) - half if signed else flat


@fused("WordConvEmbedding")
def word_conv_embedding(
    op: Builder, node: ir.Node, words: Var, filters: Var, bias: Var, characters: Var, **sizes: int
) -> Any:
    """Embed words [words, characters] of character indices: the maximum of tanh(convolution) over each word.

    Characters of index 0 or less are padding. A word shorter than the window has one window, with padding in it. A word
    whose first character is padding is empty; onnxruntime does not compute its embedding, and this form returns zeros.
    The attributes repeat sizes of ``filters`` [embedding, 1, window, character embedding] and ``characters``.
    """
    embedded = op.Unsqueeze(op.Gather(characters, words), [1])  # [words, 1, characters, character embedding]
    y = op.Squeeze(op.Tanh(op.Conv(embedded, filters, bias)), [3])  # [words, embedding, windows]
    length = op.ReduceSum(op.cast(words > 0, _INT64), [1], keepdims=1)
    windows = op.Max(length - op.dim(filters, 2), op.const(0, _INT64)) + 1  # [words, 1]: windows of each word
    within = op.arange(op.dim(y, 2)) < windows
    longest = op.ReduceMax(op.Where(op.Unsqueeze(within, [1]), y, -1.0), [2], keepdims=0)
    return op.Where(op.Slice(words, [0], [1], [1]) > 0, longest, 0.0)

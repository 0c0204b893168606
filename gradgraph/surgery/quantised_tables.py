"""Reading and writing of tables of embeddings that GatherBlockQuantized reads rows from."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from gradgraph.errors import BuildError, shown
from gradgraph.graph.quantisers import INTEGER_RANGES, Quantiser
from gradgraph.surgery.matmul_nbits import packed_bits, unpacked_bits
from gradgraph.surgery.operation import Array, numbers_of, set_numbers, tensor_of
from gradgraph.surgery.stored_weights import relative_norm


def _stored(node: ir.Node) -> tuple[ir.Value, ir.Value, ir.Value | None]:
    """Return the stored data, scales and zero points of a GatherBlockQuantized.

    Raises:
        BuildError: they are computed, or blocks are not along the last axis of a matrix.
    """
    data, _, scales, points = [*node.inputs, None, None][:4]
    while data is not None and numbers_of(data) is None:
        before = data.producer()
        data = before.inputs[0] if before is not None and before.op_type in ("Reshape", "Identity") else None
    numbers = [attribute.as_int() for name in ("gather_axis", "quantize_axis")
               if (attribute := node.attributes.get(name)) is not None]  # fmt: skip
    known = data is not None and scales is not None and numbers_of(scales) is not None
    if not known or numbers not in ([], [0], [0, 1], [0, -1]) or (points is not None and numbers_of(points) is None):
        raise BuildError(
            f"the table of '{shown(node.name)}' is computed, or has blocks along another axis than its last one, so it "
            "cannot be replaced"
        )
    assert data is not None and scales is not None
    return data, scales, points


def _bits(node: ir.Node) -> int:
    return node.attributes.get_int("bits", 4)


def _unpacked(numbers: Array, node: ir.Node, rows: int) -> Array:
    by_row = numbers.reshape(rows, -1)
    return unpacked_bits(by_row, _bits(node)) if numbers.dtype == np.uint8 else by_row


def _packed(numbers: Array, node: ir.Node, like: Array) -> Array:
    if like.dtype != np.uint8:
        return numbers.reshape(like.shape).astype(like.dtype)
    return packed_bits(numbers, _bits(node), like.size // len(numbers)).reshape(like.shape)


def _quantiser(node: ir.Node) -> tuple[Quantiser, Array]:
    """Return the quantiser of a table [rows, columns], and its integers."""
    data, scales, points = _stored(node)
    tensor, steps, stored = tensor_of(data), tensor_of(scales).numpy(), numbers_of(points)
    rows = len(steps)
    numbers, by_block = _unpacked(tensor.numpy(), node, rows), steps.reshape(rows, -1)
    is_bytes = tensor.dtype == ir.DataType.UINT8
    zeros = np.full(by_block.shape, 2 ** (_bits(node) - 1)) if is_bytes else None
    if stored is not None:
        zeros = _unpacked(stored.numpy(), node, rows)[:, : by_block.shape[1]]
    limits = (0, 2 ** _bits(node) - 1) if is_bytes else INTEGER_RANGES[tensor.dtype]
    return Quantiser(by_block, zeros, limits, 1, node.attributes.get_int("block_size", 128)), numbers


def read_table(node: ir.Node) -> Array:
    """Return the table of a GatherBlockQuantized as float32 [rows, columns]."""
    quantiser, numbers = _quantiser(node)
    return quantiser.dequantised(numbers)


def table_rounding(node: ir.Node) -> Array:
    """Return the largest rounding error of each number of a table [rows, columns]."""
    quantiser, numbers = _quantiser(node)
    return quantiser.rounding(numbers)


def write_table(work: ir.Model, node: ir.Node, table: Array) -> float:
    """Replace the table of a GatherBlockQuantized in its format; return the rounding error ``‖stored − W‖/‖W‖``.

    All readers of the stored tensors get the new table.
    """
    data, scales, points = _stored(node)
    before, numbers = _quantiser(node)
    padded = np.pad(table, ((0, 0), (0, numbers.shape[1] - table.shape[1])))
    fitted = before.refitted(padded, before.middle, signed=True)
    integers = fitted.quantised(padded)
    set_numbers(work, data, _packed(integers, node, tensor_of(data).numpy()))
    set_numbers(work, scales, fitted.scales.reshape(tensor_of(scales).shape.numpy()))
    if points is not None and fitted.points is not None:
        set_numbers(work, points, _packed(fitted.points, node, tensor_of(points).numpy()))
    return relative_norm(fitted.dequantised(integers)[:, : table.shape[1]] - table, table)

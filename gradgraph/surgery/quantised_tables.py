"""Reading and writing of tables of embeddings that GatherBlockQuantized reads rows from."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import onnx_ir as ir

from gradgraph.errors import BuildError, shown
from gradgraph.graph.quantisers import INTEGER_RANGES, Quantiser
from gradgraph.surgery.operation import numbers_of, set_numbers

Array = np.ndarray[Any, Any]


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
    if numbers.dtype != np.uint8 or _bits(node) == 8:
        return numbers.reshape(rows, -1)
    bits = _bits(node)
    packed = numbers.reshape(rows, -1, 1)
    return np.asarray((packed >> (bits * np.arange(8 // bits, dtype=np.uint8))) & (2**bits - 1)).reshape(rows, -1)


def _packed(numbers: Array, node: ir.Node, like: Array) -> Array:
    if like.dtype != np.uint8:
        return numbers.reshape(like.shape).astype(like.dtype)
    each = 8 // _bits(node)
    width = like.size // len(numbers) * each
    full = np.pad(numbers.astype(np.uint8), ((0, 0), (0, width - numbers.shape[1]))).reshape(len(numbers), -1, each)
    shifts = _bits(node) * np.arange(each, dtype=np.uint8)
    return np.asarray(np.bitwise_or.reduce(full << shifts, -1), np.uint8).reshape(like.shape)


def _quantiser(node: ir.Node) -> tuple[Quantiser, Array]:
    """Return the quantiser of a table [rows, columns], and its integers."""
    data, scales, points = _stored(node)
    tensor, steps = numbers_of(data), numbers_of(scales)
    assert tensor is not None and steps is not None
    rows = int(steps.shape.numpy()[0])
    numbers = _unpacked(tensor.numpy(), node, rows)
    by_block = steps.numpy().reshape(rows, -1)
    stored = numbers_of(points)
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
    held = numbers_of(points)
    middle = None if held is not None and before.middle is None else before.middle
    padded = np.pad(table, ((0, 0), (0, numbers.shape[1] - table.shape[1])))
    fitted = before.refitted(padded, middle, signed=True)
    integers = fitted.quantised(padded)
    tensor, steps = numbers_of(data), numbers_of(scales)
    assert tensor is not None and steps is not None and fitted.points is not None
    set_numbers(work, data, _packed(integers, node, tensor.numpy()))
    set_numbers(work, scales, fitted.scales.reshape(tuple(steps.shape.numpy())))
    if points is not None and held is not None:
        set_numbers(work, points, _packed(fitted.points, node, held.numpy()))
    rest = replace(fitted).dequantised(integers)[:, : table.shape[1]] - table
    return float(np.linalg.norm(rest) / max(np.linalg.norm(table), np.finfo(np.float64).tiny))

"""Read weights of 4 or 8 bits, packed for onnxruntime's MatMulNBits, by a DequantizeLinear from the same bytes.

MatMulNBits stores the blocks of a row consecutively, low bits first, like a uint4 tensor of ONNX. Only the declared
type and shape change; nothing is unpacked or copied, so that a frozen base model stays as small as its file, on disk
and in memory.
"""

from __future__ import annotations

import math

import ml_dtypes
import numpy as np
import onnx_ir as ir

from gradgraph.files.held_files import HeldTensor
from gradgraph.graph.builder import Builder, Var

_TYPES = {4: ir.DataType.UINT4, 8: ir.DataType.UINT8}


def as_stored(
    op: Builder, packed: Var, scales: Var, zero_points: Var | None, sizes: tuple[int, int], bits: int, block_size: int
) -> Var | None:
    """Emit a DequantizeLinear that computes the float weight (N, K) from the packed bytes.

    Returns None unless ``packed`` is an initializer of 4-bit or 8-bit numbers, its rows consist of whole blocks, and
    the zero points are constant integers.
    """
    rows, columns = sizes
    tensor = packed.value.const_value
    if bits not in _TYPES or columns % block_size or tensor is None or not packed.value.is_initializer():
        return None
    points = _points(zero_points, rows, columns // block_size, bits)
    if points is None:
        return None
    sizes_of_scales = ir.Shape((rows, columns // block_size))
    held = scales.value.const_value if scales.value.is_initializer() else None
    if held is None:
        blocks = op.Reshape(scales, list(sizes_of_scales.numpy()))
    else:  # the same bytes with a different shape
        blocks = _under_its_name(op, scales.value, seen_as(held, held.dtype, sizes_of_scales))
    numbers = _under_its_name(op, packed.value, seen_as(tensor, _TYPES[bits], ir.Shape(sizes)))
    return op.DequantizeLinear(numbers, blocks, points, axis=1, block_size=block_size)


def stored_bytes(op: Builder, table: Var) -> Var | None:
    """Return an initializer of 4-bit integers as one of bytes, [..., columns] as [..., columns / 2].

    None if it is not an initializer, or has an odd number of columns.
    """
    tensor = table.value.const_value
    if tensor is None or not table.value.is_initializer() or tensor.shape.numpy()[-1] % 2:
        return None
    *rows, columns = tensor.shape.numpy()
    return _under_its_name(op, table.value, seen_as(tensor, ir.DataType.UINT8, ir.Shape([*rows, columns // 2])))


def _points(zero_points: Var | None, rows: int, blocks: int, bits: int) -> np.ndarray | None:
    """Return the zero points in the integer type of the weight; None if it cannot represent them."""
    kind = ml_dtypes.uint4 if bits == 4 else np.dtype(np.uint8)
    if zero_points is None:
        return np.full((rows, blocks), 2 ** (bits - 1), kind)
    packed = zero_points.const
    if packed is None or packed.dtype != np.uint8:
        return None
    if bits == 8:
        return packed.reshape(rows, blocks)
    pairs = packed.reshape(rows, -1)
    return np.stack([pairs & 15, pairs >> 4], -1).reshape(rows, -1)[:, :blocks].astype(kind)


def seen_as(tensor: ir.TensorProtocol, dtype: ir.DataType, shape: ir.Shape, begin: int = 0) -> ir.TensorProtocol:
    """Return a view of the bytes of ``tensor``, starting at ``begin``, with a different type and shape."""
    sizes = shape.numpy()
    length = math.ceil(math.prod(sizes) * dtype.bitwidth / 8)
    if isinstance(tensor, HeldTensor):
        return tensor.seen_as(dtype, shape, begin)
    if isinstance(tensor, ir.ExternalTensor):
        offset = (tensor.offset or 0) + begin
        return ir.ExternalTensor(
            tensor.location, offset, length, dtype, shape=shape, name=tensor.name or "", base_dir=tensor.base_dir
        )
    held = tensor.numpy() if tensor.dtype.bitwidth >= 8 else np.frombuffer(tensor.tobytes(), np.uint8)
    raw = np.ascontiguousarray(held).reshape(-1).view(np.uint8)[begin : begin + length]
    if dtype.bitwidth < 8:
        return ir.PackedTensor(raw, dtype, shape=shape, name=tensor.name)
    return ir.tensor(raw.view(dtype.numpy()).reshape(sizes), name=tensor.name)


def _under_its_name(op: Builder, value: ir.Value, tensor: ir.TensorProtocol) -> Var:
    """Store ``tensor`` in place of the initializer ``value``, or under a new name if ``value`` is read elsewhere."""
    if len(value.uses()) > 1 or value.is_graph_output():
        other = op.weight(f"{value.name}/numbers", np.zeros(0, np.uint8)).value
    else:
        other = value
    tensor.name = other.name
    other.const_value, other.type = tensor, ir.TensorType(tensor.dtype)
    other.shape = ir.Shape(tensor.shape.numpy())
    return Var(op, other)

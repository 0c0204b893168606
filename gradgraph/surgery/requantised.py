"""A new weight stored as the old one was: the same type, blocks, channels and kind of zero points, with new scales."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx_ir as ir

from gradgraph.errors import BuildError, shown
from gradgraph.graph.marks import INTEGER_RANGES
from gradgraph.surgery.linear_layers import Layer
from gradgraph.surgery.operated import add_weight, numbers_of, set_numbers
from gradgraph.surgery.stored_weights import (
    as_laid_out,
    as_read,
    packed_again,
    packed_parts,
    packed_sizes,
    packed_weight,
    start_of,
    unpacked,
)

Array = np.ndarray[Any, Any]


def is_quantised(layer: Layer) -> bool:
    if layer.kind == "MatMulNBits":
        return True
    return any(node.op_type == "DequantizeLinear" for node in start_of(layer.weight)[1])


def write_quantised(work: ir.Model, layer: Layer, weight: Array) -> float:
    """Give a layer another weight (outputs first); how far what is stored is from it, as ``‖stored − W‖/‖W‖``."""
    if layer.kind == "MatMulNBits":
        stored = _write_packed(work, layer.node, weight)
    else:
        stored = _write_stored(work, layer, as_laid_out(layer, weight))
        weight = as_laid_out(layer, weight)
    return float(np.linalg.norm(stored - weight) / max(np.linalg.norm(weight), np.finfo(np.float64).tiny))


def _write_packed(work: ir.Model, node: ir.Node, weight: Array) -> Array:
    packed, scales, points = packed_parts(node)
    given = packed_sizes(node)
    rows, columns, bits, size = given["N"], given["K"], given["bits"], given["block_size"]
    blocks = -(-columns // size)
    padded = np.pad(weight, ((0, 0), (0, blocks * size - columns)))
    low, high = (0, 2**bits - 1)
    middle = None if points is not None else 2 ** (bits - 1)
    numbers, new_scales, new_points = _rounded(
        padded.reshape(rows, blocks, size), low, high, middle, scales.dtype, signed=True
    )
    _store(work, node, 1, packed_again(numbers, bits, packed.shape[-1]).reshape(packed.shape))
    _store(work, node, 2, new_scales.reshape(scales.shape).astype(scales.dtype))
    if points is not None:
        if points.dtype == np.uint8:
            each = unpacked(points.reshape(rows, -1), bits).shape[1] * bits // 8
            new = packed_again(new_points.reshape(rows, blocks), bits, each).reshape(points.shape)
        else:
            new = new_points.reshape(points.shape).astype(points.dtype)
        _store(work, node, 3, new)
    return packed_weight(node).astype(np.float64)


def _write_stored(work: ir.Model, layer: Layer, weight: Array) -> Array:
    """Through the nodes between the weight and what is stored, from the end."""
    _, chain = start_of(layer.weight)
    if sum(n.op_type == "DequantizeLinear" for n in chain) != 1:
        raise BuildError(f"the weight of '{shown(layer.name)}' is quantised more than once; merge it as floats")
    for node in reversed(chain):
        if node.op_type == "Transpose":
            perm = node.attributes["perm"].as_ints() if "perm" in node.attributes else range(weight.ndim)[::-1]
            weight = weight.transpose(np.argsort(list(perm)))
        elif node.op_type == "DequantizeLinear":
            break
    else:
        raise AssertionError
    if any(n.op_type == "Transpose" for n in chain[: chain.index(node)]):
        raise BuildError(f"the weight of '{shown(layer.name)}' is turned before it is dequantised; merge it as floats")
    _dequantised_anew(work, node, weight)
    return np.asarray(as_read(layer.weight), np.float64)


def _dequantised_anew(work: ir.Model, node: ir.Node, weight: Array) -> None:
    """Other numbers, scales and zero points for a DequantizeLinear."""
    stored, scales = (numbers_of(v) for v in node.inputs[:2])
    points = numbers_of(node.inputs[2]) if len(node.inputs) > 2 else None
    if stored is None or scales is None or stored.dtype not in INTEGER_RANGES:
        raise BuildError(f"'{shown(node.name)}' has computed numbers or a type of its own; merge it as floats")
    low, high = INTEGER_RANGES[stored.dtype]
    sizes = scales.shape.numpy()
    grouped, back = _in_groups(weight, sizes, _attribute(node, "axis", 1), _attribute(node, "block_size", 0))
    held = None if points is None else points.numpy().astype(np.int64)
    symmetric = held is None or (not held.any() if low else bool((held == (high + 1) // 2).all()))
    middle = (0 if low else (0 if held is None else (high + 1) // 2)) if symmetric else None
    numbers, new_scales, new_points = _rounded(grouped, low, high, middle, scales.dtype.numpy())
    _store(work, node, 0, back(numbers).astype(stored.dtype.numpy()))
    _store(work, node, 1, new_scales.reshape(sizes).astype(scales.dtype.numpy()))
    if points is not None:
        _store(work, node, 2, new_points.reshape(sizes).astype(points.dtype.numpy()))


def _attribute(node: ir.Node, name: str, default: int) -> int:
    return node.attributes[name].as_int() if name in node.attributes else default


def _in_groups(weight: Array, sizes: Sequence[int], axis: int, block: int) -> tuple[Array, Any]:
    """``weight`` with the numbers of each scale on the last axis, and how numbers so laid out lie as before."""
    if not block:
        if int(np.prod(sizes)) == 1:
            return weight.reshape(1, -1), lambda x: x.reshape(weight.shape)
        moved = np.moveaxis(weight, axis, 0)
        return moved.reshape(len(moved), -1), lambda x: np.moveaxis(x.reshape(moved.shape), 0, axis)
    moved = np.moveaxis(weight, axis, -1)
    length, count = moved.shape[-1], sizes[axis]
    padded = np.pad(moved, [(0, 0)] * (moved.ndim - 1) + [(0, count * block - length)])
    split = np.moveaxis(padded.reshape(*moved.shape[:-1], count, block), -2, axis % weight.ndim)

    def back(x: Array) -> Array:
        joined = np.moveaxis(x, axis % weight.ndim, -2).reshape(*moved.shape[:-1], count * block)
        return np.moveaxis(joined[..., :length], -1, axis)

    return split, back


def _rounded(
    groups: Array, low: int, high: int, middle: int | None, dtype: Any, signed: bool = False
) -> tuple[Array, Array, Array]:
    """Whole numbers, scales and zero points of groups on the last axis; ``middle`` is every group's zero point.

    With a zero point of each group its range is that of its numbers and 0. Else the number that is farthest from 0 is
    one end of the range; ``signed`` lets it be the lower one, with a negative scale where it is positive, as
    onnxruntime's quantiser of MatMulNBits does.
    """
    if middle is None:
        least, most = np.minimum(groups.min(-1), 0), np.maximum(groups.max(-1), 0)
        scales = _nonzero(((most - least) / (high - low)).astype(dtype))
        points = np.clip(np.rint(low - least / scales.astype(np.float64)), low, high)
    else:
        at = np.abs(groups).argmax(-1, keepdims=True)
        farthest = np.take_along_axis(groups, at, -1)[..., 0]
        scales = farthest / (low - middle) if signed else np.abs(farthest) / (high - middle)
        scales = _nonzero(scales.astype(dtype))
        points = np.full(scales.shape, middle)
    numbers = np.rint(groups / scales.astype(np.float64)[..., None]) + points[..., None]
    return np.clip(numbers, low, high).astype(np.int64), scales, points.astype(np.int64)


def _nonzero(scales: Array) -> Array:
    return np.where(scales == 0, np.ones((), scales.dtype), scales)


def _store(work: ir.Model, node: ir.Node, place: int, numbers: Array) -> None:
    """Give an input of ``node`` other numbers, and other readers of the old ones nothing."""
    value = node.inputs[place]
    assert value is not None
    if len(value.uses()) > 1:
        node.replace_input_with(place, add_weight(work, f"{value.name}.merged", numbers))
    else:
        set_numbers(work, value, numbers)

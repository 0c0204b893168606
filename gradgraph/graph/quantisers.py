"""Quantisers: floats w stored as low-bit integers q, with ``w = (q - z)·s``.

A scale s and a zero point z are per tensor, per slice of an axis, or per block along it, as in the operators
QuantizeLinear, DequantizeLinear and MatMulNBits.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from types import EllipsisType
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import DTypeLike

from gradgraph.machine.threads import workers

Array = np.ndarray[Any, Any]

INTEGER_RANGES = {  # minimum and maximum of the integer types of QuantizeLinear and DequantizeLinear
    ir.DataType.INT4: (-8, 7),
    ir.DataType.UINT4: (0, 15),
    ir.DataType.INT8: (-128, 127),
    ir.DataType.UINT8: (0, 255),
    ir.DataType.INT16: (-32768, 32767),
    ir.DataType.UINT16: (0, 65535),
}

_SLACK = 1e-3  # of a step: quantisers that divide in float32 choose either integer for floats halfway between two
_ON_GRID = 0.01  # of a step: floats this close to multiples of a scale are; in float16, they are rounded
_COARSER = 2  # times the scale fitted to updated floats: the largest current scale that is kept for them
PIECE = 1 << 17  # numbers quantised at a time, which stay in the processor's cache

# x86 processors without VNNI multiply 8-bit data by int8 weights in pairs and saturate each sum at 16 bits. Weights
# within these bounds are exact on any processor, regardless of the data: 2 · 255 · 64 = 32,640 is less than 2¹⁵.
SEVEN_BITS = (-64, 64)


def limits_of(integers: ir.TensorProtocol) -> tuple[int, int]:
    """Return the smallest and largest integer allowed for a weight stored as ``integers``.

    These are the limits of the integer type, or SEVEN_BITS if an int8 weight stays within that narrower range.
    """
    numbers = integers.numpy()
    if integers.dtype == ir.DataType.INT8 and numbers.size and within(SEVEN_BITS, (numbers.min(), numbers.max())):
        return SEVEN_BITS
    return INTEGER_RANGES[integers.dtype]


def within(limits: tuple[int, int], bounds: tuple[int, int]) -> bool:
    return limits[0] <= bounds[0] and bounds[1] <= limits[1]


@dataclass(frozen=True)
class Quantiser:
    """The mapping between floats and integers.

    Attributes:
        scales: the scales s. The shape is [] or [1] for one scale per tensor, [slices] for one per slice of ``axis``,
            or the shape of the floats with the number of blocks on ``axis``.
        points: the zero points z, of the same shape as ``scales``; None if all are zero.
        limits: the smallest and largest integer.
        axis: the axis along which scales differ.
        block: the number of elements along ``axis`` that share a scale; 0 if each slice has one scale.
    """

    scales: Array
    points: Array | None
    limits: tuple[int, int]
    axis: int = 1
    block: int = 0

    def dequantised(self, numbers: Array) -> Array:
        """Return ``(q - z)·s`` in float32."""
        offsets = numbers.astype(np.float32)
        if self.points is not None:
            offsets = offsets - self._spread(self.points.astype(np.float32), numbers.shape)
        return np.asarray(offsets * self._spread(self.scales.astype(np.float32), numbers.shape))

    def quantised(self, floats: Array, dtype: DTypeLike = np.int64) -> Array:
        """Return ``clip(round(w/s) + z)`` as ``dtype``, rounding half to even; threads work on a few rows at a time."""
        found = np.empty(floats.shape, dtype)
        scales = self._spread(_nonzero(self.scales.astype(floats.dtype)), floats.shape)
        points = None
        if self.points is not None and self.points.any():
            points = self._spread(self.points.astype(np.float32), floats.shape)

        def quantise(rows: slice | EllipsisType) -> None:
            whole = np.asarray(floats[rows] / _in_rows(scales, rows))
            np.rint(whole, out=whole)
            if points is not None:
                whole = whole + _in_rows(points, rows)
            found[rows] = np.clip(whole, *self.limits, out=whole)

        with workers() as pool:
            for _ in pool.map(quantise, _rows(floats)):
                pass
        return found

    def grid(self, shape: Sequence[int]) -> tuple[Array, Array]:
        """Return the scale and the zero point of each of the numbers of a tensor, as float32 of its shape."""
        points = np.zeros((), np.float32) if self.points is None else self.points.astype(np.float32)
        scales, points = (self._spread(each, shape) for each in (self.scales.astype(np.float32), points))
        return np.broadcast_to(scales, shape), np.broadcast_to(points, shape)

    def rounding(self, numbers: Array) -> Array:
        """Return the largest distance of each float from ``(q - z)·s`` if q is the nearest integer to it.

        That is half a step, and a whole one where q is at an end of the range, plus the rounding of the scales.
        """
        zeros = 0 if self.points is None else self._spread(self.points.astype(np.float32), numbers.shape)
        is_end = (numbers <= self.limits[0]) | (numbers >= self.limits[1])
        steps = np.where(is_end & (self.limits[0] < self.limits[1]), 1.0, 0.5) * (1 + _SLACK)
        steps = steps + np.finfo(self.scales.dtype).eps * np.abs(numbers - zeros)
        return np.asarray(steps * np.abs(self._spread(self.scales.astype(np.float64), numbers.shape)))

    @property
    def middle(self) -> int | None:
        """The common zero point of all scales, if it is the middle of the range; None otherwise."""
        middle = 0 if self.limits[0] or self.points is None else (self.limits[1] + 1) // 2
        return middle if self.points is None or bool((self.points.astype(np.int64) == middle).all()) else None

    def fitted(self, floats: Array, middle: int | None, signed: bool = False) -> Quantiser:
        """Return a quantiser of the same form with scales and zero points fitted to ``floats``.

        If ``middle`` is None, each group of numbers that share a scale gets its own zero point, and its range covers
        the numbers and 0. Otherwise ``middle`` is the zero point, and the number farthest from 0 is one end of the
        range. ``signed`` makes it the lower end, with a negative scale if the number is positive, as onnxruntime's
        quantiser of MatMulNBits does.
        """
        (low, high), groups, dtype = self.limits, self._groups(floats), self.scales.dtype
        if middle is None:
            least, most = np.minimum(groups.min(-1), 0), np.maximum(groups.max(-1), 0)
            scales = _nonzero(((most - least) / (high - low)).astype(dtype))
            points = np.clip(np.rint(low - least / scales.astype(np.float64)), low, high)
        else:
            at = np.abs(groups).argmax(-1, keepdims=True)
            farthest = np.take_along_axis(groups, at, -1)[..., 0]
            steps = farthest / (low - middle) if signed else np.abs(farthest) / (high - middle)
            scales = _nonzero(steps.astype(dtype))
            points = np.full(scales.shape, middle)
        return replace(self, scales=scales, points=points.astype(np.int64))

    def refitted(self, floats: Array, middle: int | None, signed: bool = False) -> Quantiser:
        """Return ``self.fitted(...)``, but keep the scale of each group whose floats are multiples of it.

        The scale must also be as accurate, since small floats are all close to 0 times a large scale. Floats that did
        not change are then quantised to the same integers as before, and others as if for the first time.
        """
        return self.unless_on_grid(self.fitted(floats, middle, signed), floats)

    def unless_on_grid(self, new: Quantiser, floats: Array) -> Quantiser:
        """Return ``new``, but keep the current scale and zero point of each group whose floats are multiples of it."""
        errors, scales = self._errors(floats), np.abs(self.scales.reshape(new.scales.shape))
        return self._where((errors <= _ON_GRID * scales) & (errors <= new._errors(floats)), new)

    def unless_exceeded(self, new: Quantiser, floats: Array) -> Quantiser:
        """Return ``new``, but keep the current scale and zero point of each group whose floats are within their range.

        The current scale must not be much coarser than the new one. Floats that were numbers of this grid before a
        small update are thus near to it.
        """
        sizes, (low, high) = new.scales.shape, self.limits
        scales, points = self.scales.reshape(sizes), self._old_points(sizes)
        steps = self._groups(floats) / _nonzero(scales)[..., None] + points[..., None]
        within = (steps.min(-1) >= low - 0.5) & (steps.max(-1) <= high + 0.5)
        return self._where(within & (scales != 0) & (np.abs(scales) <= _COARSER * np.abs(new.scales)), new)

    def _old_points(self, sizes: tuple[int, ...]) -> Array:
        return np.zeros(sizes) if self.points is None else self.points.reshape(sizes)

    def _where(self, kept: Array, new: Quantiser) -> Quantiser:
        """Return ``new`` with the current scales and zero points of groups that are ``kept``, if these are integers."""
        assert new.points is not None
        sizes = new.scales.shape
        old = self._old_points(sizes)
        kept = kept & (old == np.rint(old))
        return replace(
            new,
            scales=np.where(kept, self.scales.reshape(sizes), new.scales),
            points=np.where(kept, old, new.points).astype(np.int64),
        )

    def _errors(self, floats: Array) -> Array:
        """Return the largest absolute rounding error of each group of values that share a scale."""
        return np.asarray(np.abs(self._groups(self.dequantised(self.quantised(floats)) - floats)).max(-1))

    def _spread(self, v: Array, shape: Sequence[int]) -> Array:
        """Return scales or zero points in a shape that broadcasts against values of shape ``shape``."""
        if v.ndim == 0:
            return v
        axis = self.axis % len(shape)
        if self.block:
            return np.repeat(v, self.block, axis).take(range(shape[axis]), axis)
        return v.reshape([-1 if a == axis else 1 for a in range(len(shape))])

    def _groups(self, floats: Array) -> Array:
        """Return ``floats`` with the values that share a scale along the last axis; the last block is zero-padded."""
        if not self.block:
            return floats.reshape(1, -1) if self.scales.size == 1 else _flat(np.moveaxis(floats, self.axis, 0))
        moved, count = np.moveaxis(floats, self.axis, -1), self.scales.shape[self.axis]
        padded = np.pad(moved, [(0, 0)] * (moved.ndim - 1) + [(0, count * self.block - moved.shape[-1])])
        return np.moveaxis(padded.reshape(*moved.shape[:-1], count, self.block), -2, self.axis % floats.ndim)


def _rows(array: Array) -> Iterator[slice | EllipsisType]:
    """Yield slices of the first axis of ``array`` of about ``PIECE`` numbers each."""
    if array.size <= PIECE or array.ndim < 2:
        yield ...
        return
    count = max(1, PIECE * len(array) // array.size)
    for start in range(0, len(array), count):
        yield slice(start, start + count)


def _in_rows(v: Array, rows: slice | EllipsisType) -> Array:
    """Return the part of ``v``, which broadcasts against an array, for these rows of the array."""
    return v if v.ndim == 0 or len(v) == 1 else v[rows]


def _flat(rows: Array) -> Array:
    return rows.reshape(len(rows), -1)


def _nonzero(scales: Array) -> Array:
    return np.where(scales == 0, np.ones((), scales.dtype), scales)

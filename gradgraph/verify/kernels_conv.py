"""Kernels of convolution and pooling for the float64 oracle.

They compute in the precision of the input, with strided views and matrix products.

onnx's own kernels loop in Python, and some disagree with onnxruntime and PyTorch: ConvTranspose with more than one
output channel per group, AveragePool and MaxPool with ``ceil_mode`` (the overhang belongs to the end), LpPool with
padding, GlobalMaxPool outside two dimensions, MaxUnpool with an explicit output shape.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from gradgraph.verify.kernel import Kernel

Ints = Sequence[int]
WHOLE = slice(None)


@dataclass(frozen=True)
class Windows:
    """The windows of a convolution or pool along each spatial axis; ``begins`` and ``ends`` are the padding."""

    kernel: Ints
    strides: Ints
    dilations: Ints
    begins: Ints
    ends: Ints

    @property
    def extents(self) -> list[int]:
        return [(k - 1) * d + 1 for k, d in zip(self.kernel, self.dilations, strict=True)]

    def counts(self, sizes: Ints, ceil: bool = False) -> list[int]:
        """Return the number of windows along each axis; with ``ceil``, the last one may extend beyond the end."""
        rows = zip(sizes, self.extents, self.strides, self.begins, self.ends, strict=True)
        return [self._count(*row, ceil) for row in rows]

    def _count(self, size: int, extent: int, stride: int, begin: int, end: int, ceil: bool) -> int:
        room = size + begin + end - extent
        count = (-(-room // stride) if ceil else room // stride) + 1
        return count - 1 if ceil and (count - 1) * stride >= size + begin else count

    def overhang(self, sizes: Ints, counts: Ints) -> list[int]:
        """Return the number of elements, along each axis, that the last window reads beyond the padded input."""
        rows = zip(sizes, counts, self.extents, self.strides, self.begins, self.ends, strict=True)
        return [max((n - 1) * s + e - x - b - c, 0) for x, n, e, s, b, c in rows]

    def of(self, x: np.ndarray, counts: Ints, fill: float = 0.0) -> np.ndarray:
        """Return a view of the padded input with shape [N, C, *counts, *kernel]."""
        ends = np.add(self.ends, self.overhang(x.shape[2:], counts))
        padding = ((0, 0), (0, 0), *zip(self.begins, ends, strict=True))
        padded = np.pad(x, padding, constant_values=fill)
        steps = padded.strides[2:]
        strides = (*padded.strides[:2], *np.multiply(steps, self.strides), *np.multiply(steps, self.dilations))
        return np.lib.stride_tricks.as_strided(padded, (*x.shape[:2], *counts, *self.kernel), strides, writeable=False)

    def taps(self, counts: Ints) -> Iterator[tuple[tuple[int, ...], tuple[slice, ...]]]:
        """Yield each position in the kernel, with the positions of the padded input that it reads."""
        for tap in itertools.product(*map(range, self.kernel)):
            rows = zip(tap, self.dilations, self.strides, counts, strict=True)
            yield tap, tuple(slice(t * d, t * d + (n - 1) * s + 1, s) for t, d, s, n in rows)


def _windows(x: np.ndarray, given: Ints | None, attrs: Mapping[str, Any]) -> Windows:
    rank, auto_pad, pads = x.ndim - 2, attrs.get("auto_pad"), attrs.get("pads")
    kernel, strides, dilations = (v or [1] * rank for v in (given, attrs.get("strides"), attrs.get("dilations")))
    if auto_pad in ("SAME_UPPER", "SAME_LOWER"):
        rows = zip(x.shape[2:], kernel, strides, dilations, strict=True)
        pads = _same([max((-(-n // s) - 1) * s + (k - 1) * d + 1 - n, 0) for n, k, s, d in rows], auto_pad)
    pads = list(pads or [0] * 2 * rank)
    return Windows(kernel, strides, dilations, pads[:rank], pads[rank:])


def _same(totals: Ints, auto_pad: str) -> list[int]:
    """Return total paddings split into begin and end; an odd element goes to the end (SAME_UPPER) or the beginning."""
    small, large = [t // 2 for t in totals], [t - t // 2 for t in totals]
    return [*small, *large] if auto_pad == "SAME_UPPER" else [*large, *small]


# --- convolution ---------------------------------------------------------------------------------------


class Conv(Kernel):
    def _run(
        self, x: np.ndarray, w: np.ndarray, b: np.ndarray | None = None, group: int | None = 1, **attrs: Any
    ) -> tuple[np.ndarray]:
        g, batch = group or 1, x.shape[0]
        geometry = _windows(x, w.shape[2:], attrs)
        counts = geometry.counts(x.shape[2:])
        places = math.prod(counts)
        seen = geometry.of(x, counts).reshape(batch, g, x.shape[1] // g, places, math.prod(w.shape[2:]))
        columns = seen.transpose(1, 0, 3, 2, 4).reshape(g, batch * places, w[0].size)
        rows = columns @ w.reshape(g, w.shape[0] // g, w[0].size).transpose(0, 2, 1)
        y = rows.reshape(g, batch, places, w.shape[0] // g).transpose(1, 0, 3, 2).reshape(batch, w.shape[0], *counts)
        return (y if b is None else y + b.reshape(-1, *[1] * len(counts)),)


class ConvTranspose(Kernel):
    def _run(
        self, x: np.ndarray, w: np.ndarray, b: np.ndarray | None = None, group: int | None = 1, **attrs: Any
    ) -> tuple[np.ndarray]:
        if attrs.get("output_shape") or attrs.get("auto_pad") in ("SAME_UPPER", "SAME_LOWER"):
            raise NotImplementedError("ConvTranspose with automatic pads: normalise the model first")
        g, batch, counts = group or 1, x.shape[0], x.shape[2:]
        geometry = _windows(x, w.shape[2:], attrs)
        more = list(attrs.get("output_padding") or [0] * len(counts))
        places, channels = math.prod(counts), w.shape[1] * g
        thrown = w.reshape(g, w.shape[0] // g, -1).transpose(0, 2, 1) @ x.reshape(batch, g, -1, places)
        thrown = thrown.reshape(batch, channels, *w.shape[2:], *counts)
        rows = list(zip(counts, geometry.extents, geometry.strides, more, strict=True))
        y = np.zeros((batch, channels, *[max(n - 1, 0) * s + e + m for n, e, s, m in rows]), x.dtype)
        for tap, places_of_tap in geometry.taps(counts):
            y[(WHOLE, WHOLE, *places_of_tap)] += thrown[(WHOLE, WHOLE, *tap)]
        inside = zip(geometry.begins, geometry.ends, y.shape[2:], strict=True)
        y = y[(WHOLE, WHOLE, *[slice(begin, size - end) for begin, end, size in inside])]
        return (y if b is None else y + b.reshape(-1, *[1] * len(counts)),)


# --- pooling -------------------------------------------------------------------------------------------


class MaxPool(Kernel):
    def _run(
        self, x: np.ndarray, kernel_shape: Ints, ceil_mode: int | None = 0, storage_order: int | None = 0, **attrs: Any
    ) -> tuple[np.ndarray, ...]:
        geometry = _windows(x, kernel_shape, attrs)
        counts = geometry.counts(x.shape[2:], bool(ceil_mode))
        seen = geometry.of(x, counts, -np.inf).reshape(*x.shape[:2], *counts, -1)
        if len(self.output) == 1:
            return (seen.max(-1),)
        places = np.arange(math.prod(x.shape[2:]), dtype=np.float64).reshape(x.shape[2:])
        if storage_order:  # column-major
            places = places.reshape(x.shape[:1:-1]).T
        place_of = geometry.of(places[None, None], counts, -1.0).reshape(1, 1, *counts, -1)
        winner = seen.argmax(-1)[..., None]  # the first on ties
        place = np.take_along_axis(np.broadcast_to(place_of, seen.shape), winner, -1)[..., 0].astype(np.int64)
        planes = np.arange(math.prod(x.shape[:2])).reshape(*x.shape[:2], *[1] * len(counts))
        return np.take_along_axis(seen, winner, -1)[..., 0], place + planes * places.size


class AveragePool(Kernel):
    def _run(
        self,
        x: np.ndarray,
        kernel_shape: Ints,
        ceil_mode: int | None = 0,
        count_include_pad: int | None = 0,
        **attrs: Any,
    ) -> tuple[np.ndarray]:
        geometry = _windows(x, kernel_shape, attrs)
        counts = geometry.counts(x.shape[2:], bool(ceil_mode))
        taps = tuple(range(-len(counts), 0))
        counted = np.ones((1, 1, *x.shape[2:]))
        if count_include_pad:  # padding is counted, the overhang of the last window is not
            counted = np.ones((1, 1, *np.add(np.add(x.shape[2:], geometry.begins), geometry.ends)))
            whole = Windows(geometry.kernel, geometry.strides, geometry.dilations, *[[0] * len(counts)] * 2)
            divisor = whole.of(counted, counts).sum(taps)
        else:
            divisor = geometry.of(counted, counts).sum(taps)
        return ((geometry.of(x, counts).sum(taps) / divisor).astype(x.dtype),)


class LpPool(Kernel):
    def _run(
        self, x: np.ndarray, kernel_shape: Ints, ceil_mode: int | None = 0, p: int | None = 2, **attrs: Any
    ) -> tuple[np.ndarray]:
        power = 2 if p is None else p
        geometry = _windows(x, kernel_shape, attrs)
        counts = geometry.counts(x.shape[2:], bool(ceil_mode))
        total = geometry.of(np.abs(x) ** power, counts).sum(tuple(range(-len(counts), 0)))
        return (total ** (1 / power),)


class GlobalMaxPool(Kernel):
    def _run(self, x: np.ndarray) -> tuple[np.ndarray]:
        return (x.max(tuple(range(2, x.ndim)), keepdims=True),)


class GlobalLpPool(Kernel):
    def _run(self, x: np.ndarray, p: int | None = 2) -> tuple[np.ndarray]:
        power = 2 if p is None else p
        return ((np.abs(x) ** power).sum(tuple(range(2, x.ndim)), keepdims=True) ** (1 / power),)


class MaxUnpool(Kernel):
    def _run(
        self, x: np.ndarray, indices: np.ndarray, output_shape: np.ndarray | None = None, **attrs: Any
    ) -> tuple[np.ndarray]:
        geometry = _windows(x, attrs["kernel_shape"], attrs)
        rows = zip(x.shape[2:], geometry.kernel, geometry.strides, geometry.begins, geometry.ends, strict=True)
        shape = (*x.shape[:2], *[(n - 1) * s + k - b - e for n, k, s, b, e in rows])
        y = np.zeros(shape if output_shape is None else tuple(output_shape), x.dtype)
        y.reshape(-1)[indices.reshape(-1)] = x.reshape(-1)  # indices refer to the output, as in onnxruntime
        return (y,)

"""The sizes of a convolution, for its forms: all are known, except possibly the batch size."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_ir as ir

from gradgraph.graph.builder import Var
from gradgraph.graph.shapes import Dim, known_sizes
from gradgraph.rules.windows import Windows, windows


@dataclass(frozen=True)
class Layer:
    """The sizes of a convolution that reads x and writes y, one element of each channel of y per window.

    Attributes:
        batch: the batch size.
        group: the number of groups.
        m, c: the numbers of channels of y and of x, per group.
        size: the size of an image x, which is [batch, group·c, *size].
        count: the number of windows along each axis; y is [batch, group·m, *count].
        seen: the windows.

    The weights are [group·m, c, *kernel], both for ConvTranspose and Conv.
    """

    batch: Dim
    group: int
    m: int
    c: int
    size: tuple[int, ...]
    count: tuple[int, ...]
    seen: Windows

    @property
    def images(self) -> int:
        """The batch size, 0 if unknown."""
        return self.batch if isinstance(self.batch, int) else 0

    @property
    def pixels(self) -> int:
        return math.prod(self.size)

    @property
    def windows(self) -> int:
        return math.prod(self.count)

    @property
    def taps(self) -> int:
        return math.prod(k or 1 for k in self.seen.kernel)

    @property
    def fan_in(self) -> int:
        """The number of weights per channel of y."""
        return self.c * self.taps

    @property
    def columns(self) -> int:
        """The size of the im2col matrix in bytes."""
        return 4 * self.images * self.group * self.fan_in * self.windows

    def reads(self) -> np.ndarray:
        """Return the flat image index that each tap of each window reads, [taps, windows]; ``pixels`` for padding."""
        rank = self.seen.rank
        flat, inside = np.zeros(1, np.int64), np.ones(1, bool)
        rows = zip(self.size, self.count, self.seen.kernel, self.seen.strides, self.seen.dilations, strict=True)
        for axis, (size, count, k, stride, dilation) in enumerate(rows):
            tap, window = np.arange(k or 1)[:, None] * dilation, np.arange(count) * stride
            along = np.expand_dims(
                tap + window - self.seen.begins[axis], [a for a in range(2 * rank) if a % rank != axis]
            )
            flat, inside = flat * size + along, inside & (along >= 0) & (along < size)
        shape = [*(k or 1 for k in self.seen.kernel), *self.count]
        where: np.ndarray = np.broadcast_to(np.where(inside, flat, self.pixels), shape).reshape(self.taps, self.windows)
        return where


def layer(x: Var, w: Var, y: Var | None, attrs: Mapping[str, Any]) -> Layer | None:
    """Return the sizes of a float32 convolution; None if one is unknown or zero, or the padding is not explicit.

    ``y`` may be None for a Conv, where its sizes follow from ``x``, ``w`` and ``attrs``.
    """
    group = int(attrs.get("group") or 1)
    channels, size, weights = _positive_sizes(x, 1), _positive_sizes(x, 2), _positive_sizes(w, 0)
    if channels is None or size is None or weights is None or attrs.get("auto_pad", "NOTSET") not in ("NOTSET", ""):
        return None
    if w.value.dtype != ir.DataType.FLOAT or (x.shape or (0,))[0] == 0:
        return None
    seen = windows(**{**attrs, "kernel_shape": weights[2:]})
    count = seen.count(size) if y is None else _positive_sizes(y, 2)
    if count is None or min(count) <= 0:
        return None
    return Layer((x.shape or (None,))[0], group, weights[0] // group, weights[1], tuple(size), tuple(count), seen)


def _positive_sizes(x: Var, start: int) -> list[int] | None:
    """Return the sizes of the axes, starting at ``start``, if all are known and positive; else None."""
    dims = (x.shape or (None, None, None))[start:]
    sizes = [d for d in known_sizes(dims) if d > 0]
    return sizes if len(sizes) == len(dims) else None

"""Sliding windows of convolution and pooling: window ``i`` reads ``x[i·stride + tap·dilation - begin]``."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from gradgraph.graph.builder import Builder, Var
from gradgraph.graph.shapes import Dim, all_sizes, record_shape

Ints = Sequence[int]


@dataclass(frozen=True)
class Windows:
    """The windows of a convolution or pool, with one entry per spatial axis.

    ``begins`` and ``ends`` are the padding; a kernel size is ``None`` if it is unknown.
    """

    kernel: tuple[int | None, ...]
    strides: tuple[int, ...]
    dilations: tuple[int, ...]
    begins: tuple[int, ...]
    ends: tuple[int, ...]

    @property
    def rank(self) -> int:
        return len(self.strides)

    @property
    def pads(self) -> list[int]:
        return [*self.begins, *self.ends]

    @property
    def attrs(self) -> dict[str, Any]:
        """The windows as ONNX attributes."""
        return {"strides": list(self.strides), "dilations": list(self.dilations), "pads": self.pads}

    @property
    def taps(self) -> list[int]:
        """The known kernel sizes; for a pool, all of them."""
        return [k for k in self.kernel if k is not None]

    @property
    def extents(self) -> list[int | None]:
        """The number of elements from a window's first tap to its last one, inclusive."""
        pairs = zip(self.kernel, self.dilations, strict=True)
        return [(k - 1) * d + 1 if isinstance(k, int) else None for k, d in pairs]

    @property
    def mirrored(self) -> list[int] | None:
        """The pads of the Conv for the input gradient; None if a stride is not 1 or a pad would be negative."""
        pairs = list(zip(self.pads, self.extents * 2, strict=True))
        pads = [e - 1 - p for p, e in pairs if e is not None and e > p]
        return pads if len(pads) == len(pairs) and set(self.strides) == {1} else None

    @property
    def pointwise(self) -> bool:
        """Whether every window reads exactly one element, and every element is read by exactly one window."""
        return set(self.kernel) == set(self.strides) == {1} and not any(self.pads)

    @property
    def side_by_side(self) -> bool:
        """Whether windows are adjacent, without overlap or gaps."""
        return self.kernel == self.strides and set(self.dilations) == {1} and not any(self.pads)

    def spatial(self, x: Var) -> Sequence[Dim]:
        """Return the spatial sizes of ``x``; if its shape is unknown, None for each axis."""
        return (x.shape or ())[2:] or (None,) * self.rank

    def rest(self, x: Var, y: Var) -> list[int | None]:
        """Return, per axis, the number of elements at the end of the padded input that no window reads.

        It is negative if the last window exceeds the padded input, and None if sizes are unknown.
        """
        rows = zip(self.spatial(x), self.spatial(y), self.extents, self.strides, self.begins, self.ends, strict=True)
        return [_rest(*row) for row in rows]

    def count(self, size: Ints) -> list[int]:
        """Return the number of windows that fit into an image of ``size``, per axis; the kernel must be known."""
        rows = zip(size, self.extents, self.strides, self.begins, self.ends, strict=True)
        return [(n + begin + end - (extent or 1)) // stride + 1 for n, extent, stride, begin, end in rows]

    def padded_by(self, ends: Ints) -> Windows:
        return replace(self, ends=tuple(e + more for e, more in zip(self.ends, ends, strict=True)))


def _rest(size: Dim, count: Dim, extent: int | None, stride: int, begin: int, end: int) -> int | None:
    if stride == 1:
        return 0
    if not isinstance(size, int) or not isinstance(count, int) or extent is None:
        return None
    return size + begin + end - extent - (count - 1) * stride


def windows(
    kernel_shape: Sequence[int | None],
    strides: Ints | None = None,
    pads: Ints | None = None,
    dilations: Ints | None = None,
    **_: Any,
) -> Windows:
    """Return the windows that the attributes of a convolution or pool define, with ONNX's defaults."""
    n = len(kernel_shape)
    ones, pads = (1,) * n, tuple(pads or (0,) * (2 * n))
    return Windows(tuple(kernel_shape), tuple(strides or ones), tuple(dilations or ones), pads[:n], pads[n:])


# --- spatial axes: those after batch and channels ------------------------------------------------------


def ranked(y: Var, x: Var) -> Var:
    """Return ``y``, with the rank of ``x`` recorded if its shape is unknown because shape inference failed."""
    if y.shape is None:
        record_shape(y.value, (None,) * x.rank)
    return y


def spatial(x: Var) -> list[int]:
    return list(range(2, x.rank))


def sizes(x: Var) -> list[int] | None:
    """Return the spatial sizes of ``x`` if all are known, else None."""
    return all_sizes(None if x.shape is None else x.shape[2:])


def space(op: Builder, x: Var) -> Var:
    """Return the spatial sizes of ``x`` as an int64 vector; a constant if they are known."""
    static = sizes(x)
    return op.Shape(x, start=2) if static is None else op.const(np.array(static, np.int64))


def flat(op: Builder, x: Var, *lead: int) -> Var:
    """Return ``x`` with its spatial axes flattened: [*lead, positions]."""
    static = sizes(x)
    count = [math.prod(static)] if static is not None else op.ReduceProd(space(op, x), keepdims=1)
    return op.Reshape(x, op.Concat(list(lead), count, axis=0))


def positions(op: Builder, y: Var, seen: Windows, axis: int) -> Var:
    """Return the positions of the windows' taps along one axis of the padded input: int64 [windows, taps]."""
    count = op.Squeeze(op.dim(y, axis + 2), [0])
    first = op.Unsqueeze(op.Mul(op.Range(0, count, 1), seen.strides[axis]), [1])
    return op.Add(first, np.arange(seen.taps[axis]) * seen.dilations[axis])


def crop(op: Builder, x: Var, model: Var) -> Var:
    """Return ``x`` with the end of each spatial axis cropped to its size in ``model``."""
    axes = spatial(model)
    return op.Slice(x, [0] * len(axes), space(op, model), axes)

"""The weight gradient of wide maps, image by image: copies stay in the cache, and accumulation is free.

The body of a Scan over the images writes the im2col matrix and multiplies it by dy; the same Gemm adds the running sum.
Many channels are gathered as rows (``scan_channels_innermost_dw``). With few channels, x is copied once for each
horizontal tap, shifted by it. For vertical taps, either these copies are gathered again (``scan_columns_dw``), or dy is
(``scan_both_sides_dw``), which is cheaper if y has few channels.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import onnx_ir as ir

from gradgraph.backends.ort_cpu.conv.conv_images import MOST_WINDOWS_AS_COLUMNS, is_worth_a_turn
from gradgraph.backends.ort_cpu.conv.conv_table import conv_form
from gradgraph.backends.ort_cpu.conv.layer import Layer
from gradgraph.graph.builder import Builder, Var

LEAST_CHANNELS_AS_ROWS = 64  # channels of x from which pixels are gathered with all their channels
MOST_CHANNELS_COPIED = 32  # channels of y up to which dy is copied for the vertical taps, instead of x
LEAST_CHANNELS_KEPT = 64  # channels of x from which dy is copied as well, unless y has more channels
MOST_COPIED_BYTES = 2 << 20  # bytes of shifted copies of x written at once

Add = Callable[[Builder, Var, Var, Var, Layer], Var]  # (op, x, dy, running sum, layer) -> sum


def _serves(conv: Layer) -> bool:
    return conv.group == 1 and conv.seen.rank == 2 and conv.images > 0


def _wide(conv: Layer) -> bool:
    return conv.windows > MOST_WINDOWS_AS_COLUMNS


def _wide_and_narrow(conv: Layer) -> bool:
    """Return whether there are many windows, and a Scan over images should copy dy rather than x for vertical taps."""
    narrow = conv.m <= MOST_CHANNELS_COPIED <= conv.taps * conv.c // 4
    return _wide(conv) and (narrow or (conv.taps > 1 and conv.c >= max(conv.m, LEAST_CHANNELS_KEPT)))


@conv_form("ConvGradWeight", serves=_serves, when=lambda conv: _wide(conv) and conv.c >= LEAST_CHANNELS_AS_ROWS)
def scan_channels_innermost_dw(op: Builder, conv: Layer, x: Var, dy: Var, w: Var) -> Var:
    """Compute dw, image by image: gather pixels with all channels, and multiply them by dy. Sums are [m, taps, c].

    64 channels at 64 px, 128 at 32 px: 1.1 to 1.2 times PyTorch's time (for all images at once 1.5 to 1.9).
    """
    total = over_images(op, x, dy, conv, [conv.m, conv.fan_in], _add_channels_innermost)
    return _weights(op, op.Reshape(total, [conv.m, conv.taps, conv.c]), (0, 2, 1), w)


@conv_form("ConvGradWeight", serves=_serves, when=lambda conv: _wide(conv) and is_worth_a_turn(conv))
def scan_columns_dw(op: Builder, conv: Layer, x: Var, dy: Var, w: Var) -> Var:
    """Compute dw, image by image: copy x for horizontal taps, gather the copies for vertical ones, multiply by dy.

    1 channel at 128 px: 0.7 times PyTorch's time (the portable form 2.7). Sums are [taps across, c, taps down, m].
    """
    down, across = _kernel(conv)
    total = over_images(op, x, dy, conv, [across * conv.c * down, conv.m], _add_columns)
    return _weights(op, op.Reshape(total, [across, conv.c, down, conv.m]), (3, 1, 2, 0), w)


@conv_form("ConvGradWeight", serves=lambda conv: _serves(conv) and conv.seen.strides[0] == 1, when=_wide_and_narrow)
def scan_both_sides_dw(op: Builder, conv: Layer, x: Var, dy: Var, w: Var) -> Var:
    """Compute dw, image by image: copy x for horizontal taps and dy for vertical ones, and multiply the copies.

    Relative to PyTorch's time, 32 channels at 128 px take 1.0 to 1.3 (im2col 1.7, a gather with channels innermost 2.1
    to 2.5), and 128 channels at 56 px 1.2 (with channels innermost 1.4). CPU time relative to that gather: 64 channels
    at 40 to 112 px 0.77 to 0.86, 96 at 40 px 0.86, 64 to 128 at 40 px 0.98. Sums are [taps across, c, m, taps down].
    """
    down, across = _kernel(conv)
    total = over_images(op, x, dy, conv, [across * conv.c, conv.m * down], _add_both_sides)
    return _weights(op, op.Reshape(total, [across, conv.c, conv.m, down]), (2, 1, 3, 0), w)


def _kernel(conv: Layer) -> tuple[int, int]:
    down, across = conv.seen.kernel
    return down or 1, across or 1


def _weights(op: Builder, total: Var, perm: tuple[int, ...], w: Var) -> Var:
    return op.Reshape(op.Transpose(total, perm=perm), w.shape)


def over_images(op: Builder, x: Var, dy: Var, conv: Layer, shape: list[int], add: Add, together: int = 0) -> Any:
    """Call ``add`` for each image in a Scan, and return the total, of shape ``shape``.

    ``add`` returns the total plus the term of one image. If ``together`` is not 0, it gets that many images at once, on
    a leading axis.
    """

    def body(total: Var, image: Var, its_dy: Var) -> list[Var]:
        return [add(op, image, its_dy, total, conv)]

    some = [together] if together else []
    sizes = {"total": shape, "image": [*some, conv.c, *conv.size], "its_dy": [*some, conv.m, *conv.count]}
    if together:
        x, dy = (op.Reshape(v, [-1, *sizes[name]]) for v, name in ((x, "image"), (dy, "its_dy")))
    inputs = [ir.Value(name=name, type=x.value.type, shape=ir.Shape(size)) for name, size in sizes.items()]
    zeros = op.full(op.const(np.array(shape, np.int64)), 0, ir.DataType.FLOAT)
    total = op.Scan(zeros, x, dy, body=op.graph(inputs, body, "image"), num_scan_inputs=2)
    total.value.type = zeros.value.type
    return total


def _add_channels_innermost(op: Builder, x: Var, dy: Var, total: Var, conv: Layer) -> Var:
    """Return ``total + dy·seen`` for one image; ``seen`` [windows, taps·c] is a Gather of pixels with all channels."""
    reads = conv.reads().T.reshape(-1)
    pixels = op.Transpose(op.Reshape(x, [conv.c, conv.pixels]), perm=[1, 0])
    if reads.max() == conv.pixels:
        pixels = op.Pad(pixels, [0, 0, 1, 0])
    seen = op.Reshape(op.Gather(pixels, reads, axis=0), [conv.windows, conv.fan_in])
    return op.Gemm(op.Reshape(dy, [conv.m, conv.windows]), seen, total)


def _add_columns(op: Builder, x: Var, dy: Var, total: Var, conv: Layer) -> Var:
    """Return ``total + seen·dyᵀ`` for one image; ``seen`` [across·c·down, windows] is a Gather of Slices."""
    down, across = _kernel(conv)
    tall, wide = conv.count
    pads = _pads(conv, 0), _pads(conv, 1)
    padded = op.Pad(x, [0, pads[0][0], pads[1][0], 0, pads[0][1], pads[1][1]]) if any(map(any, pads)) else x
    rows = np.arange(tall) * conv.seen.strides[0] + np.arange(down)[:, None] * conv.seen.dilations[0]
    seen = op.Gather(_shifted(op, padded, conv, 0, _reach(conv, 0)), rows.reshape(-1), axis=1)
    left, right = op.Reshape(seen, [across * conv.c * down, tall * wide]), op.Reshape(dy, [conv.m, tall * wide])
    return op.Gemm(left, right, total, transB=1)


def _add_both_sides(op: Builder, x: Var, dy: Var, total: Var, conv: Layer) -> Var:
    """Return ``total`` plus dw of one image: for vertical tap t, row r of x is multiplied by row r − t·d + p of dy.

    d is the dilation, and p the padding; rows outside of dy read an appended row of zeros.
    """
    (down, across), (high, _), (tall, wide) = _kernel(conv), conv.size, conv.count
    begin, end = _pads(conv, 1)
    padded = op.Pad(x, [0, 0, begin, 0, 0, end]) if begin or end else x
    zero_below = op.Pad(dy, [0, 0, 0, 0, 1, 0])
    meets = np.arange(high) - np.arange(down)[:, None] * conv.seen.dilations[0] + conv.seen.begins[0]
    meets = np.where((meets >= 0) & (meets < tall), meets, tall)
    rows = max(1, MOST_COPIED_BYTES // (4 * across * conv.c * wide))
    for start in range(0, high, rows):
        stop = min(start + rows, high)
        read = (stop - start) * wide
        left = op.Reshape(_shifted(op, padded, conv, start, stop), [across * conv.c, read])
        right = op.Reshape(op.Gather(zero_below, meets[:, start:stop].reshape(-1), axis=1), [conv.m * down, read])
        total = op.Gemm(left, right, total, transB=1)
    return total


def _shifted(op: Builder, padded: Var, conv: Layer, start: int, stop: int) -> Any:
    """Return rows of x shifted for each horizontal tap: [taps across · c, rows, windows across]."""
    stride, reach = conv.seen.strides[1], (conv.count[1] - 1) * conv.seen.strides[1] + 1
    firsts = [t * conv.seen.dilations[1] for t in range(_kernel(conv)[1])]
    copies = [op.Slice(padded, [start, f], [stop, f + reach], [1, 2], [1, stride]) for f in firsts]
    return op.Concat(*copies, axis=0) if len(copies) > 1 else copies[0]


def _reach(conv: Layer, axis: int) -> int:
    """Return the number of pixels that all windows span along ``axis``, including padding."""
    return (conv.count[axis] - 1) * conv.seen.strides[axis] + (conv.seen.extents[axis] or 1)


def _pads(conv: Layer, axis: int) -> tuple[int, int]:
    """Return the padding before and after along ``axis``; negative after it if the last pixels are not read."""
    begin = conv.seen.begins[axis]
    return begin, _reach(conv, axis) - begin - conv.size[axis]

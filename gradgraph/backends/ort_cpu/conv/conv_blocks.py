"""Convolution in onnxruntime's blocked layout (NCHWc), whose kernels are its fastest for wide maps.

onnxruntime itself uses this layout for constant weights only. Here the weights change in every step, so the graph
converts them to blocks of b channels, [out, in, taps] -> [out/b, in/b, taps, b in, b out]: by one transpose and a
gather of rows of b numbers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from gradgraph.backends.ort_cpu.conv.conv_table import always, conv_form
from gradgraph.backends.ort_cpu.conv.layer import Layer
from gradgraph.backends.ort_operators import BLOCKED, kernel
from gradgraph.graph.builder import Builder, Var
from gradgraph.graph.shapes import Dim, known_sizes, record_shape
from gradgraph.machine.hardware import nchwc_block
from gradgraph.rules.windows import Windows, crop

# minimum padding columns per row for which an explicit Pad pays: kernels compute padded windows one by one
LEAST_PADDING_WRITTEN = 4
# widths of images for which it pays in a depthwise layer: with 5 or 7 taps it takes 0.8 to 1.0 of the time, but 1.0 to
# 1.25 for 3 to 6 px, 2 to 8 for 1 px, and 0.95 to 1.25 for 20 to 56 px
WIDTHS_PADDED_DEPTHWISE = range(7, 17)
# minimum width of padded images for which it pays in the weight gradient of a depthwise layer, which has few windows:
# with 5 taps, 8 px and more, and with 7, 6 px and more, it takes 0.56 to 0.95 of the time, for fewer px up to 1.1
LEAST_WIDTH_PADDED_FOR_DW = 12
# the minimum padding columns for images of height 1: with fewer, or dilated taps, CPU time without the Pad is 0.67 to
# 1.0 of that with it, for 16 to 1024 windows; with 15 taps, it is 1.0 to 1.3
LEAST_PADDING_OF_SEQUENCES = 12
# minimum number of channels for which y and dx of a depthwise layer are computed in blocks, if needed with channels of
# zeros: for 12 and more it takes 0.04 to 0.8 of the time of a plain Conv, for 4 and 8 up to 1.7
LEAST_CHANNELS_FILLED = 12
# onnxruntime's ReorderInput fills the last block with channels of zeros if this divides the number of channels
CHANNELS_FILLED = 4
# the taps and bytes of x for which dx of a depthwise layer with stride 2 is computed in phases, rather than with zeros
# between the pixels of dy: 0.6 to 1.0 of the time; with 3x3 taps or other sizes 0.75 to 1.6
LEAST_TAPS_IN_PHASES = 25
BYTES_IN_PHASES = range(1 << 18, 5 << 19)


def fits_blocks(group: int, outputs: int, inputs: int) -> bool:
    """Return whether a convolution of ``inputs`` to ``outputs`` channels per group fits NCHWc without padding.

    The block size must divide the number of channels of y and of x (for a depthwise layer, their common number). If x
    has fewer channels than a block, only y is in NCHWc.
    """
    block = nchwc_block()
    if not block:
        return False
    if group > 1 and outputs == inputs == 1:
        return group % block == 0
    return outputs % block == 0 and (inputs % block == 0 or (inputs < block and group == 1))


def _pays(conv: Layer) -> bool:
    """Return whether blocks pay: for most depthwise layers, else if weights, which must be blocked, are few.

    The plain Conv of a depthwise layer takes 1.3 times the time for one image of 16 channels at 1 px, and 30 times for
    16 images of 1152 channels at 3 px with 5x5 taps.
    """
    return conv.group >= LEAST_CHANNELS_FILLED if _depthwise(conv) else conv.windows >= conv.taps


def _forward(conv: Layer) -> bool:
    return _depthwise(conv) or (conv.seen.rank == 2 and fits_blocks(conv.group, conv.m, conv.c))


def _backward(conv: Layer) -> bool:
    return _depthwise(conv) or (conv.seen.rank == 2 and fits_blocks(conv.group, conv.c, conv.m))


def _depthwise(conv: Layer) -> bool:
    return nchwc_block() > 0 and conv.seen.rank == 2 and conv.c == conv.m == 1 < conv.group


def _filled(op: Builder, conv: Layer, w: Var) -> tuple[Layer, Var]:
    """Return a depthwise layer and its weights with channels of zeros that fill the last block; any other unchanged."""
    missing = -conv.group % nchwc_block() if _depthwise(conv) else 0
    if not missing:
        return conv, w
    return replace(conv, group=conv.group + missing), op.Pad(w, [0, 0, 0, 0, missing, 0, 0, 0])


@conv_form("Conv", serves=_forward, when=_pays)
def blocked(op: Builder, conv: Layer, x: Var, w: Var, b: Var | None = None) -> Var:
    """Compute y by a convolution in NCHWc.

    For images of 8 px and more, it takes 0.8 to 1.0 times PyTorch's time; a plain Conv takes 1.2 to 1.7.
    """
    conv, w = _filled(op, conv, w)
    if b is not None and b.dim(0) != conv.group * conv.m:
        b = op.Pad(b, op.Concat([0], op.Sub([conv.group * conv.m], op.dim(b, 0)), axis=0))
    return _convolve(op, x, blocked_weights(op, w, conv), b, conv.seen, conv.group)


@conv_form("ConvGradInput", serves=_backward, when=_pays)
def blocked_dx(op: Builder, conv: Layer, dy: Var, w: Var, x: Var) -> Var | None:
    """Compute dx by an NCHWc convolution of dy with flipped weights and mirrored padding.

    For images of 8 px and more, it takes 0.8 to 1.1 times PyTorch's time; a plain Conv with flipped weights takes 1.1
    to 1.9. None if a stride is not 1, or a mirrored pad would be negative.
    """
    pads = conv.seen.mirrored
    if pads is None:
        return None
    conv, w = _filled(op, conv, w)
    backwards = replace(conv.seen, begins=tuple(pads[:2]), ends=tuple(pads[2:]))
    turned = turned_weights(op, w, conv, np.arange(conv.taps)[::-1], backwards)
    return _convolve(op, dy, turned, None, backwards, conv.group)


@conv_form("ConvGradInput", serves=_depthwise, when=lambda conv: _pays(conv) and not _phases_are_cached(conv))
def blocked_spread_dx(op: Builder, conv: Layer, dy: Var, w: Var, x: Var) -> Var | None:
    """Compute dx of a depthwise layer: insert zeros between the pixels of dy, and convolve in NCHWc as for stride 1.

    A single Pad inserts them: a row of n blocks of b channels becomes a row of s·n blocks of s·b, with stride s. For
    3x3 with stride 2 it takes 0.5 to 1.0 of the time of ``blocked_phases_dx``, from 4 to 112 px. None if a pad of that
    convolution would be negative, or as large as the kernel.
    """
    block, seen = nchwc_block(), conv.seen
    size = [n * s for n, s in zip(conv.count, seen.strides, strict=True)]
    begins = [(e or 1) - 1 - p for e, p in zip(seen.extents, seen.begins, strict=True)]
    ends = [n + p - m for n, p, m in zip(conv.size, seen.begins, size, strict=True)]
    if min(begins + ends) < 0 or any(end >= (e or 1) for end, e in zip(ends, seen.extents, strict=True)):
        return None
    channels, (conv, w) = conv.group, _filled(op, conv, w)
    (down, across), wide = seen.strides, conv.count[1]
    rows = op.Reshape(reordered(op, dy), [-1, wide, block])
    spread = op.Pad(rows, [0, 0, 0, 0, wide * (down - 1), block * (across - 1)])
    apart = op.Reshape(spread, [-1, conv.group, *size])
    record_shape(apart.value, (conv.batch, conv.group, *size))
    backwards = replace(seen, strides=(1, 1), begins=tuple(begins), ends=tuple(ends))
    turned = turned_weights(op, w, conv, np.arange(conv.taps)[::-1], backwards)
    return ordered(op, convolution(op, apart, turned, None, backwards, conv.group), channels)


@conv_form("ConvGradInput", serves=_backward, when=_pays)
def blocked_phases_dx(op: Builder, conv: Layer, dy: Var, w: Var, x: Var) -> Var | None:
    """Compute dx in s² phases of pixels, their remainders modulo the stride s, and interleave the results.

    Each phase is an NCHWc convolution of dy with stride 1. For depthwise 3x3 with stride 2 it takes half the time of
    ConvTranspose, for 5x5 and images that fit the cache 0.6 to 1.0 of the time of ``blocked_spread_dx``.

    Along one axis, tap t of window i reads pixel s·q + a if s·i + t = s·q + a + p, with padding p. Phase a thus
    contains every s-th tap, and the window index i decreases by one from tap to tap. None for dilated kernels, or if a
    phase cannot be computed by a convolution (``_phase``).
    """
    axes = _phases(conv)
    if axes is None:
        return None
    channels, block = conv.group * conv.c, nchwc_block()
    conv, w = _filled(op, conv, w)
    dys = reordered(op, dy) if conv.group * conv.m >= block else dy
    rows = []
    for tall in axes[0]:
        row = []
        for wide in axes[1]:
            seen = Windows((len(tall.taps), len(wide.taps)), (1, 1), (1, 1), *zip(tall.pads, wide.pads, strict=True))
            taps = (tall.taps[:, None] * (conv.seen.kernel[1] or 1) + wide.taps).reshape(-1)
            part = convolution(op, dys, turned_weights(op, w, conv, taps, seen), None, seen, conv.group)
            row.append(op.Reshape(part, [-1, block]))
        rows.append(op.Reshape(op.Concat(*row, axis=1), [-1, block * len(row) * _quota(conv, 1)]))
    size = [_quota(conv, axis) * conv.seen.strides[axis] for axis in range(2)]
    whole = op.Reshape(op.Concat(*rows, axis=1), [-1, conv.group * conv.c, *size])
    dx = kernel(op, "ReorderOutput", BLOCKED, [whole], (conv.batch, channels, *size), channels=channels)
    return crop(op, dx, x) if tuple(size) != conv.size else dx


@dataclass(frozen=True)
class _Phase:
    """The taps, last one first, and the padding of dy with which one phase of pixels is computed along an axis."""

    taps: np.ndarray
    pads: tuple[int, int]


def _quota(conv: Layer, axis: int) -> int:
    return -(-conv.size[axis] // conv.seen.strides[axis])


def _phases(conv: Layer) -> list[list[_Phase]] | None:
    """Return the phases along each axis; None if kernels are dilated, or a phase cannot be computed (``_phase``)."""
    if set(conv.seen.dilations) != {1}:
        return None
    axes = [[_phase(conv, axis, a) for a in range(conv.seen.strides[axis])] for axis in range(2)]
    known = [[phase for phase in phases if phase is not None] for phases in axes]
    return known if [len(phases) for phases in known] == list(conv.seen.strides) else None


def _phases_are_cached(conv: Layer) -> bool:
    """Return whether a depthwise layer has phases that are faster than zeros between the pixels of dy."""
    if conv.seen.rank != 2 or conv.taps < LEAST_TAPS_IN_PHASES or set(conv.seen.strides) == {1}:
        return False
    whole = all(n % s == 0 for n, s in zip(conv.size, conv.seen.strides, strict=True))
    return whole and 4 * conv.images * conv.group * conv.pixels in BYTES_IN_PHASES and _phases(conv) is not None


def _phase(conv: Layer, axis: int, a: int) -> _Phase | None:
    """Return phase ``a`` along ``axis``; None if no tap reads it, or dy would have to be cropped."""
    s, p, k = conv.seen.strides[axis], conv.seen.begins[axis], conv.seen.kernel[axis] or 1
    taps = np.arange((a + p) % s, k, s)[::-1]
    newest = (a + p) // s  # the window, relative to q, that reads pixel s·q + a with its first tap
    pads = len(taps) - 1 - newest, _quota(conv, axis) + newest - conv.count[axis]
    return _Phase(taps, pads) if len(taps) and min(pads) >= 0 else None


@conv_form("ConvGradWeight", serves=lambda conv: _depthwise(conv) and conv.images > 0, when=always)
def blocked_dw(op: Builder, conv: Layer, x: Var, dy: Var, w: Var) -> Var | None:
    """Compute dw of a depthwise layer: convolve each channel of each image by its dy, in NCHWc, and sum over images.

    Forward and input-gradient convolutions use the same layout. For images of 56 px, it takes 1.1 times PyTorch's time;
    other forms take 5 to 9 times. None if some taps would read beyond the padding.
    """
    (filled, _), seen = _filled(op, conv, w), conv.seen
    channels = filled.images * filled.group
    kernel_shape = [k or 1 for k in seen.kernel]
    turned = replace(seen, kernel=conv.count, strides=seen.dilations, dilations=seen.strides)
    turned = _with_windows(turned, conv.size, kernel_shape)
    taps = turned.count(conv.size)
    if any(n < k for n, k in zip(taps, kernel_shape, strict=True)):
        return None  # some taps would read beyond the padding
    padding = _padding_columns(turned)
    if seen.strides[1] == 1 and padding and conv.size[1] + padding >= LEAST_WIDTH_PADDED_FOR_DW:
        x, turned = _padded(op, x, turned)
    images = op.Reshape(reordered(op, x), [1, channels, *known_sizes((x.shape or ())[2:])])
    filters = op.Reshape(reordered(op, dy), [channels, 1, *conv.count])
    each = convolution(op, images, filters, None, turned, channels)
    total = op.ReduceSum(op.Reshape(each, [conv.images, filled.group * math.prod(taps)]), [0], keepdims=0)
    dw = ordered(op, op.Reshape(total, [1, filled.group, *taps]), conv.group)
    if taps != kernel_shape:
        dw = op.Slice(dw, [0, 0], kernel_shape, [2, 3])  # drop results for taps that w does not have
    return op.Reshape(dw, w.shape)


def _with_windows(seen: Windows, size: Sequence[int], count: Sequence[int]) -> Windows:
    """Return ``seen`` with the padding at the end cropped so that, if possible, only ``count`` windows fit."""
    rows = zip(size, seen.extents, seen.strides, seen.begins, seen.ends, count, strict=True)
    ends = (min(end, max(0, (n - 1) * s + (e or 1) - x - begin)) for x, e, s, begin, end, n in rows)
    return replace(seen, ends=tuple(ends))


def _convolve(op: Builder, x: Var, blocks: Var, b: Var | None, seen: Windows, group: int) -> Var:
    """Convolve in NCHWc an NCHW tensor to an NCHW result; ``blocks`` are the reordered weights.

    A depthwise result has as many channels as ``x``, even if channels of zeros fill the last block of the weights.
    """
    depthwise = group > 1 and blocks.dim(1) == 1
    if _is_padding_written(x, seen, depthwise):
        x, seen = _padded(op, x, seen)
    inputs = x.dim(1)
    blocked = reordered(op, x) if depthwise or (isinstance(inputs, int) and inputs >= nchwc_block()) else x
    return ordered(op, convolution(op, blocked, blocks, b, seen, group), inputs if depthwise else None)


def _is_padding_written(x: Var, seen: Windows, depthwise: bool) -> bool:
    """Return whether an explicit Pad of the rows of ``x`` pays, before a convolution in NCHWc."""
    if seen.strides[1] != 1:
        return False
    if x.dim(2) == seen.kernel[0] == 1:
        return seen.dilations[1] == 1 and _padding_columns(seen) >= LEAST_PADDING_OF_SEQUENCES
    return _padding_columns(seen) > 0 and (not depthwise or x.dim(3) in WIDTHS_PADDED_DEPTHWISE)


def _padding_columns(seen: Windows) -> int:
    """Return the number of padding columns per row, 0 if they are too few for a Pad to pay."""
    columns = seen.begins[1] + seen.ends[1]
    return columns if columns >= LEAST_PADDING_WRITTEN else 0


def _padded(op: Builder, x: Var, seen: Windows) -> tuple[Var, Windows]:
    """Write the padding columns into ``x``; return it, and its windows without this padding."""
    x = op.Pad(x, [0, 0, 0, seen.begins[1], 0, 0, 0, seen.ends[1]])
    return x, replace(seen, begins=(seen.begins[0], 0), ends=(seen.ends[0], 0))


def ordered(op: Builder, y: Var, channels: Dim = None) -> Var:
    """Reorder ``y`` from NCHWc to NCHW, and keep its first ``channels`` channels, all by default."""
    images, every, *size = y.shape or (None, None)
    kept = every if channels is None else channels
    return kernel(op, "ReorderOutput", BLOCKED, [y], (images, kept, *size), channels=kept)


def reordered(op: Builder, x: Var) -> Var:
    """Reorder ``x`` from NCHW to NCHWc; channels of zeros fill the last block. The declared shape is that of NCHW."""
    images, channels, *size = x.shape or (None, None)
    missing = -channels % nchwc_block() if isinstance(channels, int) else 0
    if not missing or not isinstance(channels, int):
        return kernel(op, "ReorderInput", BLOCKED, [x], x.shape)
    if channels % CHANNELS_FILLED:
        x = op.Pad(x, [0, 0, 0, 0, 0, missing, *[0] * len(size)])
    return kernel(op, "ReorderInput", BLOCKED, [x], (images, channels + missing, *size))


def convolution(
    op: Builder,
    x: Var,
    blocks: Var,
    b: Var | None,
    seen: Windows,
    group: int,
    total: Var | None = None,
    **activation: Any,
) -> Var:
    """Convolve NCHWc tensors, add ``total``, and apply the activation with attributes ``activation``.

    ``blocks`` are the reordered weights, declared as [out, in / group, *kernel]; ``b`` is the bias.
    """
    shape = (x.dim(0), blocks.dim(0), *seen.count(known_sizes((x.shape or ())[2:])))
    inputs = [x, blocks, b] if total is None else [x, blocks, b, total]
    return kernel(op, "Conv", BLOCKED, inputs, shape, group=group, kernel_shape=seen.kernel, **seen.attrs, **activation)


def blocked_weights(op: Builder, w: Var, conv: Layer) -> Any:
    """Convert [out, in, *kernel] to [out/b, in/b, taps, b in, b out], or to [out/b, in·taps, b out] for few inputs."""
    block, inner = nchwc_block(), nchwc_block() if conv.c >= nchwc_block() else 1
    outer = conv.group * conv.m // block
    rows = op.Transpose(op.Reshape(w, [outer, block, conv.fan_in]), perm=[0, 2, 1])
    if inner == 1 or conv.taps == 1:
        return op.Reshape(rows, w.shape)
    order = order_of_rows((outer, conv.c // inner, inner, conv.taps), (0, 1, 3, 2))
    return op.Reshape(op.Gather(op.Reshape(rows, [-1, block]), order, axis=0), w.shape)


def turned_weights(op: Builder, w: Var, conv: Layer, taps: np.ndarray, seen: Windows) -> Any:
    """Return the weights in NCHWc of the convolution from dy to dx: channels swapped, taps in the order ``taps``."""
    block, inner = nchwc_block(), nchwc_block() if conv.m >= nchwc_block() else 1
    taps_first = op.Transpose(op.Reshape(w, [-1, conv.taps]), perm=[1, 0]) if conv.taps > 1 else w
    if conv.c == conv.m == 1:
        order = order_of_rows((conv.taps, conv.group // block), (1, 0), taps)
    else:
        order = order_of_rows((conv.taps, conv.group, conv.m // inner, inner, conv.c // block), (1, 4, 2, 0, 3), taps)
    rows = op.Gather(op.Reshape(taps_first, [-1, block]), order, axis=0)
    return op.Reshape(rows, [conv.group * conv.c, conv.m, *(k or 1 for k in seen.kernel)])


def order_of_rows(sizes: Sequence[int], perm: Sequence[int], first: np.ndarray | None = None) -> np.ndarray:
    """Return the row indices for a Gather that transposes rows arranged as ``sizes`` by ``perm``.

    ``first`` selects indices of the first axis. The Gather runs on all threads, unlike onnxruntime's Transpose.
    """
    places = np.arange(math.prod(sizes), dtype=np.int32).reshape(sizes)
    return (places if first is None else places[first]).transpose(perm).reshape(-1)

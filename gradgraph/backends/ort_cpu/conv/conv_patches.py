"""Convolutions with adjacent windows (stride = kernel size) in blocked layout: a window is a pixel with more channels.

With x cut into patches, [images, taps·channels, *count], the layer has 1x1 kernels:

    x = patches of (Wᵀ y)        dw = Σ y patchesᵀ

In blocked layout, a Gather of rows, one channel block each, converts between patches and x; it is the only copy.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import onnx_ir as ir

from gradgraph.backends.ort_cpu.conv.conv_blocks import convolution, fits_blocks, order_of_rows, ordered, reordered
from gradgraph.backends.ort_cpu.conv.conv_pointwise import per_image_dw
from gradgraph.backends.ort_cpu.conv.conv_table import always, conv_form
from gradgraph.backends.ort_cpu.conv.layer import Layer, layer
from gradgraph.backends.ort_cpu.cpu_table import form
from gradgraph.graph.builder import Builder, Var
from gradgraph.graph.shapes import is_static, known_sizes, record_shape
from gradgraph.machine.hardware import nchwc_block
from gradgraph.rules.registry import case, real
from gradgraph.rules.windows import Windows, windows

POINT = Windows((1, 1), (1, 1), (1, 1), (0, 0), (0, 0))


PATCHES = (
    case(real(2, 16, 3, 5), real(16, 32, 2, 2), real(32), strides=[2, 2]),
    case(real(3, 5, 4, 2), real(5, 16, 1, 3), strides=[1, 3], kernel_shape=[1, 3]),
)


def _serves(conv: Layer) -> bool:
    """Return whether windows are adjacent, with more than one tap, and read every pixel."""
    whole = tuple(n * s for n, s in zip(conv.count, conv.seen.strides, strict=True)) == conv.size
    return conv.group == 1 and conv.seen.rank == 2 and conv.taps > 1 and conv.seen.side_by_side and whole


def _larger_than_its_sums(conv: Layer) -> bool:
    return conv.windows * (conv.taps * conv.c + conv.m) >= 3 * conv.taps * conv.c * conv.m


@form("ConvTranspose", *PATCHES)
def blocked_patches(op: Builder, y: Var, w: Var, b: Var | None = None, **attrs: Any) -> Var | None:
    """Compute ConvTranspose by ``blocked_patches_dx``, in half the time for 64 to 32 channels, 2x2, at 64 px and up.

    None if a size is unknown, or the layer has groups, output padding or an output shape, or is not supported
    (``_serves``).
    """
    seen = windows(**{**attrs, "kernel_shape": (w.shape or ())[2:]})
    count = seen.spatial(y)
    if seen.rank != 2 or any(attrs.get("output_padding") or ()) or attrs.get("output_shape"):
        return None
    if not is_static((*count, *(w.shape or ()))) or attrs.get("group", 1) != 1:
        return None
    size = [n * s for n, s in zip(known_sizes(count), seen.strides, strict=True)]
    like_x = ir.Value(name="x", type=y.value.type, shape=ir.Shape([y.dim(0), w.dim(1), *size]))
    x = op.wrap(like_x)
    conv = layer(x, w, y, attrs)
    return None if conv is None or not _serves(conv) else blocked_patches_dx(op, conv, y, w, x, b)


@conv_form("ConvGradInput", serves=_serves, when=always)
def blocked_patches_dx(op: Builder, conv: Layer, y: Var, w: Var, x: Var, b: Var | None = None) -> Var | None:
    """Compute dx: its patches by an NCHWc 1x1 convolution of y, gathered to images; ``b`` is a bias of x.

    None if the number of channels does not fit NCHWc blocks.
    """
    if not fits_blocks(1, conv.c, conv.m):
        return None
    block = nchwc_block()
    biases = None if b is None else op.Concat(*[b] * conv.taps, axis=0)
    patches = convolution(op, y if conv.m < block else reordered(op, y), _weights(op, w, conv), biases, POINT, 1)
    order = np.argsort(_order(conv)).astype(np.int32)
    lines = op.Gather(op.Reshape(patches, [-1, order.size, block]), order, axis=1)
    whole = op.Reshape(lines, [-1, conv.c, *conv.size])
    record_shape(whole.value, (conv.batch, conv.c, *conv.size))
    return ordered(op, whole)


@conv_form("ConvGradWeight", serves=_serves, when=_larger_than_its_sums)
def blocked_patches_dw(op: Builder, conv: Layer, x: Var, y: Var, w: Var) -> Var | None:
    """Compute dw: gather patches of x, and sum their products with y over images.

    For 2x2 with stride 2, 64 and 32 channels at 64 px it takes a third of the time of ``scan_both_sides_dw``. None if
    the number of channels does not fit NCHWc blocks.
    """
    if not fits_blocks(1, conv.c, conv.c):
        return None
    order = _order(conv)
    lines = op.Gather(op.Reshape(reordered(op, x), [-1, order.size, nchwc_block()]), order, axis=1)
    patches = op.Reshape(lines, [-1, conv.taps * conv.c, *conv.count])
    record_shape(patches.value, (conv.batch, conv.taps * conv.c, *conv.count))
    like_w = ir.Value(name="w", type=w.value.type, shape=ir.Shape([conv.m, conv.taps * conv.c, 1, 1]))
    points = replace(conv, c=conv.taps * conv.c, size=conv.count, seen=POINT)
    dw = per_image_dw(op, points, ordered(op, patches), y, op.wrap(like_w))
    return op.Reshape(op.Transpose(op.Reshape(dw, [conv.m, conv.taps, conv.c]), perm=[0, 2, 1]), w.shape)


def _order(conv: Layer) -> np.ndarray:
    """Return the indices in an image [channels/b, high, wide] of the rows of its patches [taps, channels/b, *count]."""
    (high, wide), (down, across) = conv.count, conv.seen.strides
    places = np.arange(conv.c // nchwc_block() * conv.pixels, dtype=np.int32)
    return places.reshape(-1, high, down, wide, across).transpose(2, 4, 0, 1, 3).reshape(-1)


def _weights(op: Builder, w: Var, conv: Layer) -> Any:
    """Convert ``w`` [m, c, *kernel] to NCHWc weights of a 1x1 kernel from m to [taps, c] channels."""
    block, inner = nchwc_block(), nchwc_block() if conv.m >= nchwc_block() else 1
    taps_first = op.Reshape(op.Transpose(op.Reshape(w, [-1, conv.taps]), perm=[1, 0]), [-1, block])
    order = order_of_rows((conv.taps, conv.m // inner, inner, conv.c // block), (0, 3, 1, 2))
    return op.Reshape(op.Gather(taps_first, order, axis=0), [conv.taps * conv.c, conv.m, 1, 1])

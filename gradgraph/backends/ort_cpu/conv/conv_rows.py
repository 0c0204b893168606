"""The weight gradient of wide maps as a blocked convolution that sums over pixels.

The pixels of a row are the channels of this convolution, so that a block of channels is a run of ``b`` pixels. The
kernel is as high as the image:

    dw[m, c, s, t] = Σ dy[m, h, w] x[c, h + s, w + t] = Σ over blocks of w, then Conv over h of dy by x

Vertical taps s are the positions of the kernel and need no copies. For horizontal taps t, the side (x or dy) with fewer
channels is copied once per tap, with a shift. That side is used as the kernel, as a shift then moves whole blocks. The
other side is the image, unchanged except for the order of its blocks. Both are read in blocks of channels, if their
channels can be blocked.

    kernel  [images·taps across·channels, w, h, 1]     blocks [.., w/b, h, b of w, b of channels]
    image   [1, images·w, h, channels]                 blocks [.., w/b, h, channels, b of w]
    sums    [1, images·taps across·channels, taps down, channels]

Images are groups of the convolution; their sums are added at the end.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from gradgraph.backends.ort_cpu.conv.conv_blocks import convolution, reordered
from gradgraph.backends.ort_cpu.conv.conv_scan import LEAST_CHANNELS_AS_ROWS, over_images
from gradgraph.backends.ort_cpu.conv.conv_table import conv_form
from gradgraph.backends.ort_cpu.conv.layer import Layer
from gradgraph.backends.ort_operators import BLOCKED, kernel
from gradgraph.graph.builder import Builder, Var
from gradgraph.machine.hardware import nchwc_block
from gradgraph.rules.windows import Windows

LEAST_WINDOWS_AS_CHANNELS = 1024  # minimum windows, with ``LEAST_CHANNELS_AS_ROWS`` on both sides;
LEAST_CHANNELS_WITH_MORE = 16  # with more windows, this many channels on both sides
FILTERS_AT_ONCE = 64  # output channels that onnxruntime's kernels compute at once
LEAST_PARTS = 16  # pieces of work per image; with fewer, images are processed in pairs for two threads


@dataclass(frozen=True)
class _Plan:
    """The roles of x and dy, one as the kernel and one as the image, and the sizes of both.

    Attributes:
        dy_is_kernel: whether dy is the kernel, and x the image; otherwise x is the kernel, and dy the image.
        filters: the number of channels of the kernel's side.
        size: height and width of the kernel's side.
        channels: the number of channels of the image's side.
        columns: [taps across, width], the column of the kernel's side by which each column of the image is multiplied.
        down: the number of vertical taps.
        seen: the windows of the convolution.
    """

    dy_is_kernel: bool
    filters: int
    size: tuple[int, int]
    channels: int
    columns: np.ndarray
    down: int
    seen: Windows

    @property
    def width(self) -> int:
        """The number of columns of the image's side."""
        return int(self.columns.shape[1])


def _wide_rows(conv: Layer) -> bool:
    """Return whether ``rows_dw`` is the fastest form of dw, by the numbers of windows and channels."""
    channels = min(conv.m, conv.c)
    return channels >= LEAST_CHANNELS_WITH_MORE and (
        conv.windows > LEAST_WINDOWS_AS_CHANNELS
        or (conv.windows == LEAST_WINDOWS_AS_CHANNELS and channels >= LEAST_CHANNELS_AS_ROWS)
    )


@conv_form("ConvGradWeight", when=_wide_rows)
def rows_dw(op: Builder, conv: Layer, x: Var, dy: Var, w: Var) -> Var | None:
    """Compute dw in a Scan over images, by an NCHWc convolution with pixels of a row as its channels.

    32 channels at 128 px: 0.7 times PyTorch's time, where a Scan that copies both sides takes 1.0; 64 channels at 64
    px: 1.0. None if ``_plan`` returns None, for instance with a stride other than 1.
    """
    plan = _plan(conv)
    if plan is None:
        return None
    images, shape = _images_a_turn(conv, plan), _sum_shape(plan)

    def add(op: Builder, x: Var, dy: Var, total: Var, conv: Layer) -> Var:
        kernel_side, image_side = (dy, x) if plan.dy_is_kernel else (x, dy)
        filters, pixels = _kernel_side(op, kernel_side, plan, images), _image_side(op, image_side, plan, images)
        return convolution(op, pixels, filters, None, plan.seen, images, total)

    whole = [1, images * shape[0] * shape[1] * shape[4], shape[2], shape[3]]
    # reorder all images at once, like the layer's other two convolutions, so that they share the node
    x, dy = (reordered(op, v) if c % nchwc_block() == 0 else v for v, c in ((x, conv.c), (dy, conv.m)))
    total = over_images(op, x, dy, conv, whole, add, images)
    return _weights(op, op.ReduceSum(op.Reshape(total, [images, *shape]), [0], keepdims=0), plan, w)


def _plan(conv: Layer) -> _Plan | None:
    """Return the plan for dw, with the side (x or dy) of fewer channels as kernel.

    None if neither side fits NCHWc blocks, for groups, strides other than 1, or an unknown batch size, or if not 2-D.
    """
    if conv.group > 1 or conv.seen.rank != 2 or not conv.images or set(conv.seen.strides) != {1} or not nchwc_block():
        return None
    both = _dy_as_kernel(conv), _x_as_kernel(conv)
    fitting = [p for p in both if p.filters % nchwc_block() == p.width % nchwc_block() == 0 and min(p.seen.pads) >= 0]
    return min(fitting, key=lambda p: p.filters, default=None)


def _dy_as_kernel(conv: Layer) -> _Plan:
    """Return the plan with dy as the kernel: column u of x is multiplied by column u − t·d + p of dy for tap t.

    d is the dilation, and p the padding.
    """
    seen = Windows(
        (conv.count[0], 1), (conv.seen.dilations[0], 1), (1, 1), (conv.seen.begins[0], 0), (conv.seen.ends[0], 0)
    )
    columns = np.arange(conv.size[1]) - _tap_offsets(conv)[:, None] + conv.seen.begins[1]
    return _Plan(True, conv.m, (conv.count[0], conv.count[1]), conv.c, columns, conv.seen.kernel[0] or 1, seen)


def _x_as_kernel(conv: Layer) -> _Plan:
    """Return the plan with x as the kernel: column w of dy is multiplied by column w + t·d − p of x for tap t.

    The vertical taps are reversed.
    """
    reach = ((conv.seen.kernel[0] or 1) - 1) * conv.seen.dilations[0]
    pads = (reach - conv.seen.begins[0], 0), (reach - conv.seen.ends[0], 0)
    seen = Windows((conv.size[0], 1), (conv.seen.dilations[0], 1), (1, 1), *pads)
    columns = np.arange(conv.count[1]) + _tap_offsets(conv)[:, None] - conv.seen.begins[1]
    return _Plan(False, conv.c, (conv.size[0], conv.size[1]), conv.m, columns, conv.seen.kernel[0] or 1, seen)


def _tap_offsets(conv: Layer) -> np.ndarray:
    return np.arange(conv.seen.kernel[1] or 1) * conv.seen.dilations[1]


def _sum_shape(plan: _Plan) -> list[int]:
    """Return the shape of the sums of one image, [taps across, filters/b, taps down, channels, b]."""
    block = nchwc_block()
    return [len(plan.columns), plan.filters // block, plan.down, plan.channels, block]


def _images_a_turn(conv: Layer, plan: _Plan) -> int:
    """Return the number of images per iteration of the Scan."""
    parts = plan.down * -(-len(plan.columns) * plan.filters // FILTERS_AT_ONCE)
    return 2 if parts < LEAST_PARTS and conv.images % 2 == 0 else 1


def _kernel_side(op: Builder, v: Var, plan: _Plan, images: int) -> Any:
    """Convert [images, filters, *size] in NCHWc to the kernel's layout; columns outside read a final block of zeros."""
    block, (high, wide) = nchwc_block(), plan.size
    blocks = op.Reshape(v, [-1, block])
    zeros = op.const(np.zeros((1, block), np.float32))
    lines = np.arange(images * plan.filters // block * high).reshape(images, 1, -1, 1, high, 1)
    across = plan.columns.reshape(1, len(plan.columns), 1, -1, 1, block)  # one run of columns after the other
    inside = (across >= 0) & (across < wide)
    order = np.where(inside, lines * wide + across, images * plan.filters // block * high * wide)
    rows = op.Gather(op.Concat(blocks, zeros, axis=0), order.astype(np.int32).reshape(-1), axis=0)
    return op.Reshape(rows, [images * len(plan.columns) * plan.filters, plan.width, high, 1])


def _image_side(op: Builder, v: Var, plan: _Plan, images: int) -> Any:
    """Convert [images, channels, rows, width] to the image's layout; NCHWc blocks of b x b are transposed first."""
    block, rows = nchwc_block(), v.dim(2)
    assert isinstance(rows, int)
    blocked = plan.channels % block == 0
    lines, run = (plan.channels // block, block * block) if blocked else (plan.channels, block)
    if blocked:
        v = kernel(op, "ReorderOutput", BLOCKED, [op.Reshape(v, [-1, block, 1, block])], None, channels=block)
    runs = np.arange(images * lines * rows * plan.width // block, dtype=np.int32)
    order = runs.reshape(images, lines, rows, -1).transpose(0, 3, 2, 1).reshape(-1)
    return op.Reshape(op.Gather(op.Reshape(v, [-1, run]), order, axis=0), [1, images * plan.width, rows, plan.channels])


def _weights(op: Builder, sums: Var, plan: _Plan, w: Var) -> Var:
    """Convert [taps across, filters/b, taps down, channels, b] to [m, c, taps down, taps across]."""
    if plan.dy_is_kernel:
        ordered = op.Transpose(sums, perm=[1, 4, 3, 2, 0])
    else:
        down = np.arange(plan.down)[::-1].copy()
        ordered = op.Transpose(op.Gather(sums, down, axis=2), perm=[3, 1, 4, 2, 0])
    return op.Reshape(ordered, w.shape)

"""Convolution: bilinear, so {Conv, its input gradient, its weight gradient} are one another's derivatives.

Notation: ``x`` is what windows read (Conv's input, ConvTranspose's output), ``y`` has one element per window; ``w`` is
[channels of y, channels of x / group, *kernel] for both operators. Which ONNX nodes compute the two gradients is
chosen in ``input_gradient`` and ``weight_gradient`` alone; PERFORMANCE decides, the mathematics is the same.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from gradgraph.builder import Builder, Var
from gradgraph.registry import Gradients, case, point, real, vjp
from gradgraph.rules.windows import Windows, crop, places, ranked, space, spatial, windows
from gradgraph.shapes import is_static


@vjp(
    "Conv",
    case(real(2, 3, 7), real(4, 3, 3), real(4)),
    case(real(2, 3, 6, 5), real(4, 3, 3, 2)),
    case(real(2, 2, 4, 3, 5), real(3, 2, 2, 3, 2), real(3), pads=[1, 1, 0, 0, 1, 1]),
    case(real(2, 3, 8, 7), real(4, 3, 3, 3), real(4), kernel_shape=[3, 3], strides=[2, 2], pads=[1, 1, 1, 1]),
    case(real(1, 9, 9, 8), real(2, 9, 3, 2), strides=[3, 2], pads=[0, 2, 1, 0], dilations=[2, 3]),
    case(real(2, 3, 10), real(2, 3, 2), strides=[4]),  # two elements at the end are never read
    case(real(2, 3, 9), real(2, 3, 2), strides=[4], dilations=[2], pads=[2, 1]),
    case(real(2, 4, 6, 6), real(6, 2, 3, 3), real(6), group=2, pads=[1, 1, 1, 1]),
    case(real(1, 4, 7, 6), real(6, 2, 3, 3), group=2, strides=[2, 2], dilations=[1, 2], pads=[0, 2, 1, 1]),
    case(real(1, 16, 4, 4), real(4, 8, 3, 2), group=2, strides=[1, 2], pads=[1, 0, 1, 0]),
    case(real(2, 3, 5, 5), real(3, 1, 3, 3), real(3), group=3, pads=[1, 1, 1, 1]),  # depthwise
    case(real(2, 3, 6), real(6, 1, 3), group=3, strides=[2]),  # depthwise, channel multiplier 2
    case(real(2, 3, 4, 5), real(4, 3, 1, 1), real(4)),
    case(real(2, 4, 5), real(6, 2, 1), group=2),
    case(real(2, 3, 4, 5), real(4, 3, 1, 1), strides=[2, 3]),
    case(real(2, 3, 4), real(4, 3, 1), pads=[1, 2]),
    case(real(1, 1, 1, 1), real(1, 1, 1, 1)),
    case(real(1, 2, 3, 3), real(2, 2, 3, 3)),  # one window
    case(real(1, 1, 4), real(1, 1, 2), pads=[2, 3]),  # windows that see nothing but padding
    point([[[1.0, 2.0, 3.0]]], [[[10.0]]], [5.0], gives=[[[[10.0, 0.0, 10.0]]], [[[4.0]]], [2.0]], strides=[2]),
)
def conv(
    op: Builder, dy: Var, y: Var, x: Var, w: Var, b: Var | None = None, *, group: int = 1, **attrs: Any
) -> Gradients:
    seen, dy = windows(_kernel(w, attrs), **attrs), ranked(dy, x)
    dx = input_gradient(op, dy, w, x, seen, group)
    return dx, weight_gradient(op, x, dy, w, seen, group), None if b is None else bias_gradient(op, dy)


@vjp(
    "ConvTranspose",
    case(real(2, 3, 5), real(3, 4, 3), real(4)),
    case(real(2, 3, 4, 3), real(3, 2, 3, 2), strides=[2, 3], pads=[1, 0, 0, 1]),
    case(real(1, 2, 3, 2, 3), real(2, 3, 2, 3, 2), real(3), strides=[1, 2, 2], pads=[0, 1, 0, 1, 0, 1]),
    case(real(2, 3, 4, 4), real(3, 2, 3, 3), strides=[2, 3], pads=[1, 1, 1, 1], output_padding=[1, 2]),
    case(
        real(1, 2, 4),
        real(2, 3, 3),
        dilations=[3],
        strides=[2],
        output_padding=[2],
        onnxruntime="refuses output_padding not below the stride, which the specification allows",
    ),
    case(real(2, 4, 3, 4), real(4, 3, 2, 3), real(6), group=2, strides=[2, 1], dilations=[1, 2]),
    case(real(2, 3, 5), real(3, 1, 3), group=3, strides=[2], pads=[1, 1], output_padding=[1]),  # depthwise
    case(real(1, 8, 3, 3), real(8, 9, 3, 3), kernel_shape=[3, 3], strides=[2, 2], pads=[1, 1, 1, 1]),
    case(real(2, 3, 4, 5), real(3, 4, 1, 1), real(4)),
    case(real(1, 1, 1), real(1, 1, 1)),
)
def conv_transpose(
    op: Builder,
    dy: Var,
    y: Var,
    x: Var,
    w: Var,
    b: Var | None = None,
    *,
    group: int = 1,
    output_padding: list[int] | None = None,
    **attrs: Any,
) -> Gradients:
    seen, dy = windows(_kernel(w, attrs), **attrs), ranked(dy, x)
    dx = op.Conv(dy, w, group=group, **seen.attrs)
    if any(more >= stride for more, stride in zip(output_padding or [], seen.strides, strict=False)):
        dx = crop(op, dx, x)  # room for windows that x does not have
    return dx, weight_gradient(op, dy, x, w, seen, group), None if b is None else bias_gradient(op, dy)


def _kernel(w: Var, attrs: dict[str, Any]) -> list[int | None]:
    """The kernel's sizes as far as they are known: the attribute may be absent, or the weight's shape."""
    sizes = attrs.get("kernel_shape") or [k if isinstance(k, int) else None for k in (w.shape or ())[2:]]
    return list(sizes) or [None] * (w.rank - 2)


# --- the three derivatives -----------------------------------------------------------------------------


def bias_gradient(op: Builder, dy: Var) -> Var:
    """Summed over space, then over the batch: in onnxruntime twice as fast as at once."""
    db: Var = op.ReduceSum(op.ReduceSum(dy, spatial(dy), keepdims=0), [0], keepdims=0)
    return db


def input_gradient(op: Builder, dy: Var, w: Var, x: Var, seen: Windows, group: int) -> Var:
    """Every window hands its cotangent back to what it read: ``dx[i·s + t·d - p] += dy[i] · w[t]``.

    Stride 1 is a Conv with turned weights (in onnxruntime a quarter faster than ConvTranspose, 1x1 twice). Otherwise a
    ConvTranspose, which leaves room for what the last window did not read: exactly where the sizes are known, else
    as much as a stride allows, to be cut at run time.
    """
    if seen.mirrored is not None:
        dx: Var = op.Conv(dy, _turned(op, w, seen, group), group=group, dilations=seen.dilations, pads=seen.mirrored)
        return dx
    rest = [r for r in seen.rest(x, dy) if r is not None]
    if len(rest) == seen.rank:
        seen = seen.padded_by([max(-r, 0) for r in rest])
        dx = op.ConvTranspose(dy, w, group=group, output_padding=[max(r, 0) for r in rest], **seen.attrs)
        return dx
    room = [s - 1 for s in seen.strides]
    return crop(op, op.ConvTranspose(dy, w, group=group, output_padding=room, **seen.attrs), x)


def weight_gradient(op: Builder, x: Var, dy: Var, w: Var, seen: Windows, group: int) -> Var:
    """``dw[t] = Σ dy[i] · x[i·s + t·d - p]``, summed over batch and windows.

    As a matrix product over gathered windows where a group has channels enough to gather in runs (in onnxruntime 2 to
    4 times faster than a Conv); as a Conv whose image is x and whose kernel is dy for few channels and unknown sizes.
    """
    channels = (w.shape or (None, None))[:2]
    runs = seen.pointwise or (is_static(w.shape) and w.shape[1] >= 8 and places(x) > 0)
    form = _by_matmul if is_static(channels) and runs else _by_conv
    return form(op, x, dy, w, seen, group)


# --- their forms ---------------------------------------------------------------------------------------


def _turned(op: Builder, w: Var, seen: Windows, group: int) -> Var:
    """The weights that lead from y back to x: channels trade places within each group, taps run backwards."""
    axes = spatial(w)
    if group == 1:
        turned: Var = op.Transpose(w, perm=[1, 0, *axes])
    elif w.shape is not None and w.shape[:2] == (group, 1):
        turned = w
    else:
        split = op.Reshape(w, op.Concat([group, -1], op.dim(w, 1), space(op, w), axis=0))
        turned = op.Transpose(split, perm=[0, 2, 1, *(a + 1 for a in axes)])
        turned = op.Reshape(turned, op.Concat([-1], op.Div(op.dim(w, 0), [group]), space(op, w), axis=0))
    back = [a for a in axes if seen.kernel[a - 2] != 1]
    return op.Slice(turned, [-1] * len(back), [-(2**31)] * len(back), back, [-1] * len(back)) if back else turned


def _by_conv(op: Builder, x: Var, dy: Var, w: Var, seen: Windows, group: int) -> Var:
    """Batch and channels trade places, and so do stride and dilation; each group is a run of the batch."""
    axes = spatial(x)
    rest = seen.rest(x, dy)
    cut = [min(r or 0, end) for r, end in zip(rest, seen.ends, strict=True)]
    swapped = _groups_in_batch(op, x, w, group) if group > 1 else op.Transpose(x, perm=[1, 0, *axes])
    kernel = op.Transpose(dy, perm=[1, 0, *axes])
    pads = seen.padded_by([-c for c in cut]).pads
    dw: Var = op.Conv(swapped, kernel, group=group, strides=seen.dilations, dilations=seen.strides, pads=pads)
    unread = [s - 1 if r is None else r - c for r, c, s in zip(rest, cut, seen.strides, strict=True)]
    if any(u >= d for u, d in zip(unread, seen.dilations, strict=True)):
        dw = crop(op, dw, w)  # taps that w does not have
    return op.Transpose(dw, perm=[1, 0, *axes])


def _groups_in_batch(op: Builder, x: Var, w: Var, group: int) -> Var:
    """[N, group·c, *space] -> [c, group·N, *space]."""
    split = op.Reshape(x, op.Concat([0, group], op.dim(w, 1), space(op, x), axis=0))
    outside = op.Transpose(split, perm=[2, 1, 0, *(a + 1 for a in spatial(x))])
    merged: Var = op.Reshape(outside, op.Concat(op.dim(w, 1), [-1], space(op, x), axis=0))
    return merged


def _by_matmul(op: Builder, x: Var, dy: Var, w: Var, seen: Windows, group: int) -> Var:
    """dy [N, group, m, windows] times what the windows see [N, group, windows, taps·c], summed over N."""
    m, c = w.shape[0], w.shape[1]
    per_window = op.Reshape(dy, [0, group, m // group, places(dy)])
    total = op.ReduceSum(op.MatMul(per_window, _columns(op, x, dy, c, seen, group)), [0], keepdims=0)
    if seen.pointwise:
        return op.Reshape(total, op.shape(w))
    taps_last = op.Transpose(op.Reshape(total, [m, -1, c]), perm=[0, 2, 1])
    dw: Var = op.Reshape(taps_last, op.shape(w))
    return dw


def _columns(op: Builder, x: Var, dy: Var, c: int, seen: Windows, group: int) -> Var:
    """im2col with channels last, so that a gather copies runs of ``c`` numbers."""
    axes = spatial(x)
    if any(seen.pads):
        x = op.Pad(x, seen.pads, None, axes)
    channels_last = op.Transpose(op.Reshape(x, [0, group, c, places(x)]), perm=[0, 1, 3, 2])
    if seen.pointwise:
        return channels_last
    columns: Var = op.Gather(channels_last, _positions(op, x, dy, seen), axis=2)
    return op.Reshape(columns, [0, group, places(dy), c * math.prod(seen.kernel)])


def _positions(op: Builder, x: Var, dy: Var, seen: Windows) -> Var:
    """The flat position in ``x`` of each window's taps: int32 [*windows, *taps]."""
    sizes, counts = x.shape[2:], dy.shape[2:]
    total = None
    for axis, (count, k, s, d) in enumerate(zip(counts, seen.kernel, seen.strides, seen.dilations, strict=True)):
        pitch = math.prod(sizes[axis + 1 :])
        along = (np.arange(count)[:, None] * s + np.arange(k) * d) * pitch
        shape = np.ones(2 * seen.rank, np.int64)
        shape[[axis, axis + seen.rank]] = along.shape
        term = op.const(along.astype(np.int32).reshape(shape))
        total = term if total is None else op.Add(total, term)
    return total

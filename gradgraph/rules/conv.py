"""Gradient rules of Conv and ConvTranspose.

Convolution is bilinear, so Conv, its input gradient and its weight gradient are derivatives of each other.

Notation: windows read ``x`` (the input of Conv, the output of ConvTranspose), and ``y`` has one element per window;
``w`` is [channels of y, channels of x / group, *kernel] for both operators. ``input_gradient`` and ``weight_gradient``
choose the ONNX nodes that onnxruntime runs fastest; all choices compute the same.
"""

from __future__ import annotations

import functools
import math
from typing import Any

from gradgraph.graph.builder import Builder, Var
from gradgraph.graph.shapes import all_sizes, sizes_or
from gradgraph.rules.named_operators import named_operator
from gradgraph.rules.registry import Gradients, case, point, real, vjp
from gradgraph.rules.windows import Windows, crop, flat, positions, ranked, sizes, space, spatial, windows

# measured in onnxruntime on x86-64; both forms are correct at any size
LEAST_CHANNELS_GATHERED = 4  # from this many channels per group on, gathered windows beat a Conv as weight gradient
LEAST_CHANNELS_TURNED = 16  # from this many channels of x on, a Conv with flipped weights beats ConvTranspose


@vjp(
    "Conv",
    case(real(2, 3, 7), real(4, 3, 3), real(4)),
    case(real(2, 3, 6, 5), real(4, 3, 3, 2)),
    case(real(2, 2, 4, 3, 5), real(3, 2, 2, 3, 2), real(3), pads=[1, 1, 0, 0, 1, 1]),
    case(real(2, 3, 8, 7), real(4, 3, 3, 3), real(4), kernel_shape=[3, 3], strides=[2, 2], pads=[1, 1, 1, 1]),
    case(real(1, 9, 9, 8), real(2, 9, 3, 2), strides=[3, 2], pads=[0, 2, 1, 0], dilations=[2, 3]),
    case(real(2, 3, 9), real(2, 3, 2), strides=[4]),  # the last three elements are never read
    case(real(2, 3, 10), real(2, 3, 2), strides=[4], dilations=[2], pads=[2, 1]),  # the last two are never read
    case(real(2, 4, 6, 6), real(6, 2, 3, 3), real(6), group=2, pads=[1, 1, 1, 1]),
    case(real(1, 4, 7, 6), real(6, 2, 3, 3), group=2, strides=[2, 2], dilations=[1, 2], pads=[0, 2, 1, 1]),
    case(real(1, 16, 4, 4), real(4, 8, 3, 2), group=2, strides=[1, 2], pads=[1, 0, 1, 0]),
    case(real(2, 16, 4), real(2, 16, 3), pads=[1, 2], dilations=[2]),
    case(real(1, 16, 3, 4), real(4, 8, 2, 3), group=2, pads=[1, 1, 0, 1]),
    case(real(1, 16, 4), real(16, 1, 3), group=16, pads=[1, 1]),
    case(real(1, 16, 3), real(8, 2, 2), group=8),
    case(real(1, 16, 3), real(2, 16, 2), pads=[2, 0]),  # the first window reads only padding
    case(real(1, 4, 2, 3, 4), real(2, 4, 1, 2, 3)),  # gathered windows with three axes
    case(real(2, 3, 5, 5), real(3, 1, 3, 3), real(3), group=3, pads=[1, 1, 1, 1]),  # depthwise
    case(real(2, 3, 6), real(6, 1, 3), group=3, strides=[2]),  # depthwise, channel multiplier 2
    case(real(2, 3, 4, 5), real(4, 3, 1, 1), real(4)),
    case(real(2, 4, 5), real(6, 2, 1), group=2, kernel_shape=[1]),
    case(real(2, 3, 4, 5), real(4, 3, 1, 1), strides=[2, 3]),
    case(real(2, 4, 4, 6), real(3, 4, 2, 2), strides=[2, 2]),  # adjacent windows
    case(real(2, 3, 4), real(4, 3, 1), pads=[1, 2]),
    case(real(1, 2, 5, 6), real(2, 2, 3, 2), kernel_shape=[3, 2], auto_pad="SAME_UPPER", strides=[2, 2]),
    case(real(1, 2, 5, 6), real(2, 2, 2, 4), kernel_shape=[2, 4], auto_pad="SAME_LOWER"),
    case(real(1, 2, 5, 6), real(2, 2, 2, 4), kernel_shape=[2, 4], auto_pad="VALID"),
    case(real(1, 1, 1, 1), real(1, 1, 1, 1)),
    case(real(1, 2, 3, 3), real(2, 2, 3, 3)),  # one window
    case(real(1, 1, 4), real(1, 1, 2), pads=[2, 3]),  # windows that read only padding
    point([[[1.0, 2.0, 3.0]]], [[[10.0]]], [5.0], gives=[[[[10.0, 0.0, 10.0]]], [[[4.0]]], [2.0]], strides=[2]),
)
def conv(op: Builder, dy: Var, y: Var, x: Var, w: Var, b: Var | None = None, **attrs: Any) -> Gradients:
    dy, lie = ranked(dy, x), _where(attrs)
    dx = input_gradient(op, dy, w, x, **lie)
    return dx, weight_gradient(op, x, dy, w, **lie), None if b is None else bias_gradient(op, dy)


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
        onnxruntime="rejects output_padding not below the stride, which the specification allows",
    ),
    case(real(2, 4, 3, 4), real(4, 3, 2, 3), real(6), group=2, strides=[2, 1], dilations=[1, 2]),
    case(real(2, 3, 5), real(3, 1, 3), group=3, strides=[2], pads=[1, 1], output_padding=[1]),  # depthwise
    case(
        real(1, 4, 2, 3, 2),
        real(4, 3, 2, 2, 3),
        real(6),
        group=2,
        strides=[2, 1, 2],
        pads=[1, 0, 1, 0, 1, 1],
        output_padding=[1, 0, 1],
    ),
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
    seen, dy = _seen(w, attrs), ranked(dy, x)
    dx = op.Conv(dy, w, group=group, **seen.attrs)
    if any(more >= stride for more, stride in zip(output_padding or [], seen.strides, strict=False)):
        dx = crop(op, dx, x)  # output_padding made room for more windows than x has elements
    dw = weight_gradient(op, dy, x, w, **_where(attrs | {"group": group}))
    return dx, dw, None if b is None else bias_gradient(op, dy)


def _where(attrs: dict[str, Any]) -> dict[str, Any]:
    """Return the window attributes of a convolution; absent ones are None."""
    return {name: attrs.get(name) for name in ("group", "kernel_shape", "strides", "pads", "dilations")}


def _seen(w: Var, attrs: dict[str, Any]) -> Windows:
    """Return the windows of a convolution; kernel sizes come from the attribute or ``w``, and may be None (unknown)."""
    dims = (w.shape or ())[2 : w.rank]  # w.rank raises an error if the rank is unknown
    return windows(**{**attrs, "kernel_shape": attrs.get("kernel_shape") or sizes_or(dims, None)})


# --- the three derivatives -----------------------------------------------------------------------------


def bias_gradient(op: Builder, dy: Var) -> Var:
    """Return ``dy`` summed over space, then over the batch: in onnxruntime twice as fast as a single sum."""
    return op.ReduceSum(op.ReduceSum(dy, spatial(dy), keepdims=0), [0], keepdims=0)


@named_operator("ConvGradInput", like=[2], shape_only=[2])
def input_gradient(op: Builder, dy: Var, w: Var, x: Var, *, group: int = 1, **attrs: Any) -> Var:
    """Return the input gradient of a convolution: ``dx[i·s + t·d - p] += dy[i] · w[t]``.

    Here i is a window, t a tap of the kernel, s the stride, d the dilation and p the begin padding.
    """
    return hand_back(op, dy, w, x, _seen(w, attrs), group)


def hand_back(op: Builder, dy: Var, w: Var, x: Var, seen: Windows, group: int) -> Var:
    """Return the input gradient; only the spatial sizes of ``x`` are read.

    With stride 1 and many channels, it is computed as a Conv with flipped weights, a third faster than ConvTranspose.
    Otherwise it is computed as a ConvTranspose whose output padding covers the elements at the end that no window
    reads. If sizes are unknown, the padding is the largest that the stride allows, and the result is cropped at run
    time.
    """
    c = _channels(w)[1] or LEAST_CHANNELS_TURNED
    if seen.mirrored is not None and c * group >= LEAST_CHANNELS_TURNED:
        return op.Conv(dy, _turned(op, w, seen, group), group=group, dilations=seen.dilations, pads=seen.mirrored)
    rest = [r for r in seen.rest(x, dy) if r is not None]
    exact = len(rest) == seen.rank
    if exact:
        seen = seen.padded_by([max(-r, 0) for r in rest])
    room = [max(r, 0) for r in rest] if exact else [s - 1 for s in seen.strides]
    dx = op.ConvTranspose(dy, w, group=group, output_padding=room, **seen.attrs)
    return dx if exact else crop(op, dx, x)


@named_operator("ConvGradWeight", like=[2], shape_only=[2])
def weight_gradient(op: Builder, x: Var, dy: Var, w: Var, *, group: int = 1, **attrs: Any) -> Var:
    """Return the weight gradient ``dw[t] = Σ dy[i] · x[i·s + t·d - p]``, summed over the batch and all windows i.

    Here t is a tap of the kernel, s the stride, d the dilation and p the begin padding. With enough channels per group,
    it is computed as a matrix product with gathered windows, which is 2 to 4 times faster in onnxruntime than a Conv.
    With few channels or an unknown kernel size, it is computed as a Conv with image x and kernel dy.
    """
    seen, c = _seen(w, attrs), _channels(w)[1]
    by_matmul = (seen.pointwise and c) or (c >= LEAST_CHANNELS_GATHERED and sizes(w))
    return (_by_matmul if by_matmul else by_conv)(op, x, dy, w, seen, group)


# --- implementations ---------------------------------------------------------------------------------------


def _turned(op: Builder, w: Var, seen: Windows, group: int) -> Any:
    """Return the weights of the Conv that computes the input gradient: channels swapped per group, taps flipped."""
    turned = _channels_traded(op, w, group)
    back = [axis for axis, k in zip(spatial(w), seen.kernel, strict=True) if k != 1]
    return op.Slice(turned, [-1] * len(back), [-(2**31)] * len(back), back, [-1] * len(back)) if back else turned


def _channels_traded(op: Builder, w: Var, group: int) -> Any:
    """Return ``w`` with channels swapped within each group: [group·m, c, *kernel] -> [group·c, m, *kernel]."""
    axes = spatial(w)
    if group == 1:
        return op.Transpose(w, perm=[1, 0, *axes])
    if w.shape is not None and w.shape[:2] == (group, 1):
        return w
    split = op.Reshape(w, op.Concat([group, -1], op.dim(w, 1), space(op, w), axis=0))
    traded = op.Transpose(split, perm=[0, 2, 1, *(a + 1 for a in axes)])
    return op.Reshape(traded, op.Concat([-1], op.Div(op.dim(w, 0), [group]), space(op, w), axis=0))


def by_conv(op: Builder, x: Var, dy: Var, w: Var, seen: Windows, group: int) -> Var:
    """Compute the weight gradient by a Conv with batch and channels swapped, and stride and dilation swapped.

    Groups are moved to the batch axis.
    """
    axes = spatial(x)
    rest = seen.rest(x, dy)
    cut = [min(r or 0, end) for r, end in zip(rest, seen.ends, strict=True)]
    pads = seen.padded_by([-c for c in cut]).pads
    if any(pads):  # a separate Pad: onnxruntime hangs in a padded Conv without channels, here an empty batch
        x = op.Pad(x, pads, None, axes)
    swapped = _groups_in_batch(op, x, w, group) if group > 1 else op.Transpose(x, perm=[1, 0, *axes])
    kernel = op.Transpose(dy, perm=[1, 0, *axes])
    dw = op.Conv(swapped, kernel, group=group, strides=seen.dilations, dilations=seen.strides)
    unread = [s - 1 if r is None else r - c for r, c, s in zip(rest, cut, seen.strides, strict=True)]
    if any(u >= d for u, d in zip(unread, seen.dilations, strict=True)):
        dw = crop(op, dw, w)  # remove taps that w does not have
    return op.Transpose(dw, perm=[1, 0, *axes])


def _groups_in_batch(op: Builder, x: Var, w: Var, group: int) -> Any:
    """Return ``x`` with groups moved to the batch axis: [N, group·c, *space] -> [c, group·N, *space]."""
    split = op.Reshape(x, op.Concat([0, group], op.dim(w, 1), space(op, x), axis=0))
    outside = op.Transpose(split, perm=[2, 1, 0, *(a + 1 for a in spatial(x))])
    return op.Reshape(outside, op.Concat(op.dim(w, 1), [-1], space(op, x), axis=0))


def _by_matmul(op: Builder, x: Var, dy: Var, w: Var, seen: Windows, group: int) -> Any:
    """Return dy [N, group, m, windows] times gathered windows [N, group, windows, taps·c], summed over N."""
    m, c = _channels(w)
    per_window = flat(op, dy, 0, group, m // group)
    total = op.ReduceSum(op.MatMul(per_window, _columns(op, x, dy, w, seen, group)), [0], keepdims=0)
    if seen.pointwise:
        return op.Reshape(total, op.shape(w))
    taps_last = op.Transpose(op.Reshape(total, [m, -1, c]), perm=[0, 2, 1])
    return op.Reshape(taps_last, op.shape(w))


def _columns(op: Builder, x: Var, dy: Var, w: Var, seen: Windows, group: int) -> Any:
    """Return the im2col matrix [N, group, windows, taps·c], channels last, so that Gather copies contiguous runs."""
    _, run = _channels(w)
    if any(seen.pads):
        x = op.Pad(x, seen.pads, None, spatial(x))
    channels_last = op.Transpose(flat(op, x, 0, group, run), perm=[0, 1, 3, 2])
    if seen.pointwise:
        return channels_last
    where = functools.reduce(op.Add, [_offsets(op, x, dy, seen, axis) for axis in range(seen.rank)])
    windows = op.ReduceProd(space(op, dy), keepdims=1)
    shape = op.Concat([0, group], windows, [run * math.prod(sizes(w) or ())], axis=0)
    return op.Reshape(op.Gather(channels_last, where, axis=2), shape)


def _offsets(op: Builder, x: Var, dy: Var, seen: Windows, axis: int) -> Any:
    """Return one axis' contribution to the flat index [*windows, *taps] into the padded ``x``, ready to broadcast."""
    along = positions(op, dy, seen, axis)
    if axis < seen.rank - 1:
        along = op.Mul(along, op.ReduceProd(op.Concat(*(op.dim(x, a) for a in spatial(x)[axis + 1 :]), axis=0)))
    return op.Unsqueeze(along, [a for a in range(2 * seen.rank) if a % seen.rank != axis])


def _channels(w: Var) -> tuple[int, int]:
    """Return the first two sizes of the weight ``w``, or zeros if one is unknown."""
    m, c = all_sizes((w.shape or ())[:2]) or (0, 0)
    return m, c

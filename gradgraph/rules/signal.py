"""Gradient rules of DFT, STFT and Col2Im. The operators are linear, so the gradient is their adjoint, applied to dy.

Conjugation flips the sign of the exponent in a Fourier transform: the adjoint of the sum over e^(-iφ) is the sum over
e^(+iφ), which is the inverse transform without its factor 1/n, and vice versa.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from gradgraph.errors import ModelError
from gradgraph.graph.builder import Builder, Var
from gradgraph.graph.shapes import record_shape
from gradgraph.rules.placement import positions, put
from gradgraph.rules.registry import Gradients, case, no_gradient, real, vjp
from gradgraph.rules.shape import reshaped

no_gradient(
    "a matrix or window computed from sizes", "MelWeightMatrix", "BlackmanWindow", "HammingWindow", "HannWindow"
)

_ODD_FILL = "computes a wrong inverse if the spectrum is not as long as the signal"


@vjp(
    "DFT",
    case(real(2, 5, 3, 1)),
    case(real(2, 5, 3, 2), None, 1),
    case(real(2, 5, 3, 2), None, -3, inverse=1),
    case(real(2, 5, 3, 1), None, 0, inverse=1),
    case(real(2, 5, 2), 7, 1),
    case(real(2, 5, 2), 3, 1),
    case(real(2, 5, 2), 8, 1, inverse=1),
    case(real(2, 5, 1), 4, 1, inverse=1),
    case(real(2, 5, 1), None, 1, onesided=1),
    case(real(2, 6, 1), None, -2, onesided=1),
    case(real(2, 6, 1), 9, 1, onesided=1),
    case(real(2, 6, 1), 5, 1, onesided=1),
    case(real(2, 5, 3, 2), None, 1, inverse=1, onesided=1),
    case(real(2, 4, 3, 2), 7, 1, inverse=1, onesided=1),
    case(real(2, 5, 2), 5, 1, inverse=1, onesided=1, onnxruntime=_ODD_FILL),
    case(real(2, 3, 2), 8, -2, inverse=1, onesided=1, onnxruntime=_ODD_FILL),
    case(real(2, 1, 1)),
    case(real(2, 1, 2), 1, 1, inverse=1),
    case(real(1, 4, 2), 1, 1),
)
def dft(
    op: Builder,
    dy: Var,
    y: Var,
    x: Var,
    length: Var | None = None,
    axis: Var | None = None,
    *,
    inverse: int = 0,
    onesided: int = 0,
) -> Gradients:
    axis = op.const(-2) if axis is None else axis
    size = _size(op, x, axis)
    if inverse and onesided:
        n = _size(op, y, axis) if length is None else op.Reshape(length, [1])
        bins = op.Add(op.Div(n, [2]), [1])
        spectrum = op.DFT(dy, length, axis, onesided=1) * (_multiplicity(op, n, bins, x, axis) / op.cast(n, x.dtype))
        return (_resized(op, spectrum, bins, size, axis),)
    n = size if length is None else op.Reshape(length, [1])
    if onesided:
        dy = _resized(op, dy, op.Add(op.Div(n, [2]), [1]), n, axis)
    dx = op.Slice(_adjoint(op, dy, n, axis, inverse), [0], op.dim(x, -1), [-1])  # for a real signal, the real part
    return (_resized(op, dx, n, size, axis),)


def _size(op: Builder, x: Var, axis: Var) -> Var:
    """Return the size of ``x`` along an axis that may only be known at run time, as int64 [1]."""
    return op.dim(x, int(axis.const)) if axis.const is not None else op.Gather(op.Shape(x), op.Reshape(axis, [1]))


def _adjoint(op: Builder, dy: Var, n: Var, axis: Var, inverse: int) -> Var:
    """Return the adjoint of the complex Fourier transform of length ``n``, or of its inverse, applied to ``dy``."""
    count, turned = op.cast(n, dy.dtype), op.like(op.DFT(dy, None, axis, inverse=1 - inverse), dy)
    return turned / count if inverse else turned * count


def _resized(op: Builder, x: Var, size: Var, wanted: Var, axis: Var) -> Var:
    """Return ``x`` with zeros appended or elements dropped at the end of ``axis``, for length ``wanted``."""
    more = op.Sub(wanted, size)
    if more.const is not None and not more.const.any():
        return x
    changed = op.Pad(x, op.Concat([0], more, axis=0), None, op.Reshape(axis, [1]))
    if changed.shape is None:  # a run-time axis
        record_shape(changed.value, None if x.shape is None else (None,) * x.rank)
    return changed


def _multiplicity(op: Builder, n: Var, bins: Var, x: Var, axis: Var) -> Var:
    """Return the multiplicity of each bin of a one-sided spectrum: 2, or 1 for a bin that is its own mirror image."""
    k = op.Range(0, op.Squeeze(bins), 1)
    alone = op.Or(op.Equal(k, 0), op.Equal(op.Mul(k, 2), n))
    along = op.Equal(np.arange(x.rank), op.Mod(axis, x.rank))
    return op.Reshape(op.cast(op.Where(alone, 1, 2), x.dtype), op.Where(along, -1, 1))


@vjp(
    "STFT",
    case(real(2, 17, 1), 4, real(6), 6),
    case(real(2, 16, 1), 3, real(5)),
    case(real(2, 16, 1), 3, real(5), onesided=0),
    case(real(1, 12, 1), 5, None, 4),
    case(real(2, 12, 2), 3, real(4), 4, onesided=0),
    case(real(2, 12, 2), 5, None, 6, onesided=0),
    case(real(1, 9, 2), 2, real(5), onesided=1),
    case(real(2, 6, 1), 1, real(6)),
    case(real(1, 4, 1), 3, real(1)),
    case(real(2, 7, 1), 3, onnxruntime="requires a window or a frame length"),
)
def stft(
    op: Builder,
    dy: Var,
    y: Var,
    signal: Var,
    step: Var,
    window: Var | None = None,
    length: Var | None = None,
    *,
    onesided: int = 1,
) -> Gradients:
    """Return the gradient of the signal: the adjoint transforms of all frames' cotangents, added where frames overlap.

    Frame f is ``window · signal[f · step :]``.
    """
    given, signal = signal, op.Unsqueeze(signal, [2]) if signal.rank == 2 else signal  # as in onnxruntime
    if dy.shape is None:  # ONNX does not infer it without a window and a length
        record_shape(dy.value, (None,) * 4)
    n = op.dim(signal, 1) if window is None else op.dim(window, 0)
    n = op.Reshape(length, [1]) if length is not None else n
    axis = op.const(2)
    bins = op.Add(op.Div(n, [2]), [1])
    full = _resized(op, dy, bins, n, axis) if onesided else dy
    df = op.Slice(_adjoint(op, full, n, axis, 0), [0], op.dim(signal, 2), [3])
    first = op.Mul(op.Range(0, op.Squeeze(op.Shape(dy, start=1, end=2)), 1), op.Reshape(step, [1]))
    index = op.Add(op.Unsqueeze(first, [1]), op.Range(0, op.Squeeze(n), 1))
    weighted = df if window is None else df * op.Unsqueeze(window, [1])
    dx = put(op, weighted, op.Gather(positions(op, signal), index, axis=1), signal, "add")
    dx = dx if given is signal else op.Squeeze(dx, [2])
    if window is None:
        return (dx,)
    return dx, None, op.ReduceSum(df * op.Gather(signal, index, axis=1), [0, 1, 3], keepdims=0)


# --- columns -------------------------------------------------------------------------------------------

_AXES = "the number of axes must be known"


@vjp(
    "Col2Im",
    case(real(2, 6, 9), [4, 5], [2, 3], constant_literals=_AXES),
    case(real(1, 8, 4), [4, 4], [2, 2], strides=[2, 2]),
    case(real(1, 4, 6), [5, 4], [2, 2], strides=[2, 1], pads=[1, 0, 0, 1], dilations=[2, 2]),
    case(real(2, 12, 4), [3, 3], [2, 3], pads=[0, 1, 0, 0], strides=[1, 1]),
    case(real(1, 8, 12), [4, 3, 3], [2, 2, 2], strides=[1, 1, 1]),
    case(real(1, 8, 12), [3, 3, 3], [2, 2, 2], pads=[1, 0, 0, 0, 0, 0]),
    case(real(1, 4, 4), [7, 5], [2, 2], strides=[3, 2], dilations=[1, 1]),
    case(real(1, 1, 1), [1, 1], [1, 1], pads=[0, 0, 0, 0]),
)
def col2im(
    op: Builder,
    dy: Var,
    y: Var,
    x: Var,
    image_shape: Var,
    block_shape: Var,
    *,
    strides: Sequence[int] | None = None,
    pads: Sequence[int] | None = None,
    dilations: Sequence[int] | None = None,
) -> Gradients:
    """Return the adjoint of Col2Im: the columns ``dy[n, c, k·dilation + window·stride]``, gathered axis by axis."""
    axes = _axes(image_shape, strides, dilations, [0] * (len(pads or ()) // 2))
    ones, pads = [1] * axes, list(pads or [0] * 2 * axes)
    columns = op.Pad(dy, [0, 0, *pads[:axes], 0, 0, *pads[axes:]]) if any(pads) else dy
    for a in reversed(range(axes)):
        begin, end, stride, dilation = pads[a], pads[axes + a], (strides or ones)[a], (dilations or ones)[a]
        image, block = op.Slice(image_shape, [a], [a + 1]), op.Slice(block_shape, [a], [a + 1])
        room = op.Sub(op.Add(image, begin + end - 1), op.Mul(op.Sub(block, 1), dilation))
        windows = op.Add(op.Div(room, stride), 1)
        taps = op.Unsqueeze(op.Mul(op.Range(0, op.Squeeze(block), 1), dilation), [1])
        where = op.Add(taps, op.Mul(op.Range(0, op.Squeeze(windows), 1), stride))
        columns = op.Gather(columns, where, axis=2 + a)
    order = [0, 1, *range(2, 2 + 2 * axes, 2), *range(3, 3 + 2 * axes, 2)]
    return (reshaped(op, op.Transpose(columns, perm=order), x),)


def _axes(image_shape: Var, *lists: Sequence[int] | None) -> int:
    """Return the number of spatial axes, from the length of ``image_shape`` or of an attribute."""
    count = (image_shape.shape or (None,))[0]
    known = [count] if isinstance(count, int) else [len(v) for v in lists if v]
    if not known:
        raise ModelError(
            f"the number of image axes of Col2Im, the length of '{image_shape.value.name}', is unknown; declare the "
            "shape of that input, or set strides on the node"
        )
    return known[0]

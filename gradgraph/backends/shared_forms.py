"""Tables of forms shared by several backends that do not extend one another."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx_ir as ir

from gradgraph.backends.forms import Call, Forms
from gradgraph.graph.builder import Builder, Var
from gradgraph.graph.prune import is_wanted
from gradgraph.graph.shapes import record_shape
from gradgraph.rules.conv import hand_back
from gradgraph.rules.norm import columns, inverse_deviation
from gradgraph.rules.registry import case, positive, real
from gradgraph.rules.shape import reshaped
from gradgraph.rules.windows import Windows, sizes, spatial, windows

UNPOOLING = Forms()  # for runtimes without MaxUnpool
TRAINING = Forms()  # for inference runtimes: no indices of maxima, no norms in training mode


@UNPOOLING.add(
    "MaxUnpool",
    case(real(1, 2, 2, 2), [[[[5, 7], [13, 10]], [[16, 19], [25, 31]]]], kernel_shape=[2, 2], strides=[2, 2]),
    case(real(1, 1, 3), [[[0, 3, 7]]], kernel_shape=[2], strides=[3]),
)
def scattered_winners(
    op: Builder, x: Var, indices: Var, size: Var | None = None, *, kernel_shape: list[int], **attrs: Any
) -> Var | None:
    """Compute MaxUnpool by scattering x into zeros; None with pads or an output size."""
    if size is not None or x.shape is None or any(attrs.get("pads") or ()):
        return None
    strides = list(attrs.get("strides") or [1] * len(kernel_shape))
    last = op.shape(x) - op.const(np.array([0, 0, *[1] * len(kernel_shape)]))
    shape = last * op.const(np.array([1, 1, *strides])) + op.const(np.array([0, 0, *kernel_shape]))
    zeros = op.full(op.ReduceProd(shape, keepdims=1), 0, x.dtype)
    return op.Reshape(op.ScatterElements(zeros, op.Reshape(indices, [-1]), op.Reshape(x, [-1])), shape)


# --- norms ----------------------------------------------------------------------------------------------------

VECTORS = (real(3), real(3), real(3), positive(3))


@TRAINING.add(
    "BatchNormalization",
    case(real(4, 3), *VECTORS, training_mode=1, outputs=3),
    case(real(2, 3, 4, 2), *VECTORS, training_mode=1, outputs=3, momentum=0.0, epsilon=0.1),
)
def written_out_batch_norm(
    op: Builder,
    x: Var,
    scale: Var,
    bias: Var,
    mean: Var,
    var: Var,
    *,
    epsilon: float = 1e-5,
    momentum: float = 0.9,
    training_mode: int = 0,
) -> tuple[Var, Var, Var] | None:
    """Write BatchNormalization in training mode by its formula, for runtimes that do not support this mode.

    None in evaluation mode, or unless x is float32 of known rank.
    """
    if not training_mode or x.shape is None or x.dtype != ir.DataType.FLOAT:
        return None
    axes = [axis for axis in range(x.rank) if axis != 1]
    own = op.ReduceMean(x, axes, keepdims=0)
    centred = x - columns(op, own, x)
    spread = op.ReduceMean(centred * centred, axes, keepdims=0)
    slope = scale * inverse_deviation(op, spread, epsilon)
    y = centred * columns(op, slope, x) + columns(op, bias, x)
    running = [b if momentum == 0.0 else a * momentum + b * (1.0 - momentum) for a, b in ((mean, own), (var, spread))]
    return op.like(y, x), running[0], running[1]


def batch_norm_by_statistics(
    op: Builder,
    x: Var,
    scale: Var,
    bias: Var,
    mean: Var,
    var: Var,
    *,
    epsilon: float = 1e-5,
    training_mode: int = 0,
    **_: Any,
) -> Var | None:
    """Write BatchNormalization in evaluation mode by its formula.

    None in training mode, or unless x is float32 of known rank.
    """
    if training_mode or x.shape is None or x.dtype != ir.DataType.FLOAT:
        return None
    slope = scale * inverse_deviation(op, var, epsilon)
    return op.like((x - columns(op, mean, x)) * columns(op, slope, x) + columns(op, bias, x), x)


# --- the maximum of a window -------------------------------------------------------------------------------------


@TRAINING.add("MaxPoolGrad")
def compared_winners(op: Builder, dy: Var, x: Var, **attrs: Any) -> Var | None:
    """Compute MaxPoolGrad without indices: the first element that equals the maximum of its window gets the gradient.

    Elements are compared tap by tap (a tap is one position within the window). If windows are adjacent, the gradients
    of all taps are interleaved; otherwise one ConvTranspose, whose weights select taps, adds them up. None for
    ``ceil_mode``, unknown sizes, or unless x is float32.
    """
    seen = windows(**attrs)
    if sizes(x) is None or sizes(dy) is None or attrs.get("ceil_mode") or x.dtype != ir.DataType.FLOAT:
        return None
    largest = op.MaxPool(x, **attrs)
    padded = _padded(op, x, seen)
    won = [op.cast(op.Equal(tap, largest), x.dtype) for tap in _taps(op, padded, dy, seen)]
    free: Var | None = None
    parts = []
    for hit in won:
        parts.append(hit if free is None else hit * free)
        free = 1.0 - hit if free is None else free * (1.0 - hit)
    shares = [dy * part for part in parts]
    if seen.side_by_side and not any(seen.rest(x, dy)):
        return _woven(op, shares, x, dy, seen)
    return _added_up(op, shares, x, dy, seen)


def _padded(op: Builder, x: Var, seen: Windows) -> Var:
    """Pad ``x`` with the lowest float32, which is never selected as a maximum."""
    if not any(seen.pads):
        return x
    lowest = op.const(np.array(np.finfo(np.float32).min))
    return op.Pad(x, op.const(np.array(seen.pads)), lowest, op.const(np.array(spatial(x))))


def _taps(op: Builder, padded: Var, y: Var, seen: Windows) -> list[Var]:
    """Return one tensor per tap, shaped like ``y``, with the element at this tap of every window."""
    found = []
    for place in itertools.product(*(range(k) for k in seen.taps)):  # row by row
        starts = [t * d for t, d in zip(place, seen.dilations, strict=True)]
        ends = [s + (n - 1) * step + 1 for s, n, step in zip(starts, sizes(y) or (), seen.strides, strict=True)]
        found.append(op.like(op.Slice(padded, starts, ends, spatial(y), list(seen.strides)), y))
    return found


def _woven(op: Builder, shares: Sequence[Var], x: Var, y: Var, seen: Windows) -> Var:
    """Interleave ``shares``, one tensor [N, C, H, W] per tap of adjacent windows, to the shape of ``x``."""
    n, last = seen.rank, y.rank
    stacked = op.Concat(*(op.Unsqueeze(s, [last]) for s in shares), axis=last)
    apart = op.Reshape(stacked, op.Concat(op.shape(y), list(seen.taps), axis=0))
    order = [0, 1, *(axis for k in range(n) for axis in (2 + k, 2 + n + k))]
    return op.like(op.Reshape(op.Transpose(apart, perm=order), op.shape(x)), x)


def _added_up(op: Builder, shares: Sequence[Var], x: Var, y: Var, seen: Windows) -> Var:
    """Add up ``shares``, one tensor [N, C, H, W] per tap, at the pixels of ``x`` that taps read, by one-hot kernels."""
    rows = [op.Reshape(s, [-1, 1, *(sizes(y) or ())]) for s in shares]
    places = op.const(np.eye(len(shares), dtype=np.float32).reshape(len(shares), 1, *seen.taps))
    stacked = op.Concat(*rows, axis=1)
    record_shape(stacked.value, (None, len(shares), *(sizes(y) or ())))
    return reshaped(op, hand_back(op, stacked, places, x, seen, group=1), x)


# --- statistics -------------------------------------------------------------------------------------------------

TRAINING_WITH_STATISTICS = Forms(TRAINING)  # for runtimes that compute only the first output of a LayerNormalization


def reads_statistics(call: Call) -> bool:
    """Return whether any output of a norm other than the first is read."""
    return any(map(is_wanted, call.node.outputs[1:]))


@TRAINING_WITH_STATISTICS.add(
    "LayerNormalization",
    case(real(2, 3, 4), real(4), real(4), outputs=3),
    case(real(2, 3, 4), real(3, 4), axis=1, epsilon=0.1, outputs=3),
    when=reads_statistics,
)
def written_out_layer_norm(
    op: Builder, x: Var, scale: Var, bias: Var | None = None, *, axis: int = -1, epsilon: float = 1e-5, **_: Any
) -> tuple[Var, Var, Var] | None:
    """Write LayerNormalization, with its mean and inverse deviation, by its formula.

    None unless x is float32 of known rank.
    """
    if x.shape is None or x.dtype != ir.DataType.FLOAT:
        return None
    axes = list(range(axis % x.rank, x.rank))
    mean = op.ReduceMean(x, axes, keepdims=1)
    centred = x - mean
    inv = inverse_deviation(op, op.ReduceMean(centred * centred, axes, keepdims=1), epsilon)
    y = centred * inv * scale
    return op.like(y if bias is None else y + bias, x), mean, inv

"""Forms for onnxruntime's CUDA provider: cuDNN and cuBLAS where possible, no Scan, nothing on the CPU.

None of these forms has been measured. Forms without ``when`` exist because CUDA has no kernel for the operator (see
``cuda_kernels``); the docstrings of other forms say why they may be faster, and ``gradgraph tune --device cuda``
decides.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx_ir as ir

from gradgraph.backends.ort_cuda.cuda_table import form
from gradgraph.graph.builder import Builder, Var
from gradgraph.rules.conv import by_conv
from gradgraph.rules.placement import few_places, scattered, sizes_of, turned
from gradgraph.rules.registry import case, positive, real
from gradgraph.rules.windows import windows

# --- normalization ------------------------------------------------------------------------------------------


@form(
    "BatchNormalization",
    case(real(4, 3, 2, 5), real(3), real(3), real(3), positive(3), training_mode=1, outputs=3, momentum=0.0),
    case(real(4, 3), real(3), real(3), real(3), positive(3), training_mode=1, outputs=3, momentum=0.3, epsilon=0.1),
)
def separate_statistics(
    op: Builder, x: Var, scale: Var, b: Var, mean: Var, var: Var, *, training_mode: int = 0, **attrs: Any
) -> tuple[Var, Var, Var] | None:
    """Compute BatchNormalization in training mode by reductions and evaluation mode, as CUDA has no training mode.

    None in evaluation mode, or if the rank of x is unknown.
    """
    if not training_mode or x.shape is None:
        return None
    epsilon, keep = attrs.get("epsilon", 1e-5), attrs.get("momentum", 0.9)
    axes = [0, *range(2, x.rank)]
    batch_mean = op.ReduceMean(x, axes, keepdims=1)
    centred = x - batch_mean
    batch_mean = op.Reshape(batch_mean, [-1])
    batch_var = op.ReduceMean(centred * centred, axes, keepdims=0)
    y = op.BatchNormalization(x, scale, b, batch_mean, batch_var, epsilon=epsilon, momentum=keep, training_mode=0)
    return y, _blended(mean, batch_mean, keep), _blended(var, batch_var, keep)


def _blended(old: Var, new: Var, keep: float) -> Var:
    return new if keep == 0 else old * keep + new * (1 - keep)


# --- convolution --------------------------------------------------------------------------------------------


@form(
    "ConvGradInput",
    case(real(2, 6, 5, 5), real(6, 4, 3, 3), real(2, 4, 5, 5), pads=[1, 1, 1, 1]),
    case(real(2, 6, 3, 3), real(6, 4, 3, 3), real(2, 4, 6, 6), pads=[1, 1, 1, 1], strides=[2, 2]),
    case(real(2, 6, 4), real(6, 2, 3), real(2, 4, 6), group=2),
)
def backward_data(op: Builder, dy: Var, w: Var, x: Var, *, group: int | None = None, **attrs: Any) -> Var | None:
    """Compute ConvGradInput by ConvTranspose with unchanged weights, which runs cuDNN's input gradient.

    The portable form flips the weights in every step, as Conv is faster on CPUs. None if a size is unknown, or an
    output padding would not be below the stride.
    """
    seen = windows(**{**attrs, "kernel_shape": (w.shape or ())[2:]})
    rest = [r for r in seen.rest(x, dy) if r is not None]
    if (
        w.shape is None
        or len(rest) != seen.rank
        or any(r < 0 or r >= s for r, s in zip(rest, seen.strides, strict=True))
    ):
        return None
    return op.ConvTranspose(dy, w, group=group or 1, output_padding=rest, **seen.attrs)


@form(
    "ConvGradWeight",
    case(real(2, 4, 5, 5), real(2, 6, 5, 5), real(6, 4, 3, 3), pads=[1, 1, 1, 1]),
    case(real(2, 4, 6, 6), real(2, 6, 3, 3), real(6, 4, 3, 3), pads=[1, 1, 1, 1], strides=[2, 2]),
    when=lambda call: False,
)
def swapped(op: Builder, x: Var, dy: Var, w: Var, *, group: int | None = None, **attrs: Any) -> Var | None:
    """Compute ConvGradWeight by a Conv with batch and channels swapped, whose filter is as large as the image.

    This needs no im2col matrix, but has few outputs, each a long sum that a forward convolution does not parallelise;
    the product of the portable form is parallel over images. It is therefore a candidate for ``tune``, not the default.
    None for grouped convolutions, or unknown ranks.
    """
    seen = windows(**{**attrs, "kernel_shape": (w.shape or ())[2:]})
    if w.shape is None or x.shape is None or (group or 1) > 1:
        return None
    return by_conv(op, x, dy, w, seen, 1)


@form(
    "ConvTranspose",
    case(real(2, 3, 4, 5), real(3, 2, 3, 3), real(2), strides=[2, 2], pads=[0, 1, 1, 0], output_padding=[1, 0]),
    case(real(2, 4, 6), real(4, 1, 3), pads=[2, 0], group=2, dilations=[2]),
)
def cropped(op: Builder, x: Var, w: Var, b: Var | None = None, **attrs: Any) -> Var | None:
    """Write a ConvTranspose with uneven pads as one without pads and a crop, as cuDNN pads both ends equally.

    None if the pads are even, or implied by ``auto_pad`` or ``output_shape``.
    """
    pads = list(attrs.get("pads") or ())
    half = len(pads) // 2
    begins, ends = pads[:half], pads[half:]
    if begins == ends or attrs.get("output_shape") or attrs.get("auto_pad", "NOTSET") not in ("NOTSET", ""):
        return None
    whole = op.ConvTranspose(x, w, b, **{**attrs, "pads": [0] * len(pads)})
    stop = [-e if e else np.iinfo(np.int64).max for e in ends]
    return op.Slice(whole, begins, stop, list(range(2, 2 + half)))


# --- scattering ---------------------------------------------------------------------------------------------


@form(
    "GatherGrad",
    case(real(5, 3), [0, 2, 2, 0, 128], real(129, 3), axis=0),
    case(real(2, 5, 3), [1, 1, 3, 0, 1], real(2, 4, 3), axis=1),
)
def added(op: Builder, dy: Var, where: Var, x: Var, *, axis: int) -> Var | None:
    """Compute GatherGrad by adding rows of dy to zeros at the positions ``where``, with atomic operations.

    The portable form sorts positions, and the CPU has to wait for the number of distinct ones. None if the axis has few
    positions (``few_places``).
    """
    if x.shape is None or few_places(x, axis):
        return None
    front = [axis, *(i for i in range(x.rank) if i != axis)]
    rows = turned(op, dy, front)
    column = op.Reshape(op.cast(where, ir.DataType.INT64), [-1, *[1] * (x.rank - 1)])
    zeros = op.full(sizes_of(op, x, front), 0, rows.dtype)
    dx = scattered(op, zeros, op.Expand(column, op.shape(rows)), rows, 0, "add")
    return turned(op, dx, np.argsort(front).tolist())


# --- bits ---------------------------------------------------------------------------------------------------

_BYTES = np.arange(256, dtype=np.uint32)
_WORDS = np.array([[3, 2**32 - 1], [2**31 + 256, 77]], np.uint32)
_BITS = {ir.DataType.UINT32: 32, ir.DataType.UINT64: 64}


@form(
    "BitShift",
    case(_WORDS, np.uint32(16), direction="RIGHT"),
    case(_WORDS, np.uint32(15), direction="LEFT"),
)
def divided(op: Builder, x: Var, shift: Var, *, direction: str) -> Var | None:
    """Write BitShift by a constant as division or multiplication by a power of two, as CUDA has no BitShift.

    None if the shift is not constant, or not below the number of bits.
    """
    known = shift.const
    if known is None or x.dtype not in _BITS or int(known.max(initial=0)) >= _BITS[x.dtype]:
        return None
    power = op.const(np.left_shift(known.dtype.type(1), known))
    return x * power if direction == "LEFT" else x / power


@form("BitwiseXor", case(_WORDS, _WORDS[::-1]), case(_WORDS, np.uint32(2**31 + 77)))
def by_bytes(op: Builder, x: Var, y: Var) -> Var | None:
    """Compute BitwiseXor of uint32 byte by byte from a table of 256 x 256 results; None for other types.

    CUDA has no bitwise kernels.
    """
    if x.dtype != ir.DataType.UINT32:
        return None
    table = op.const(np.bitwise_xor.outer(_BYTES, _BYTES).reshape(-1))
    total: Var | None = None
    for place in range(4):
        weight = op.const(np.uint32(256**place))
        a, b = (op.Mod(v / weight, op.const(np.uint32(256))) for v in (x, y))
        at = op.Cast(a * op.const(np.uint32(256)) + b, to=int(ir.DataType.INT64))
        byte = op.Gather(table, at) * weight
        total = byte if total is None else total + byte
    return total

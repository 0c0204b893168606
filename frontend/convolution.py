"""Convolutions and transposed convolutions in 1, 2 and 3 dimensions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from gradgraph.errors import ModelError
from gradgraph.frontend.dims import Extent, floor_divide
from gradgraph.frontend.trace import TensorLike, op, tensor

if TYPE_CHECKING:
    from gradgraph.frontend.tensor import Tensor

__all__ = ["conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d"]

Spatial: TypeAlias = "int | Sequence[int]"


def per_axis(value: Spatial, rank: int, what: str) -> list[int]:
    """Return ``value``, one number or one per spatial axis, as ``rank`` numbers; ``what`` is its name in errors."""
    numbers = [int(value)] * rank if isinstance(value, int | np.integer) else [int(v) for v in value]
    if len(numbers) != rank:
        raise ModelError(f"{what} {tuple(numbers)} must be one number or {rank}, one per spatial dimension")
    return numbers


def window_dim(size: Extent, kernel: int, stride: int, pads: int, dilation: int, ceil_mode: bool = False) -> Extent:
    """Return the number of windows along an axis: ``floor((size + pads - dilation*(kernel-1) - 1) / stride) + 1``."""
    rest: Extent = size + (pads - dilation * (kernel - 1) - 1)
    return floor_divide(rest + (stride - 1 if ceil_mode else 0), stride) + 1


def conv1d(
    x: TensorLike,
    weight: TensorLike,
    bias: TensorLike | None = None,
    stride: Spatial = 1,
    padding: str | Spatial = 0,
    dilation: Spatial = 1,
    groups: int = 1,
) -> Tensor:
    """Convolution of ``x`` ``[N, C, *spatial]`` with ``weight`` ``[out, C/groups, *kernel]``.

    ``padding`` is "same", "valid", or the padding of each axis.
    """
    x, weight = tensor(x), tensor(weight)
    _check(x, weight, x.shape[1], weight.shape[1] * groups)
    rank = weight.ndim - 2
    kernel = [int(k) for k in weight.shape[2:]]
    strides, dilations = per_axis(stride, rank, "stride"), per_axis(dilation, rank, "dilation")
    begins, ends = conv_pads(padding, kernel, strides, dilations)
    spatial = [
        window_dim(n, k, s, b + e, d)
        for n, k, s, b, e, d in zip(x.shape[2:], kernel, strides, begins, ends, dilations, strict=True)
    ]
    return op.Conv(
        x,
        weight,
        bias,
        kernel_shape=kernel,
        strides=strides,
        pads=begins + ends,
        dilations=dilations,
        group=groups,
        shape=[x.shape[0], weight.shape[0], *spatial],
    )


conv2d = conv3d = conv1d


def conv_pads(
    padding: str | Spatial, kernel: Sequence[int], strides: Sequence[int], dilations: Sequence[int]
) -> tuple[list[int], list[int]]:
    """Return the padding before and after each axis; if "same" needs an odd number, the larger part comes after."""
    if not isinstance(padding, str):
        pads = per_axis(padding, len(kernel), "padding")
        return pads, pads
    if padding == "valid":
        return [0] * len(kernel), [0] * len(kernel)
    if padding != "same" or any(s != 1 for s in strides):
        raise ModelError(
            f"padding={padding!r} with stride {tuple(strides)}: use numbers, 'valid', or 'same' with stride 1"
        )
    total = [d * (k - 1) for d, k in zip(dilations, kernel, strict=True)]
    return [t // 2 for t in total], [t - t // 2 for t in total]


def conv_transpose1d(
    x: TensorLike,
    weight: TensorLike,
    bias: TensorLike | None = None,
    stride: Spatial = 1,
    padding: Spatial = 0,
    output_padding: Spatial = 0,
    groups: int = 1,
    dilation: Spatial = 1,
) -> Tensor:
    """Transposed convolution of ``x`` ``[N, C, *spatial]`` with ``weight`` ``[C, out/groups, *kernel]``."""
    x, weight = tensor(x), tensor(weight)
    _check(x, weight, x.shape[1], weight.shape[0])
    rank = weight.ndim - 2
    kernel = [int(k) for k in weight.shape[2:]]
    strides, dilations = per_axis(stride, rank, "stride"), per_axis(dilation, rank, "dilation")
    pads, extra = per_axis(padding, rank, "padding"), per_axis(output_padding, rank, "output_padding")
    spatial = [
        (n - 1) * s + (d * (k - 1) + 1 + e - 2 * p)
        for n, k, s, p, d, e in zip(x.shape[2:], kernel, strides, pads, dilations, extra, strict=True)
    ]
    return op.ConvTranspose(
        x,
        weight,
        bias,
        kernel_shape=kernel,
        strides=strides,
        pads=pads + pads,
        dilations=dilations,
        output_padding=extra,
        group=groups,
        shape=[x.shape[0], weight.shape[1] * groups, *spatial],
    )


conv_transpose2d = conv_transpose3d = conv_transpose1d


def _check(x: Tensor, weight: Tensor, channels: Extent, expected: Extent) -> None:
    if x.ndim != weight.ndim:
        raise ModelError(
            f"a convolution with a kernel of {weight.ndim - 2} dimensions got an input of shape {x.shape}; expected "
            f"[batch, channels] and {weight.ndim - 2} more"
        )
    if isinstance(channels, int) and channels != expected:
        raise ModelError(f"a convolution over {expected} channels got an input of shape {x.shape}; channels are axis 1")

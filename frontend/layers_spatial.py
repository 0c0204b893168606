"""Convolutions, pools, padding and resizing as layers.

Arguments, their order, their defaults and the names and layouts of parameters are those of ``torch.nn``.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from gradgraph.errors import ModelError
from gradgraph.frontend import convolution, pooling, resampling
from gradgraph.frontend.convolution import Spatial, per_axis
from gradgraph.frontend.function_layers import layer_of
from gradgraph.frontend.layers import empty, fan_in_uniform
from gradgraph.frontend.module import Module, layers_in
from gradgraph.frontend.trace import TensorLike

# --- convolutions --------------------------------------------------------------------------------


class _Conv(Module):
    rank: ClassVar[int]
    transposed: ClassVar[bool] = False

    def __init_subclass__(cls, rank: int | None = None) -> None:
        super().__init_subclass__()
        if rank is not None:
            cls.rank = rank

    def _create(self, in_channels: int, out_channels: int, kernel_size: Spatial, groups: int, bias: bool) -> None:
        if in_channels % groups or out_channels % groups:
            raise ModelError(
                f"{in_channels} input and {out_channels} output channels must be divisible by groups={groups}"
            )
        self.in_channels, self.out_channels, self.groups = in_channels, out_channels, groups
        self.kernel_size = tuple(per_axis(kernel_size, self.rank, "kernel_size"))
        outer, inner = (in_channels, out_channels) if self.transposed else (out_channels, in_channels)
        self.weight = empty(outer, inner // groups, *self.kernel_size)
        self.register_parameter("bias", empty(out_channels) if bias else None)
        fan_in_uniform(self.weight, self.bias)

    def extra_repr(self) -> str:
        return f"{self.in_channels}, {self.out_channels}, kernel_size={self.kernel_size}"


class _ConvNd(_Conv):
    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: Spatial,
        stride: Spatial = 1,
        padding: str | Spatial = 0,
        dilation: Spatial = 1,
        groups: int = 1,
        bias: bool = True,
        padding_mode: str = "zeros",
    ) -> None:
        super().__init__()
        if padding_mode not in ("zeros", "reflect", "replicate", "circular"):
            raise ModelError(
                f"a convolution has no padding_mode {padding_mode!r}; use zeros, reflect, replicate or circular"
            )
        self._create(in_channels, out_channels, kernel_size, groups, bias)
        self.stride, self.padding, self.dilation, self.padding_mode = stride, padding, dilation, padding_mode

    def forward(self, x: TensorLike) -> Any:
        padding = self.padding
        if self.padding_mode != "zeros":
            strides, dilations = (
                per_axis(self.stride, self.rank, "stride"),
                per_axis(self.dilation, self.rank, "dilation"),
            )
            begins, ends = convolution.conv_pads(padding, self.kernel_size, strides, dilations)
            pairs = [n for pair in list(zip(begins, ends, strict=True))[::-1] for n in pair]
            x, padding = resampling.pad(x, pairs, self.padding_mode), 0
        return convolution.conv1d(x, self.weight, self.bias, self.stride, padding, self.dilation, self.groups)


class Conv1d(_ConvNd, rank=1):
    """Convolution of ``[N, C, L]``."""


class Conv2d(_ConvNd, rank=2):
    """Convolution of ``[N, C, H, W]``."""


class Conv3d(_ConvNd, rank=3):
    """Convolution of ``[N, C, D, H, W]``."""


class _ConvTransposeNd(_Conv):
    transposed = True

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: Spatial,
        stride: Spatial = 1,
        padding: Spatial = 0,
        output_padding: Spatial = 0,
        groups: int = 1,
        bias: bool = True,
        dilation: Spatial = 1,
    ) -> None:
        super().__init__()
        self._create(in_channels, out_channels, kernel_size, groups, bias)
        self.stride, self.padding, self.output_padding, self.dilation = stride, padding, output_padding, dilation

    def forward(self, x: TensorLike) -> Any:
        return convolution.conv_transpose1d(
            x, self.weight, self.bias, self.stride, self.padding, self.output_padding, self.groups, self.dilation
        )


class ConvTranspose1d(_ConvTransposeNd, rank=1):
    """Transposed convolution of ``[N, C, L]``."""


class ConvTranspose2d(_ConvTransposeNd, rank=2):
    """Transposed convolution of ``[N, C, H, W]``."""


class ConvTranspose3d(_ConvTransposeNd, rank=3):
    """Transposed convolution of ``[N, C, D, H, W]``."""


# --- pools ---------------------------------------------------------------------------------------


layer = functools.partial(layer_of, __name__)

MaxPool1d, MaxPool2d, MaxPool3d = (
    layer(f"MaxPool{rank}d", pool, "kernel_size stride padding dilation return_indices ceil_mode")
    for rank, pool in enumerate((pooling.max_pool1d, pooling.max_pool2d, pooling.max_pool3d), start=1)
)
AvgPool1d, AvgPool2d, AvgPool3d = (
    layer(f"AvgPool{rank}d", pool, "kernel_size stride padding ceil_mode count_include_pad")
    for rank, pool in enumerate((pooling.avg_pool1d, pooling.avg_pool2d, pooling.avg_pool3d), start=1)
)
AdaptiveAvgPool1d = layer("AdaptiveAvgPool1d", pooling.adaptive_avg_pool1d, "output_size")
AdaptiveAvgPool2d = layer("AdaptiveAvgPool2d", pooling.adaptive_avg_pool2d, "output_size")
AdaptiveAvgPool3d = layer("AdaptiveAvgPool3d", pooling.adaptive_avg_pool3d, "output_size")
AdaptiveMaxPool1d = layer("AdaptiveMaxPool1d", pooling.adaptive_max_pool1d, "output_size")
AdaptiveMaxPool2d = layer("AdaptiveMaxPool2d", pooling.adaptive_max_pool2d, "output_size")
AdaptiveMaxPool3d = layer("AdaptiveMaxPool3d", pooling.adaptive_max_pool3d, "output_size")


# --- resizing and padding ------------------------------------------------------------------------


Upsample = layer("Upsample", resampling.interpolate, "size scale_factor mode align_corners")
PixelShuffle = layer("PixelShuffle", resampling.pixel_shuffle, "upscale_factor")
PixelUnshuffle = layer("PixelUnshuffle", resampling.pixel_unshuffle, "downscale_factor")


class _Pad(Module):
    mode: ClassVar[str]

    def __init__(self, padding: Spatial) -> None:
        super().__init__()
        self.padding = [int(padding)] * 4 if isinstance(padding, int | np.integer) else list(padding)
        self.value = 0.0

    def forward(self, x: TensorLike) -> Any:
        return resampling.pad(x, self.padding, self.mode, self.value)


class ZeroPad2d(_Pad):
    """Padding of the last two dimensions with zeros: (left, right, top, bottom)."""

    mode = "constant"


class ReflectionPad2d(_Pad):
    """Padding of the last two dimensions by mirroring at the border: (left, right, top, bottom)."""

    mode = "reflect"


class ReplicationPad2d(_Pad):
    """Padding of the last two dimensions with the border value: (left, right, top, bottom)."""

    mode = "replicate"


class ConstantPad2d(_Pad):
    """Padding of the last two dimensions with one value: (left, right, top, bottom)."""

    mode = "constant"

    def __init__(self, padding: Spatial, value: float) -> None:
        super().__init__(padding)
        self.value = value


if not TYPE_CHECKING:
    __all__ = layers_in(globals())

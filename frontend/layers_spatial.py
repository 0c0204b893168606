"""Convolutions, pools, padding and resizing as layers.

Arguments, their order, their defaults and the names and layouts of parameters are those of ``torch.nn``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import numpy as np

from gradgraph.errors import ModelError
from gradgraph.frontend import convolution, pooling, resampling
from gradgraph.frontend.convolution import Spatial, per_axis
from gradgraph.frontend.layers import empty, fan_in_uniform
from gradgraph.frontend.module import Module
from gradgraph.frontend.trace import TensorLike

__all__ = [
    "AdaptiveAvgPool1d",
    "AdaptiveAvgPool2d",
    "AdaptiveAvgPool3d",
    "AdaptiveMaxPool1d",
    "AdaptiveMaxPool2d",
    "AdaptiveMaxPool3d",
    "AvgPool1d",
    "AvgPool2d",
    "AvgPool3d",
    "ConstantPad2d",
    "Conv1d",
    "Conv2d",
    "Conv3d",
    "ConvTranspose1d",
    "ConvTranspose2d",
    "ConvTranspose3d",
    "MaxPool1d",
    "MaxPool2d",
    "MaxPool3d",
    "PixelShuffle",
    "PixelUnshuffle",
    "ReflectionPad2d",
    "ReplicationPad2d",
    "Upsample",
    "ZeroPad2d",
]


class _Ranked(Module):
    """Base class of layers over ``rank`` spatial axes."""

    rank: ClassVar[int]

    def __init_subclass__(cls, rank: int | None = None) -> None:
        super().__init_subclass__()
        if rank is not None:
            cls.rank = rank


# --- convolutions --------------------------------------------------------------------------------


class _Conv(_Ranked):
    transposed: ClassVar[bool] = False

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


class _MaxPool(_Ranked):
    def __init__(
        self,
        kernel_size: Spatial,
        stride: Spatial | None = None,
        padding: Spatial = 0,
        dilation: Spatial = 1,
        return_indices: bool = False,
        ceil_mode: bool = False,
    ) -> None:
        super().__init__()
        if return_indices:
            raise ModelError(
                "max pooling does not support return_indices=True, as the indices of ONNX differ from PyTorch's; leave "
                "it False"
            )
        self.options = (kernel_size, stride, padding, dilation, ceil_mode)

    def forward(self, x: TensorLike) -> Any:
        return pooling.max_pool(x, self.rank, *self.options)


class _AvgPool(_Ranked):
    def __init__(
        self,
        kernel_size: Spatial,
        stride: Spatial | None = None,
        padding: Spatial = 0,
        ceil_mode: bool = False,
        count_include_pad: bool = True,
    ) -> None:
        super().__init__()
        self.options = (kernel_size, stride, padding, ceil_mode, count_include_pad)

    def forward(self, x: TensorLike) -> Any:
        return pooling.avg_pool(x, self.rank, *self.options)


class _Adaptive(_Ranked):
    function: ClassVar[Callable[..., Any]]

    def __init__(self, output_size: int | Sequence[int | None] | None) -> None:
        super().__init__()
        self.output_size = output_size

    def forward(self, x: TensorLike) -> Any:
        return type(self).function(x, self.rank, self.output_size)


class _AdaptiveAvg(_Adaptive):
    function = staticmethod(pooling.adaptive_avg_pool)


class _AdaptiveMax(_Adaptive):
    function = staticmethod(pooling.adaptive_max_pool)


class MaxPool1d(_MaxPool, rank=1):
    """Maximum of windows of ``[N, C, L]``."""


class MaxPool2d(_MaxPool, rank=2):
    """Maximum of windows of ``[N, C, H, W]``."""


class MaxPool3d(_MaxPool, rank=3):
    """Maximum of windows of ``[N, C, D, H, W]``."""


class AvgPool1d(_AvgPool, rank=1):
    """Mean of windows of ``[N, C, L]``."""


class AvgPool2d(_AvgPool, rank=2):
    """Mean of windows of ``[N, C, H, W]``."""


class AvgPool3d(_AvgPool, rank=3):
    """Mean of windows of ``[N, C, D, H, W]``."""


class AdaptiveAvgPool1d(_AdaptiveAvg, rank=1):
    """Means of ``[N, C, L]`` over ``output_size`` windows per axis; 1 is global pooling."""


class AdaptiveAvgPool2d(_AdaptiveAvg, rank=2):
    """Means of ``[N, C, H, W]`` over ``output_size`` windows per axis; 1 is global pooling."""


class AdaptiveAvgPool3d(_AdaptiveAvg, rank=3):
    """Means of ``[N, C, D, H, W]`` over ``output_size`` windows per axis; 1 is global pooling."""


class AdaptiveMaxPool1d(_AdaptiveMax, rank=1):
    """Maxima of ``[N, C, L]`` over ``output_size`` windows per axis; 1 is global pooling."""


class AdaptiveMaxPool2d(_AdaptiveMax, rank=2):
    """Maxima of ``[N, C, H, W]`` over ``output_size`` windows per axis; 1 is global pooling."""


class AdaptiveMaxPool3d(_AdaptiveMax, rank=3):
    """Maxima of ``[N, C, D, H, W]`` over ``output_size`` windows per axis; 1 is global pooling."""


# --- resizing and padding ------------------------------------------------------------------------


class Upsample(Module):
    """``[N, C, *spatial]`` resized to ``size`` or by ``scale_factor``."""

    def __init__(
        self,
        size: Spatial | None = None,
        scale_factor: float | Sequence[float] | None = None,
        mode: str = "nearest",
        align_corners: bool | None = None,
    ) -> None:
        super().__init__()
        self.options = (size, scale_factor, mode, align_corners)

    def forward(self, x: TensorLike) -> Any:
        return resampling.interpolate(x, *self.options)


class PixelShuffle(Module):
    """Channels to space: ``[N, C·r², H, W]`` to ``[N, C, H·r, W·r]``."""

    def __init__(self, upscale_factor: int) -> None:
        super().__init__()
        self.upscale_factor = upscale_factor

    def forward(self, x: TensorLike) -> Any:
        return resampling.pixel_shuffle(x, self.upscale_factor)


class PixelUnshuffle(Module):
    """Space to channels: the inverse of PixelShuffle."""

    def __init__(self, downscale_factor: int) -> None:
        super().__init__()
        self.downscale_factor = downscale_factor

    def forward(self, x: TensorLike) -> Any:
        return resampling.pixel_unshuffle(x, self.downscale_factor)


class _Pad(Module):
    mode: ClassVar[str]

    def __init__(self, padding: Spatial) -> None:
        super().__init__()
        self.padding = [int(padding)] * 4 if isinstance(padding, int | np.integer) else list(padding)
        self.value = 0.0

    def forward(self, x: TensorLike) -> Any:
        return resampling.pad(x, self.padding, self.mode, self.value)


class ZeroPad2d(_Pad):
    """Zeros around the last two dimensions: (left, right, top, bottom)."""

    mode = "constant"


class ReflectionPad2d(_Pad):
    """The image mirrored at its border: (left, right, top, bottom)."""

    mode = "reflect"


class ReplicationPad2d(_Pad):
    """The border repeated: (left, right, top, bottom)."""

    mode = "replicate"


class ConstantPad2d(_Pad):
    """One value around the last two dimensions: (left, right, top, bottom)."""

    mode = "constant"

    def __init__(self, padding: Spatial, value: float) -> None:
        super().__init__(padding)
        self.value = value

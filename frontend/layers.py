"""Layers for linear maps, normalisation, embedding, dropout and reshaping.

Arguments, their order, their defaults and the names and layouts of parameters are those of ``torch.nn``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from gradgraph.errors import ModelError
from gradgraph.frontend import attention, init, normalization, products, shaping
from gradgraph.frontend.function_layers import layer_of
from gradgraph.frontend.module import Module, Parameter, layers_in
from gradgraph.frontend.trace import TensorLike, tensor


def empty(*shape: int) -> Parameter:
    return Parameter(np.zeros(shape, np.float32))


def fan_in_uniform(weight: Parameter, bias: Parameter | None) -> None:
    """Fill ``weight`` and ``bias`` with uniform numbers in ``±1 / sqrt(fan_in)``, PyTorch's default for linear and
    convolution layers.
    """
    init.kaiming_uniform_(weight, a=math.sqrt(5.0))
    if bias is not None:
        bound = 1.0 / math.sqrt(init.fans(weight.data.shape)[0])
        init.uniform_(bias, -bound, bound)


class Identity(Module):
    """The identity; accepts any constructor arguments."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__()

    def forward(self, x: TensorLike) -> Any:
        return tensor(x)


class Linear(Module):
    """``x @ weight.T + bias`` over the last dimension; ``weight`` is ``[out_features, in_features]``."""

    def __init__(self, in_features: int, out_features: int, bias: bool = True) -> None:
        super().__init__()
        self.in_features, self.out_features = in_features, out_features
        self.weight = empty(out_features, in_features)
        self.bias = empty(out_features) if bias else None
        self.register_parameter("bias", self.bias)
        fan_in_uniform(self.weight, self.bias)

    def forward(self, x: TensorLike) -> Any:
        return products.linear(x, self.weight, self.bias)

    def extra_repr(self) -> str:
        return f"{self.in_features}, {self.out_features}"


class Bilinear(Module):
    """``x1 A x2 + bias`` with one matrix ``A`` per output feature."""

    def __init__(self, in1_features: int, in2_features: int, out_features: int, bias: bool = True) -> None:
        super().__init__()
        bound = 1.0 / math.sqrt(in1_features)
        self.weight = init.uniform_(empty(out_features, in1_features, in2_features), -bound, bound)
        self.register_parameter("bias", init.uniform_(empty(out_features), -bound, bound) if bias else None)

    def forward(self, x1: TensorLike, x2: TensorLike) -> Any:
        return products.bilinear(x1, x2, self.weight, self.bias)


# --- normalisation -------------------------------------------------------------------------------


class _BatchNorm(Module):
    ranks: ClassVar[tuple[int, ...]]

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
    ) -> None:
        super().__init__()
        if momentum is None and track_running_stats:
            raise ModelError(
                "BatchNorm does not support momentum=None, as ONNX has no cumulative average; use a number such as 0.1"
            )
        self.num_features, self.eps, self.momentum = num_features, eps, 0.1 if momentum is None else momentum
        self.register_parameter("weight", init.ones_(empty(num_features)) if affine else None)
        self.register_parameter("bias", empty(num_features) if affine else None)
        self.register_buffer("running_mean", np.zeros(num_features, np.float32) if track_running_stats else None)
        self.register_buffer("running_var", np.ones(num_features, np.float32) if track_running_stats else None)

    def forward(self, x: TensorLike) -> Any:
        x = tensor(x)
        if x.ndim not in self.ranks:
            wanted = " or ".join(map(str, self.ranks))
            raise ModelError(f"{type(self).__name__} got an input of shape {x.shape}; expected {wanted} dimensions")
        normalization.channels(x, self.num_features)
        return normalization.batch_norm(
            x, self.running_mean, self.running_var, self.weight, self.bias, momentum=self.momentum, eps=self.eps
        )

    def extra_repr(self) -> str:
        return f"{self.num_features}, eps={self.eps}, momentum={self.momentum}"


class BatchNorm1d(_BatchNorm):
    """Batch normalisation of ``[N, C]`` or ``[N, C, L]``."""

    ranks = (2, 3)


class BatchNorm2d(_BatchNorm):
    """Batch normalisation of ``[N, C, H, W]``."""

    ranks = (4,)


class BatchNorm3d(_BatchNorm):
    """Batch normalisation of ``[N, C, D, H, W]``."""

    ranks = (5,)


class LayerNorm(Module):
    """Normalisation over the last dimensions, with a scale and a bias of the shape ``normalized_shape``."""

    def __init__(
        self,
        normalized_shape: int | Sequence[int],
        eps: float = 1e-5,
        elementwise_affine: bool = True,
        bias: bool = True,
    ) -> None:
        super().__init__()
        self.normalized_shape = normalization.sizes_of(normalized_shape)
        self.eps = eps
        scaled = elementwise_affine
        self.register_parameter("weight", init.ones_(empty(*self.normalized_shape)) if scaled else None)
        self.register_parameter("bias", empty(*self.normalized_shape) if scaled and bias else None)

    def forward(self, x: TensorLike) -> Any:
        return normalization.layer_norm(x, self.normalized_shape, self.weight, self.bias, self.eps)

    def extra_repr(self) -> str:
        return f"{self.normalized_shape}, eps={self.eps}"


class RMSNorm(Module):
    """Division by the root mean square over the last dimensions, with a scale of the shape ``normalized_shape``."""

    def __init__(
        self, normalized_shape: int | Sequence[int], eps: float | None = None, elementwise_affine: bool = True
    ) -> None:
        super().__init__()
        self.normalized_shape = normalization.sizes_of(normalized_shape)
        self.eps = eps
        self.register_parameter("weight", init.ones_(empty(*self.normalized_shape)) if elementwise_affine else None)

    def forward(self, x: TensorLike) -> Any:
        return normalization.rms_norm(x, self.normalized_shape, self.weight, self.eps)


class GroupNorm(Module):
    """Normalisation over groups of channels, with a scale and a bias per channel."""

    def __init__(self, num_groups: int, num_channels: int, eps: float = 1e-5, affine: bool = True) -> None:
        super().__init__()
        self.num_groups, self.num_channels, self.eps = num_groups, num_channels, eps
        self.register_parameter("weight", init.ones_(empty(num_channels)) if affine else None)
        self.register_parameter("bias", empty(num_channels) if affine else None)

    def forward(self, x: TensorLike) -> Any:
        normalization.channels(tensor(x), self.num_channels)
        return normalization.group_norm(x, self.num_groups, self.weight, self.bias, self.eps)


class _InstanceNorm(Module):
    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float = 0.1,
        affine: bool = False,
        track_running_stats: bool = False,
    ) -> None:
        super().__init__()
        if track_running_stats:
            raise ModelError(
                "InstanceNorm does not support track_running_stats=True, for which ONNX has no operator; use False"
            )
        self.num_features, self.eps = num_features, eps
        self.register_parameter("weight", init.ones_(empty(num_features)) if affine else None)
        self.register_parameter("bias", empty(num_features) if affine else None)

    def forward(self, x: TensorLike) -> Any:
        normalization.channels(tensor(x), self.num_features)
        return normalization.instance_norm(x, weight=self.weight, bias=self.bias, eps=self.eps)


class InstanceNorm1d(_InstanceNorm):
    """Normalisation of each channel of each sample of ``[N, C, L]``."""


class InstanceNorm2d(_InstanceNorm):
    """Normalisation of each channel of each sample of ``[N, C, H, W]``."""


class InstanceNorm3d(_InstanceNorm):
    """Normalisation of each channel of each sample of ``[N, C, D, H, W]``."""


LocalResponseNorm = layer_of(__name__, "LocalResponseNorm", normalization.local_response_norm, "size alpha beta k")


# --- the rest ------------------------------------------------------------------------------------


Dropout = layer_of(__name__, "Dropout", attention.dropout, "p inplace")


class Embedding(Module):
    """A table of vectors, looked up by integer index. The row ``padding_idx`` starts as zeros and is not trained."""

    def __init__(self, num_embeddings: int, embedding_dim: int, padding_idx: int | None = None) -> None:
        super().__init__()
        if padding_idx is not None and not -num_embeddings <= padding_idx < num_embeddings:
            raise ModelError(f"padding_idx {padding_idx} must be one of the {num_embeddings} rows")
        self.num_embeddings, self.embedding_dim, self.padding_idx = num_embeddings, embedding_dim, padding_idx
        self.weight = init.normal_(empty(num_embeddings, embedding_dim))
        if padding_idx is not None:
            self.weight.data[padding_idx] = 0.0

    def forward(self, x: TensorLike) -> Any:
        return attention.embedding(x, self.weight, self.padding_idx)

    def extra_repr(self) -> str:
        return f"{self.num_embeddings}, {self.embedding_dim}"


class Flatten(Module):
    """Dimensions ``start_dim`` to ``end_dim`` flattened to one."""

    def __init__(self, start_dim: int = 1, end_dim: int = -1) -> None:
        super().__init__()
        self.start_dim, self.end_dim = start_dim, end_dim

    def forward(self, x: TensorLike) -> Any:
        return shaping.flatten(x, self.start_dim, self.end_dim)


class Unflatten(Module):
    """The dimension ``dim`` split into several, of the sizes ``unflattened_size``."""

    def __init__(self, dim: int, unflattened_size: Sequence[int]) -> None:
        super().__init__()
        self.dim, self.unflattened_size = dim, tuple(unflattened_size)

    def forward(self, x: TensorLike) -> Any:
        return shaping.unflatten(x, self.dim, self.unflattened_size)


if not TYPE_CHECKING:
    __all__ = layers_in(globals())

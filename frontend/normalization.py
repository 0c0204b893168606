"""Normalisation over batches, layers, groups and instances."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from gradgraph.errors import ModelError
from gradgraph.frontend.pointwise import real
from gradgraph.frontend.reductions import mean
from gradgraph.frontend.trace import TensorLike, op, tensor

if TYPE_CHECKING:
    from gradgraph.frontend.tensor import Tensor

__all__ = ["batch_norm", "group_norm", "instance_norm", "layer_norm", "local_response_norm", "rms_norm"]


def affine(x: Tensor, scale: TensorLike | None, bias: TensorLike | None, shape: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Return scale and bias as tensors; None becomes a constant of shape ``shape``: 1 for the scale, 0 for the bias."""
    return (
        tensor(np.ones(shape, np.float32) if scale is None else scale, x.dtype),
        tensor(np.zeros(shape, np.float32) if bias is None else bias, x.dtype),
    )


def channels(x: Tensor, expected: int | None = None) -> int:
    size = x.shape[1] if x.ndim > 1 else None
    if not isinstance(size, int) or (expected is not None and size != expected):
        wanted = "a fixed number of" if expected is None else str(expected)
        raise ModelError(f"normalisation got an input of shape {x.shape}; axis 1 must have {wanted} channels")
    return size


def batch_norm(
    x: TensorLike,
    running_mean: TensorLike | None,
    running_var: TensorLike | None,
    weight: TensorLike | None = None,
    bias: TensorLike | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    """BatchNormalization in inference mode; building a training step switches it to batch statistics.

    Without running statistics, batch statistics are used in both modes.
    """
    x = real(x)
    if training and running_mean is not None:
        raise ModelError(
            "batch_norm got training=True, but is traced in inference mode; leave training=False, as building a "
            "training step switches the mode"
        )
    count = channels(x)
    if running_mean is None or running_var is None:
        axes = [a for a in range(x.ndim) if a != 1]
        centred = x - mean(x, axes, keepdim=True)
        y = centred / (mean(centred * centred, axes, keepdim=True) + eps).sqrt()
        column = [count] + [1] * (x.ndim - 2)
        y = y if weight is None else y * tensor(weight).reshape(column)
        return y if bias is None else y + tensor(bias).reshape(column)
    scale, shift = affine(x, weight, bias, [count])
    statistics = tensor(running_mean, x.dtype), tensor(running_var, x.dtype)
    return op.BatchNormalization(
        x, scale, shift, *statistics, epsilon=eps, momentum=1.0 - momentum, training_mode=0, shape=x.shape
    )


def layer_norm(
    x: TensorLike,
    normalized_shape: int | Sequence[int],
    weight: TensorLike | None = None,
    bias: TensorLike | None = None,
    eps: float = 1e-5,
) -> Tensor:
    """Normalise ``x`` to mean 0 and variance 1 over its last dimensions, whose sizes are ``normalized_shape``."""
    x = real(x)
    inner = normalized(x, normalized_shape)
    scale, shift = affine(x, weight, bias, inner)
    return op.LayerNormalization(
        x, scale, None if bias is None else shift, axis=-len(inner), epsilon=eps, shape=x.shape
    )


def rms_norm(
    x: TensorLike,
    normalized_shape: int | Sequence[int],
    weight: TensorLike | None = None,
    eps: float | None = None,
) -> Tensor:
    """``x`` divided by its root mean square over its last dimensions; ``eps`` is by default the machine epsilon."""
    x = real(x)
    inner = normalized(x, normalized_shape)
    eps = float(np.finfo(x.dtype.numpy()).eps) if eps is None else eps
    y = x / (mean(x * x, list(range(-len(inner), 0)), keepdim=True) + eps).sqrt()
    return y if weight is None else y * weight


def sizes_of(shape: int | Sequence[int]) -> tuple[int, ...]:
    """Return a size, or a sequence of sizes, as a tuple."""
    return (int(shape),) if isinstance(shape, int | np.integer) else tuple(shape)


def normalized(x: Tensor, normalized_shape: int | Sequence[int]) -> list[int]:
    inner = list(sizes_of(normalized_shape))
    fixed = x.shape[x.ndim - len(inner) :] if len(inner) <= x.ndim else ()
    if len(fixed) != len(inner) or any(isinstance(d, int) and d != n for d, n in zip(fixed, inner, strict=True)):
        raise ModelError(
            f"a normalisation over {tuple(inner)} got an input of shape {x.shape}; its last dimensions must be "
            f"{tuple(inner)}"
        )
    return inner


def group_norm(
    x: TensorLike, num_groups: int, weight: TensorLike | None = None, bias: TensorLike | None = None, eps: float = 1e-5
) -> Tensor:
    """Normalise ``x`` to mean 0 and variance 1 over each of ``num_groups`` groups of channels."""
    x = real(x)
    count = channels(x)
    if count % num_groups:
        raise ModelError(f"group_norm requires channels divisible by num_groups={num_groups}, but got {count}")
    scale, shift = affine(x, weight, bias, [count])
    return op.GroupNormalization(x, scale, shift, epsilon=eps, num_groups=num_groups, shape=x.shape)


def instance_norm(
    x: TensorLike,
    running_mean: TensorLike | None = None,
    running_var: TensorLike | None = None,
    weight: TensorLike | None = None,
    bias: TensorLike | None = None,
    use_input_stats: bool = True,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    """Normalise ``x`` to mean 0 and variance 1 over the spatial axes of each channel of each sample, without running
    statistics.
    """
    if running_mean is not None or running_var is not None or not use_input_stats or momentum != 0.1:
        raise ModelError(
            "instance_norm does not support running statistics; remove the arguments running_mean, running_var, "
            "use_input_stats and momentum"
        )
    x = real(x)
    scale, shift = affine(x, weight, bias, [channels(x)])
    return op.InstanceNormalization(x, scale, shift, epsilon=eps, shape=x.shape)


def local_response_norm(x: TensorLike, size: int, alpha: float = 1e-4, beta: float = 0.75, k: float = 1.0) -> Tensor:
    """``x`` divided by ``(k + alpha · m) ** beta``, where m is the mean square of ``size`` neighbouring channels."""
    if size % 2 == 0:
        raise ModelError(f"the size of local_response_norm is {size}, but must be odd, as ONNX centres the window")
    return op.LRN(real(x), size=size, alpha=alpha, beta=beta, bias=k)

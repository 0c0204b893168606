"""Pooling over windows in 1, 2 and 3 dimensions, global and adaptive pooling."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Concatenate, ParamSpec, TypeAlias

import numpy as np

from gradgraph.errors import ModelError
from gradgraph.frontend.convolution import Spatial, per_axis, window_dim
from gradgraph.frontend.dims import Extent, same
from gradgraph.frontend.reductions import amax, mean
from gradgraph.frontend.shaping import cat
from gradgraph.frontend.trace import TensorLike, op, tensor

if TYPE_CHECKING:
    from gradgraph.frontend.tensor import Tensor

__all__ = [
    "adaptive_avg_pool",
    "adaptive_avg_pool1d",
    "adaptive_avg_pool2d",
    "adaptive_avg_pool3d",
    "adaptive_max_pool",
    "adaptive_max_pool1d",
    "adaptive_max_pool2d",
    "adaptive_max_pool3d",
    "avg_pool1d",
    "avg_pool2d",
    "avg_pool3d",
    "max_pool1d",
    "max_pool2d",
    "max_pool3d",
]

P = ParamSpec("P")
Output: TypeAlias = "int | Sequence[int | None] | None"


def max_pool(
    x: TensorLike,
    rank: int,
    kernel_size: Spatial,
    stride: Spatial | None = None,
    padding: Spatial = 0,
    dilation: Spatial = 1,
    ceil_mode: bool = False,
    return_indices: bool = False,
) -> Tensor:
    """The maximum of each window of ``x`` ``[N, C, *spatial]``, with ``rank`` spatial axes."""
    if return_indices:
        raise ModelError(
            "max pooling does not support return_indices=True, as the indices of ONNX differ from PyTorch's; leave "
            "it False"
        )
    x = _checked(tensor(x), rank, "MaxPool")
    dilations = per_axis(dilation, rank, "dilation")
    kernel, strides, pads = _windows(rank, kernel_size, stride, padding)
    axes = list(zip(x.shape[2:], kernel, strides, pads, dilations, strict=True))
    counts = [_count(*axis, ceil_mode) for axis in axes]
    ends = [_end(c, *axis) if ceil_mode else axis[3] for c, axis in zip(counts, axes, strict=True)]
    return op.MaxPool(
        x,
        kernel_shape=kernel,
        strides=strides,
        pads=pads + ends,
        dilations=dilations,
        shape=[*x.shape[:2], *counts],
    )


def _end(count: Extent, size: Extent, kernel: int, stride: int, pad: int, dilation: int) -> int:
    """Return the end padding of an axis that its last window requires, as runtimes differ in ceil_mode."""
    if not isinstance(count, int) or not isinstance(size, int):
        return pad  # stride 1, for which ceil_mode has no effect
    return max((count - 1) * stride + dilation * (kernel - 1) + 1 - size - pad, 0)


def avg_pool(
    x: TensorLike,
    rank: int,
    kernel_size: Spatial,
    stride: Spatial | None = None,
    padding: Spatial = 0,
    ceil_mode: bool = False,
    count_include_pad: bool = True,
) -> Tensor:
    """The mean of each window of ``x`` ``[N, C, *spatial]``; by default, it includes the padding."""
    x = _checked(tensor(x), rank, "AvgPool")
    kernel, strides, pads = _windows(rank, kernel_size, stride, padding)
    axes = list(zip(x.shape[2:], kernel, strides, pads, [1] * rank, strict=True))
    counts = [_count(*axis, ceil_mode) for axis in axes]
    return op.AveragePool(
        x,
        kernel_shape=kernel,
        strides=strides,
        pads=pads + pads,
        ceil_mode=int(ceil_mode and _rounds_up(counts, axes)),
        count_include_pad=int(count_include_pad),
        shape=[*x.shape[:2], *counts],
    )


def _rounds_up(counts: list[Extent], axes: list[tuple[Extent, int, int, int, int]]) -> bool:
    """Return the value of ONNX's ceil_mode that results in ``counts`` windows per axis; raise ModelError if none does.

    Each of ``axes`` is (size, kernel, stride, padding, dilation). With ceil_mode, ONNX includes a last window that
    starts in the padding; PyTorch does not.
    """
    for up in (False, True):
        if all(same(c, window_dim(n, k, s, 2 * p, d, up)) for c, (n, k, s, p, d) in zip(counts, axes, strict=True)):
            return up
    raise ModelError(
        "ceil_mode=True rounds the sizes of some dimensions up and of others down here, which ONNX does not support "
        "for "
        "average pooling; pad the input and leave ceil_mode False"
    )


def _windows(
    rank: int, kernel_size: Spatial, stride: Spatial | None, padding: Spatial
) -> tuple[list[int], list[int], list[int]]:
    kernel = per_axis(kernel_size, rank, "kernel_size")
    strides = kernel if stride is None else per_axis(stride, rank, "stride")
    pads = per_axis(padding, rank, "padding")
    if any(2 * p > k for p, k in zip(pads, kernel, strict=True)):
        raise ModelError(f"the padding {tuple(pads)} of pooling must be at most half the kernel {tuple(kernel)}")
    return kernel, strides, pads


def _count(size: Extent, kernel: int, stride: int, pad: int, dilation: int, ceil_mode: bool) -> Extent:
    """Return PyTorch's number of windows along an axis: even with ceil_mode, none starts in the end padding."""
    count = window_dim(size, kernel, stride, 2 * pad, dilation, ceil_mode)
    if not ceil_mode or stride == 1:
        return count
    if not isinstance(count, int) or not isinstance(size, int):
        raise ModelError(
            f"pooling with ceil_mode requires fixed sizes, but got the symbolic size '{size}'; use a fixed size, or "
            "pad "
            "the input instead"
        )
    return count - 1 if (count - 1) * stride >= size + pad else count


def _checked(x: Tensor, rank: int, name: str) -> Tensor:
    if x.ndim != rank + 2:
        raise ModelError(f"{name}{rank}d got an input of shape {x.shape}; expected [batch, channels] and {rank} more")
    return x


# --- adaptive pooling ----------------------------------------------------------------------------


def adaptive_avg_pool(x: TensorLike, rank: int, output_size: Output) -> Tensor:
    """The means of ``output_size`` windows that cover the input; None keeps the size of an axis."""
    return _adaptive(_checked(tensor(x), rank, "AdaptiveAvgPool"), output_size, "AveragePool")


def adaptive_max_pool(x: TensorLike, rank: int, output_size: Output) -> Tensor:
    """The maxima of ``output_size`` windows that cover the input; None keeps the size of an axis."""
    return _adaptive(_checked(tensor(x), rank, "AdaptiveMaxPool"), output_size, "MaxPool")


def _adaptive(x: Tensor, output_size: Output, kind: str) -> Tensor:
    """Return the maxima or means (``kind``) of ``output_size`` windows: by one node if possible, else axis by axis."""
    sizes = x.shape[2:]
    given = list(output_size) if isinstance(output_size, Sequence) else [output_size] * len(sizes)
    asked: list[int | None] = [int(o) if isinstance(o, np.integer) else o for o in given]
    if len(asked) != len(sizes):
        raise ModelError(
            f"the output_size of adaptive pooling is {tuple(asked)}, but must be {len(sizes)} sizes, one per spatial "
            "dimension"
        )
    outputs = [n if o is None else o for o, n in zip(asked, sizes, strict=True)]
    if all(same(o, 1) for o in outputs):
        return op.emit(f"Global{kind}", x, shape=[*x.shape[:2], *outputs])
    pairs = list(zip(sizes, outputs, strict=True))
    strides = [n // o for n, o in pairs if isinstance(n, int) and isinstance(o, int) and o <= n and n % o == 0]
    if len(strides) == len(pairs):
        return op.emit(kind, x, kernel_shape=strides, strides=strides, shape=[*x.shape[:2], *outputs])
    for axis, (size, out) in enumerate(pairs, start=2):
        x = _adaptive_axis(x, axis, size, out, kind)
    return x


def _adaptive_axis(x: Tensor, axis: int, size: Extent, out: Extent, kind: str) -> Tensor:
    reduce = mean if kind == "AveragePool" else amax
    if same(size, out):
        return x
    if same(out, 1):
        return reduce(x, axis, keepdim=True)
    if not isinstance(size, int) or not isinstance(out, int):
        raise ModelError(
            f"adaptive pooling to size {out} requires a fixed input size, but got the symbolic size '{size}'; use a "
            "fixed size, or pool to 1"
        )
    windows = [(i * size // out, -(-(i + 1) * size // out)) for i in range(out)]
    if kind == "MaxPool":
        parts = [x[(slice(None),) * axis + (slice(a, b),)] for a, b in windows]
        return cat([reduce(p, axis, keepdim=True) for p in parts], axis)
    weights = np.zeros((size, out), x.dtype.numpy())  # the windows' means as one matrix
    for i, (a, b) in enumerate(windows):
        weights[a:b, i] = 1.0 / (b - a)
    return (x.transpose(axis, -1) @ weights).transpose(axis, -1)


# --- PyTorch's names -----------------------------------------------------------------------------


def _of_rank(
    pool: Callable[Concatenate[TensorLike, int, P], Tensor], rank: int, words: str
) -> Callable[Concatenate[TensorLike, P], Tensor]:
    """Return ``pool`` for ``rank`` spatial axes, under PyTorch's name and with a docstring made from ``words``."""

    def function(x: TensorLike, *args: P.args, **kwargs: P.kwargs) -> Tensor:
        return pool(x, rank, *args, **kwargs)

    signature = inspect.signature(pool)
    others = [parameter for name, parameter in signature.parameters.items() if name != "rank"]
    function.__name__ = function.__qualname__ = f"{pool.__name__}{rank}d"
    function.__doc__ = f"{words} ``[N, C, {('L', 'H, W', 'D, H, W')[rank - 1]}]``."
    function.__signature__ = signature.replace(parameters=others)  # type: ignore[attr-defined]
    return function  # type: ignore[return-value]  # x may be given by its name


RANKS = (1, 2, 3)
max_pool1d, max_pool2d, max_pool3d = (_of_rank(max_pool, rank, "The maximum of each window of") for rank in RANKS)
avg_pool1d, avg_pool2d, avg_pool3d = (_of_rank(avg_pool, rank, "The mean of each window of") for rank in RANKS)
adaptive_avg_pool1d, adaptive_avg_pool2d, adaptive_avg_pool3d = (
    _of_rank(adaptive_avg_pool, rank, "Means of ``output_size`` windows per axis (1: global pooling) that cover")
    for rank in RANKS
)
adaptive_max_pool1d, adaptive_max_pool2d, adaptive_max_pool3d = (
    _of_rank(adaptive_max_pool, rank, "Maxima of ``output_size`` windows per axis (1: global pooling) that cover")
    for rank in RANKS
)

"""Reductions and scans along dimensions, as in PyTorch: sums, means, extremes, sorting."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, ParamSpec, TypeAlias, TypeVar

import numpy as np
import onnx_ir as ir

from gradgraph.errors import ModelError
from gradgraph.frontend.dims import Extent, product
from gradgraph.frontend.pointwise import cast, maximum, minimum, real
from gradgraph.frontend.trace import TensorLike, op, shaped, tensor

if TYPE_CHECKING:
    from gradgraph.frontend.tensor import Tensor

__all__ = [
    "all",
    "amax",
    "amin",
    "any",
    "argmax",
    "argmin",
    "argsort",
    "cumsum",
    "logsumexp",
    "max",
    "mean",
    "min",
    "norm",
    "prod",
    "sort",
    "std",
    "sum",
    "topk",
    "var",
]

Axes: TypeAlias = "int | Sequence[int] | None"


class Extreme(NamedTuple):
    """The values and indices returned by ``max``, ``min``, ``topk`` and ``sort`` along a dimension."""

    values: Tensor
    indices: Tensor


P = ParamSpec("P")
R = TypeVar("R")


def numpy_words(function: Callable[P, R]) -> Callable[P, R]:
    """Return ``function`` with NumPy's ``axis`` and ``keepdims`` as aliases of ``dim`` and ``keepdim``."""

    @functools.wraps(function)
    def translated(*args: P.args, **kwargs: P.kwargs) -> R:
        for word, meaning in (("axis", "dim"), ("keepdims", "keepdim")):
            if word in kwargs:
                kwargs[meaning] = kwargs.pop(word)
        return function(*args, **kwargs)

    return translated


def axes_of(x: Tensor, dim: Axes) -> list[int]:
    """Return ``dim`` as a list of non-negative axes; raise ``ModelError`` if ``x`` has no such axis."""
    given = list(range(x.ndim)) if dim is None else [int(dim)] if isinstance(dim, int | np.integer) else list(dim)
    return [axis_of(x, d) for d in given]


def axis_of(x: Tensor, dim: int) -> int:
    rank = x.ndim or 1
    if not -rank <= dim < rank:
        raise ModelError(f"a tensor of shape {x.shape} has no dimension {dim}; use a number from {-rank} to {rank - 1}")
    return dim % x.ndim if x.ndim else 0


def reduce(op_type: str, x: Tensor, dim: Axes, keepdim: bool) -> Tensor:
    axes = None if dim is None else axes_of(x, dim)
    return op.emit(op_type, x, axes, keepdims=int(keepdim))


@numpy_words
def sum(x: TensorLike, dim: Axes = None, keepdim: bool = False, *, dtype: Any = None) -> Tensor:
    """The sum of all elements, or along ``dim``; integers and booleans are summed as int64."""
    x = tensor(x)
    if dtype is None and not x.is_floating_point():
        dtype = ir.DataType.INT64
    return reduce("ReduceSum", x if dtype is None else cast(x, dtype), dim, keepdim)


@numpy_words
def mean(x: TensorLike, dim: Axes = None, keepdim: bool = False, *, dtype: Any = None) -> Tensor:
    """The mean of all elements, or along ``dim``."""
    x = tensor(x) if dtype is None else cast(x, dtype)
    if not x.is_floating_point():
        raise ModelError(f"mean requires a floating-point tensor, not {x.dtype.name.lower()}; convert it with .float()")
    return reduce("ReduceMean", x, dim, keepdim)


@numpy_words
def prod(x: TensorLike, dim: int | None = None, keepdim: bool = False) -> Tensor:
    """The product of all elements, or along ``dim``."""
    x = tensor(x)
    return reduce("ReduceProd", x if x.is_floating_point() else cast(x, ir.DataType.INT64), dim, keepdim)


@numpy_words
def amax(x: TensorLike, dim: Axes = None, keepdim: bool = False) -> Tensor:
    """The maximum of all elements, or along ``dim``; its gradient is divided equally among ties."""
    return reduce("ReduceMax", tensor(x), dim, keepdim)


@numpy_words
def amin(x: TensorLike, dim: Axes = None, keepdim: bool = False) -> Tensor:
    """The minimum of all elements, or along ``dim``; its gradient is divided equally among ties."""
    return reduce("ReduceMin", tensor(x), dim, keepdim)


@numpy_words
def max(x: TensorLike, dim: TensorLike | None = None, keepdim: bool = False) -> Any:
    """Without ``dim``, the maximum; with it, ``(values, indices)``, and only elements at these indices get a gradient.

    If the second argument is a tensor, the element-wise maximum, as in PyTorch.
    """
    if dim is None:
        return amax(x)
    return _extreme("ArgMax", x, int(dim), keepdim) if isinstance(dim, int | np.integer) else maximum(x, dim)


@numpy_words
def min(x: TensorLike, dim: TensorLike | None = None, keepdim: bool = False) -> Any:
    """Without ``dim``, the minimum; with it, ``(values, indices)``, and only elements at these indices get a gradient.

    If the second argument is a tensor, the element-wise minimum, as in PyTorch.
    """
    if dim is None:
        return amin(x)
    return _extreme("ArgMin", x, int(dim), keepdim) if isinstance(dim, int | np.integer) else minimum(x, dim)


def _extreme(op_type: str, x: TensorLike, dim: int, keepdim: bool) -> Extreme:
    x = tensor(x)
    axis = axis_of(x, dim)
    indices = op.emit(op_type, x, axis=axis, keepdims=1)
    values = op.GatherElements(x, indices, axis=axis)
    return Extreme(values, indices) if keepdim else Extreme(op.Squeeze(values, [axis]), op.Squeeze(indices, [axis]))


@numpy_words
def argmax(x: TensorLike, dim: int | None = None, keepdim: bool = False) -> Tensor:
    """The index of the first maximum, in the flattened tensor or along ``dim``."""
    return _position("ArgMax", x, dim, keepdim)


@numpy_words
def argmin(x: TensorLike, dim: int | None = None, keepdim: bool = False) -> Tensor:
    """The index of the first minimum, in the flattened tensor or along ``dim``."""
    return _position("ArgMin", x, dim, keepdim)


def _position(op_type: str, x: TensorLike, dim: int | None, keepdim: bool) -> Tensor:
    x = tensor(x)
    if dim is None:
        return op.emit(op_type, x.reshape(-1), axis=0, keepdims=0)
    return op.emit(op_type, x, axis=axis_of(x, dim), keepdims=int(keepdim))


@numpy_words
def var(
    x: TensorLike,
    dim: Axes = None,
    unbiased: bool | None = None,
    keepdim: bool = False,
    *,
    correction: int | None = None,
) -> Tensor:
    """The variance: the sum of squared deviations, divided by ``count - correction`` (1 by default, as in PyTorch)."""
    x = real(x)
    axes = axes_of(x, dim)
    if correction is None:
        correction = 1 if unbiased is None else int(unbiased)
    freedom: Extent = product(x.shape[a] for a in axes) - correction
    deviation = x - mean(x, axes, keepdim=True)
    return sum(deviation * deviation, axes, keepdim) / tensor(freedom, x.dtype)


@numpy_words
def std(
    x: TensorLike,
    dim: Axes = None,
    unbiased: bool | None = None,
    keepdim: bool = False,
    *,
    correction: int | None = None,
) -> Tensor:
    """The standard deviation of all elements or along ``dim``, with ``correction`` as for ``var``."""
    return op.Sqrt(var(x, dim, unbiased, keepdim, correction=correction))


@numpy_words
def logsumexp(x: TensorLike, dim: Axes, keepdim: bool = False) -> Tensor:
    """``log Σ eˣ`` along ``dim``, without overflow."""
    return reduce("ReduceLogSumExp", real(x), dim, keepdim)


@numpy_words
def norm(x: TensorLike, p: float | str = 2.0, dim: Axes = None, keepdim: bool = False) -> Tensor:
    """The vector p-norm (1, 2, any other number, or infinity) along ``dim``."""
    x = real(x)
    if p in (1, 2, "fro"):
        return reduce("ReduceL1" if p == 1 else "ReduceL2", x, dim, keepdim)
    p = float(p)
    if p in (float("inf"), float("-inf")):
        return reduce("ReduceMax" if p > 0 else "ReduceMin", op.Abs(x), dim, keepdim)
    return reduce("ReduceSum", op.Abs(x) ** p, dim, keepdim) ** (1.0 / p)


@numpy_words
def any(x: TensorLike, dim: Axes = None, keepdim: bool = False) -> Tensor:
    """Whether any element is true, in the whole tensor or along ``dim``."""
    return cast(reduce("ReduceMax", _flags(x), dim, keepdim), "bool")


@numpy_words
def all(x: TensorLike, dim: Axes = None, keepdim: bool = False) -> Tensor:
    """Whether all elements are true, in the whole tensor or along ``dim``."""
    return cast(reduce("ReduceMin", _flags(x), dim, keepdim), "bool")


def _flags(x: TensorLike) -> Tensor:
    return cast(cast(x, "bool"), "int32")


@numpy_words
def cumsum(x: TensorLike, dim: int) -> Tensor:
    """The cumulative sum along ``dim``."""
    x = tensor(x)
    x = x if x.is_floating_point() else cast(x, ir.DataType.INT64)
    return op.CumSum(x, axis_of(x, dim), shape=x.shape)


def topk(x: TensorLike, k: Extent, dim: int = -1, largest: bool = True, sorted: bool = True) -> Extreme:
    """The ``k`` greatest (or least) elements along ``dim``, and their indices."""
    x = tensor(x)
    axis = axis_of(x, dim)
    k = int(k) if isinstance(k, np.integer) else k
    count = [k] if isinstance(k, int) else k
    values, indices = op.several("TopK", x, count, axis=axis, largest=int(largest), sorted=int(sorted), outputs=2)
    dims = [*x.shape[:axis], k, *x.shape[axis + 1 :]]
    return Extreme(shaped(values, dims), shaped(indices, dims))


def sort(x: TensorLike, dim: int = -1, descending: bool = False) -> Extreme:
    """The elements along ``dim`` in order, and their original indices."""
    x = tensor(x)
    return topk(x, x.shape[axis_of(x, dim)], dim, largest=descending)


def argsort(x: TensorLike, dim: int = -1, descending: bool = False) -> Tensor:
    """The indices that sort the elements along ``dim``."""
    return sort(x, dim, descending).indices

"""Functions that reshape, transpose, join, split and repeat tensors, as in PyTorch, also with dynamic sizes."""

from __future__ import annotations

import numbers
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from gradgraph.errors import ModelError
from gradgraph.frontend.dims import Dim, Extent, floor_divide, product, same
from gradgraph.frontend.reductions import Axes, axes_of, axis_of
from gradgraph.frontend.trace import TensorLike, current, op, shaped, tensor, tensors, wrap

if TYPE_CHECKING:
    from gradgraph.frontend.tensor import Tensor

__all__ = [
    "cat",
    "chunk",
    "concat",
    "expand",
    "flatten",
    "flip",
    "movedim",
    "permute",
    "repeat",
    "repeat_interleave",
    "reshape",
    "roll",
    "split",
    "squeeze",
    "stack",
    "tile",
    "transpose",
    "unbind",
    "unflatten",
    "unsqueeze",
]

Sizes: TypeAlias = "Extent | Sequence[Extent]"

# --- reshape -------------------------------------------------------------------------------------


def reshape(x: TensorLike, *shape: Sizes) -> Tensor:
    """``x`` with the shape ``shape``, which has the same number of elements; one size may be -1 (inferred).

    The target uses Reshape's special values where possible (0: unchanged, -1: inferred), so that a dynamic batch costs
    no shape arithmetic at run time.
    """
    x = tensor(x)
    asked = listed(shape)
    dims = _without_hole(x, asked)
    if len(dims) == x.ndim and all(map(same, dims, x.shape)):
        return x
    target: list[Extent] = [
        0 if i < x.ndim and isinstance(d, Dim) and d.same(x.shape[i]) else d for i, d in enumerate(dims)
    ]
    open_ended = [i for i, d in enumerate(target) if isinstance(d, Dim)]
    hole = next((i for i in open_ended if same(asked[i], -1)), None)
    if hole is None and len(open_ended) == 1 and same(product(dims), product(x.shape)):
        hole = open_ended[0]
    if hole is not None:
        target[hole] = -1
    return op.Reshape(x, op_sizes(target), shape=dims)


def _without_hole(x: Tensor, dims: list[Extent]) -> list[Extent]:
    """Return ``dims`` with -1 replaced by the inferred size; raise ModelError if ``x`` cannot have that shape."""
    total = product(x.shape)
    holes = [i for i, d in enumerate(dims) if isinstance(d, int) and d == -1]
    if len(holes) > 1:
        raise ModelError(f"reshape to {tuple(dims)} leaves several sizes open; use at most one -1")
    if holes:
        rest = product(d for d in dims if not (isinstance(d, int) and d == -1))
        if isinstance(total, int) and isinstance(rest, int) and (rest == 0 or total % rest):
            raise ModelError(
                f"a tensor of shape {x.shape} cannot be reshaped to {tuple(dims)}; {rest} must divide {total}"
            )
        dims = [floor_divide(total, rest) if i == holes[0] else d for i, d in enumerate(dims)]
    elif isinstance(total, int) and isinstance(product(dims), int) and total != product(dims):
        raise ModelError(
            f"a tensor of shape {x.shape} has {total} elements and cannot be reshaped to {tuple(dims)}; use sizes with "
            f"the product {total}"
        )
    return dims


def listed(sizes: Sequence[Sizes]) -> list[Extent]:
    """Return the sizes in a variadic argument, passed as ``f(2, 3)`` or ``f((2, 3))``, as a list."""
    flat: Any = sizes[0] if len(sizes) == 1 and not isinstance(sizes[0], numbers.Integral | Dim) else sizes
    return [d if isinstance(d, Dim) else int(d) for d in flat]


def op_sizes(dims: Sequence[Extent]) -> Tensor:
    """Return sizes as an int64 vector of the graph."""
    return wrap(current().sizes(dims))


def flatten(x: TensorLike, start_dim: int = 0, end_dim: int = -1) -> Tensor:
    """``x`` with the dimensions ``start_dim`` to ``end_dim`` merged into one."""
    x = tensor(x)
    if x.ndim == 0:
        return op.Reshape(x, [1])
    start, end = axis_of(x, start_dim), axis_of(x, end_dim)
    dims = [*x.shape[:start], product(x.shape[start : end + 1]), *x.shape[end + 1 :]]
    if start == 1 and end == x.ndim - 1 and end > 1:
        return op.Flatten(x, axis=1, shape=dims)
    return reshape(x, dims)


def unflatten(x: TensorLike, dim: int, sizes: Sequence[Extent]) -> Tensor:
    """``x`` with the dimension ``dim`` split into dimensions of the sizes ``sizes``, one of which may be −1."""
    x = tensor(x)
    axis = axis_of(x, dim)
    size, rest = x.shape[axis], product(d for d in sizes if not (isinstance(d, int) and d == -1))
    inner = [floor_divide(size, rest) if isinstance(d, int) and d == -1 else d for d in sizes]
    return reshape(x, [*x.shape[:axis], *inner, *x.shape[axis + 1 :]])


def squeeze(x: TensorLike, dim: Axes = None) -> Tensor:
    """Remove the dimensions ``dim``, if of size 1; by default, all dimensions of size 1."""
    x = tensor(x)
    axes = [a for a in axes_of(x, dim) if same(x.shape[a], 1)]
    return op.Squeeze(x, axes, shape=[d for i, d in enumerate(x.shape) if i not in axes]) if axes else x


def unsqueeze(x: TensorLike, dim: int) -> Tensor:
    """Insert a dimension of size 1 at ``dim``."""
    x = tensor(x)
    axis = dim if dim >= 0 else dim + x.ndim + 1
    if not 0 <= axis <= x.ndim:
        raise ModelError(f"unsqueeze({dim}) does not fit a tensor of shape {x.shape}; use at most {x.ndim}")
    return op.Unsqueeze(x, [axis], shape=[*x.shape[:axis], 1, *x.shape[axis:]])


# --- order of dimensions -------------------------------------------------------------------------


def permute(x: TensorLike, *dims: int | Sequence[int]) -> Tensor:
    """Reorder the dimensions."""
    x = tensor(x)
    axes = axes_of(x, [int(d) for d in listed(dims)])
    if sorted(axes) != list(range(x.ndim)):
        raise ModelError(f"permute({axes}) must name each of the {x.ndim} dimensions of shape {x.shape} once")
    return x if axes == list(range(x.ndim)) else op.Transpose(x, perm=axes, shape=[x.shape[a] for a in axes])


def transpose(x: TensorLike, *dims: int) -> Tensor:
    """Swap two dimensions; without arguments, or with more than two, reorder all as NumPy's ``transpose`` does."""
    x = tensor(x)
    if len(dims) != 2:
        return permute(x, dims or list(range(x.ndim))[::-1])
    dim0, dim1 = dims
    axes = list(range(x.ndim))
    a, b = axis_of(x, dim0), axis_of(x, dim1)
    axes[a], axes[b] = b, a
    return permute(x, axes)


def movedim(x: TensorLike, source: int, destination: int) -> Tensor:
    """Move the dimension ``source`` to ``destination``; the others keep their order."""
    x = tensor(x)
    axes = list(range(x.ndim))
    axes.insert(axis_of(x, destination), axes.pop(axis_of(x, source)))
    return permute(x, axes)


def flip(x: TensorLike, *dims: int | Sequence[int]) -> Tensor:
    """Reverse the elements along ``dims``."""
    x = tensor(x)
    axes = axes_of(x, [int(d) for d in listed(dims)])
    ends = np.full(len(axes), np.iinfo(np.int64).min)
    return op.Slice(x, [-1] * len(axes), ends, axes, [-1] * len(axes), shape=x.shape)


def roll(x: TensorLike, shifts: int | Sequence[int], dims: int | Sequence[int]) -> Tensor:
    """Shift the elements by ``shifts`` along ``dims``, cyclically."""
    x = tensor(x)
    for shift, dim in zip(listed([shifts]), listed([dims]), strict=True):
        axis = axis_of(x, int(dim))
        size = x.shape[axis]
        shift = shift % size if isinstance(size, int) else shift
        if shift:
            tail, head = ((slice(None),) * axis + (part,) for part in (slice(-shift, None), slice(None, -shift)))
            x = shaped(cat([x[tail], x[head]], axis), x.shape)
    return x


# --- repeating -----------------------------------------------------------------------------------


def expand(x: TensorLike, *sizes: Sizes) -> Tensor:
    """``x`` repeated along its dimensions of size 1 (and new leading ones) up to ``sizes``; -1 keeps a size."""
    x = tensor(x)
    wanted = listed(sizes)
    before = [1] * (len(wanted) - x.ndim) + list(x.shape)
    if len(before) != len(wanted):
        raise ModelError(f"a tensor of shape {x.shape} cannot be expanded to {tuple(wanted)}; specify every dimension")
    dims = [b if isinstance(w, int) and w == -1 else w for w, b in zip(wanted, before, strict=True)]
    for d, b in zip(dims, before, strict=True):
        if isinstance(d, int) and isinstance(b, int) and b not in (1, d):
            raise ModelError(
                f"a tensor of shape {x.shape} cannot be expanded to {tuple(wanted)}; {b} is neither 1 nor {d}"
            )
    # Expand broadcasts in both directions, so a size that stays is written as 1
    target = [1 if same(d, b) else d for d, b in zip(dims, before, strict=True)]
    if len(dims) == x.ndim and all(map(same, dims, before)):
        return x
    return op.Expand(x, op_sizes(target), shape=dims)


def repeat(x: TensorLike, *counts: Sizes) -> Tensor:
    """Tile ``x`` ``counts`` times along each dimension (PyTorch's ``repeat``, NumPy's ``tile``)."""
    x = tensor(x)
    times = listed(counts)
    for _ in range(len(times) - x.ndim):
        x = unsqueeze(x, 0)
    times = [*[1] * (x.ndim - len(times)), *times]
    return op.Tile(x, op_sizes(times), shape=[d * t for d, t in zip(x.shape, times, strict=True)])


tile = repeat


def repeat_interleave(x: TensorLike, repeats: int, dim: int | None = None) -> Tensor:
    """Repeat each element along ``dim``: ``[a, b]`` becomes ``[a, a, b, b]`` for 2 ``repeats``."""
    x = tensor(x).reshape(-1) if dim is None else tensor(x)
    axis = axis_of(x, dim or 0)
    wide = unsqueeze(x, axis + 1)
    wide = expand(wide, [*x.shape[: axis + 1], repeats, *x.shape[axis + 1 :]])
    return reshape(wide, [*x.shape[:axis], x.shape[axis] * repeats, *x.shape[axis + 1 :]])


# --- joining and splitting -----------------------------------------------------------------------


def cat(xs: Sequence[TensorLike], dim: int = 0) -> Tensor:
    """Concatenate tensors along an existing dimension."""
    parts = tensors(*xs)
    axis = axis_of(parts[0], dim)
    ranks = {p.ndim for p in parts}
    if len(ranks) > 1:
        raise ModelError(f"cat requires tensors of equal rank, but got shapes {', '.join(str(p.shape) for p in parts)}")
    length: Extent = 0
    for part in parts:
        length = length + part.shape[axis]
    if len(parts) == 1:
        return parts[0]
    return op.Concat(*parts, axis=axis, shape=[*parts[0].shape[:axis], length, *parts[0].shape[axis + 1 :]])


concat = cat


def stack(xs: Sequence[TensorLike], dim: int = 0) -> Tensor:
    """Concatenate tensors along a new dimension."""
    parts = tensors(*xs)
    axis = dim if dim >= 0 else dim + parts[0].ndim + 1
    return cat([unsqueeze(p, axis) for p in parts], axis)


def split(x: TensorLike, split_size_or_sections: int | Sequence[int], dim: int = 0) -> tuple[Tensor, ...]:
    """Split ``x`` along ``dim`` into pieces of equal size (the last may be smaller), or of the listed sizes."""
    x = tensor(x)
    axis = axis_of(x, dim)
    size = x.shape[axis]
    if isinstance(split_size_or_sections, int | np.integer):
        step = int(split_size_or_sections)
        if not isinstance(size, int):
            raise ModelError(
                f"the number of pieces of size {step} along dimension {dim} is unknown, as its size '{size}' is "
                "symbolic; use chunk, list the sizes, or make that size fixed"
            )
        sections = [min(step, size - i) for i in range(0, size, step)]
    else:
        sections = list(split_size_or_sections)
        if isinstance(size, int) and sum(sections) != size:
            raise ModelError(f"split sizes {sections} must add up to {size}, the size of dimension {dim}")
    if len(sections) == 1:
        return (x,)
    pieces = op.several("Split", x, sections, axis=axis, outputs=len(sections))
    return tuple(shaped(p, [*x.shape[:axis], n, *x.shape[axis + 1 :]]) for p, n in zip(pieces, sections, strict=True))


def chunk(x: TensorLike, chunks: int, dim: int = 0) -> tuple[Tensor, ...]:
    """Split ``x`` along ``dim`` into ``chunks`` pieces of equal size; the last may be smaller."""
    x = tensor(x)
    axis = axis_of(x, dim)
    size = x.shape[axis]
    if isinstance(size, int):
        return split(x, max(-(-size // chunks), 1), axis)
    if chunks == 1:
        return (x,)
    pieces = op.several("Split", x, axis=axis, num_outputs=chunks, outputs=chunks)
    even = floor_divide(size, chunks)
    if isinstance(even, int) or not same(even * chunks, size):
        return pieces
    return tuple(shaped(p, [*x.shape[:axis], even, *x.shape[axis + 1 :]]) for p in pieces)


def unbind(x: TensorLike, dim: int = 0) -> tuple[Tensor, ...]:
    """Return the slices along a dimension of fixed size, with that dimension removed."""
    x = tensor(x)
    axis = axis_of(x, dim)
    return tuple(
        op.Squeeze(p, [axis], shape=[d for i, d in enumerate(p.shape) if i != axis]) for p in split(x, 1, axis)
    )

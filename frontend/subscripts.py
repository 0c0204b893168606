"""Indexing: ``x[...]`` as in NumPy, gather and scatter; triangles; creation of constant tensors and ranges."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx_ir as ir

from gradgraph.errors import ModelError
from gradgraph.frontend.dims import Dim, Extent, same
from gradgraph.frontend.pointwise import cast
from gradgraph.frontend.reductions import axis_of
from gradgraph.frontend.shaping import cat, op_sizes, permute, unsqueeze
from gradgraph.frontend.trace import TensorLike, Value, as_dtype, current, op, shaped, tensor, wrap

if TYPE_CHECKING:
    from gradgraph.frontend.tensor import Tensor

__all__ = [
    "arange",
    "full",
    "full_like",
    "gather",
    "index_select",
    "nonzero",
    "one_hot",
    "ones",
    "ones_like",
    "scatter",
    "scatter_add",
    "take_along_dim",
    "tril",
    "triu",
    "zeros",
    "zeros_like",
]

LAST = np.iinfo(np.int64).max  # an open end of a Slice
FIRST = np.iinfo(np.int64).min  # an open end of a Slice with a negative step


def index(x: TensorLike, key: Any) -> Tensor:
    """``x[key]`` for integers, slices (of any step), ``None``, ``...``, integer tensors and a boolean mask.

    As in PyTorch, integers remove their dimension first. Index tensors then broadcast with each other. If the
    dimensions that they index are adjacent, the broadcast dimensions replace them; otherwise they come first.
    """
    x = tensor(x)
    entries = _listed_key(key)
    used = sum(e is not None and e is not Ellipsis for e in entries)
    if used > x.ndim:
        raise ModelError(f"{used} indices are too many for a tensor of shape {x.shape}; use at most {x.ndim}")
    # replace ... by full slices, also for dimensions without an index
    at = next((i for i, e in enumerate(entries) if e is Ellipsis), len(entries))
    behind = [e for e in entries[at + 1 :] if e is not Ellipsis]
    x, entries = _cut(x, [*entries[:at], *[slice(None)] * (x.ndim - used), *behind])
    for position, entry in enumerate(entries):
        if entry is None:
            x = unsqueeze(x, position)
    return _take(x, [(i, e) for i, e in enumerate(entries) if isinstance(e, Value)])


def _listed_key(key: Any) -> list[Any]:
    """Return the indices in ``key``: lists and arrays become tensors, and a mask becomes one tensor per dimension."""
    entries: list[Any] = []
    for entry in key if isinstance(key, tuple) else (key,):
        if isinstance(entry, bool | np.bool_ | float):
            raise ModelError(f"a tensor cannot be indexed with {entry!r}; use an integer, a slice or a tensor")
        if isinstance(entry, np.integer):
            entry = int(entry)
        if isinstance(entry, slice):
            bounds = (entry.start, entry.stop, entry.step)
            entry = slice(*(int(b) if isinstance(b, np.integer) else b for b in bounds))
        if isinstance(entry, list | np.ndarray):
            entry = tensor(np.asarray(entry))
        if isinstance(entry, Value) and tensor(entry).is_bool():
            entries.extend(nonzero(entry, as_tuple=True))
        else:
            entries.append(tensor(entry) if isinstance(entry, Value) else entry)
    return entries


def _cut(x: Tensor, entries: list[Any]) -> tuple[Tensor, list[Any]]:
    """Apply all slices and integers in ``entries``; return the result, and the entries without integers."""
    cuts: list[tuple[int, Extent, Extent, int]] = []
    dims = list(x.shape)
    dropped = []
    for axis, entry in enumerate(e for e in entries if e is not None):
        if isinstance(entry, int | Dim):
            size = dims[axis]
            if isinstance(size, int) and isinstance(entry, int) and not -size <= entry < size:
                raise ModelError(
                    f"index {entry} is out of bounds for a dimension of size {size}; use an index from {-size} to "
                    f"{size - 1}"
                )
            cuts.append((axis, entry, LAST if isinstance(entry, int) and entry == -1 else entry + 1, 1))
            dims[axis] = 1
            dropped.append(axis)
        elif isinstance(entry, slice) and entry not in (slice(None), slice(None, None, 1)):
            step = 1 if entry.step is None else int(entry.step)
            if step == 0:
                raise ModelError("a slice has step 0; use a step that is not zero")
            start = entry.start if entry.start is not None else (0 if step > 0 else LAST)
            stop = entry.stop if entry.stop is not None else (LAST if step > 0 else FIRST)
            cuts.append((axis, start, stop, step))
            dims[axis] = _sliced_size(x, dims[axis], entry, step)
    if cuts:
        axes, starts, stops, steps = map(list, zip(*cuts, strict=True))
        stepping = [steps] if any(s != 1 for s in steps) else []
        x = shaped(op.Slice(x, op_sizes(starts), op_sizes(stops), axes, *stepping), dims)
    if dropped:
        x = op.Squeeze(x, dropped, shape=[d for i, d in enumerate(dims) if i not in dropped])
    return x, [e for e in entries if not isinstance(e, int | Dim)]


def _sliced_size(x: Tensor, size: Extent, part: slice, step: int) -> Extent:
    """Return the size of a dimension of ``size`` after slicing; a symbolic size if it is known only at run time."""
    start, stop = None if isinstance(part.start, int) and part.start == 0 and step > 0 else part.start, part.stop
    if isinstance(size, int) and not isinstance(start, Dim) and not isinstance(stop, Dim):
        return len(range(*part.indices(size)))
    if abs(step) == 1 and start is None and stop is None:
        return size
    is_long = same(stop, size) or (isinstance(size, int) and size > 1)
    if step == 1 and start is None and isinstance(stop, Dim) and is_long:
        return stop  # x[:n], where n is not above the size
    if step == 1 and isinstance(size, Dim):
        cut = start if stop is None else -stop if start is None and isinstance(stop, int) else None
        if isinstance(cut, int) and cut > 0:  # x[k:] or x[:-k]; a dimension has at least 1 element
            return size - 1 if cut == 1 else Dim.named(f"max({size} - {cut}, 0)")
    return Dim.named(current().builder.fresh(f"{x.traced.value.name}[{part.start}:{part.stop}:{part.step}]"))


def _take(x: Tensor, chosen: list[tuple[int, Value]]) -> Tensor:
    """Return ``x`` indexed by integer tensors; ``chosen`` lists (axis, indices)."""
    if not chosen:
        return x
    axes = [axis for axis, _ in chosen]
    places = [cast(places, ir.DataType.INT64) for _, places in chosen]
    if len(chosen) == 1:
        dims = [*x.shape[: axes[0]], *places[0].shape, *x.shape[axes[0] + 1 :]]
        return op.Gather(x, places[0], axis=axes[0], shape=dims)
    rest = [a for a in range(x.ndim) if a not in axes]
    common = broadcast_shape(*(p.shape for p in places))
    joined = cat([unsqueeze(p.expand(common), -1) for p in places], -1)
    dims = [*common, *(x.shape[a] for a in rest)]
    taken = op.GatherND(permute(x, [*axes, *rest]), joined, shape=dims)
    if axes != list(range(axes[0], axes[0] + len(axes))):
        return taken
    front, lead = len(common), axes[0]
    order = [*range(front, front + lead), *range(front), *range(front + lead, taken.ndim)]
    return permute(taken, order)


def broadcast_shape(*shapes: Sequence[Extent]) -> list[Extent]:
    """Return the shape to which ``shapes`` broadcast; raise ModelError if two symbolic sizes of an axis differ."""
    rank = max(map(len, shapes))
    result: list[Extent] = []
    for column in zip(*[(*[1] * (rank - len(s)), *s) for s in shapes], strict=True):
        rest = [d for d in column if not same(d, 1)]
        if any(not same(d, rest[0]) for d in rest):
            raise ModelError(f"shapes {' and '.join(str(tuple(s)) for s in shapes)} do not broadcast together")
        result.append(rest[0] if rest else 1)
    return result


# --- gather --------------------------------------------------------------------------------------


def gather(x: TensorLike, dim: int, index: TensorLike) -> Tensor:
    """The elements at ``index`` along ``dim``: ``out[i, j] = x[index[i, j], j]`` for ``dim=0``, as in PyTorch."""
    x, places = tensor(x), cast(index, ir.DataType.INT64)
    axis = axis_of(x, dim)
    for i, (size, wanted) in enumerate(zip(x.shape, places.shape, strict=True)):
        if i != axis and not same(size, wanted):  # GatherElements requires equal sizes, gather allows smaller ones
            x = x[(slice(None),) * i + (slice(0, wanted),)]
    return op.GatherElements(x, places, axis=axis, shape=places.shape)


def index_select(x: TensorLike, dim: int, index: TensorLike) -> Tensor:
    """The slices of ``x`` along ``dim`` at the indices in the vector ``index``."""
    x = tensor(x)
    return index_at(x, axis_of(x, dim), tensor(index))


def index_at(x: Tensor, axis: int, places: Tensor) -> Tensor:
    """Return the entries of ``x`` along ``axis`` at the indices ``places``, an integer tensor of any rank."""
    return _take(x, [(axis, places)])


def take_along_dim(x: TensorLike, indices: TensorLike, dim: int) -> Tensor:
    """The elements at ``indices`` along ``dim``, as ``gather`` returns them."""
    return gather(x, dim, indices)


def scatter(x: TensorLike, dim: int, index: TensorLike, src: TensorLike, *, reduce: str | None = None) -> Tensor:
    """``x`` with ``src`` written at ``index`` along ``dim``, or, by ``reduce``, added ("add") or multiplied
    ("multiply").
    """
    x, places = tensor(x), cast(index, ir.DataType.INT64)
    update = tensor(src, x.dtype)
    update = update.expand(places.shape) if update.ndim == 0 else update
    how = {None: "none", "add": "add", "multiply": "mul"}
    if reduce not in how:
        raise ModelError(f"scatter has no reduce={reduce!r}; use None, 'add' or 'multiply'")
    return op.ScatterElements(x, places, update, axis=axis_of(x, dim), reduction=how[reduce], shape=x.shape)


def scatter_add(x: TensorLike, dim: int, index: TensorLike, src: TensorLike) -> Tensor:
    """``x`` with ``src`` added at ``index`` along ``dim``."""
    return scatter(x, dim, index, src, reduce="add")


def one_hot(x: TensorLike, num_classes: int) -> Tensor:
    """int64 one-hot vectors of ``num_classes`` classes along a new last dimension."""
    x = cast(x, ir.DataType.INT64)
    values = np.array([0, 1], np.int64)
    return op.OneHot(x, np.array(num_classes, np.int64), values, axis=-1, shape=[*x.shape, num_classes])


def nonzero(x: TensorLike, as_tuple: bool = False) -> Any:
    """The positions of nonzero elements: int64 ``[count, rank]``, or one vector per dimension."""
    x = tensor(x)
    positions = op.NonZero(x)
    count = positions.shape[1]
    if not as_tuple:
        return op.Transpose(positions, perm=[1, 0], shape=[count, x.ndim])
    return tuple(op.Squeeze(p, [0], shape=[count]) for p in positions.split(1, 0))


# --- creation ------------------------------------------------------------------------------------


def full(size: Extent | Sequence[Extent], value: float, dtype: Any = "float32") -> Tensor:
    """A tensor filled with ``value``; sizes may be dynamic."""
    dims = [size] if isinstance(size, int | Dim) else list(size)
    kind = as_dtype(dtype)
    filled = wrap(current().builder.full(current().sizes(dims), value, kind))
    return shaped(filled, dims)


def zeros(*size: Any, dtype: Any = "float32") -> Tensor:
    """A tensor of zeros; sizes may be dynamic."""
    return full(size[0] if len(size) == 1 else size, 0, dtype)


def ones(*size: Any, dtype: Any = "float32") -> Tensor:
    """A tensor of ones; sizes may be dynamic."""
    return full(size[0] if len(size) == 1 else size, 1, dtype)


def full_like(x: TensorLike, value: float) -> Tensor:
    """A tensor with the shape and element type of ``x``, filled with ``value``."""
    x = tensor(x)
    return full(x.shape, value, x.dtype)


def zeros_like(x: TensorLike) -> Tensor:
    """Zeros with the shape and element type of ``x``."""
    return full_like(x, 0)


def ones_like(x: TensorLike) -> Tensor:
    """Ones with the shape and element type of ``x``."""
    return full_like(x, 1)


def arange(start: Extent | float, end: Extent | float | None = None, step: float = 1, dtype: Any = None) -> Tensor:
    """Numbers from ``start`` (0 by default) up to, but excluding, ``end``; bounds may be dynamic."""
    low, high = (0, start) if end is None else (start, end)
    if not isinstance(low, Dim) and not isinstance(high, Dim):
        return tensor(np.arange(low, high, step), None if dtype is None else as_dtype(dtype))
    bounds = [tensor(b, ir.DataType.INT64) for b in (low, high, step)]
    count: Any = high - low if step == 1 else None
    numbers = op.Range(*bounds) if count is None else op.Range(*bounds, shape=[count])
    return numbers if dtype is None else cast(numbers, dtype)


def tril(x: TensorLike, diagonal: int = 0) -> Tensor:
    """The lower triangle of the last two dimensions, zeros elsewhere."""
    x = tensor(x)
    return op.Trilu(x, np.array(diagonal, np.int64), upper=0, shape=x.shape)


def triu(x: TensorLike, diagonal: int = 0) -> Tensor:
    """The upper triangle of the last two dimensions, zeros elsewhere."""
    x = tensor(x)
    return op.Trilu(x, np.array(diagonal, np.int64), upper=1, shape=x.shape)

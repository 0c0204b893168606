"""Find stored tensors that an exporter computed from a weight, and that would not change with the weight in training.

An exporter that folds ``1 - w`` or the transpose of ``w`` stores the result separately from the weight, without a link
between the two, so that it must be recognised by its elements. Candidates are found by fingerprints: the order of a few
elements, which monotone functions preserve or reverse, and the first elements of rows, which survive a Concat. Only
candidates are compared in full, so the search is linear in the number of tensors and rows.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.lib.stride_tricks import sliding_window_view

from gradgraph.graph.shapes import stored_sizes

Array = np.ndarray[Any, Any]

_SAMPLES, _DISTINCT = 16, 8  # numbers in a fingerprint, and how many of them must be distinct (zeros and ones are not)
_COMPARED = 1 << 18  # maximum numbers to compare, evenly spaced in larger tensors
_TRIES = 8  # maximum weights to compare in full with a tensor
_PROBE = 4  # the first numbers of a row, which form its key
_PARTS = 16  # maximum parts of a concatenation; tensors larger than this many weights are not compared with the weight
_FRACTIONS = np.arange(1, _SAMPLES + 1) * 0.6180339887 % 1  # positions; evenly spaced ones might all be in one column
_TURNED = ("{}", "the transpose of {}")
_FLOATS = (ir.DataType.FLOAT16, ir.DataType.FLOAT, ir.DataType.DOUBLE)


@dataclass(frozen=True)
class Copy:
    """A tensor computed from ``weight``; ``relation`` describes how, with ``{}`` for the weight's name."""

    tensor: ir.Value
    weight: ir.Value
    relation: str


def find_copies(
    weights: Sequence[ir.Value],
    tensors: Sequence[ir.Value],
    group: Callable[[ir.Value], Hashable] = lambda value: value,
) -> list[Copy]:
    """Return the ``tensors`` that equal a weight, transposed or concatenated, or a simple function of a weight.

    A tensor is read only if its shape allows such a relation, and is never compared with a weight of the same
    ``group``. Each tensor is found at most once.
    """
    held = _arrays([w for w in weights if _is_comparable(w)], [t for t in tensors if _is_comparable(t)], group)
    by_order: dict[Hashable, list[_View]] = defaultdict(list)
    by_width: dict[int, list[_Probe]] = defaultdict(list)
    for view in (view for w in weights if w in held for view in _views(w, held[w], group(w))):
        if (key := _order_key(view.array)) is not None:
            by_order[key].append(view)
            if view.array.ndim <= 2 or not view.is_turned:
                by_width[_row_length(view.array.shape)].append(_probe(view))
    lookup = {width: (probes, np.array([p.key for p in probes], np.uint64)) for width, probes in by_width.items()}
    sizes = {view.array.size for views in by_order.values() for view in views}
    found = []
    for tensor in tensors:
        if tensor in held:
            subject = _View(tensor, held[tensor], group(tensor))
            whole = _copy_of_whole(subject, by_order) if subject.array.size in sizes else None
            copy = whole or _copy_of_part(subject, lookup)
            found += [] if copy is None else [copy]
    return found


# --- candidates ---------------------------------------------------------------------------------------------


def _arrays(
    weights: Sequence[ir.Value], tensors: Sequence[ir.Value], group: Callable[[ir.Value], Hashable]
) -> dict[ir.Value, Array]:
    """Return the arrays of all tensors and weights whose shapes allow one to be computed from the other."""
    dims = {v: stored_sizes(v) for v in {*weights, *tensors}}
    read: dict[ir.Value, None] = {}
    for one, others, sign in ((tensors, weights, 1), (weights, tensors, -1)):
        sizes, widths = _Others(), _Others()
        for value in others:
            sizes.add(dims[value], 0, group(value), whole=True)
            widths.add(dims[value], sign, group(value))
        mine = [v for v in one if sizes.has(dims[v], 0, group(v), whole=True) or widths.has(dims[v], sign, group(v))]
        read.update(dict.fromkeys(mine))
    arrays = {}
    for value in read:
        assert value.const_value is not None
        arrays[value] = value.const_value.numpy()
    return arrays


class _Others:
    """The two smallest numbers of rows, of tensors in different groups, for each row length."""

    def __init__(self) -> None:
        self._shortest: dict[int, list[tuple[int, Hashable]]] = defaultdict(list)

    def add(self, dims: Sequence[int], sign: int, group: Hashable, whole: bool = False) -> None:
        for width, length in _keys(dims, whole):
            known = [*self._shortest[width], (sign * length, group)]
            known.sort(key=lambda k: k[0])
            self._shortest[width] = [k for i, k in enumerate(known) if all(k[1] != other[1] for other in known[:i])][:2]

    def has(self, dims: Sequence[int], sign: int, group: Hashable, whole: bool = False) -> bool:
        """Whether another group has a tensor of the same row length with fewer rows, or with more if ``sign`` is −1.

        If ``whole``, it only has to have the same number of elements.
        """
        return any(
            other != group and (whole or shortest < sign * length)
            for width, length in _keys(dims, whole)
            for shortest, other in self._shortest.get(width, ())
        )


def _keys(dims: Sequence[int], whole: bool) -> list[tuple[int, int]]:
    """Return (row length, number of rows) for a tensor as stored and transposed; if ``whole``, (size, 0)."""
    if whole:
        return [(math.prod(dims), 0)]
    return [(_row_length(dims), dims[0]), (dims[0], dims[1])] if len(dims) == 2 else [(_row_length(dims), dims[0])]


def _is_comparable(value: ir.Value) -> bool:
    tensor = value.const_value
    return tensor is not None and tensor.dtype in _FLOATS and tensor.size >= _SAMPLES


@dataclass(frozen=True)
class _View:
    """The numbers of a tensor as stored, or transposed."""

    value: ir.Value
    array: Array
    group: Hashable
    is_turned: bool = False


@dataclass(frozen=True)
class _Probe:
    """A row of a view that serves as its lookup key."""

    view: _View
    place: int
    key: int


def _views(weight: ir.Value, array: Array, group: Hashable) -> Iterator[_View]:
    yield _View(weight, array, group)
    if array.ndim > 1:
        yield _View(weight, np.swapaxes(array, -1, -2), group, is_turned=True)


# --- a function of the whole weight -----------------------------------------------------------------------


def _order_key(array: Array) -> Hashable | None:
    """Return a key shared by all monotone functions of a tensor: its size, and the order of a few elements.

    None if few of these elements are distinct.
    """
    places = (array.size * _FRACTIONS).astype(np.int64)
    distinct, ranks = np.unique(array.flat[places], return_inverse=True)
    if len(distinct) < _DISTINCT:
        return None
    return array.size, min(tuple(ranks.tolist()), tuple((len(distinct) - 1 - ranks).tolist()))


_FUNCTIONS: Sequence[tuple[str, Callable[[Array], Array]]] = (
    ("1 - {}", lambda w: 1 - w),
    ("1 + {}", lambda w: 1 + w),
    ("the exponential of {}", np.exp),
    ("minus the exponential of {}", lambda w: -np.exp(w)),
    ("the sigmoid of {}", lambda w: 1 / (1 + np.exp(-w))),
    ("the softplus of {}", lambda w: np.log1p(np.exp(w))),
    ("the tangent (tanh) of {}", np.tanh),
)


def _copy_of_whole(tensor: _View, by_order: Mapping[Hashable, Sequence[_View]]) -> Copy | None:
    key = _order_key(tensor.array)
    views = [] if key is None else [v for v in by_order.get(key, ()) if v.group != tensor.group]
    for view in views[:_TRIES]:
        if (words := _function(*_samples(view.array, tensor.array))) is not None:
            return Copy(tensor.value, view.value, f"is {words.format(_TURNED[view.is_turned])}")
    return None


def _samples(x: Array, y: Array) -> tuple[Array, Array]:
    """Return elements of ``x`` and ``y`` at equal positions, in float64: all, or a sample of about ``_COMPARED``."""
    step = -(-x.size // _COMPARED) | 1
    if step == 1:
        return x.reshape(-1).astype(np.float64), y.reshape(-1).astype(np.float64)
    places = np.arange(0, x.size, step)
    return x.flat[places].astype(np.float64), y.flat[places].astype(np.float64)


def _function(x: Array, y: Array) -> str | None:
    """Return the function that maps ``x`` to ``y``, in words with ``{}`` for ``x``; None if none is known."""
    if np.array_equal(x, y):
        return "{}"
    with np.errstate(all="ignore"):
        for words, f in _FUNCTIONS:
            if _is_close(f(x), y):
                return words
        largest = np.argmax(np.abs(x))
        factor = y[largest] / x[largest]
        return f"{{}} times {factor:.4g}" if _is_close(x * factor, y) else None


def _is_close(a: Array, b: Array) -> bool:
    return bool(np.allclose(a, b, rtol=1e-5, atol=1e-6 * float(np.abs(b).max())))


# --- a concatenated weight ----------------------------------------------------------------------------------


def _copy_of_part(tensor: _View, lookup: Mapping[int, tuple[Sequence[_Probe], Array]]) -> Copy | None:
    """Return a ``Copy`` if ``tensor`` is a weight concatenated with more along its first or second axis, else None."""
    array = tensor.array
    for whole, is_turned in ((array, False), (array.T, True)) if array.ndim == 2 else ((array, False),):
        every, keys = lookup.get(_row_length(whole.shape), ((), np.array([], np.uint64)))
        near = [i for i, probe in enumerate(every) if len(probe.view.array) * _PARTS >= len(whole)]
        probes, known = [every[i] for i in near], keys[near]
        if not len(known) or len(whole) < _PROBE:
            continue
        rows = _hashes(whole)
        for place in np.flatnonzero(np.isin(rows, known))[: 2 * len(known)].tolist():
            for i in np.flatnonzero(known == rows[place]).tolist():
                view = probes[i].view
                if view.group != tensor.group and _holds(whole, view.array, place - probes[i].place):
                    words = _TURNED[view.is_turned != is_turned]
                    return Copy(tensor.value, view.value, f"contains {words} among other numbers")
    return None


def _row_length(dims: Sequence[int]) -> int:
    """Return the number of elements in a row; 0 for vectors, whose rows are short overlapping windows."""
    return math.prod(dims[1:]) if len(dims) > 1 else 0


def _hashes(array: Array) -> Array:
    """Return a hash of the first few elements of each row."""
    heads = sliding_window_view(array, _PROBE) if array.ndim == 1 else array.reshape(len(array), -1)[:, :_PROBE]
    bits = np.ascontiguousarray(heads, np.float32).view(np.uint32).astype(np.uint64)
    factors = np.array([1, 0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9], np.uint64)[: bits.shape[1]]
    return np.asarray((bits * factors).sum(axis=1, dtype=np.uint64))


def _probe(view: _View) -> _Probe:
    """Return a row from the middle of ``view`` (unlikely to be padding) as its lookup key."""
    array = view.array
    rows = _PROBE if array.ndim == 1 else 1
    middle = min(len(array) // 2, len(array) - rows)
    return _Probe(view, middle, int(_hashes(array[middle : middle + rows])[0]))


def _holds(whole: Array, part: Array, start: int) -> bool:
    if len(part) >= len(whole) or start < 0 or start + len(part) > len(whole) or whole.shape[1:] != part.shape[1:]:
        return False
    return np.array_equal(*_samples(part, whole[start : start + len(part)]))

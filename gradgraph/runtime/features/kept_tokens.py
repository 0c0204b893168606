"""Kept values of samples that are padded to the longest of their batch, such as the features of each token.

They are computed for samples padded to the longest of all, and cut to the width of each batch. All other inputs and
targets of the batch are read from the data again.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from gradgraph.data.arrays.batch import Array, Batch
from gradgraph.data.arrays.padded import Padded
from gradgraph.data.arrays.stored import StoredArray
from gradgraph.data.dataset import Loadable
from gradgraph.data.record.specs import TensorSpec
from gradgraph.data.sources.sources import Columns, Indexed, Samples
from gradgraph.errors import DataError, shown
from gradgraph.runtime.features.kept_rows import Arrays
from gradgraph.runtime.features.static_values import OpenSizes, Row

Place = tuple[str, int]  # an input and one of its axes


@dataclass(frozen=True)
class Widths:
    """The sizes that differ between batches, because samples are padded to the longest of their batch.

    Attributes:
        longest: the indices of samples with which a batch is as wide as any batch can be.
        shortest: the indices of samples with the smallest of these sizes.
        wide: the shapes of the inputs in the widest batch.
        open: the shapes of the inputs in a narrower batch, and the names of the sizes that differ.
        places: an input and its axis with each of these sizes, by name.
        differing: the inputs and targets with such a size.
    """

    longest: tuple[int, ...]
    shortest: tuple[int, ...]
    wide: Mapping[str, tuple[int, ...]]
    open: OpenSizes
    places: Mapping[str, Place]
    differing: frozenset[str]

    @classmethod
    def of(cls, source: Columns | Samples, specs: Sequence[TensorSpec]) -> Widths | None:
        """Return the sizes that differ between batches of ``source``; None if all batches have the same width.

        Args:
            source: the data.
            specs: the inputs and targets of the step.

        Raises:
            DataError: if two independent sizes have the same largest and smallest values.
        """
        candidates = _candidates(source) if isinstance(source, Samples) else []
        if len(candidates) < 2:
            return None
        shapes = [{s.name: batch[s.name].shape for s in specs} for batch in source.at([[i] for i in candidates])]
        open_ = [(s, axis) for s in specs for axis, d in enumerate(s.shape) if axis and not isinstance(d, int)]
        sizes = {(s.name, axis): np.array([shape[s.name][axis] for shape in shapes]) for s, axis in open_}
        names = {(s.name, axis): str(s.shape[axis] or f"{s.name}.{axis}") for s, axis in open_}
        differing = {place: each for place, each in sizes.items() if each.min() < each.max()}
        if not differing:
            return None
        by_pair = dict[tuple[int, int], Place]()
        for place, each in differing.items():
            other = by_pair.setdefault((int(each.max()), int(each.min())), place)
            if not np.array_equal(differing[other], each):
                raise DataError(
                    f"'{shown(other[0])}' and '{shown(place[0])}' have different lengths with the same maximum and "
                    "minimum, so their features cannot be kept; pad all samples to one length, or omit keep_features"
                )
        wide, narrow = (
            {n: tuple(int(choose([shape[n][axis] for shape in shapes])) for axis in range(len(of)))
             for n, of in shapes[0].items()}
            for choose in (max, min)
        )  # fmt: skip
        longest = dict.fromkeys(candidates[int(each.argmax())] for each in differing.values())
        shortest = dict.fromkeys(candidates[int(each.argmin())] for each in differing.values())
        opened = OpenSizes(narrow, {pair: names[place] for pair, place in by_pair.items()})
        return cls(
            tuple(longest),
            tuple(shortest),
            wide,
            opened,
            {names[place]: place for place in by_pair.values()},
            frozenset(name for name, _ in differing),
        )


def _candidates(source: Samples) -> list[int]:
    """Return the indices of samples among which are those with the largest and smallest sizes; empty if unknown."""
    dataset, rows = source.dataset, source.rows or 0
    if isinstance(dataset, Padded):
        return list(range(rows))
    lengths = dataset.lengths if isinstance(dataset, Loadable) else None
    return [] if lengths is None else sorted({int(np.argmin(lengths)), int(np.argmax(lengths))})


def cut_to(array: Array, row: Row, sizes: Mapping[str, int], from_end: bool) -> Array:
    """Return kept values [samples, …], cut to the ``sizes`` of a batch.

    Args:
        row: which axes have which size.
        from_end: whether samples are padded at their beginning, so that their ends are aligned.
    """
    return array[(slice(None), *_slices(row, sizes, from_end))]


def _slices(row: Row, sizes: Mapping[str, int], from_end: bool) -> Iterator[slice]:
    for name, whole in itertools.zip_longest(row.open, row.shape):
        size = whole if name is None else sizes[name]
        if size > whole:
            raise DataError(
                f"'{shown(name)}' is {size} in this batch, but {whole} for the longest sample alone, so features "
                "cannot be kept; pad all samples to one length, or omit keep_features"
            )
        yield slice(whole - size, whole) if from_end else slice(size)


class KeptTokens(Indexed):
    """Kept values, cut to the width of each batch, with the other inputs and targets of the batch.

    Args:
        source: the data.
        arrays: the kept values of all samples, as computed for the widest batch.
        kept: their rows.
        places: an input and its axis with each size that differs between batches, by name.
        read: the inputs and targets that the head reads itself.
        from_end: as for ``cut_to``.
    """

    def __init__(
        self,
        source: Columns | Samples,
        arrays: Arrays,
        kept: Mapping[str, Row],
        places: Mapping[str, Place],
        read: Sequence[str],
        from_end: bool,
    ) -> None:
        self._source, self._arrays, self._kept, self._places = source, arrays, kept, places
        self._read, self._from_end = list(read), from_end
        self.order, self.names, self.rows = source.order, source.names, source.rows
        self.batches_per_epoch = source.batches_per_epoch

    def batches(self, epoch: int, start: int = 0) -> Iterator[Batch]:
        numbers, size = self._indices(epoch), self.order.size
        for i, batch in enumerate(self._source.batches(epoch, start), start):
            assert isinstance(batch, Mapping)
            yield self._with_kept(batch, numbers[i * size : (i + 1) * size])

    def at(self, batches: Sequence[Sequence[int]]) -> Iterator[dict[str, Array]]:
        for numbers, batch in zip(batches, self._source.at(batches), strict=True):
            yield self._with_kept(batch, np.asarray(numbers))

    def _indices(self, epoch: int) -> Array:
        if isinstance(self._source, Samples):
            return self._source.indices(epoch)
        rows = self.rows or 0
        indices = self.order.indices(epoch, rows)
        return np.arange(rows) if indices is None else indices

    def _with_kept(self, batch: Mapping[str, Any], numbers: Array) -> dict[str, Array]:
        sizes = {name: batch[place].shape[axis] for name, (place, axis) in self._places.items()}
        found = {name: np.asarray(batch[name]) for name in self._read}
        for name, array in self._arrays.items():
            found[name] = _rows_of(array, numbers, tuple(_slices(self._kept[name], sizes, self._from_end)))
        return found


def _rows_of(array: Array | StoredArray, numbers: Array, cut: tuple[slice, ...]) -> Array:
    if isinstance(array, StoredArray):
        rows = np.empty((len(numbers), *array.shape[1:]), array.dtype)
        return np.ascontiguousarray(array.take(numbers, 0, rows, "clip")[(slice(None), *cut)])
    index: tuple[Any, ...] = (numbers, *cut)
    found: Array = array[index]
    return np.ascontiguousarray(found)

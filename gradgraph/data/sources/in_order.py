"""Data that are read once from beginning to end, with only one batch of an array file in memory at a time."""

from __future__ import annotations

import contextlib
import math
import os
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Any
from zipfile import ZipFile, ZipInfo

import numpy as np

from gradgraph.data.arrays.batch import Array
from gradgraph.data.arrays.numpy_files import explained, load_arrays
from gradgraph.data.dataset import Loadable
from gradgraph.data.preprocess.frames import Frame
from gradgraph.data.record.data_names import NO_NAMES, DataNames
from gradgraph.data.record.specs import TensorSpec
from gradgraph.data.sources.sources import common_length, row_count
from gradgraph.data.tables import columns_of, is_table_file, read_table
from gradgraph.errors import DataError, listed, shown
from gradgraph.files.untrusted.array_files import array_in, npy_header, opened_npz

# the shape of an array, and a function that reads its next rows
Opened = tuple[tuple[int, ...], Callable[[int], Array]]


def in_order(
    data: Any, wanted: Mapping[str, TensorSpec], unread: Collection[str] = (), known: DataNames = NO_NAMES
) -> Ordered:
    """Open a dataset, or the arrays at a path, to read all samples once in order; arguments as for :class:`InOrder`."""
    if isinstance(data, Loadable):
        return LoadedInOrder(data, wanted, known)
    return InOrder(data, wanted, unread, known)


class Ordered(contextlib.ExitStack, ABC):
    """Samples that are read once, in order; a context manager that closes files.

    Attributes:
        rows: number of samples.
        others: names of arrays in the data that are not read.
        files: paths of the samples' files, if each sample is a file.
    """

    rows: int
    others: list[str]
    files: list[str]

    @abstractmethod
    def batches(self, size: int) -> Iterator[dict[str, Array]]:
        """Yield batches of ``size`` samples; the last one may be smaller."""


class LoadedInOrder(Ordered):
    """The samples of a ``Loadable`` dataset, in order."""

    def __init__(self, samples: Loadable, wanted: Mapping[str, TensorSpec], known: DataNames) -> None:
        super().__init__()
        self._samples, self._wanted = samples, wanted
        self._names = samples.names_for(wanted, known)
        self.rows, self.others = len(samples), list[str]()
        self.files = [str(file) for file in samples.files]

    def batches(self, size: int) -> Iterator[dict[str, Array]]:
        ranges = (range(first, min(first + size, self.rows)) for first in range(0, self.rows, size))
        return self._samples.load(ranges, self._wanted, (), self._names)


class InOrder(Ordered):
    """The arrays of an ``.npz`` (stored or compressed), of a folder of ``.npy`` files, or of a table (loaded whole).

    Args:
        wanted: the arrays to read, at least one, by name; each has one row per sample.
        unread: names of columns of a table to ignore, such as targets.
        known: column and class names of the training data, which must match.

    Attributes:
        rows, others, files: as for :class:`Ordered`.

    Raises:
        DataError: if the data do not exist or are damaged, or the arrays have different lengths.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        wanted: Mapping[str, TensorSpec],
        unread: Collection[str] = (),
        known: DataNames = NO_NAMES,
    ) -> None:
        super().__init__()
        self.path, self.files = Path(path), []
        found: dict[str, Opened]
        with contextlib.ExitStack() as unless_all_is_well:
            unless_all_is_well.callback(self.close)
            if is_table_file(self.path):
                table = read_table(self.path, known=known)
                arrays, _ = columns_of(table, wanted, known, unread)
                found = {name: _sliced(array) for name, array in arrays.items()}
                self.others = [name for name in Frame(table) if name in unread]
            elif self.path.is_file():
                with explained(self.path):
                    archive, members = self.enter_context(opened_npz(self.path, sys.maxsize))
                    found = {name: self._member(archive, members[name]) for name in wanted if name in members}
                self.others = [name for name in members if name not in wanted]
            else:
                loaded = load_arrays(self.path)
                found = {name: _sliced(loaded[name]) for name in wanted if name in loaded}
                self.others = [name for name in loaded if name not in wanted]
            if missing := [name for name in wanted if name not in found]:
                has = f"; it has {listed(self.others)}" if self.others else ""
                raise DataError(
                    f"'{shown(self.path)}' does not contain {listed(missing)}, which the model requires{has}"
                )
            self.rows = common_length({name: row_count(name, shape) for name, (shape, _) in found.items()})
            unless_all_is_well.pop_all()
        self._read = {name: read for name, (_, read) in found.items()}

    def batches(self, size: int) -> Iterator[dict[str, Array]]:
        """Yield batches of ``size`` rows; the last one may be smaller."""
        for first in range(0, self.rows, size):
            count = min(size, self.rows - first)
            with explained(self.path):
                yield {name: read(count) for name, read in self._read.items()}

    def _member(self, archive: ZipFile, info: ZipInfo) -> Opened:
        file = self.enter_context(archive.open(info))
        shape, is_fortran, dtype = npy_header(file)
        if is_fortran:  # its rows are not contiguous
            file.seek(0)
            return _sliced(array_in(file))
        row = math.prod(shape[1:]) * dtype.itemsize

        def read(count: int) -> Array:
            content = file.read(count * row)
            if len(content) < count * row:
                raise EOFError("an array is truncated")
            return np.frombuffer(content, dtype).reshape(count, *shape[1:])

        return shape, read


def _sliced(array: Any) -> Opened:
    position = 0

    def read(count: int) -> Array:
        nonlocal position
        position += count
        rows: Array = array[position - count : position]
        return rows

    return array.shape, read

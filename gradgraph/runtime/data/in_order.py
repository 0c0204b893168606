"""Arrays from disk, read once from their first row to their last: no more than a batch of them is in memory."""

from __future__ import annotations

import contextlib
import math
import os
import sys
import zipfile
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

import numpy as np
from numpy.lib import format as npy

from gradgraph.errors import DataError, listed, shown
from gradgraph.runtime.data.arrays import checked_members, explained, load_arrays, npy_header
from gradgraph.runtime.data.batch import Array
from gradgraph.runtime.data.images import ImageFolder
from gradgraph.runtime.data.shards import Shards
from gradgraph.runtime.data.sources import common_length, row_count
from gradgraph.runtime.data.tables import columns_in, columns_of, is_table_file, read_table
from gradgraph.step.manifest import TensorSpec

Opened = tuple[tuple[int, ...], Callable[[int], Array]]  # the shape of an array, and what reads its next rows


def in_order(data: Any, wanted: Mapping[str, TensorSpec], unread: Collection[str] = ()) -> Ordered:
    """Read images, shards, or arrays at a path once; arguments are those of ``InOrder``."""
    return LoadedInOrder(data, wanted) if isinstance(data, ImageFolder | Shards) else InOrder(data, wanted, unread)


class Ordered(Protocol):
    """Samples that are read once."""

    rows: int
    others: list[str]

    def __enter__(self) -> Ordered: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None, /
    ) -> None: ...

    def batches(self, size: int) -> Iterator[dict[str, Array]]: ...


class LoadedInOrder(contextlib.nullcontext[Any]):
    """The images of a folder, sorted, or the samples of shards."""

    def __init__(self, samples: ImageFolder | Shards, wanted: Mapping[str, TensorSpec]) -> None:
        super().__init__(self)
        self._samples, self._wanted = samples, wanted
        self.rows, self.others = len(samples), list[str]()

    def batches(self, size: int) -> Iterator[dict[str, Array]]:
        ranges = (range(first, min(first + size, self.rows)) for first in range(0, self.rows, size))
        return self._samples.load(ranges, self._wanted, ())


class InOrder:
    """The arrays of an ``.npz`` (stored or compressed), of a folder of ``.npy`` files, or of a table (read whole).

    Args:
        path: of any of them.
        wanted: what to read, by name, at least one, which all have one row per sample.
        unread: names of columns that a table may have besides.

    Attributes:
        rows: how many samples there are.
        others: the names of arrays that are not read.

    Raises:
        DataError: there is no such data, they are damaged, or their lengths differ.
    """

    def __init__(
        self, path: str | os.PathLike[str], wanted: Mapping[str, TensorSpec], unread: Collection[str] = ()
    ) -> None:
        self.path, self._open = Path(path), contextlib.ExitStack()
        found: dict[str, Opened]
        with contextlib.ExitStack() as unless_all_is_well:
            unless_all_is_well.callback(self._open.close)
            if is_table_file(self.path):
                table = read_table(self.path)
                found = {name: _sliced(array) for name, array in columns_of(table, wanted, unread).items()}
                self.others = [name for name in columns_in(table) if name in unread]
            elif self.path.is_file():
                with explained(self.path):
                    archive = self._open.enter_context(zipfile.ZipFile(self.path))
                    members = checked_members(archive, self.path, sys.maxsize)
                    found = {name: self._member(archive, members[name]) for name in wanted if name in members}
                self.others = [name for name in members if name not in wanted]
            else:
                arrays = load_arrays(self.path)
                found = {name: _sliced(arrays[name]) for name in wanted if name in arrays}
                self.others = [name for name in arrays if name not in wanted]
            if missing := [name for name in wanted if name not in found]:
                has = f"; it has {listed(self.others)}" if self.others else ""
                raise DataError(f"'{shown(self.path)}' has no {listed(missing)}, which the model takes{has}")
            self.rows = common_length({name: row_count(name, shape) for name, (shape, _) in found.items()})
            if self.rows == 0:
                raise DataError("the data are empty; give at least one sample")
            unless_all_is_well.pop_all()
        self._read = {name: read for name, (_, read) in found.items()}

    def __enter__(self) -> InOrder:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._open.close()

    def batches(self, size: int) -> Iterator[dict[str, Array]]:
        """Batches of ``size`` rows, the last one of those that are left."""
        for first in range(0, self.rows, size):
            count = min(size, self.rows - first)
            with explained(self.path):
                yield {name: read(count) for name, read in self._read.items()}

    def _member(self, archive: zipfile.ZipFile, info: zipfile.ZipInfo) -> Opened:
        file = self._open.enter_context(archive.open(info))
        shape, is_fortran, dtype = npy_header(file)
        if is_fortran:  # its rows lie nowhere in one piece
            file.seek(0)
            return _sliced(np.asarray(npy.read_array(file, allow_pickle=False)))
        row = math.prod(shape[1:]) * dtype.itemsize

        def read(count: int) -> Array:
            content = file.read(count * row)
            if len(content) < count * row:
                raise EOFError("an array ends too early")
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

"""Arrays from disk, read once from their first row to their last: no more than a batch of them is in memory."""

from __future__ import annotations

import contextlib
import math
import os
import sys
import zipfile
import zlib
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

import numpy as np
from numpy.lib import format as npy

from gradgraph.errors import DataError, listed, shown
from gradgraph.runtime.data.arrays import Arrays, checked_members, load_arrays, npy_header
from gradgraph.runtime.data.batch import Array
from gradgraph.runtime.data.images import ImageFolder
from gradgraph.runtime.data.remedies import FORMATS, for_file
from gradgraph.runtime.data.shards import Shards
from gradgraph.runtime.data.tables import columns_in, columns_of, is_table_file, read_table
from gradgraph.step.manifest import TensorSpec

Read = Callable[[int], Array]


def in_order(data: Any, wanted: Mapping[str, TensorSpec], unread: Collection[str] = ()) -> Ordered:
    """Images, shards, or what lies at a path, read once; as for ``InOrder``."""
    return LoadedInOrder(data, wanted) if isinstance(data, ImageFolder | Shards) else InOrder(data, wanted, unread)


class Ordered(Protocol):
    """Samples that are read once."""

    rows: int
    others: list[str]

    def __enter__(self) -> Ordered: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None: ...

    def batches(self, size: int) -> Iterator[dict[str, Array]]: ...


class LoadedInOrder(contextlib.nullcontext[Any]):
    """The images of a folder, sorted, or the samples of shards."""

    def __init__(self, samples: ImageFolder | Shards, wanted: Mapping[str, TensorSpec]) -> None:
        super().__init__(self)
        self._samples, self._wanted = samples, wanted
        self.rows, self.others = len(samples), list[str]()

    def batches(self, size: int) -> Iterator[dict[str, Array]]:
        """As of ``InOrder``."""
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
        self._read: dict[str, Read] = {}
        self._lengths: dict[str, int] = {}
        try:
            if is_table_file(self.path):
                self.others = self._of_table(wanted, unread)
            else:
                self.others = (
                    self._of_npz(wanted) if self.path.is_file() else self._of_arrays(load_arrays(self.path), wanted)
                )
            self.rows = self._common_length(wanted)
        except BaseException:
            self._open.close()
            raise

    def __enter__(self) -> InOrder:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._open.close()

    def batches(self, size: int) -> Iterator[dict[str, Array]]:
        """Batches of ``size`` rows, the last one of those that are left."""
        for first in range(0, self.rows, size):
            count = min(size, self.rows - first)
            with self._explained():
                yield {name: read(count) for name, read in self._read.items()}

    def _of_table(self, wanted: Mapping[str, TensorSpec], unread: Collection[str]) -> list[str]:
        table = read_table(self.path)
        self._of_arrays({**columns_of(table, wanted, unread)}, wanted)
        return [name for name in columns_in(table) if name in unread]

    def _of_arrays(self, arrays: Arrays, wanted: Collection[str]) -> list[str]:
        for name in (n for n in wanted if n in arrays):
            self._lengths[name] = _length(name, arrays[name].shape)
            self._read[name] = _sliced(arrays[name])
        return [name for name in arrays if name not in wanted]

    def _of_npz(self, wanted: Collection[str]) -> list[str]:
        with self._explained():
            archive = self._open.enter_context(zipfile.ZipFile(self.path))
            members = checked_members(archive, self.path, sys.maxsize)
            for name in (n for n in wanted if n in members):
                shape, self._read[name] = self._member(archive, members[name])
                self._lengths[name] = _length(name, shape)
        return [name for name in members if name not in wanted]

    def _member(self, archive: zipfile.ZipFile, info: zipfile.ZipInfo) -> tuple[tuple[int, ...], Read]:
        file = self._open.enter_context(archive.open(info))
        shape, is_fortran, dtype = npy_header(file)
        if is_fortran:  # its rows lie nowhere in one piece
            file.seek(0)
            return shape, _sliced(np.asarray(npy.read_array(file, allow_pickle=False)))
        row = math.prod(shape[1:]) * dtype.itemsize

        def read(count: int) -> Array:
            content = file.read(count * row)
            if len(content) < count * row:
                raise EOFError("an array ends too early")
            return np.frombuffer(content, dtype).reshape(count, *shape[1:])

        return shape, read

    @contextlib.contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except zipfile.BadZipFile as error:
            what = f"'{shown(self.path)}' cannot be read ({shown(error)}): {FORMATS}"
            raise DataError(what, **for_file(self.path)) from None
        except (zlib.error, EOFError, NotImplementedError, RuntimeError, ValueError) as error:
            raise DataError(f"'{shown(self.path)}' cannot be read ({shown(error)}); save it again as .npz") from None

    def _common_length(self, wanted: Collection[str]) -> int:
        if missing := [name for name in wanted if name not in self._lengths]:
            has = f"; it has {listed(self.others)}" if self.others else ""
            raise DataError(f"'{shown(self.path)}' has no {listed(missing)}, which the model takes{has}")
        first = next(iter(self._lengths))
        for name, length in self._lengths.items():
            if length != self._lengths[first]:
                raise DataError(f"'{shown(first)}' has {self._lengths[first]} rows but '{shown(name)}' has {length}; "
                                "give one row per sample in each")  # fmt: skip
        if self._lengths[first] == 0:
            raise DataError("the data are empty; give at least one sample")
        return self._lengths[first]


def _length(name: str, shape: tuple[int, ...]) -> int:
    if not shape:
        raise DataError(f"'{shown(name)}' has no axis of samples; give one row per sample")
    return shape[0]


def _sliced(array: Any) -> Read:
    position = 0

    def read(count: int) -> Array:
        nonlocal position
        position += count
        rows: Array = array[position - count : position]
        return rows

    return read

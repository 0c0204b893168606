"""Rows that are kept for each sample, in memory or in files next to a checkpoint."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from gradgraph.data.arrays.batch import Array
from gradgraph.data.arrays.stored import StoredArray
from gradgraph.data.record.specs import numpy_dtype
from gradgraph.data.sources.sources import Columns, Samples, Source
from gradgraph.errors import DataError, readable_bytes, shown
from gradgraph.files.atomic import explain_errors, write_atomically
from gradgraph.files.digest import Digest, digest_of
from gradgraph.files.mapped import pieces
from gradgraph.files.spilled import Folder
from gradgraph.files.untrusted.documents import LARGEST, json_of
from gradgraph.files.untrusted.regular import regular_bytes
from gradgraph.machine.free_memory import free_memory
from gradgraph.runtime.features.static_values import Row

SHARE = 0.25  # share of the free memory that may be used
_DIGEST = "digest.json"  # written last, so that files without it are incomplete
_READ = 1 << 24  # bytes of a stored array that are read at a time
Arrays = dict[str, Array | StoredArray]


class Writer:
    """A writer of rows into ``arrays``, or into files; ``arrays`` are complete when all rows are written."""

    def __init__(self, rows: Mapping[str, Row], arrays: Arrays, files: Mapping[str, Any]) -> None:
        self._rows, self.arrays, self._files, self._done = rows, arrays, files, 0
        self.digests = {name: Digest() for name in files}  # of what is written

    def append(self, batch: Mapping[str, Array], rows: int) -> None:
        """Add the first ``rows`` rows of a batch.

        Raises:
            DataError: if their size differs from that of earlier rows.
        """
        for name, row in self._rows.items():
            if batch[name].shape[1:] != row.shape:
                raise DataError(
                    f"'{shown(name)}' has a different size in each batch ({list(row.shape)} and "
                    f"{list(batch[name].shape[1:])} per sample), so it cannot be kept; pad all samples to one size, or "
                    "omit keep_features"
                )
        for name, file in self._files.items():
            data = np.ascontiguousarray(batch[name][:rows]).reshape(-1).view(np.uint8).data
            file.write(data)
            self.digests[name].update(data)
        for name, array in self.arrays.items():
            assert isinstance(array, np.ndarray)
            array[self._done : self._done + rows] = batch[name][:rows]
        self._done += rows


class KeptRows:
    """Rows of several arrays for each sample, written in order.

    Args:
        rows: the shape and type of each value per sample, by name.
        count: the number of samples.
        folder: the folder for files if the rows take more than ``SHARE`` of the free memory; None for a temporary
            folder.
        processes: the number of processes that keep as much.

    Attributes:
        nbytes: size in bytes.
        in_memory: whether they are kept in memory.
        folder: the folder of the files; None in memory.
    """

    def __init__(self, rows: Mapping[str, Row], count: int, folder: Path | None, processes: int = 1) -> None:
        self.rows, self.count = dict(rows), count
        self.nbytes = count * sum(row.nbytes for row in rows.values())
        free = free_memory()
        self.in_memory = free is None or self.nbytes * processes <= SHARE * free
        self._temporary = None if self.in_memory or folder is not None else Folder()
        self.folder = None if self.in_memory else self._temporary.path if self._temporary else folder

    def __str__(self) -> str:
        where = "memory" if self.folder is None else f"'{shown(self.folder)}'"
        return f"{readable_bytes(self.nbytes)} in {where}"

    def found(self, digest: str) -> Arrays | None:
        """Return the arrays that an earlier run wrote; None if there are none of this digest, or if they are damaged.

        Rows of data without a digest ("") are never found.
        """
        with contextlib.suppress(OSError, ValueError, DataError):
            if self.folder is None or not digest:
                return None
            expected = json_of(regular_bytes(self.folder / _DIGEST, LARGEST))
            if isinstance(expected, list) and expected[:1] == [digest]:
                arrays = self._opened(self.folder)
                if expected[1:] == [digest_of(_pieces(array)) for array in arrays.values()]:
                    return arrays
        return None

    @contextlib.contextmanager
    def written(self, digest: str) -> Iterator[Writer]:
        """Return a context with a writer of the rows, which are complete at its end.

        Raises:
            OutputError: if a file cannot be written.
        """
        if self.folder is None:
            rows = self.rows.items()
            yield Writer(self.rows, {n: np.empty((self.count, *r.shape), numpy_dtype(r.dtype)) for n, r in rows}, {})
            return
        with explain_errors(self.folder), contextlib.ExitStack() as files:
            self.remove()
            self.folder.mkdir(parents=True, exist_ok=True)
            paths = {name: self._path(self.folder, i) for i, name in enumerate(self.rows)}
            writer = Writer(self.rows, {}, {name: files.enter_context(path.open("wb")) for name, path in paths.items()})
            yield writer
        digests = [digest, *(found.text() for found in writer.digests.values())]
        write_atomically(self.folder / _DIGEST, json.dumps(digests).encode())
        writer.arrays.update(self._opened(self.folder))

    def _opened(self, folder: Path) -> Arrays:
        return {
            name: StoredArray(self._path(folder, i), 0, (self.count, *row.shape), numpy_dtype(row.dtype))
            for i, (name, row) in enumerate(self.rows.items())
        }

    def _path(self, folder: Path, i: int) -> Path:
        return folder / f"{i}.rows"

    def remove(self) -> None:
        """Remove the files, and their folder unless it contains others."""
        if self.folder is None:
            return
        with contextlib.suppress(OSError):
            for path in [*self.folder.glob("*.rows"), self.folder / _DIGEST]:
                path.unlink(missing_ok=True)
            self.folder.rmdir()
            if self._temporary is None:
                self.folder.parent.rmdir()  # unless other data are kept there


def part_of(array: Array | StoredArray, first: int, count: int) -> Array | StoredArray:
    """Return ``count`` consecutive rows of a kept array, without a copy."""
    return array[first : first + count] if isinstance(array, np.ndarray) else array.part(first, count)


def digest_of_data(source: Source) -> Digest | None:
    """Return a digest of the data; None if they have no content that can be compared.

    For arrays, it covers all bytes; for files, names, sizes and times.
    """
    digest = Digest()
    if isinstance(source, Columns):
        for name, array in source.arrays.items():
            digest.update_text(f"{name} {array.dtype} {array.shape}")
            for piece in _pieces(array):
                digest.update(piece)
        return digest
    if not isinstance(source, Samples) or not source.files:
        return None
    digest.update_text(f"{source.names!r} {source.rows}")
    for file in source.files:
        status = Path(file).stat()
        digest.update_text(f"{file} {status.st_size} {status.st_mtime_ns}")
    return digest


def _pieces(array: Array | StoredArray) -> Iterator[memoryview]:
    if isinstance(array, np.ndarray):
        yield from pieces(array)
        return
    step = max(1, _READ * len(array) // max(array.nbytes, 1))
    for first in range(0, len(array), step):
        yield np.ascontiguousarray(array[first : first + step]).reshape(-1).view(np.uint8).data

"""Arrays that stay on disk, whose rows are read on demand.

Ordinary reads raise an error for a truncated file; accessing a memory map of one would kill the process (SIGBUS).
"""

from __future__ import annotations

import os
import threading
import weakref
from pathlib import Path
from typing import Any

import numpy as np

from gradgraph.errors import DataError, shown

Array = np.ndarray[Any, Any]


class StoredArray:
    """An array on disk in C order, with at least one axis.

    Args:
        start: offset of the first element in bytes.

    Raises:
        OSError: if the file cannot be opened.
        DataError: if the file is shorter than the array.
    """

    def __init__(self, path: Path, start: int, shape: tuple[int, ...], dtype: np.dtype[Any]) -> None:
        self.path, self.shape, self.dtype, self.ndim = path, shape, dtype, len(shape)
        self._start = start
        self._row = int(np.prod(shape[1:], dtype=object)) * dtype.itemsize
        self.nbytes = self._row * shape[0]
        self._file = os.open(path, os.O_RDONLY | getattr(os, "O_BINARY", 0))
        weakref.finalize(self, os.close, self._file)
        self._lock = threading.Lock()  # for platforms without preadv, where readers share the position in the file
        if os.fstat(self._file).st_size < start + self.nbytes:
            raise self._cut()

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, rows: slice) -> Array:
        """Read consecutive rows into new memory."""
        first, end, _ = rows.indices(len(self))
        out = np.empty((max(end - first, 0), *self.shape[1:]), self.dtype)
        self._read(_bytes_of(out), first * self._row)
        return out

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Array:
        return self[:] if dtype is None else self[:].astype(dtype)

    def part(self, first: int, count: int) -> StoredArray:
        """Return an array of ``count`` consecutive rows, which stay on disk."""
        return StoredArray(self.path, self._start + first * self._row, (count, *self.shape[1:]), self.dtype)

    def take(self, indices: Array, axis: int, out: Array, mode: str) -> Array:
        """Read rows into ``out``, like ``numpy.take`` with ``axis=0``; the indices must be in range."""
        view, row = _bytes_of(out), self._row
        for i, index in enumerate(indices.tolist()):
            self._read(view[i * row : (i + 1) * row], index * row)
        return out

    def _read(self, view: memoryview, offset: int) -> None:
        offset += self._start
        while len(view):
            if hasattr(os, "preadv"):
                count = os.preadv(self._file, [view], offset)
            else:
                with self._lock:
                    os.lseek(self._file, offset, os.SEEK_SET)
                    data = os.read(self._file, len(view))
                count = len(data)
                view[:count] = data
            if not count:
                raise self._cut()
            view, offset = view[count:], offset + count

    def _cut(self) -> DataError:
        return DataError(
            f"'{shown(self.path)}' is shorter than its array of {self.nbytes:,} bytes: it is incomplete, or was "
            "truncated while it was read; write it again (to replace a file while it is read, write another one and "
            "rename it)"
        )


def _bytes_of(array: Array) -> memoryview:
    return array.reshape(-1).view(np.uint8).data

"""Memory-mapped arrays: checks for truncated files, and release of pages that are no longer needed.

Reading a page beyond the end of a truncated file kills the process (SIGBUS). Replacing a file is harmless: the mapping
stays valid.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from gradgraph.files.digest import BLOCK

Array: TypeAlias = np.ndarray[Any, Any]

_EVERY = 0.02  # seconds between releases of pages; in that time, reading maps about 40 MB
PIECE = 1 << 24  # bytes read from a mapped file before their memory is released
# bytes read from a file at a time, which are still in the processor's cache when written (copying 0.5 GB took 0.14 s;
# by 16 MiB 0.24 s, by 256 KiB 0.17 s)
READ = 1 << 20


def is_mapped(array: Array) -> bool:
    """Whether ``array`` is mapped from a file by NumPy or ``mmap``; also for views and ``np.asarray``."""
    return _mapping(array) is not None


def is_cut(array: Array) -> bool:
    """Whether ``array`` is mapped from a file that is now shorter than the mapping."""
    found = _mapping(array)
    if found is None:
        return False
    mapping, first = found
    with contextlib.suppress(OSError, ValueError):  # not a file, or a mapping without a known file
        return mapping.size() < first + len(mapping)
    return False


def is_at(path: Path, status: os.stat_result) -> bool:
    """Whether ``path`` leads to the open file of ``status``, rather than to one that has replaced it."""
    try:
        return os.path.samestat(path.stat(), status)
    except OSError:
        return False


def pieces(array: Array) -> Iterator[memoryview]:
    """Yield the bytes of ``array`` in pieces; pages of a mapped file do not stay in memory."""
    flat = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    for start in range(0, len(flat), PIECE):
        piece = flat[start : start + PIECE]
        yield piece.data
        forget_pages(piece)


def forget_pages(array: Array) -> None:
    """Release the pages of ``array``, if it is mapped read-only from a file."""
    if (found := _mapping(array)) is not None and memoryview(found[0]).readonly:
        _release_pages(found[0], array)


def _release_pages(mapping: mmap.mmap, read: Array) -> None:
    """Release the pages of ``mapping`` that contain ``read``; a later access reads them again."""
    if not hasattr(mapping, "madvise"):
        return
    start = _address(read) - _address(np.frombuffer(mapping, np.uint8))
    end, start = start + read.nbytes, start - start % mmap.PAGESIZE
    mapping.madvise(mmap.MADV_DONTNEED, start, end - start)


@contextlib.contextmanager
def passing_through(arrays: Iterable[Array]) -> Iterator[None]:
    """Return a context that keeps releasing the pages of mapped ``arrays`` while other code copies these."""
    mappings = {id(found[0]): found[0] for array in arrays if (found := _mapping(array)) is not None}
    mappings = {key: mapping for key, mapping in mappings.items() if hasattr(mapping, "madvise")}
    done = threading.Event()

    def release_pages() -> None:
        while not done.wait(_EVERY):
            for mapping in mappings.values():
                mapping.madvise(mmap.MADV_DONTNEED)

    helper = threading.Thread(target=release_pages, daemon=True)
    if mappings:
        helper.start()
    try:
        yield
    finally:
        done.set()
        if mappings:
            helper.join()
        for mapping in mappings.values():
            mapping.madvise(mmap.MADV_DONTNEED)


def _address(array: Array) -> int:
    address: int = array.__array_interface__["data"][0]
    return address


def _mapping(array: Array) -> tuple[mmap.mmap, int] | None:
    """Return the file mapping of the view ``array``, and its offset in the file (0 if unknown); None if in memory."""
    owner: Any = array
    while isinstance(owner, np.ndarray | memoryview):
        mapping = getattr(owner, "_mmap", None)
        if isinstance(owner, np.memmap) and isinstance(mapping, mmap.mmap):
            return mapping, owner.offset - owner.offset % mmap.ALLOCATIONGRANULARITY
        owner = owner.base if isinstance(owner, np.ndarray) else owner.obj
    return (owner, 0) if isinstance(owner, mmap.mmap) else None


def pieces_of(file: Any) -> Iterator[bytes]:
    """Yield the rest of a binary file, in pieces."""
    while piece := file.read(BLOCK):
        yield piece

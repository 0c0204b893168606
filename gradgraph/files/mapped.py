"""Files that are mapped into memory: whether one was cut meanwhile, and those that hold the weights of a step.

Who touches a page of a mapped file behind its end ends the process (SIGBUS). A file that another one has replaced does
no harm: what was mapped stays.
"""

from __future__ import annotations

import contextlib
import mmap
import threading
from collections.abc import Iterable, Iterator
from typing import Any, TypeAlias

import numpy as np

from gradgraph.files.digest import BLOCK

Array: TypeAlias = np.ndarray[Any, Any]

_EVERY = 0.02  # seconds in which a reader brings about 40 MB into memory
PIECE = 1 << 24  # bytes that are read of a mapped file before their memory is given back
# bytes that are read of a file at a time: the processor has them at hand when they are written (0.5 GB from file to
# file in 0.14 s, by 16 MiB in 0.24 s, by 256 KiB in 0.17 s)
READ = 1 << 20


def is_mapped(array: Array) -> bool:
    """Does ``array`` lie in a file, as far as NumPy tells? Also behind views and ``np.asarray``."""
    return _mapping(array) is not None


def is_cut(array: Array) -> bool:
    """Does ``array`` lie in a file that has become shorter than what is mapped of it?"""
    found = _mapping(array)
    if found is None:
        return False
    mapping, first = found
    with contextlib.suppress(OSError, ValueError):  # memory of no file, or a mapping that does not know its own
        return mapping.size() < first + len(mapping)
    return False


def pieces(array: Array) -> Iterator[memoryview]:
    """The bytes of ``array``, a few at a time; of one that lies in a file, none stay in memory."""
    flat = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    for start in range(0, len(flat), PIECE):
        piece = flat[start : start + PIECE]
        yield piece.data
        forget_pages(piece)


def forget_pages(array: Array) -> None:
    """Let the system forget that ``array`` was read, if it lies in a file and nobody may write to it there."""
    if (found := _mapping(array)) is not None and memoryview(found[0]).readonly:
        _give_back(found[0], array)


def _give_back(mapping: mmap.mmap, read: Array) -> None:
    """Let the system forget that these bytes were read: they come again from its cache, or from the file."""
    if not hasattr(mapping, "madvise"):
        return
    start = _address(read) - _address(np.frombuffer(mapping, np.uint8))
    end, start = start + read.nbytes, start - start % mmap.PAGESIZE
    mapping.madvise(mmap.MADV_DONTNEED, start, end - start)


@contextlib.contextmanager
def passing_through(arrays: Iterable[Array]) -> Iterator[None]:
    """While somebody else copies ``arrays``, their pages in mapped files do not stay in memory: two copies are one."""
    mappings = {id(found[0]): found[0] for array in arrays if (found := _mapping(array)) is not None}
    mappings = {key: mapping for key, mapping in mappings.items() if hasattr(mapping, "madvise")}
    done = threading.Event()

    def give_back() -> None:
        while not done.wait(_EVERY):
            for mapping in mappings.values():
                mapping.madvise(mmap.MADV_DONTNEED)

    helper = threading.Thread(target=give_back, daemon=True)
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
    """The mapping that ``array`` is a view of, and where in the file it begins (0 where nobody says)."""
    owner: Any = array
    while isinstance(owner, np.ndarray | memoryview):
        mapping = getattr(owner, "_mmap", None)
        if isinstance(owner, np.memmap) and isinstance(mapping, mmap.mmap):
            return mapping, owner.offset - owner.offset % mmap.ALLOCATIONGRANULARITY
        owner = owner.base if isinstance(owner, np.ndarray) else owner.obj
    return (owner, 0) if isinstance(owner, mmap.mmap) else None


def pieces_of(file: Any) -> Iterator[bytes]:
    """The content of a binary file, from where it stands, a few bytes at a time."""
    while piece := file.read(BLOCK):
        yield piece

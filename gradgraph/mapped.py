"""Files that are mapped into memory: whether one was cut meanwhile, and those that hold the weights of a step.

Who touches a page of a mapped file behind its end ends the process (SIGBUS). A file that another one has replaced does
no harm: what was mapped stays.
"""

from __future__ import annotations

import contextlib
import mmap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from gradgraph.digest import BLOCK, digest_of
from gradgraph.errors import ModelError, shown
from gradgraph.manifest import DIGESTS

Array: TypeAlias = np.ndarray[Any, Any]

PIECE = 1 << 24  # bytes that are read of a mapped file before their memory is given back


def is_mapped(array: Array) -> bool:
    """Whether ``array`` lies in a file, as far as NumPy tells: also behind views and ``np.asarray``."""
    return _mapping(array) is not None


def is_cut(array: Array) -> bool:
    """Whether the file that ``array`` lies in, if it does, has become shorter than what is mapped of it."""
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
    found = _mapping(flat)
    for start in range(0, len(flat), PIECE):
        piece = flat[start : start + PIECE]
        yield piece.data
        if found is not None:
            _give_back(found[0], piece)


def _give_back(mapping: mmap.mmap, read: Array) -> None:
    """Let the system forget that these bytes were read: they come again from its cache, or from the file."""
    if not hasattr(mapping, "madvise"):
        return
    start = _address(read) - _address(np.frombuffer(mapping, np.uint8))
    end, start = start + len(read), start - start % mmap.PAGESIZE
    mapping.madvise(mmap.MADV_DONTNEED, start, end - start)


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


class MappedFile:
    """A file beside the models of a step, mapped whole.

    Args:
        path: the file.
        digest: what its content must give, if that is known; it is read once for that.
        refusal: the error for a file with another digest.

    Attributes:
        content: its bytes.

    Raises:
        ModelError: it cannot be read, or is not what was saved.
    """

    def __init__(self, path: Path, digest: str | None, refusal: Callable[[Path], ModelError] | None = None) -> None:
        self._path = path
        try:
            with path.open("rb", buffering=0) as file:
                if digest is not None and digest_of(pieces_of(file)) != digest:
                    raise (refusal or not_as_saved)(path)
                # of the file that was compared, whatever has taken its name meanwhile
                self.content: Array = np.memmap(file, np.uint8, "r") if file.seek(0, 2) else np.zeros(0, np.uint8)
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or error
            raise ModelError(f"cannot read '{shown(path)}' ({shown(reason)}); build the step again") from None

    def part(self, offset: int, length: int) -> Array:
        """Some of the bytes.

        Raises:
            ModelError: they are not there (any more).
        """
        self.check_uncut()
        part = self.content[offset : offset + length]
        if len(part) != length:
            raise self._cut()
        return part

    def pieces(self, offset: int, length: int) -> Iterator[memoryview]:
        """Some of the bytes, a few at a time, of which none stay in memory.

        Raises:
            ModelError: they are not there (any more).
        """
        for piece in pieces(self.part(offset, length)):
            self.check_uncut()
            yield piece

    def check_uncut(self) -> None:
        """Raise ModelError if the file has become shorter than it was."""
        if is_cut(self.content):
            raise self._cut()

    def _cut(self) -> ModelError:
        return ModelError(
            f"'{shown(self._path)}' has become shorter since the step was loaded, and its weights are gone; build the "
            "step again (while something reads a step folder, write another one and rename that)"
        )


def not_as_saved(path: Path) -> ModelError:
    return ModelError(
        f"'{shown(path)}' is not the file that was saved with the manifest.json beside it, so it was damaged or "
        f'edited; build the step again (or take it out of "{DIGESTS}" there, if the change is yours)'
    )


def pieces_of(file: Any) -> Iterator[bytes]:
    """The content of a binary file, from where it stands, a few bytes at a time."""
    while piece := file.read(BLOCK):
        yield piece

"""Memory-mapped files of weights next to the models of a step."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from gradgraph.errors import ModelError, shown
from gradgraph.files.digest import digest_of
from gradgraph.files.mapped import Array, is_at, is_cut, pieces, pieces_of
from gradgraph.files.untrusted.regular import open_regular
from gradgraph.step.manifest import DIGESTS


class MappedFile:
    """A memory-mapped file of weights, next to the models of a step or shared by it.

    Args:
        path: the file.
        digest: the expected digest, if known; checking it reads the file once.
        refusal: a function that returns the error for a file with a different digest.

    Attributes:
        content: the bytes of the file.

    Raises:
        ModelError: if the file cannot be read, or has a different digest.
    """

    def __init__(self, path: Path, digest: str | None, refusal: Callable[[Path], ModelError] | None = None) -> None:
        self._path = path
        try:
            with open_regular(path) as file:
                if digest is not None and digest_of(pieces_of(file)) != digest:
                    raise (refusal or not_as_saved)(path)
                self._status = os.fstat(file.fileno())
                # map the open file, whose digest was checked, even if the path has been replaced meanwhile
                self.content: Array = np.memmap(file, np.uint8, "r") if file.seek(0, 2) else np.zeros(0, np.uint8)
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or error
            raise ModelError(f"cannot read '{shown(path)}' ({shown(reason)}); build the step again") from None

    @property
    def modified(self) -> int:
        """The time (in ns) at which the file had last been written when it was opened."""
        return self._status.st_mtime_ns

    def is_in_place(self) -> bool:
        """Whether the file is still at its path: no other file has replaced it."""
        return is_at(self._path, self._status)

    def part(self, offset: int, length: int) -> Array:
        """Return ``length`` bytes of the file, starting at ``offset``.

        Raises:
            ModelError: if the file is too short, or was truncated.
        """
        self.check_uncut()
        part = self.content[offset : offset + length]
        if len(part) != length:
            raise self._cut()
        return part

    def pieces(self, offset: int, length: int) -> Iterator[memoryview]:
        """Yield ``length`` bytes of the file, starting at ``offset``, in pieces, releasing the memory of each piece.

        Raises:
            ModelError: if the file is too short, or was truncated.
        """
        for piece in pieces(self.part(offset, length)):
            self.check_uncut()
            yield piece

    def check_uncut(self) -> None:
        """Raise ModelError if the file was truncated."""
        if is_cut(self.content):
            raise self._cut()

    def _cut(self) -> ModelError:
        return ModelError(
            f"'{shown(self._path)}' was truncated after the step was loaded, so its weights are lost; build the step "
            "again (to replace a step folder that is in use, write a new one and rename it)"
        )


def not_as_saved(path: Path) -> ModelError:
    return ModelError(
        f"'{shown(path)}' has a different digest from the one in the manifest.json of its folder, so it was damaged "
        "or edited; build the step again (or remove its entry under "
        f'"{DIGESTS}" in manifest.json if you edited the file)'
    )

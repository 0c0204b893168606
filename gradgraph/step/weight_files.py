"""Memory-mapped files of weights next to the models of a step."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from gradgraph.errors import ModelError, shown
from gradgraph.files.digest import digest_of
from gradgraph.files.mapped import Array, is_cut, pieces, pieces_of
from gradgraph.files.untrusted.regular import open_regular
from gradgraph.step.manifest import DIGESTS


class MappedFile:
    """A memory-mapped file next to the models of a step.

    Args:
        path: the file.
        digest: the expected digest, if known; checking it reads the file once.
        refusal: the error for a file with another digest.

    Attributes:
        content: its bytes.

    Raises:
        ModelError: it cannot be read, or is not what was saved.
    """

    def __init__(self, path: Path, digest: str | None, refusal: Callable[[Path], ModelError] | None = None) -> None:
        self._path = path
        try:
            with open_regular(path) as file:
                if digest is not None and digest_of(pieces_of(file)) != digest:
                    raise (refusal or not_as_saved)(path)
                # of the file that was checked, even if its name now leads to another
                self.content: Array = np.memmap(file, np.uint8, "r") if file.seek(0, 2) else np.zeros(0, np.uint8)
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or error
            raise ModelError(f"cannot read '{shown(path)}' ({shown(reason)}); build the step again") from None

    def part(self, offset: int, length: int) -> Array:
        """Return bytes of the file.

        Raises:
            ModelError: the file is too short, or was truncated.
        """
        self.check_uncut()
        part = self.content[offset : offset + length]
        if len(part) != length:
            raise self._cut()
        return part

    def pieces(self, offset: int, length: int) -> Iterator[memoryview]:
        """Yield bytes of the file in pieces, of which none stay in memory.

        Raises:
            ModelError: the file is too short, or was truncated.
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
            f"'{shown(self._path)}' was truncated after the step was loaded, and its weights are gone; build the step "
            "again (while something reads a step folder, write another one and rename that)"
        )


def not_as_saved(path: Path) -> ModelError:
    return ModelError(
        f"'{shown(path)}' is not the file that was saved with the manifest.json in its folder, so it was damaged or "
        f'edited; build the step again (or remove it from "{DIGESTS}" there, if the change is yours)'
    )

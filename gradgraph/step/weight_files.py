"""Files of weights beside the models of a step, mapped whole."""

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
            with open_regular(path) as file:
                if digest is not None and digest_of(pieces_of(file)) != digest:
                    raise (refusal or not_as_saved)(path)
                # of the file that was compared, whatever has taken its name meanwhile
                self.content: Array = np.memmap(file, np.uint8, "r") if file.seek(0, 2) else np.zeros(0, np.uint8)
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or error
            raise ModelError(f"cannot read '{shown(path)}' ({shown(reason)}); build the step again") from None

    def part(self, offset: int, length: int) -> Array:
        """Bytes of the file.

        Raises:
            ModelError: they are not there (any more).
        """
        self.check_uncut()
        part = self.content[offset : offset + length]
        if len(part) != length:
            raise self._cut()
        return part

    def pieces(self, offset: int, length: int) -> Iterator[memoryview]:
        """Bytes of the file, a few at a time, of which none stay in memory.

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

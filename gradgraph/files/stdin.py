"""Reading of data from stdin."""

from __future__ import annotations

import contextlib
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from gradgraph.errors import DataError

STDIO = Path("-")
_ZIP = b"PK"  # the magic bytes of an .npz


@contextlib.contextmanager
def from_stdin(path: Path) -> Iterator[Path]:
    """Yield ``path``, or for "-" the path of a temporary copy of the ``.npz`` on stdin.

    The copy is needed because a zip file can be read only from its end, and stdin has no random access.

    Raises:
        DataError: if stdin is not an ``.npz``.
    """
    if path != STDIO:
        yield path
        return
    first = sys.stdin.buffer.read(len(_ZIP))
    if first != _ZIP:
        raise DataError("the data on stdin are not an .npz; pipe in an .npz with one array per input, or pass a file")
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "stdin.npz"
        with copy.open("wb") as file:
            file.write(first)
            shutil.copyfileobj(sys.stdin.buffer, file, 1 << 20)
        yield copy

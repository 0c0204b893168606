"""Data that a command reads from stdin."""

from __future__ import annotations

import contextlib
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from gradgraph.errors import DataError

STDIO = Path("-")
_ZIP = b"PK"  # what an .npz begins with


@contextlib.contextmanager
def from_stdin(path: Path) -> Iterator[Path]:
    """``path``, or where it is "-" an ``.npz`` from stdin: in a temporary file, as a zip file is read from its end.

    Raises:
        DataError: what comes is something else, be it without an end.
    """
    if path != STDIO:
        yield path
        return
    first = sys.stdin.buffer.read(len(_ZIP))
    if first != _ZIP:
        raise DataError("what comes from stdin is no .npz; pipe one in, with one array per input, or name a file")
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "stdin.npz"
        with copy.open("wb") as file:
            file.write(first)
            shutil.copyfileobj(sys.stdin.buffer, file, 1 << 20)
        yield copy

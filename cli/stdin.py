"""Data that a command reads from stdin."""

from __future__ import annotations

import contextlib
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

STDIO = Path("-")


@contextlib.contextmanager
def from_stdin(path: Path) -> Iterator[Path]:
    """``path``, or where it is "-" an ``.npz`` from stdin: in a temporary file, as a zip file is read from its end."""
    if path != STDIO:
        yield path
        return
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "stdin.npz"
        with copy.open("wb") as file:
            shutil.copyfileobj(sys.stdin.buffer, file, 1 << 20)
        yield copy

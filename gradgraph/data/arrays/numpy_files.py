"""Functions that read arrays from an ``.npz`` or a folder of ``.npy`` files; large ``.npy`` files stay on disk."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from gradgraph.data.arrays.remedies import FORMATS, for_file
from gradgraph.data.arrays.stored import StoredArray
from gradgraph.errors import DataError, shown
from gradgraph.files.untrusted.array_files import NoArchiveError, archive_errors, array_in, npy_header, opened_npz
from gradgraph.files.untrusted.regular import UnreadableError, open_regular, readable, reason_of

Arrays = dict[str, np.ndarray[Any, Any] | StoredArray]

# bytes; smaller .npy files are loaded into memory, which takes a tenth of a second, so that batches need not wait
IN_MEMORY = 256 << 20


def load_arrays(path: str | os.PathLike[str], limit: int | None = None) -> Arrays:
    """Load the arrays of an ``.npz``, or of a folder of ``.npy`` files, by name.

    Args:
        path: the file or folder.
        limit: the maximum unpacked size of an ``.npz`` in bytes; by default the machine's memory.

    Raises:
        DataError: if the path does not exist, is damaged, contains pickled objects, or is larger than ``limit``.
    """
    path = Path(path)
    check_exists(path)
    if path.is_dir():
        return _load_folder(path)
    if not path.is_file():
        raise DataError(f"'{shown(path)}' is not a regular file; give an .npz file or a folder of .npy files")
    with explained(path), opened_npz(path, _physical_memory() if limit is None else limit) as (archive, members):
        return {name: array_in(archive.open(info)) for name, info in members.items()}


def check_exists(path: Path) -> None:
    """Raise DataError if there is no file or folder at ``path``."""
    with readable(path, "path"):
        exists = path.exists()  # fails for a name that is too long
    if not exists:
        raise DataError(f"'{shown(path)}' does not exist; check the path")


def _load_folder(path: Path) -> Arrays:
    arrays: Arrays = {}
    for file in sorted(path.glob("*.npy")):
        if not file.is_file():
            raise DataError(f"'{shown(file)}' is not a regular file; give .npy files")
        try:
            arrays[file.stem] = _load_npy(file)
        except (ValueError, OSError, EOFError, OverflowError) as error:
            raise DataError(f"'{shown(file)}' cannot be read ({reason_of(error)}); save it again as .npy") from None
    if not arrays:
        raise DataError(f"the folder '{shown(path)}' contains no .npy files; save one array per input there")
    return arrays


def _load_npy(path: Path) -> np.ndarray[Any, Any] | StoredArray:
    with open_regular(path) as file:
        shape, is_fortran, dtype = npy_header(file)
        start = file.tell()
        if dtype.hasobject:
            raise ValueError("it contains pickled objects, which are never loaded")
        stored = StoredArray(path, start, shape or (1,), dtype)
        if shape and stored.nbytes > IN_MEMORY and not is_fortran:
            return stored
        return stored[:].reshape(-1).reshape(shape, order="F" if is_fortran else "C")


@contextlib.contextmanager
def explained(path: Path) -> Iterator[None]:
    """Run a block that reads the ``.npz`` at ``path``; convert its errors to a DataError with a remedy."""
    try:
        with archive_errors():
            yield
    except NoArchiveError as error:
        raise DataError(f"'{shown(path)}' cannot be read ({error}): {FORMATS}", **for_file(path)) from None
    except UnreadableError as error:
        raise DataError(f"'{shown(path)}' cannot be read ({error}); save it again as .npz") from None


def _physical_memory() -> int:
    """Return the memory of this machine in bytes; 16 GiB if it is unknown."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        return 16 << 30

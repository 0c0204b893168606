"""Arrays from disk: an ``.npz``, or a folder of ``.npy`` files (large ones stay there). Nothing is unpickled, ever.

An ``.npz`` is a zip file, whose headers may lie and whose members may be bombs: names, dtypes and sizes are checked
before the memory for them is allocated.
"""

from __future__ import annotations

import contextlib
import math
import os
import tokenize
import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.lib import format as npy

from gradgraph.errors import DataError, shown
from gradgraph.runtime.data.remedies import FORMATS, for_file
from gradgraph.runtime.data.stored import StoredArray

Arrays = dict[str, np.ndarray[Any, Any] | StoredArray]

# bytes: smaller .npy files are read at once, in a tenth of a second, and then no batch waits for them
IN_MEMORY = 256 << 20
MAX_MEMBERS = 10_000


def load_arrays(path: str | os.PathLike[str], limit: int | None = None) -> Arrays:
    """The arrays of an ``.npz``, or of a folder of ``.npy`` files, by name.

    Args:
        path: the file or folder.
        limit: the most bytes that an ``.npz`` may unpack to; the machine's memory by default.

    Raises:
        DataError: not there, damaged, pickled objects, or larger than ``limit``.
    """
    path = Path(path)
    try:
        is_folder = path.is_dir()
    except OSError as error:  # a name that is too long
        raise DataError(f"'{shown(path)}' cannot be read ({error.strerror}); check the path") from None
    if is_folder:
        return _load_folder(path)
    if not path.is_file():
        what = "is not a regular file" if path.exists() else "is not there"
        raise DataError(f"'{shown(path)}' {what}; give an .npz file or a folder of .npy files")
    with explained(path), zipfile.ZipFile(path) as archive:
        members = checked_members(archive, path, _physical_memory() if limit is None else limit)
        return {name: npy.read_array(archive.open(info), allow_pickle=False) for name, info in members.items()}


def _load_folder(path: Path) -> Arrays:
    arrays: Arrays = {}
    for file in sorted(path.glob("*.npy")):
        if not file.is_file():
            raise DataError(f"'{shown(file)}' is not a regular file; give .npy files")
        try:
            arrays[file.stem] = _load_npy(file)
        except (ValueError, OSError, EOFError, OverflowError) as error:
            raise DataError(f"'{shown(file)}' cannot be read ({_first(error)}); save it again as .npy") from None
    if not arrays:
        raise DataError(f"the folder '{shown(path)}' holds no .npy file; save one array per input there")
    return arrays


def _load_npy(path: Path) -> np.ndarray[Any, Any] | StoredArray:
    with path.open("rb") as file:
        shape, is_fortran, dtype = npy_header(file)
        start = file.tell()
        if dtype.hasobject:
            raise ValueError("it holds pickled objects, which are never loaded")
        stored = StoredArray(path, start, shape or (1,), dtype)
        if shape and stored.nbytes > IN_MEMORY and not is_fortran:
            return stored
        return stored[:].reshape(-1).reshape(shape, order="F" if is_fortran else "C")


@contextlib.contextmanager
def explained(path: Path) -> Iterator[None]:
    """Turn errors of reading an ``.npz`` into DataError, which says what to do."""
    try:
        yield
    except zipfile.BadZipFile as error:
        raise DataError(f"'{shown(path)}' cannot be read ({_first(error)}): {FORMATS}", **for_file(path)) from None
    except (zlib.error, OSError, EOFError, ValueError, RuntimeError, NotImplementedError) as error:
        raise DataError(f"'{shown(path)}' cannot be read ({_first(error)}); save it again as .npz") from None


def checked_members(archive: zipfile.ZipFile, path: Path, limit: int) -> dict[str, zipfile.ZipInfo]:
    """The members of an ``.npz`` by name; raises DataError for what is no array, or too large."""
    infos = archive.infolist()
    if not infos or len(infos) > MAX_MEMBERS:
        raise DataError(f"'{shown(path)}' holds {len(infos)} arrays; give one array per input")
    members: dict[str, zipfile.ZipInfo] = {}
    for info in infos:
        name = info.filename.removesuffix(".npy")
        if name == info.filename:
            raise DataError(f"'{shown(path)}' holds '{shown(name)}', which is no .npy array; save plain arrays")
        if name in members:
            raise DataError(f"'{shown(path)}' holds two arrays called '{shown(name)}'; give each a name of its own")
        members[name] = info
    total = sum(_unpacked_size(archive, info) for info in infos)
    if total > limit:
        raise DataError(
            f"'{shown(path)}' unpacks to {total:,} bytes, more than the {limit:,} that fit; "
            "save the arrays as .npy files in a folder, where large ones stay"
        )
    return members


def _unpacked_size(archive: zipfile.ZipFile, info: zipfile.ZipInfo) -> int:
    """The bytes that a member's array needs by its own header; the zip directory must say the same."""
    with archive.open(info) as file:
        shape, _, dtype = npy_header(file)
        start = file.tell()
    if dtype.hasobject:
        raise DataError(f"'{shown(info.filename)}' holds pickled objects, which are never loaded; save plain numbers")
    size = math.prod(shape) * dtype.itemsize
    if any(d < 0 for d in shape) or start + size != info.file_size:
        raise DataError(
            f"'{shown(info.filename)}' says that it needs {size:,} bytes, but {info.file_size - start:,} are stored; "
            "the file is damaged"
        )
    return size


def npy_header(file: Any) -> tuple[tuple[int, ...], bool, np.dtype[Any]]:
    version = npy.read_magic(file)
    read = {(1, 0): npy.read_array_header_1_0, (2, 0): npy.read_array_header_2_0}.get(version)
    if read is None:
        raise ValueError(f"unknown .npy version {version}")
    try:
        shape, fortran_order, dtype = read(file)
    except (tokenize.TokenError, SyntaxError, TypeError, RecursionError, MemoryError) as error:  # of a damaged one
        raise ValueError(f"its header is damaged: {_first(error)}") from None
    if any(d < 0 for d in shape):
        raise ValueError("its header is damaged: a negative size")
    return tuple(shape), fortran_order, dtype


def _physical_memory() -> int:
    """Bytes of memory of this machine; 16 GiB where the system does not say."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        return 16 << 30


def _first(error: BaseException) -> str:
    return shown(str(error).split("\n", 1)[0] or type(error).__name__)

"""Untrusted arrays: members of ``.npz``, ``.npy``, safetensors. Nothing is ever unpickled.

An ``.npz`` is a zip file, whose headers may be wrong and whose members may be bombs: names, dtypes and sizes are
checked before memory is allocated.
"""

from __future__ import annotations

import contextlib
import io
import lzma
import math
import mmap
import os
import tokenize
import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import ml_dtypes
import numpy as np
import safetensors
from numpy.lib import format as npy

from gradgraph.errors import DataError, counted, shown
from gradgraph.files.untrusted.documents import json_of
from gradgraph.files.untrusted.regular import UnreadableError, open_regular, reason_of

Array = np.ndarray[Any, Any]

MAX_MEMBERS = 10_000
_LONGEST_HEADER = 10_000  # bytes, as in NumPy: the header is parsed as Python
# errors of zip files besides BadZipFile: damage, passwords, unsupported compression
_ZIP_ERRORS = (zlib.error, lzma.LZMAError, OSError, EOFError, ValueError, RuntimeError, NotImplementedError)


class NoArchiveError(UnreadableError):
    """Raised for a file that is not a zip file."""


# --- .npy ---------------------------------------------------------------------------------------------


def npy_header(file: IO[bytes]) -> tuple[tuple[int, ...], bool, np.dtype[Any]]:
    """Return the shape, Fortran order and dtype in the header of a ``.npy``; leave the file positioned after it.

    Raises:
        UnreadableError: if the header is damaged, of another version, or too long.
    """
    magic = file.read(npy.MAGIC_LEN)
    width = {b"\x93NUMPY\x01\x00": 2, b"\x93NUMPY\x02\x00": 4}.get(magic)
    if width is None:
        raise UnreadableError("it is not a .npy file of version 1 or 2")
    length = file.read(width)
    size = int.from_bytes(length, "little")
    if size > _LONGEST_HEADER:
        raise UnreadableError(f"its header is damaged: it has {size:,} bytes")
    read = npy.read_array_header_1_0 if width == 2 else npy.read_array_header_2_0
    try:
        shape, fortran_order, dtype = read(io.BytesIO(length + file.read(size)))
    except (tokenize.TokenError, SyntaxError, TypeError, ValueError, RecursionError, MemoryError) as error:
        raise UnreadableError(f"its header is damaged: {reason_of(error)}") from None
    if any(d < 0 for d in shape):
        raise UnreadableError("its header is damaged: a negative size")
    return tuple(shape), fortran_order, dtype


# --- .npz ---------------------------------------------------------------------------------------------


@contextlib.contextmanager
def opened_npz(path: Path, most: int) -> Iterator[tuple[zipfile.ZipFile, dict[str, zipfile.ZipInfo]]]:
    """Open an ``.npz`` archive; the context value is the archive and its members by array name.

    Later reads of members should be wrapped in ``archive_errors``.

    Args:
        most: the maximum total size of the arrays in bytes.

    Raises:
        DataError: if a member is not an array, or the arrays are larger than ``most``.
        UnreadableError: if ``path`` is not a regular file, or is damaged.
    """
    with open_regular(path) as file, archive_errors(), zipfile.ZipFile(file) as archive:
        yield archive, _checked_members(archive, path, most)


@contextlib.contextmanager
def archive_errors() -> Iterator[None]:
    """Return a context that converts ``zipfile`` errors to UnreadableError, or NoArchiveError for other files."""
    try:
        yield
    except UnreadableError:
        raise
    except zipfile.BadZipFile as error:
        raise NoArchiveError(reason_of(error)) from None
    except _ZIP_ERRORS as error:
        raise UnreadableError(reason_of(error)) from None


def array_in(file: IO[bytes]) -> Array:
    """Return the array in an open member of an ``.npz``, which :func:`opened_npz` has checked."""
    return np.asarray(npy.read_array(file, allow_pickle=False))


def _checked_members(archive: zipfile.ZipFile, path: Path, most: int) -> dict[str, zipfile.ZipInfo]:
    infos = archive.infolist()
    if not infos or len(infos) > MAX_MEMBERS:
        raise DataError(f"'{shown(path)}' contains {counted(len(infos), 'array')}; save one array per input")
    members: dict[str, zipfile.ZipInfo] = {}
    for info in infos:
        name = info.filename.removesuffix(".npy")
        if name == info.filename:
            raise DataError(f"'{shown(path)}' contains '{shown(name)}', which is not a .npy array; save plain arrays")
        if name in members:
            raise DataError(f"'{shown(path)}' contains two arrays called '{shown(name)}'; give each a name of its own")
        members[name] = info
    total = sum(_unpacked_size(archive, info, path) for info in infos)
    if total > most:
        raise DataError(
            f"'{shown(path)}' unpacks to {total:,} bytes, more than the limit of {most:,}; "
            "save the arrays as .npy files in a folder, from which large arrays are read piece by piece"
        )
    return members


def _unpacked_size(archive: zipfile.ZipFile, info: zipfile.ZipInfo, path: Path) -> int:
    """Return the size in bytes from an array's header; raise DataError if the zip directory differs, or for pickles."""
    with archive.open(info) as file:
        shape, _, dtype = npy_header(file)
        start = file.tell()
    if dtype.hasobject:
        raise DataError(
            f"'{shown(info.filename)}' in '{shown(path)}' contains pickled objects, which are never loaded; "
            "save plain numbers"
        )
    size = math.prod(shape) * dtype.itemsize
    if start + size != info.file_size:
        raise DataError(
            f"'{shown(info.filename)}' in '{shown(path)}' declares an array of {size:,} bytes, but "
            f"{info.file_size - start:,} are stored, so the file is damaged; save it again"
        )
    return size


# --- safetensors --------------------------------------------------------------------------------------

# element types that safetensors does not convert for NumPy
_FLOAT8 = {"F8_E4M3": ml_dtypes.float8_e4m3fn, "F8_E5M2": ml_dtypes.float8_e5m2, "F8_E8M0": ml_dtypes.float8_e8m0fnu}


def safetensors_in(path: str | os.PathLike[str]) -> tuple[dict[str, Array], dict[str, str]]:
    """Return the tensors of a safetensors file by name, and its metadata.

    Raises:
        UnreadableError: if ``path`` is not a regular file, is damaged, or has element types that NumPy lacks.
    """
    found, metadata = safetensors_mapped(path)
    return {name: np.array(array) for name, array in found.items()}, metadata


def safetensors_mapped(path: str | os.PathLike[str]) -> tuple[dict[str, Array], dict[str, str]]:
    """Return the tensors and metadata as ``safetensors_in`` does, with tensors memory-mapped from the file.

    The mapping stays valid if another file replaces the file.

    Raises:
        UnreadableError: as for ``safetensors_in``.
    """
    try:
        with open_regular(path) as opened, safetensors.safe_open(path, framework="np") as file:  # checks the header
            if not os.path.samestat(os.fstat(opened.fileno()), Path(path).stat()):  # the file was just replaced
                return safetensors_mapped(path)
            whole = np.frombuffer(mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ), np.uint8)
            start = 8 + int.from_bytes(whole[:8].tobytes(), "little")
            places = json_of(whole[8:start].tobytes())
            found = {}
            for name in file.keys():  # noqa: SIM118 - not a dict
                begin, end = (start + at for at in places[name]["data_offsets"])
                one = file.get_slice(name)
                if (shape := one.get_shape()) and 0 not in shape:
                    dtype = _FLOAT8.get(one.get_dtype()) or one[:0].dtype
                    found[name] = whole[begin:end].view(dtype).reshape(shape)
                else:
                    found[name] = file.get_tensor(name)
            return found, file.metadata() or {}
    except (safetensors.SafetensorError, OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise UnreadableError(reason_of(error)) from None

"""Reading of regular files only: a pipe would block forever, a device never ends."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Iterator
from typing import BinaryIO

from gradgraph.errors import DataError, shown


class UnreadableError(ValueError):
    """Raised for unreadable or invalid content, with the reason in one line that is safe to print."""


class MissingFileError(UnreadableError):
    """Raised for a path without a file."""


class IrregularFileError(UnreadableError):
    """Raised for a folder, pipe, socket or device."""


def open_regular(path: str | os.PathLike[str]) -> BinaryIO:
    """Open a file for reading if it is a regular file.

    The open file is checked, so that nobody can replace it by a pipe after the check.

    Raises:
        UnreadableError: if ``path`` does not exist, cannot be opened, or is a folder, pipe, socket or device.
    """
    try:
        handle = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
    except FileNotFoundError as error:
        raise MissingFileError(reason_of(error)) from None
    except (OSError, ValueError) as error:  # ValueError: a name with a zero byte
        _check_regular(path)  # a socket, or a folder on Windows, cannot even be opened
        raise UnreadableError(reason_of(error)) from None
    try:
        _check_regular(handle)
    except UnreadableError:
        os.close(handle)
        raise
    return os.fdopen(handle, "rb")


def _check_regular(file: str | os.PathLike[str] | int) -> None:
    try:
        mode = os.stat(file).st_mode  # noqa: PTH116 - works on a handle
    except (OSError, ValueError):
        return
    if not stat.S_ISREG(mode):
        raise IrregularFileError("it is a folder" if stat.S_ISDIR(mode) else "it is not a regular file")


def regular_bytes(path: str | os.PathLike[str], most: int | None = None) -> bytes:
    """Return the content of a regular file of at most ``most`` bytes (unlimited by default).

    Raises:
        UnreadableError: as for :func:`open_regular`, and if the file is larger than ``most`` or cannot be read.
    """
    with open_regular(path) as file:
        try:
            content = file.read() if most is None else file.read(most + 1)
        except OSError as error:
            raise UnreadableError(reason_of(error)) from None
    if most is not None and len(content) > most:
        raise UnreadableError(f"it is larger than {most >> 20} MiB")
    return content


def regular_text(path: str | os.PathLike[str], most: int | None = None) -> str:
    """Return the content of a regular UTF-8 file, without a byte order mark; errors as for :func:`regular_bytes`."""
    try:
        return regular_bytes(path, most).decode("utf-8-sig")
    except UnicodeDecodeError:
        raise UnreadableError("it is not UTF-8") from None


@contextlib.contextmanager
def readable(path: str | os.PathLike[str], what: str = "file") -> Iterator[None]:
    """Run a block that reads ``path``; convert its errors to a DataError, which advises to check ``what``."""
    try:
        yield
    except (UnreadableError, OSError) as error:
        raise DataError(f"'{shown(path)}' cannot be read ({reason_of(error)}); check the {what}") from None


def reason_of(error: BaseException) -> str:
    """Return the first line of an error message, safe to print; the class of the error if it is empty."""
    if isinstance(error, OSError) and error.errno == errno.EMFILE:
        return "too many files are open: raise the limit, as by ulimit -n 8192, or store external data in one file"
    strerror = error.strerror if isinstance(error, OSError) else None
    return shown((strerror or str(error)).split("\n", 1)[0] or type(error).__name__)

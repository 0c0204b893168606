"""Regular files alone are read: a pipe would wait for ever, a device never ends."""

from __future__ import annotations

import os
import stat
from typing import BinaryIO

from gradgraph.errors import shown


class UnreadableError(ValueError):
    """Content that cannot be read, or is not what it should be: says why in one line that steers no terminal."""


class MissingFileError(UnreadableError):
    """There is no such file."""


class IrregularFileError(UnreadableError):
    """There is a folder, pipe, socket or device of this name."""


def open_regular(path: str | os.PathLike[str]) -> BinaryIO:
    """Open a file for reading, once it is sure that it is a regular one.

    It is looked at after it is open, so that nobody can put a pipe in its place in between.

    Raises:
        UnreadableError: it is not there, cannot be opened, or is a folder, pipe, socket or device.
    """
    try:
        handle = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
    except FileNotFoundError as error:
        raise MissingFileError(reason_of(error)) from None
    except (OSError, ValueError) as error:  # a name with a zero byte is the latter
        _check_regular(path)  # a socket, or a folder of Windows, cannot even be opened
        raise UnreadableError(reason_of(error)) from None
    try:
        _check_regular(handle)
    except UnreadableError:
        os.close(handle)
        raise
    return os.fdopen(handle, "rb")


def _check_regular(file: str | os.PathLike[str] | int) -> None:
    try:
        mode = os.stat(file).st_mode  # noqa: PTH116 - of a handle, too
    except (OSError, ValueError):
        return
    if not stat.S_ISREG(mode):
        raise IrregularFileError("it is a folder" if stat.S_ISDIR(mode) else "it is not a regular file")


def regular_bytes(path: str | os.PathLike[str], most: int | None = None) -> bytes:
    """The content of a regular file.

    Args:
        most: the bytes that it may have; any number by default.

    Raises:
        UnreadableError: as for :func:`open_regular`; it has more bytes, or cannot be read.
    """
    with open_regular(path) as file:
        try:
            content = file.read() if most is None else file.read(most + 1)
        except OSError as error:
            raise UnreadableError(reason_of(error)) from None
    if most is not None and len(content) > most:
        raise UnreadableError(f"it is larger than {most >> 20} MiB")
    return content


def reason_of(error: BaseException) -> str:
    """The first line of what an error says, harmless to a terminal; its class where it says nothing."""
    strerror = error.strerror if isinstance(error, OSError) else None
    return shown((strerror or str(error)).split("\n", 1)[0] or type(error).__name__)

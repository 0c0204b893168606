"""One writer for a checkpoint: a second run that would save to the same path is refused before it trains.

The lock belongs to an open file (``.run.ckpt.gradgraph-lock``), so the system releases it however its owner ends.
A file that a killed run has left is simply locked anew.
"""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import stat
import sys
from collections.abc import Iterator
from pathlib import Path

from gradgraph.errors import OutputError, shown
from gradgraph.files.atomic import explain_errors
from gradgraph.files.paths import output_target

SUFFIX = ".gradgraph-lock"


@contextlib.contextmanager
def only_writer(path: str | os.PathLike[str]) -> Iterator[None]:
    """Hold the lock of ``path``. Where none can be had (a folder that is not there or closed, a file system without
    locks), nothing is locked: saving says what is wrong there.

    Raises:
        OutputError: another run holds it, or somebody has laid a link or another file at its name.
    """
    with explain_errors(path):
        target = output_target(path)
    file = target.with_name(f".{target.name[:100]}{SUFFIX}")
    handle = _open_lock(file, path)
    try:
        yield
    finally:
        if handle is not None:
            # removed while it is locked, so that nobody locks one that is about to go; Windows removes no open file
            if sys.platform != "win32":
                with contextlib.suppress(OSError):  # what is left is locked anew by the next run
                    file.unlink(missing_ok=True)
            os.close(handle)


def _open_lock(file: Path, path: str | os.PathLike[str]) -> int | None:
    """Open and lock the lock file; returns its handle, or None where locks cannot be had."""
    while True:
        try:
            handle = os.open(file, os.O_RDWR | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0), 0o644)
        except OSError as error:
            if error.errno == errno.ELOOP:
                raise _no_lock_file(file) from None
            return None
        status = os.fstat(handle)
        if not stat.S_ISREG(status.st_mode) or status.st_nlink > 1:
            os.close(handle)
            raise _no_lock_file(file)
        try:
            _lock(handle)
        except (BlockingIOError, PermissionError):
            owner = os.read(handle, 200).decode("utf-8", "replace")
            os.close(handle)
            raise OutputError(
                f"'{shown(os.fspath(path))}' is the checkpoint of another run, {shown(owner) or 'just begun'}; "
                "wait for its end, or save to another path"
            ) from None
        except OSError:
            os.close(handle)
            return None
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(file.stat(), os.fstat(handle)):
                with contextlib.suppress(OSError):  # a full disk: the file is locked, though it does not say by whom
                    os.ftruncate(handle, 0)
                    os.write(handle, f"process {os.getpid()} on {socket.gethostname()}".encode())
                return handle
        os.close(handle)  # its owner has removed it in the meantime


def _no_lock_file(file: Path) -> OutputError:
    return OutputError(  # a link leads to a file that is not ours to write to
        f"'{shown(file)}', the lock of a checkpoint, is a link or no regular file; remove it, or save to another path"
    )


if sys.platform == "win32":
    import msvcrt

    def _lock(handle: int) -> None:
        os.lseek(handle, 1 << 20, os.SEEK_SET)  # beyond the text, which others should be able to read
        msvcrt.locking(handle, msvcrt.LK_NBLCK, 1)
        os.lseek(handle, 0, os.SEEK_SET)

else:
    import fcntl

    def _lock(handle: int) -> None:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)

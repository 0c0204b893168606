"""Exclusive access to a checkpoint path: a second run that would save there is rejected before training.

The lock is held on an open file (``.run.ckpt.gradgraph-lock``), so the system releases it even if the process is
killed. The next run reuses a file left by a killed run.
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
    """Hold the lock of a checkpoint path during a block.

    If locking is impossible (a missing or read-only folder, a file system without locks), the block runs without it.

    Raises:
        OutputError: if another run holds the lock, or the lock file is a link or not a regular file.
    """
    with explain_errors(path):
        target = output_target(path)
    file = target.with_name(f".{target.name[:100]}{SUFFIX}")
    handle = _open_lock(file, path)
    try:
        yield
    finally:
        if handle is not None:
            # removed while locked, so that no other run locks a deleted file; Windows cannot remove open files
            if sys.platform != "win32":
                with contextlib.suppress(OSError):  # a remaining file is locked again by the next run
                    file.unlink(missing_ok=True)
            os.close(handle)


def _open_lock(file: Path, path: str | os.PathLike[str]) -> int | None:
    """Open and lock the lock file; return its handle, or None if locking is impossible."""
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
                f"another run ({shown(owner) or 'just started'}) saves its checkpoint to '{shown(os.fspath(path))}'; "
                "wait until it has ended, or save to another path"
            ) from None
        except OSError:
            os.close(handle)
            return None
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(file.stat(), os.fstat(handle)):
                with contextlib.suppress(OSError):  # a full disk: locked, but without the name of the owner
                    os.ftruncate(handle, 0)
                    os.write(handle, f"process {os.getpid()} on {socket.gethostname()}".encode())
                return handle
        os.close(handle)  # removed by its owner in the meantime


def _no_lock_file(file: Path) -> OutputError:
    return OutputError(  # a link may point to a file of another owner
        f"the lock file of the checkpoint, '{shown(file)}', is a link or not a regular file; remove it, or save to "
        "another path"
    )


if sys.platform == "win32":
    import msvcrt

    def _lock(handle: int) -> None:
        os.lseek(handle, 1 << 20, os.SEEK_SET)  # beyond the text, which stays readable to others
        msvcrt.locking(handle, msvcrt.LK_NBLCK, 1)
        os.lseek(handle, 0, os.SEEK_SET)

else:
    import fcntl

    def _lock(handle: int) -> None:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)

"""The user's cache folder, and checks that no other user can write to it.

Cached libraries run with this user's permissions. As with ssh keys, they are loaded only if the file and all its parent
folders are owned by this user or the system and are not writable by anyone else.
"""

from __future__ import annotations

import errno
import os
import shlex
import stat
import sys
from pathlib import Path

from gradgraph.errors import RuntimeUnavailableError, shown

FOLDER_MODE = 0o700
FILE_MODE = 0o600
_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH


def cache_folder() -> Path:
    """Return the folder ``gradgraph`` in the user's cache folder; relative paths in the environment are ignored."""
    if sys.platform == "win32":
        return _absolute("LOCALAPPDATA", Path.home() / "AppData" / "Local") / "gradgraph"
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "gradgraph"
    return _absolute("XDG_CACHE_HOME", Path.home() / ".cache") / "gradgraph"


def _absolute(variable: str, otherwise: Path) -> Path:
    given = Path(os.environ.get(variable, ""))
    return given if given.is_absolute() else otherwise


def open_private(folder: Path) -> None:
    """Create ``folder`` if it is missing, accessible to this user only (for any umask), and check its permissions.

    Raises:
        RuntimeUnavailableError: if another user can write to it.
        OSError: if it cannot be created.
    """
    missing = []
    for each in (folder, *folder.parents):
        if each.exists():
            break
        missing.append(each)
    for each in reversed(missing):
        each.mkdir(FOLDER_MODE)
        each.chmod(FOLDER_MODE)  # the umask may have removed some bits
    if not folder.is_dir():
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR))
    if os.name != "nt":
        _check_folders(folder)
    if folder == cache_folder():
        folder.chmod(FOLDER_MODE)  # older versions created it by the umask


def check_ours(file: Path) -> None:
    """Check that only this user or the system can write to ``file``. A missing file passes.

    Raises:
        RuntimeUnavailableError: if another user can write to it; the message contains the user, the path and a remedy.
    """
    if os.name == "nt" or not os.path.lexists(file):
        return
    _check_folders(file.parent)
    status = file.lstat()
    if not stat.S_ISREG(status.st_mode):
        kind = "a symbolic link" if stat.S_ISLNK(status.st_mode) else "not a regular file"
        raise RuntimeUnavailableError(
            f"'{shown(file)}' is {kind}, but gradgraph writes a regular file there; remove it"
        )
    _check(file, status, "it")


def _check_folders(folder: Path) -> None:
    """Check ``folder`` and all its parents, both with symbolic links as written and resolved."""
    seen: set[Path] = set()
    for start in (folder.absolute(), folder.resolve()):
        for each in (start, *start.parents):
            if each not in seen:
                seen.add(each)
                _check(each, each.stat(), "files in it")


def _check(path: Path, status: os.stat_result, planted: str) -> None:
    elsewhere = "set XDG_CACHE_HOME to a folder of your own" if sys.platform == "linux" else "make it your own"
    if status.st_uid not in (os.geteuid(), 0, Path("/").stat().st_uid):
        raise RuntimeUnavailableError(
            f"'{shown(path)}' belongs to another user (number {status.st_uid}), who may have written {planted}; "
            f"remove it, or {elsewhere}"
        )
    # in a folder with the sticky bit, such as /tmp, users cannot move or delete files of others
    sticky = stat.S_ISDIR(status.st_mode) and status.st_mode & stat.S_ISVTX
    if status.st_mode & _OTHERS_WRITE and not sticky:
        raise RuntimeUnavailableError(
            f"other users may write to '{shown(path)}' (mode {stat.S_IMODE(status.st_mode):o}), and may have "
            f"written {planted}; remove files that are not yours and run `chmod go-w {shlex.quote(shown(path))}`, "
            f"or {elsewhere}"
        )

"""The user's cache folder, and checks that nobody else may have written to it.

Libraries in it run with this user's permissions. So they are accepted as ssh accepts its keys: only if this user or the
system owns the file, its folder and all folders above, and nobody else may write to them.
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
    """Return ``gradgraph`` in the user's cache folder; a relative path in the environment is ignored."""
    if sys.platform == "win32":
        return _absolute("LOCALAPPDATA", Path.home() / "AppData" / "Local") / "gradgraph"
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "gradgraph"
    return _absolute("XDG_CACHE_HOME", Path.home() / ".cache") / "gradgraph"


def _absolute(variable: str, otherwise: Path) -> Path:
    given = Path(os.environ.get(variable, ""))
    return given if given.is_absolute() else otherwise


def open_private(folder: Path) -> None:
    """Ensure that ``folder`` exists and nobody else may write to it; it is created for this user alone, whatever the
    umask.

    Raises:
        RuntimeUnavailableError: others may have written to it.
        OSError: it cannot be created.
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
    """Check that nobody but this user, or the system, can have written ``file``, if it exists.

    Raises:
        RuntimeUnavailableError: somebody else can; the message names who, where, and the remedy.
    """
    if os.name == "nt" or not os.path.lexists(file):
        return
    _check_folders(file.parent)
    status = file.lstat()
    if not stat.S_ISREG(status.st_mode):
        kind = "a symbolic link" if stat.S_ISLNK(status.st_mode) else "no file"
        raise RuntimeUnavailableError(f"'{shown(file)}' is {kind}, which is not what gradgraph writes there; remove it")
    _check(file, status, "it")


def _check_folders(folder: Path) -> None:
    """Check ``folder`` and every folder above it, on the path as written and with links resolved."""
    seen: set[Path] = set()
    for start in (folder.absolute(), folder.resolve()):
        for each in (start, *start.parents):
            if each not in seen:
                seen.add(each)
                _check(each, each.stat(), "what is in it")


def _check(path: Path, status: os.stat_result, planted: str) -> None:
    elsewhere = "set XDG_CACHE_HOME to a folder of your own" if sys.platform == "linux" else "make it your own"
    if status.st_uid not in (os.geteuid(), 0, Path("/").stat().st_uid):
        raise RuntimeUnavailableError(
            f"'{shown(path)}' belongs to another user (number {status.st_uid}), who may have planted {planted}; "
            f"remove it, or {elsewhere}"
        )
    # in a sticky folder such as /tmp, nobody moves files of other users
    sticky = stat.S_ISDIR(status.st_mode) and status.st_mode & stat.S_ISVTX
    if status.st_mode & _OTHERS_WRITE and not sticky:
        raise RuntimeUnavailableError(
            f"other users may write to '{shown(path)}' (mode {stat.S_IMODE(status.st_mode):o}), and may have "
            f"planted {planted}; remove what is not yours and run `chmod go-w {shlex.quote(shown(path))}`, "
            f"or {elsewhere}"
        )

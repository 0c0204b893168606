"""Checks that paths named in untrusted files, and files of untrusted folders, do not lead out of the folder.

Every reader of such a name uses these checks: external data of a model, files named by ``genai_config.json``, images of
annotations, tokenizers and chat templates, adapters, and files copied from one folder to another.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path

from gradgraph.files.untrusted.regular import IrregularFileError, MissingFileError, UnreadableError, regular_bytes

_SNAPSHOTS, _BLOBS = "snapshots", "blobs"  # in a download cache: snapshots/<revision>/name -> ../../blobs/<hash>


class OutsideError(UnreadableError):
    """Raised for a name that leads out of its folder: by ``..`` or an absolute path, a symlink or a hard link."""


def check_relative(name: str) -> str:
    """Return ``name``, which must be a relative path without ``..`` on every system, including Windows.

    Raises:
        OutsideError: if ``name`` is absolute, has ``..``, a drive or a zero byte, or is empty.
    """
    parts = name.replace("\\", "/").split("/")
    if not name or "\0" in name:
        raise OutsideError("it names no file")
    if parts[0] == "" or ":" in parts[0] or ".." in (part.strip() for part in parts):
        raise OutsideError("it leads out of the folder; only relative paths within it are read")
    return name


def is_inside(folder: str | os.PathLike[str], name: str) -> bool:
    """Whether the folder has an entry called ``name``, which may be a dangling link."""
    return os.path.lexists(Path(folder) / name)


def path_inside(folder: str | os.PathLike[str], name: str, linked: Path | None = None) -> Path:
    """Return the real path of a regular file ``name`` in ``folder``.

    Links are followed within the folder only, and into the blob store of a download cache.

    Args:
        folder: the folder passed by the user, or a link to it.
        name: the path of a file relative to ``folder``, as named by an untrusted file.
        linked: a file passed by the user; if it is a symlink, files next to its target are allowed, too.

    Raises:
        OutsideError: if the path leads outside the folder.
        MissingFileError: if the file does not exist.
        IrregularFileError: if the path is a folder, pipe, socket or device.
    """
    path, root = Path(folder) / check_relative(name), Path(os.path.realpath(folder))
    try:
        real = path.resolve(strict=True)
        status = real.stat()
    except (OSError, RuntimeError, ValueError):  # circular links raise the latter before Python 3.13
        raise MissingFileError("it does not exist") from None
    stores = {linked.resolve().parent} if linked is not None and linked.is_symlink() else set[Path]()
    if root.parent.name == _SNAPSHOTS:
        stores.add(root.parent.parent / _BLOBS)
    if not (real.is_relative_to(root) or real.parent in stores):
        raise OutsideError("it is a symlink out of the folder; put the file itself there")
    if not stat.S_ISREG(status.st_mode):
        raise IrregularFileError("it is a folder" if stat.S_ISDIR(status.st_mode) else "it is not a regular file")
    if status.st_nlink > 1:
        raise OutsideError("it is a hard link to a file elsewhere; put a copy of the file there")
    return real


def bytes_inside(folder: str | os.PathLike[str], name: str, most: int | None = None) -> bytes | None:
    """Return the content of the file ``name`` in ``folder``, at most ``most`` bytes; None without such an entry.

    Raises:
        UnreadableError: as for :func:`path_inside` and ``regular_bytes``.
    """
    return regular_bytes(path_inside(folder, name), most) if is_inside(folder, name) else None

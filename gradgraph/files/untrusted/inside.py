"""A path that a file names, and any file of a folder that somebody gave us: neither leads out of the folder.

Every reader of such a name asks here: external data of a model, what ``genai_config.json`` names, pictures of
annotations, tokenizers and chat templates, adapters, and what is copied from one folder to another.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path

from gradgraph.files.untrusted.regular import IrregularFileError, MissingFileError, UnreadableError, regular_bytes

_SNAPSHOTS, _BLOBS = "snapshots", "blobs"  # of a cache of downloads: snapshots/<revision>/name -> ../../blobs/<hash>


class OutsideError(UnreadableError):
    """A name leads out of its folder: by its words, a symlink or a hard link."""


def check_relative(name: str) -> str:
    """The name, if it is a relative path that goes down alone, on any system: of Windows, too, wherever we are.

    Raises:
        OutsideError: it is absolute, has ``..``, a drive or a zero byte, or is empty.
    """
    parts = name.replace("\\", "/").split("/")
    if not name or "\0" in name:
        raise OutsideError("it names no file")
    if parts[0] == "" or ":" in parts[0] or ".." in (part.strip() for part in parts):
        raise OutsideError("it leads out of the folder; only relative paths within it are read")
    return name


def is_inside(folder: str | os.PathLike[str], name: str) -> bool:
    """Whether a folder has something of this name, a link that leads nowhere too."""
    return os.path.lexists(Path(folder) / name)


def path_inside(folder: str | os.PathLike[str], name: str, linked: Path | None = None) -> Path:
    """The real path of a regular file that ``folder`` has under ``name``.

    A link is followed within the folder alone, and into the store of a cache of downloads whose revision it is.

    Args:
        folder: the folder, or link to it, that a user gave.
        name: of a file in it or below, as a file says it.
        linked: a file that the user gave as a link: those that lie beside its end may be led to.

    Raises:
        OutsideError: it is, or leads, out of the folder.
        MissingFileError: there is no such file.
        IrregularFileError: it is a folder, pipe, socket or device.
    """
    path, root = Path(folder) / check_relative(name), Path(os.path.realpath(folder))
    try:
        real = path.resolve(strict=True)
        status = real.stat()
    except (OSError, RuntimeError, ValueError):  # links in a circle are of the second kind, in Python before 3.13
        raise MissingFileError("it is not there") from None
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
    """The content of such a file, of at most so many bytes; None where the folder has nothing of this name.

    Raises:
        UnreadableError: as for :func:`path_inside`, and ``regular_bytes``.
    """
    return regular_bytes(path_inside(folder, name), most) if is_inside(folder, name) else None

"""A check of the paths that a command writes to: refused before the work begins, not after it."""

from __future__ import annotations

import errno
import stat
from pathlib import Path

from gradgraph.errors import OutputError, shown


def check_output(path: Path | None, *inputs: Path) -> None:
    """Refuse before the work begins what could not be written after it.

    Raises:
        OutputError: the folder is missing or may not be written to, ``path`` is a folder, a device, a link to itself or
            no name for a file, or it is one of the files that are read.
    """
    from gradgraph.files.atomic import check_writable
    from gradgraph.step.folder import ALL_FILES

    if path is None:
        return
    if path.is_dir():
        raise OutputError(f"'{shown(path)}' is a folder, and a file is to be written there; add a file name")
    try:
        regular = stat.S_ISREG(path.stat().st_mode)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise OutputError(
                f"'{shown(path)}' is a link that leads to itself; choose another path to write to"
            ) from None
    else:
        if not regular:
            raise OutputError(f"'{shown(path)}' is not a regular file; choose another path to write to")
    target = path.resolve()  # a symlink's target is what will be written
    if not target.parent.is_dir():
        where = target.parent if path.is_symlink() else path.parent
        raise OutputError(f"there is no folder '{shown(where)}' to write '{shown(target.name)}' to; create it first")
    for given in filter(Path.exists, inputs):
        # of a step folder or a folder of arrays, its files are read
        read = [f for glob in (*ALL_FILES, "*.npy") for f in given.glob(glob)] if given.is_dir() else [given]
        if path.exists() and any(file.samefile(path) for file in read):
            raise OutputError(f"'{shown(path)}' is what the command reads; write to another path")
    check_writable(path)

"""Checks of output paths before a command starts its work."""

from __future__ import annotations

import errno
import stat
from pathlib import Path

from gradgraph.errors import OutputError, shown


def check_output(path: Path | None, *inputs: Path) -> None:
    """Check that a command can write its output file to ``path``; for None, do nothing.

    Args:
        path: the output file.
        inputs: the files and folders that the command reads, which must not be overwritten.

    Raises:
        OutputError: if the folder of ``path`` does not exist or is not writable; if ``path`` is a folder, a device, a
            link to itself or an invalid name; or if it is one of the input files.
    """
    from gradgraph.files.atomic import check_writable
    from gradgraph.step.folder import ALL_FILES

    if path is None:
        return
    if path.is_dir():
        raise OutputError(f"'{shown(path)}' is a folder, but the output is a file; add a file name")
    try:
        regular = stat.S_ISREG(path.stat().st_mode)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise OutputError(f"'{shown(path)}' is a symbolic link to itself; choose another output path") from None
    else:
        if not regular:
            raise OutputError(f"'{shown(path)}' is not a regular file; choose another output path")
    target = path.resolve()  # the output goes to the target of a symlink
    if not target.parent.is_dir():
        where = target.parent if path.is_symlink() else path.parent
        raise OutputError(f"there is no folder '{shown(where)}' to write '{shown(target.name)}' to; create it first")
    for given in filter(Path.exists, inputs):
        # if an input is a folder, its files are the inputs
        read = [f for glob in (*ALL_FILES, "*.npy") for f in given.glob(glob)] if given.is_dir() else [given]
        if path.exists() and any(file.samefile(path) for file in read):
            raise OutputError(f"'{shown(path)}' is an input of this command; choose another output path")
    check_writable(path)

"""Where a command may write: refused before the work begins, not after it."""

from __future__ import annotations

from pathlib import Path

from gradgraph.errors import OutputError, shown


def check_output(path: Path | None, *inputs: Path) -> None:
    """Refuse before the work begins what could not be written after it.

    Raises:
        OutputError: the folder is missing or may not be written to, ``path`` is a folder or no name for a file, or it
            is one of the files that are read.
    """
    from gradgraph.files.atomic import check_writable

    if path is None:
        return
    if path.is_dir():
        raise OutputError(f"'{shown(path)}' is a folder, and a file is to be written there; add a file name")
    target = path.resolve()  # a symlink's target is what will be written
    if not target.parent.is_dir():
        where = target.parent if path.is_symlink() else path.parent
        raise OutputError(f"there is no folder '{shown(where)}' to write '{shown(target.name)}' to; create it first")
    if any(path.exists() and file.samefile(path) for i in inputs for file in _read(i)):
        raise OutputError(f"'{shown(path)}' is what the command reads; write to another path")
    check_writable(path)


def _read(path: Path) -> list[Path]:
    """The files that are read where ``path`` is an input: itself, or those of a step folder or a folder of arrays."""
    from gradgraph.step.folder import ALL_FILES

    if not path.is_dir():
        return [path] if path.exists() else []
    return [file for glob in (*ALL_FILES, "*.npy") for file in path.glob(glob)]

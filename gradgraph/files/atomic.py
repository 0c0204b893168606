"""Atomic writes of artefacts.

An output path always contains the complete old or the complete new artefact: the new one is written to a temporary
file next to the path, flushed to disk and renamed.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import shutil
import socket
import stat
import time
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import TypeAlias

from gradgraph.arguments import PATH, checked
from gradgraph.errors import GradgraphError, OutputError, shown
from gradgraph.files.paths import output_target
from gradgraph.files.untrusted.documents import LARGEST, json_of
from gradgraph.files.untrusted.regular import UnreadableError, regular_bytes

Data: TypeAlias = bytes | bytearray | memoryview | Iterable[bytes | memoryview]

_STALE = 24 * 3600  # seconds after which a temporary file of another machine counts as abandoned


@checked(path=PATH)
def write_atomically(path: str | os.PathLike[str], data: Data, mode: int | None = None) -> None:
    """Write ``data`` to ``path``: afterwards the file is complete and on disk, or unchanged.

    The old file's mode is kept unless ``mode`` is set. If ``path`` is a symlink, its target is replaced, not the link.
    Temporary files abandoned by earlier writers are removed.

    Raises:
        OutputError: if the folder is missing or read-only, the disk is full, or ``path`` is not a regular file.
    """
    with explain_errors(path):
        target = output_target(path)
        former = _mode_of(target)
        _sweep(target)
        temporary = _temporary(target)
        try:
            _write(temporary, data, former if mode is None else mode)
            os.replace(temporary, target)  # noqa: PTH105 - the atomic step
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
        _sync_folder(target.parent)


def link_atomically(source: str | os.PathLike[str], path: str | os.PathLike[str]) -> None:
    """Make ``path`` a hard link to the file ``source``, replacing an existing file.

    Raises:
        OutputError: if ``source`` does not exist, or the file system does not support hard links.
    """
    with explain_errors(path):
        target = output_target(path)
        _sweep(target)
        temporary = _temporary(target)
        try:
            os.link(os.path.realpath(source), temporary)
            temporary.replace(target)  # a no-op if both are already the same file
        finally:
            temporary.unlink(missing_ok=True)


def check_writable(path: str | os.PathLike[str]) -> None:
    """Check that ``write_atomically`` can write to ``path``, by creating and removing its temporary file.

    Raises:
        OutputError: if ``path`` cannot be written.
    """
    with explain_errors(path):
        target = output_target(path)
        _mode_of(target)
        temporary = _temporary(target)
        temporary.touch(exist_ok=False)
        temporary.unlink()


def write_folder_atomically(path: str | os.PathLike[str], files: Mapping[str, Data], force: bool = False) -> None:
    """Write ``files`` (name to data) to the folder ``path`` as one artefact: it appears complete, or not at all.

    The folder must be missing or empty. With ``force``, a folder written by an earlier call (a ``manifest.json`` and
    no foreign files) is replaced as a whole.

    Raises:
        OutputError: if the folder contains other files, or cannot be written.
    """
    with explain_errors(path):
        target = output_target(path)
        _sweep(target)
        check_replaceable(target, files, force)
        temporary = _temporary(target)
        try:
            temporary.mkdir()
            for name, data in files.items():
                if Path(name).name != name or name in ("", ".."):
                    raise OutputError(f"'{shown(name)}' cannot be the name of a file in a folder; use a plain name")
                _write(temporary / name, data, None)
            _sync_folder(temporary)
            _swap_in(temporary, target)
        except BaseException:
            shutil.rmtree(temporary, ignore_errors=True)
            raise
        _sync_folder(target.parent)


_OURS = (".onnx", ".onnx.data", ".bin", ".ort", ".config")  # extensions of files from earlier calls


def _swap_in(new: Path, target: Path) -> None:
    """Rename ``new`` to ``target``; an existing target is moved away first, then removed, or restored on failure."""
    if not target.exists():
        new.rename(target)
        return
    old = new.with_name(new.name.removesuffix(_TEMPORARY) + _REPLACED)
    target.rename(old)
    try:
        new.rename(target)
    except BaseException:
        old.rename(target)
        raise
    shutil.rmtree(old, ignore_errors=True)


def check_replaceable(target: Path, files: Collection[str], force: bool) -> None:
    """Raise OutputError unless ``write_folder_atomically`` may write a folder with ``files`` to ``target``."""
    if not target.exists():
        return
    if not target.is_dir():
        raise OutputError(f"'{shown(target)}' is a file, not a folder to write to; choose another path")
    there = sorted(p.name for p in target.iterdir())
    if not there:
        return
    if not force:
        raise OutputError(
            f"the folder '{shown(target)}' is not empty",
            remedy="choose another one, or replace it with force=True",
            shell="choose another one, or replace it with --force",
        )
    foreign = [n for n in there if n not in files and not n.endswith(_OURS)]
    if foreign or not _has_manifest(target):
        what = f"contains '{shown(foreign[0])}'" if foreign else "has no gradgraph manifest.json"
        raise OutputError(f"the folder '{shown(target)}' {what}, so it is not replaced; choose another one")


def _has_manifest(folder: Path) -> bool:
    try:
        return isinstance(json_of(regular_bytes(folder / "manifest.json", LARGEST)), dict)
    except UnreadableError:
        return False


def _write(path: Path, data: Data, mode: int | None) -> None:
    chunks = [data] if isinstance(data, bytes | bytearray | memoryview) else data
    with path.open("xb") as file:
        for chunk in chunks:
            file.write(chunk)
        if mode is not None:
            os.fchmod(file.fileno(), mode) if hasattr(os, "fchmod") else path.chmod(mode)
        file.flush()
        os.fsync(file.fileno())


def _mode_of(target: Path) -> int | None:
    try:
        status = target.stat()
    except FileNotFoundError:
        return None
    if not stat.S_ISREG(status.st_mode):
        raise OutputError(f"'{shown(target)}' is not a regular file; choose another path to write to")
    if not os.access(target, os.W_OK):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(target))
    return stat.S_IMODE(status.st_mode)


def _sync_folder(folder: Path) -> None:
    if os.name == "nt":
        return  # Windows cannot open a folder, and journals renames itself
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # some network file systems do not support it
            raise
    finally:
        os.close(handle)


@contextlib.contextmanager
def explain_errors(path: str | os.PathLike[str]) -> Iterator[None]:
    """Return a context that converts OS errors while ``path`` is written into an OutputError with a remedy."""
    try:
        yield
    except GradgraphError:
        raise
    except (OSError, ValueError) as error:
        reason = (error.strerror if isinstance(error, OSError) else None) or str(error)
        where = f"cannot write '{shown(os.fspath(path))}'"
        remedy = {
            errno.ENOENT: "create its folder first",
            errno.ENOTDIR: "part of its path is a file",
            errno.EACCES: "choose a folder that you may write to",
            errno.EPERM: "choose a folder that you may write to",
            errno.EROFS: "choose a folder that you may write to",
            errno.ENOSPC: "free some space and try again",
            errno.EDQUOT: "free some space and try again",
        }.get(error.errno or 0 if isinstance(error, OSError) else 0, "choose another path")
        raise OutputError(f"{where}: {shown(reason)} (existing files are untouched)", remedy=remedy) from error


# --- temporary files --------------------------------------------------------------------------------------

_TEMPORARY = ".gradgraph-tmp"
_REPLACED = ".gradgraph-old"


def _temporary(target: Path) -> Path:
    return target.with_name(f"{_prefix(target)}{_host()}-{os.getpid()}-{secrets.token_hex(4)}{_TEMPORARY}")


def _prefix(target: Path) -> str:
    return f".{target.name[:100]}."


def _host() -> str:
    return "".join(c for c in socket.gethostname() if c.isalnum())[:32] or "host"


def _sweep(target: Path) -> None:
    """Remove temporary files of killed writers of ``target``; restore a folder that was moved but not replaced."""
    for entry in _left_behind(target):
        with contextlib.suppress(OSError):
            if entry.name.endswith(_REPLACED) and not target.exists():
                entry.rename(target)
            elif entry.is_dir():
                shutil.rmtree(entry)
            else:
                entry.unlink()


def _left_behind(target: Path) -> list[Path]:
    prefix = _prefix(target)
    try:
        names = [n for n in os.listdir(target.parent) if n.startswith(prefix)]  # noqa: PTH208 - only names are needed
    except OSError:
        return []
    names = [n for n in names if n.endswith((_TEMPORARY, _REPLACED))]
    return [target.parent / n for n in names if _abandoned(target.parent / n, n[len(prefix) :])]


def _abandoned(entry: Path, rest: str) -> bool:
    host, _, tail = rest.partition("-")
    pid = tail.partition("-")[0]
    if host == _host() and pid.isdigit() and os.name != "nt" and not _alive(int(pid)):
        return True
    try:
        return time.time() - entry.stat().st_mtime > _STALE
    except OSError:
        return False


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except (PermissionError, OverflowError):
        return True
    return True

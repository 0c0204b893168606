"""Native kernels for the tests: compiled once for an environment, and found where a user's would be.

All processes of a run, and all runs with this environment, share what one of them has compiled.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

from gradgraph.backends.ort_native import in_use
from gradgraph.backends.ort_native import library as native
from gradgraph.backends.ort_native.flags import COMPILERS
from gradgraph.errors import GradgraphError

HOME = Path(sys.prefix).resolve() if os.access(sys.prefix, os.W_OK) else Path(__file__).resolve().parents[2] / "build"
CACHE = HOME / "share" / "gradgraph-tests"  # stands for the cache folder of a user


def compiled() -> Path:
    """Return the library for this machine, compiled if it is not there yet.

    Raises:
        RuntimeUnavailableError: if there is no compiler, or it fails.
        OutputError: if the folder cannot be written.
    """
    folder = CACHE / "gradgraph"
    folder.mkdir(0o700, parents=True, exist_ok=True)
    library = native.in_folder(folder)
    with _alone(folder / "compiled.lock"):
        if not library.is_built:
            native.build(library=library)
    return library.path


def use() -> str | None:
    """Let this process, and those that it starts, find a library, that of the installation if it has one.

    Returns what stands in the way where there is a compiler.
    """
    if os.environ.get(in_use.VARIABLE) == in_use.OFF or not any(map(shutil.which, COMPILERS)):
        return None
    try:
        if in_use.found().why_not:
            os.environ["XDG_CACHE_HOME"] = str(CACHE)
            compiled()
        return in_use.found().why_not or None
    except GradgraphError as error:
        return str(error)


@contextlib.contextmanager
def _alone(lock: Path) -> Iterator[None]:
    """One process at a time: the others wait, and find what the first has made."""
    if sys.platform == "win32":
        yield
        return
    import fcntl

    with lock.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield

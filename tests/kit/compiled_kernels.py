"""Native kernels for the tests, copied from the installation or compiled, in a folder used as the user's cache.

All processes of a test run, and all runs in this environment, share the compiled library.
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
    """Return the path of the library for this machine; if it is missing, copy the installed one, or compile it.

    Raises:
        RuntimeUnavailableError: if there is no compiler, or compilation fails.
        OutputError: if the folder cannot be written.
    """
    folder = CACHE / "gradgraph"
    folder.mkdir(0o700, parents=True, exist_ok=True)
    library = native.in_folder(folder)
    with _alone(folder / "compiled.lock"):
        if not library.is_built:
            installed = native.shipped()
            if installed is None:
                native.build(library=library)
            else:
                shutil.copy(installed.path, library.path)
    return library.path


def use() -> str | None:
    """Make this process and its subprocesses use native kernels, installed or compiled.

    Returns:
        Why there are no native kernels although there is a compiler; None if there are, or without a compiler.
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
    """Run this context in one process at a time; the others wait for the lock."""
    if sys.platform == "win32":
        yield
        return
    import fcntl

    with lock.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield

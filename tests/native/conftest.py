"""The library, built once for all tests here, in a cache folder of their own."""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from gradgraph.backends.ort_native import library as native
from gradgraph.backends.ort_native.library import COMPILERS


def use_cache(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let ``folder`` be the user's cache."""
    for name in ("XDG_CACHE_HOME", "LOCALAPPDATA"):
        monkeypatch.setenv(name, str(folder))
    monkeypatch.setattr(Path, "home", lambda: folder)


@pytest.fixture
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    use_cache(tmp_path / "cache", monkeypatch)
    return native.here().path.parent


@pytest.fixture(scope="session")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache folder with the library in it."""
    if not any(map(shutil.which, COMPILERS)):
        pytest.skip(f"native kernels need a C++ compiler ({', '.join(COMPILERS)}), and there is none")
    folder = _shared(tmp_path_factory) / "native-cache"
    with pytest.MonkeyPatch.context() as patch, _alone(folder.with_suffix(".lock")):
        use_cache(folder, patch)
        if not native.here().path.exists():
            native.build()
    return folder


def _shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of this run's that all its processes share."""
    own = tmp_path_factory.getbasetemp()
    return own.parent if "PYTEST_XDIST_WORKER" in os.environ else own


@contextlib.contextmanager
def _alone(lock: Path) -> Iterator[None]:
    """One process at a time: the others wait, and find what the first has made."""
    if sys.platform == "win32":
        yield  # each builds it; the last one's stays
        return
    import fcntl

    with lock.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


@pytest.fixture
def library(built: Path, monkeypatch: pytest.MonkeyPatch) -> native.Library:
    """The library of this machine, built."""
    use_cache(built, monkeypatch)
    return native.here()

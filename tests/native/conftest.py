"""The library, built once for all tests here, in a cache folder of their own."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from gradgraph import native
from gradgraph.native.library import COMPILERS


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
    folder = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        use_cache(folder, patch)
        native.build()
    return folder


@pytest.fixture
def library(built: Path, monkeypatch: pytest.MonkeyPatch) -> native.Library:
    """The library of this machine, built."""
    use_cache(built, monkeypatch)
    return native.here()

"""The library in a cache folder of its own."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from gradgraph.backends.ort_native import in_use, native_attention, native_table
from gradgraph.backends.ort_native import library as native
from gradgraph.backends.ort_native.flags import COMPILERS
from gradgraph.machine.caches import FILE_MODE, open_private
from tests.kit import compiled_kernels


def use_cache(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let ``folder`` be the user's cache."""
    for name in ("XDG_CACHE_HOME", "LOCALAPPDATA"):
        monkeypatch.setenv(name, str(folder))
    monkeypatch.setattr(Path, "home", lambda: folder)


@pytest.fixture(autouse=True)
def every_family(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels are tried at all levels, not only where they were measured to be faster."""
    for family in native_table.LEAST_LEVEL:
        monkeypatch.setitem(native_table.LEAST_LEVEL, family, "")


@pytest.fixture
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache folder without a library, which does not come with the package either."""
    monkeypatch.setattr(native, "BUILT", tmp_path / "none")
    monkeypatch.setattr(in_use, "levels_in_use", lambda: ["avx2"])  # a processor for which there could be one
    use_cache(tmp_path / "cache", monkeypatch)
    return native.here().path.parent


@pytest.fixture(scope="session")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache folder with the library in it, and nothing else."""
    if not any(map(shutil.which, COMPILERS)):
        pytest.skip(f"native kernels need a C++ compiler ({', '.join(COMPILERS)}), and there is none")
    folder = tmp_path_factory.mktemp("native-cache")
    with pytest.MonkeyPatch.context() as patch:
        use_cache(folder, patch)
        place = native.in_folder(native.cache_folder()).path
        open_private(place.parent)
        shutil.copy(compiled_kernels.compiled(), place)
        place.chmod(FILE_MODE)
    return folder


@pytest.fixture
def library(built: Path, monkeypatch: pytest.MonkeyPatch) -> native.Library:
    """The library of this machine, built."""
    use_cache(built, monkeypatch)
    return native.here()


@pytest.fixture
def by_vectors(library: native.Library, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is computed by vectors where they were measured to be faster is so at all levels without tiles."""
    if library.has_tiles:
        pytest.skip("with tiles, floats of a few rows of a stored weight are multiplied")
    monkeypatch.setattr(native.Library, "has_fast_vectors", True)


@pytest.fixture
def every_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    """Attentions of all sizes are computed by the kernels, on any processor."""
    for name in ("LEAST_ROWS", "LEAST_HEAD_SIZE", "LEAST_WORK", "LEAST_SCORES"):
        monkeypatch.setattr(native_attention, name, 1)
    monkeypatch.setattr(native_attention, "_most_head_size", lambda: 1_000)
    monkeypatch.setattr(native.Library, "has_fast_vectors", True)

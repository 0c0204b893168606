"""What lies in the user's cache is taken only if nobody else can have written it."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from gradgraph.backends.ort_cpu import ORT_CPU
from gradgraph.backends.ort_native import library as native
from gradgraph.cli.app import run
from gradgraph.errors import GradgraphError, RuntimeUnavailableError
from gradgraph.machine.caches import cache_folder, check_ours, open_private
from gradgraph.runtime.execution.session import Placement, RuntimeOptions
from gradgraph.runtime.execution.tuner import Tuner, default_cache

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="Windows has no modes, and caches of each user")

STRANGER = 12_345  # the number of no user here
needs_root = pytest.mark.skipif(
    sys.platform != "win32" and os.getuid() != 0, reason="only root may give files to another user"
)
CPU = Placement(("CPUExecutionProvider",))


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The user's cache folder, with a file for each reader."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(Path, "home", lambda: tmp_path / "cache")
    monkeypatch.setattr(native, "BUILT", tmp_path / "none")
    open_private(cache_folder())
    for file in (native.here().path, default_cache()):
        file.write_text("{}")
        file.chmod(0o600)
    return cache_folder()


def file_of_another(file: Path) -> None:
    os.chown(file, STRANGER, -1)


def folder_of_another(file: Path) -> None:
    os.chown(file.parent, STRANGER, -1)


def folder_above_of_another(file: Path) -> None:
    os.chown(file.parent.parent, STRANGER, -1)


def file_of_the_group(file: Path) -> None:
    file.chmod(0o660)


def file_of_everybody(file: Path) -> None:
    file.chmod(0o602)


def folder_of_the_group(file: Path) -> None:
    file.parent.chmod(0o770)


def folder_of_everybody(file: Path) -> None:
    file.parent.chmod(0o777)


def folder_above_of_everybody(file: Path) -> None:
    file.parent.parent.chmod(0o777)


def link_to_a_file(file: Path) -> None:
    other = file.with_name("other")
    file.rename(other)
    file.symlink_to(other)


def link_to_nothing(file: Path) -> None:
    file.unlink()
    file.symlink_to(file.with_name("nothing"))


def folder_is_a_link_to_that_of_everybody(file: Path) -> None:
    other = file.parent.parent.parent / "other"
    other.mkdir()
    other.chmod(0o777)
    file.parent.rename(other / "gradgraph")
    file.parent.symlink_to(other / "gradgraph")


def a_pipe(file: Path) -> None:
    file.unlink()
    os.mkfifo(file, 0o600)


OWNERS = [pytest.param(f, marks=needs_root) for f in (file_of_another, folder_of_another, folder_above_of_another)]
PLANTED = [
    *OWNERS, file_of_the_group, file_of_everybody, folder_of_the_group, folder_of_everybody, folder_above_of_everybody,
    link_to_a_file, link_to_nothing, folder_is_a_link_to_that_of_everybody, a_pipe,
]  # fmt: skip


def refused(call: Callable[[], object]) -> None:
    with pytest.raises(RuntimeUnavailableError, match=r"^[^;]*; (remove|run)") as caught:
        call()
    assert ("another user" in str(caught.value)) + ("other users may" in str(caught.value)) + (
        "gradgraph writes a regular file there" in str(caught.value)
    ) == 1


@pytest.mark.parametrize("plant", PLANTED)
def test_what_others_can_have_written_is_not_read(plant: Callable[[Path], None]) -> None:
    plant(default_cache())
    refused(lambda: Tuner(ORT_CPU, CPU, cache=default_cache()))


@pytest.mark.parametrize("plant", PLANTED)
def test_a_library_that_others_can_have_written_is_not_loaded(
    plant: Callable[[Path], None], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(native.here().path)
    if not native.here().is_built:  # a link to nothing, a pipe
        with pytest.raises(RuntimeUnavailableError, match="no native kernels"):
            native.here().required()
        assert not native.here().has_tiles
        return
    refused(native.here().required)
    refused(lambda: native.here().has_tiles)
    refused(lambda: RuntimeOptions(native_kernels=True).session_options())
    assert run(["native", "status"]) == 1
    assert capsys.readouterr().err.startswith("error: ")


FOLDERS = [p for p in PLANTED if "folder" in str(p)]


@pytest.mark.parametrize("plant", FOLDERS)
def test_nothing_is_built_where_others_may_write(
    plant: Callable[[Path], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(native.here().path)
    monkeypatch.setattr(native, "_compile", lambda command: pytest.fail("it was compiled"))
    monkeypatch.setattr(native, "_compiler", lambda given: "c++")
    refused(native.build)


def test_what_the_system_owns_and_links_of_ones_own_are_fine(cache: Path, tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir(mode=0o755)
    cache.rename(tmp_path / "disk" / "gradgraph")
    cache.symlink_to(tmp_path / "disk" / "gradgraph")
    check_ours(native.here().path)
    check_ours(cache / "missing")
    check_ours(Path("/etc/hosts"))


def modes(*paths: Path) -> list[int]:
    return [path.stat().st_mode & 0o777 for path in paths]


@pytest.fixture(params=[0o000, 0o002, 0o777], ids=oct)
def umask(request: pytest.FixtureRequest) -> Iterator[None]:
    old = os.umask(request.param)
    yield
    os.umask(old)


@pytest.mark.usefixtures("umask")
def test_whatever_the_umask_the_cache_is_the_users_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "new" / "cache"))
    tuner = Tuner(ORT_CPU, CPU, cache=default_cache(), chosen={"a": "b"})
    tuner._store()
    assert modes(cache_folder(), cache_folder().parent, default_cache()) == [0o700, 0o700, 0o600]
    assert json.loads(default_cache().read_text())[tuner._machine] == {"a": "b"}
    assert Tuner(ORT_CPU, CPU, cache=default_cache()).chosen == {"a": "b"}


def test_an_older_cache_is_closed_and_other_folders_stay_as_they_are(cache: Path, tmp_path: Path) -> None:
    cache.chmod(0o755)
    open_private(cache)
    other = tmp_path / "other"
    other.mkdir()
    other.chmod(0o755)
    open_private(other)
    assert modes(cache, other) == [0o700, 0o755]


@pytest.mark.parametrize("given", ["", "cache", "./x"])
def test_a_cache_in_the_working_folder_counts_as_none(given: str, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = Path.home() / ".cache" / "gradgraph" if sys.platform == "linux" else cache_folder()
    monkeypatch.setenv("XDG_CACHE_HOME", given)
    assert cache_folder() == wanted


def test_errors_are_those_of_this_package() -> None:
    assert issubclass(RuntimeUnavailableError, GradgraphError)

"""Building the library, finding it again, and what is said where it is not."""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import onnx
import pytest

import gradgraph as gg
from gradgraph.backends.ort_native import flags
from gradgraph.backends.ort_native import library as native
from gradgraph.cli.app import run
from gradgraph.errors import OutputError, RuntimeUnavailableError
from gradgraph.runtime.execution.session import Placement, RuntimeOptions
from tests.kit.command_line import arrays, mlp

pytestmark = pytest.mark.one_level

NATIVE = RuntimeOptions(native_kernels=True)


def step() -> gg.Step:
    return gg.build(mlp(), "cross_entropy", gg.optim.adamw(0.01))


def compiler(folder: Path, script: str) -> str:
    """The path of a program that does what ``script`` says with the name of the output file as its last argument."""
    path = folder / "compiler"
    path.write_text(f"#!/bin/sh\nfor out; do :; done\n{script}\n")
    path.chmod(0o755)
    return str(path)


def test_it_is_built_where_it_is_looked_for(library: native.Library) -> None:
    assert library.is_built and library.required() == library.path
    assert [p.name for p in library.path.parent.iterdir()] == [library.path.name]  # nothing else is left there


@pytest.mark.parametrize("part", ["processor", "instructions"])
def test_another_machine_needs_another_one(
    library: native.Library, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, part: str
) -> None:
    monkeypatch.setattr(native, part, lambda: "another")
    monkeypatch.setattr(native, "BUILT", tmp_path)  # where none came with the package
    assert not native.here().is_built


def test_another_version_needs_another_one(
    library: native.Library, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for source in flags.SOURCES.glob("*.[ch]*"):
        (tmp_path / source.name).write_bytes(source.read_bytes())
    monkeypatch.setattr(flags, "SOURCES", tmp_path)
    for place, name in (
        (flags, "sources"),
        (flags, "digest"),
        (native, "digest"),
    ):  # of another process, which reads anew
        monkeypatch.setattr(place, name, getattr(place, name).__wrapped__)
    assert native.here() == library
    with (tmp_path / "kernel.h").open("a") as file:
        file.write("// changed\n")
    assert not native.here().is_built


def test_a_trainer_says_that_it_is_not_built(empty_cache: Path) -> None:
    with pytest.raises(RuntimeUnavailableError, match=r"no native kernels for this processor.*gradgraph native build"):
        gg.Trainer(step(), device="cpu", options=NATIVE)


def test_another_provider_has_no_use_for_it() -> None:
    with pytest.raises(
        RuntimeUnavailableError, match=r"CPU provider, but the first provider here is CUDA.*device='cpu'"
    ):
        Placement(("CUDAExecutionProvider", "CPUExecutionProvider"), "cuda").trains_for(NATIVE)


def test_a_damaged_library_is_named(empty_cache: Path) -> None:
    native.here().path.parent.mkdir(parents=True)
    native.here().path.write_text("not a library")
    with pytest.raises(RuntimeUnavailableError, match=r"native kernels in '.*native-.*' do not load: .*native build"):
        gg.Trainer(step(), device="cpu", options=NATIVE).step(arrays(8))


@pytest.mark.parametrize(
    ("script", "says"),
    [
        ("echo 'In file included' >&2; echo 'kernel.h:3: error: too old' >&2; exit 1", "fails: kernel.h:3: error: too"),
        ("exit 1", "fails: it prints no reason"),
        ("echo text > $out", "compiled but do not run in onnxruntime"),
        ("exec 2>&1; kill -9 $$", "fails: it prints no reason"),
    ],
)
def test_a_compiler_that_fails(empty_cache: Path, tmp_path: Path, script: str, says: str) -> None:
    with pytest.raises(RuntimeUnavailableError, match=says):
        native.build(compiler(tmp_path, script))
    assert not native.here().is_built and list(empty_cache.iterdir()) == []


def test_no_compiler(empty_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RuntimeUnavailableError, match=r"no compiler 'icc' on the PATH; install g\+\+"):
        native.build("icc")
    monkeypatch.setenv("CXX", "/opt/none/c++")
    with pytest.raises(RuntimeUnavailableError, match=r"no compiler '/opt/none/c\+\+'"):
        native.build()
    monkeypatch.delenv("CXX")
    monkeypatch.setenv("PATH", "")
    with pytest.raises(RuntimeUnavailableError, match=r"no C\+\+ compiler \(c\+\+, g\+\+, clang\+\+\)"):
        native.build()


def test_a_folder_that_cannot_be_written(empty_cache: Path, tmp_path: Path) -> None:
    empty_cache.parent.mkdir(parents=True)
    empty_cache.write_text("a file")
    with pytest.raises(OutputError, match=r"cannot write the native kernels to '.*gradgraph'"):
        native.build(compiler(tmp_path, "true"))


def test_an_onnxruntime_without_the_functions_is_refused(library: native.Library) -> None:
    """The table that it asks for is not there: an error, and no call into nothing."""
    said: list[bytes] = []
    version = ctypes.create_string_buffer(b"1.17.0")
    pointer = ctypes.c_void_p

    def create_status(_: int, message: bytes) -> int:
        said.append(message)
        return 1

    create = ctypes.CFUNCTYPE(pointer, ctypes.c_int, ctypes.c_char_p)(create_status)
    oldest = (pointer * 1)(ctypes.cast(create, pointer))
    get_api = ctypes.CFUNCTYPE(pointer, ctypes.c_uint32)(lambda v: ctypes.addressof(oldest) if v == 1 else None)
    get_version = ctypes.CFUNCTYPE(pointer)(lambda: ctypes.addressof(version))
    base = (pointer * 2)(ctypes.cast(get_api, pointer), ctypes.cast(get_version, pointer))
    assert ctypes.CDLL(str(library.path)).RegisterCustomOps(None, base)
    assert said == [b"the native kernels need onnxruntime 1.18 or later, and this is 1.17.0"]


# --- the command line --------------------------------------------------------------------------------


@pytest.fixture
def cli(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., Sequence]:
    """``cli(*words)`` gives exit code, stdout and stderr, in a folder with a model and data."""
    onnx.save(mlp(), tmp_path / "model.onnx")
    np.savez(tmp_path / "train.npz", **arrays(64))
    monkeypatch.chdir(tmp_path)

    def call(*words: str) -> Sequence:
        code = run(words)
        return code, *capsys.readouterr()

    return call


def test_status_and_build(
    library: native.Library, cli: Callable[..., Sequence], monkeypatch: pytest.MonkeyPatch
) -> None:
    code, out, _ = cli("native", "status")
    assert code == 0 and out.startswith(f"built: {library.path}\nin use by default on the CPU: ")
    monkeypatch.setattr(native, "_compile", lambda command: shutil.copy(library.path, command[-1]))
    code, out, _ = cli("native", "build", "--json")
    found = json.loads(out)
    assert code == 0 and found.pop("told").startswith("in use by default")
    assert found == {"built": True, "library": str(library.path)}


def test_status_of_none(empty_cache: Path, cli: Callable[..., Sequence]) -> None:
    code, out, _ = cli("native", "status")
    assert code == 0 and out.startswith("not built: ") and "\nnot in use: this install has none" in out
    assert cli("native", "status", "--compiler", "c++")[0] == 2
    code, _, err = cli("native", "build", "--compiler", "icc")
    assert code == 1 and err.startswith("error: there is no compiler 'icc'")
    code, _, err = cli("train", "model.onnx", "--data", "train.npz", "--native-kernels")
    assert code == 1 and "run `gradgraph native build`" in err


def test_training_uses_them(library: native.Library, cli: Callable[..., Sequence]) -> None:
    words = ("train", "model.onnx", "--data", "train.npz", "--epochs", "2", "--device", "cpu", "--json", "--quiet")
    histories = [json.loads(cli(*words, f"--{no}native-kernels")[1])["history"] for no in ("no-", "")]
    np.testing.assert_allclose(histories[1]["loss"], histories[0]["loss"], rtol=1e-5)


@pytest.mark.skipif(sys.platform == "win32" or os.getuid() == 0, reason="root may write anywhere")
def test_a_folder_without_permission(empty_cache: Path, tmp_path: Path) -> None:
    empty_cache.parent.mkdir(parents=True)
    empty_cache.parent.chmod(0o500)
    with pytest.raises(OutputError, match="cannot write the native kernels"):
        native.build(compiler(tmp_path, "true"))


def test_the_package_s_own_library_is_taken_where_none_was_built(
    empty_cache: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Of what a wheel carries, the highest level that this processor has, and GRADGRAPH_CPU lets our code see."""
    for module in (native, flags):
        monkeypatch.setattr(module, "shipped_levels", lambda: dict.fromkeys(("avx2", "avx512", "amx"), ()))
    monkeypatch.setattr(native, "levels_in_use", lambda: ["avx2", "avx512"])
    assert native.shipped(tmp_path) is None
    for level in ("avx2", "avx512", "amx"):
        (tmp_path / flags.shipped_name(level)).write_text(level)
    taken = native.shipped(tmp_path)
    assert taken is not None and taken.is_built and taken.required().read_text() == "avx512"
    monkeypatch.setattr(native, "levels_in_use", lambda: ["avx2"])
    lower = native.shipped(tmp_path)
    assert lower is not None and lower.path.read_text() == "avx2"
    monkeypatch.setattr(native, "levels_in_use", list)
    assert native.shipped(tmp_path) is None

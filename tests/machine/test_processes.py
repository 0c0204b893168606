"""Programs that gradgraph starts find nothing in the working folder, and nothing else in it starts programs."""

from __future__ import annotations

import ast
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import gradgraph
from gradgraph.backends.ort_native import library as native
from gradgraph.cli.app import run
from gradgraph.machine import processes
from gradgraph.machine.hardware import VARIABLE
from gradgraph.runtime.execution import tuner as tune
from tests.kit.package_trees import trees

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="the traps are shell scripts")

ROOT = Path(gradgraph.__file__).parent
SHADOWS = ("numpy.py", "onnx.py", "onnxruntime.py", "gradgraph.py", "os.py", "sitecustomize.py", "usercustomize.py")
PROGRAMS = ("c++", "g++", "clang++", "cc1plus", "as", "ld", "nvidia-smi")


@pytest.fixture
def trap(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The working folder, full of modules and programs that leave a trace where they run."""
    trace, folder = tmp_path / "ran", tmp_path / "work"
    folder.mkdir()
    for name in SHADOWS:
        (folder / name).write_text(f"open({str(trace)!r}, 'a').write({name!r})\nraise SystemExit(1)\n")
    for name in PROGRAMS:
        (folder / name).write_text(f"#!/bin/sh\necho {name} >> '{trace}'\nexit 1\n")
        (folder / name).chmod(0o755)
    monkeypatch.chdir(folder)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(Path, "home", lambda: tmp_path / "cache")
    monkeypatch.setenv("PATH", os.pathsep.join(["", ".", os.environ["PATH"], "work"]))
    yield folder
    assert not trace.exists(), trace.read_text()


def test_python_finds_our_modules_and_none_of_the_working_folder(trap: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", ["", str(trap), "relative", *sys.path])
    code = "import numpy, onnx, onnxruntime, os, sys\nprint(numpy.__file__, os.getcwd(), sys.argv[1:])"
    ran = processes.run_python(code, "argument", text=True)
    module, folder, *arguments = ran.stdout.split()
    assert module == sys.modules["numpy"].__file__ and arguments == ["['argument']"]
    assert Path(folder) != trap and not Path(folder).exists()


def test_a_clone_that_is_installed_by_its_path_is_used_from_its_own_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT.parent)
    monkeypatch.setattr(sys, "path", [str(ROOT.parent), *(path for path in sys.path if path)])
    assert str(ROOT.parent) in processes.python_command("")[-1].split(os.pathsep)


def test_kernels_are_built_by_nothing_in_the_working_folder(
    trap: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """As far as a compiler goes that is quick."""
    tools = tmp_path / "tools"
    tools.mkdir()
    (tools / "c++").write_text('#!/bin/sh\nfor out; do :; done\npwd > "$out"\n')
    (tools / "c++").chmod(0o755)
    monkeypatch.setenv("PATH", os.pathsep.join(["", ".", str(tools), os.environ["PATH"]]))
    assert run(["native", "build"]) == 1  # it compiled text
    assert run(["native", "status"]) == 0


@pytest.mark.parametrize("words", [["env"], ["native", "status"], ["ops"], ["inspect", "missing.onnx"]], ids=" ".join)
def test_no_other_command_runs_what_lies_there(trap: Path, words: list[str]) -> None:
    run(words)


def test_the_graphics_card_is_told_by_no_program_of_the_working_folder(trap: Path) -> None:
    tune.graphics_card(0)


def test_a_program_is_looked_for_where_the_path_says(trap: Path, tmp_path: Path) -> None:
    assert processes.program("cc1plus") is None and processes.program("nothing-of-that-name") is None
    assert processes.program("./c++") == str(trap / "c++")
    assert Path(processes.program("sh") or "").is_absolute()


def test_a_working_folder_that_is_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "gone"
    folder.mkdir()
    monkeypatch.chdir(folder)
    folder.rmdir()
    assert processes.run_python("print(1)", text=True).stdout == "1\n"


MODULES = {"multiprocessing", "pty", "concurrent.futures.process"}
CALLS = ("system", "popen", "spawn", "exec", "fork", "posix_spawn", "startfile", "ProcessPoolExecutor")
HARMLESS = {"subprocess.SubprocessError"}


def starts_programs(tree: ast.Module) -> bool:
    for node in ast.walk(tree):
        names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
        names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
        if MODULES & set(names) or (isinstance(node, ast.ImportFrom) and node.module == "subprocess"):
            return True
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and _is_start(node.value.id, node.attr):
            return True
    return False


def _is_start(module: str, name: str) -> bool:
    if f"{module}.{name}" in HARMLESS:
        return False
    return module == "subprocess" or (module in ("os", "futures") and name.startswith(CALLS))


@pytest.mark.sweep(0)
def test_one_module_starts_programs() -> None:
    """So that what is said above holds of all of them."""
    assert len(trees()) > 200
    assert [p for p, tree in trees().items() if starts_programs(tree)] == ["gradgraph/machine/processes.py"]


# --- hidden features of the processor ---------------------------------------------------------------------------------


def test_a_level_that_is_not_here_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("gradgraph.machine.hardware.instructions", lambda: "sse2 ssse3 sse4_2 popcnt avx2 fma")
    for asked, says in (
        ("avx512", "which this processor lacks; set it to x86-64-v2 or avx2"),
        ("AVX2", "which is not one of x86-64-v2, avx2, avx512, amx"),
    ):
        monkeypatch.setenv(VARIABLE, asked)
        assert run(["native", "status"]) == 1
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith(f"error: the environment variable {VARIABLE} is '{asked}', ") and says in line
    monkeypatch.setenv(VARIABLE, "x86-64-v2")
    hidden = native.here().path
    monkeypatch.delenv(VARIABLE)
    assert native.here().path != hidden

"""An installation compiles native kernels where a compiler works, and never fails for want of one."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from gradgraph.backends.ort_native import flags

ROOT = Path(__file__).parents[3]
NONE = "no library comes with the package on this system"
pytest.importorskip("setuptools.command.bdist_wheel", reason="setuptools makes wheels from 70.1 on")
pytestmark = [pytest.mark.one_level, pytest.mark.skipif(not flags.shipped_levels(), reason=NONE)]
LEVELS = list(flags.shipped_levels())
TOLD = f'echo "#define {flags.MACROS[LEVELS[0]]} 1"'  # the lowest level, by the compiler's macros
# what it is asked to write is its last argument; asked for macros it says what a processor of that level has
WORKS = f'case "$*" in *-dM*) {TOLD};; *) for out; do :; done; echo compiled > "$out";; esac'
SAYS_AND_FAILS = f'case "$*" in *-dM*) {TOLD};; *) echo "error: broken" >&2; exit 1;; esac'
DIES = f'case "$*" in *-dM*) {TOLD};; *) kill -9 $$;; esac'


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """What an installation reads of a checkout."""
    place = tmp_path / "source"
    room = ROOT / "gradgraph" / "backends" / "ort_native"
    copied = place / room.relative_to(ROOT)
    (copied / "kernels").mkdir(parents=True)
    for file in (*room.glob("*.py"), *flags.files("*.cc", "*.h")):
        shutil.copy(file, copied / file.relative_to(room))
    shutil.copy(ROOT / "setup.py", place)
    (place / "pyproject.toml").write_text(
        '[project]\nname = "onnx-gradgraph"\nversion = "0"\n'
        '[tool.setuptools]\npackages = ["gradgraph.backends.ort_native"]\n'
    )
    return place


def install(source: Path, script: str | None, asked: str = "") -> tuple[int, list[str], str]:
    """Exit code, the libraries of the wheel and its tag, with a compiler that does what ``script`` says; None: none."""
    compiler = source.parent / "c++"
    if script is not None:
        compiler.write_text(f"#!/bin/sh\n{script}\n")
        compiler.chmod(0o755)
    told = {"CXX": str(compiler), "GRADGRAPH_COMPILE_KERNELS": asked}
    command = [sys.executable, "setup.py", "-q", "bdist_wheel", "--keep-temp", "--dist-dir", "../dist"]
    ran = subprocess.run(command, cwd=source, env=os.environ | told, capture_output=True, check=False)
    built = [p.name for p in (source / "build").glob("bdist*/**/ort_native/built/*")]
    (wheel,) = [p.stem for p in (source.parent / "dist").glob("*.whl")] or [""]
    return ran.returncode, sorted(built), wheel.rpartition("-")[2]


@pytest.mark.parametrize("script", [None, "exit 1", "exit 0", "kill -9 $$", "echo '#define __SSE2__ 1'"])
def test_without_a_compiler_that_knows_a_level_the_wheel_is_pure(source: Path, script: str | None) -> None:
    assert install(source, script) == (0, [], "any")


@pytest.mark.parametrize("script", [SAYS_AND_FAILS, DIES])
def test_a_compiler_that_fails_stops_no_installation(source: Path, script: str) -> None:
    code, built, _ = install(source, script)
    assert (code, built) == (0, [])
    assert install(source, script, asked="1")[0] != 0


def test_a_compiler_s_library_is_in_the_wheel_under_the_name_that_is_looked_for(source: Path) -> None:
    code, built, tag = install(source, WORKS)
    assert (code, built) == (0, [flags.shipped_name(LEVELS[0])]) and tag != "any"


def test_wheels_for_others_carry_all_levels(source: Path) -> None:
    code, built, tag = install(source, WORKS, asked="1")
    assert (code, built) == (0, sorted(map(flags.shipped_name, LEVELS))) and tag != "any"


def test_none_are_compiled_where_none_are_wanted(source: Path) -> None:
    assert install(source, WORKS, asked="0") == (0, [], "any")


@pytest.mark.parametrize("level", LEVELS)
def test_a_compiler_s_macros_tell_the_level(level: str) -> None:
    known = LEVELS[: LEVELS.index(level) + 1]
    macros = "".join(f"#define {flags.MACROS[each]} 1\n" for each in known)
    assert flags.level_of(macros) == level and flags.level_of("#define __cplusplus 201703L\n") is None

"""Clang, which is the compiler of macOS, takes every source for every kind of processor that wheels are made for.

No source tells systems apart, so one with arm64 is enough: it sees its headers, and others see those of Linux.

`make runtimes` installs Zig, which carries Clang and the headers of those systems.
"""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from gradgraph.backends.ort_native import flags
from tests.kit.compiled_c import ZIG

TARGETS = {
    "aarch64-macos": (),
    "x86_64-linux-gnu": ("-mcpu=haswell",),
    "x86_64-linux-gnu.2.28": ("-mcpu=sapphirerapids",),
}


@pytest.mark.skipif(not ZIG.exists(), reason="Zig is not installed: make runtimes")
@pytest.mark.one_level
@pytest.mark.sweep(0.02)
@pytest.mark.parametrize("source", flags.files("*.cc"), ids=lambda path: path.name)
@pytest.mark.parametrize("target", TARGETS)
def test_clang_takes_a_source(target: str, source: Path, tmp_path: Path) -> None:
    options = [option for option in flags.FLAGS if option not in ("-shared", "-O3")]
    command = [ZIG, "-m", "ziglang", "c++", "-target", target, *TARGETS[target], *options, "-O0", "-w", "-c", source]
    ran = subprocess.run([*command, "-o", tmp_path / "made.o"], capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr

"""Compiles native kernels as the package is built, as an optional step; all else stands in pyproject.toml.

The environment variable GRADGRAPH_COMPILE_KERNELS decides: 1 compiles those for every level of processors, as wheels
carry them, and fails if that fails; 0 compiles none, and the wheel is pure. Without it those for this processor are
compiled where there is a compiler, and neither its lack nor its failure stops an installation.
"""

import os
import runpy
import shutil
import subprocess
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from setuptools import Distribution, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

ASKED = os.environ.get("GRADGRAPH_COMPILE_KERNELS", "")
ROOM = Path("gradgraph/backends/ort_native")
KNOWN: dict[str, Any] = runpy.run_path(str(ROOM / "flags.py"))
LIMIT = 600  # seconds


def compiler() -> str | None:
    """The C++ compiler: that of CXX, or the first one there is."""
    asked = os.environ.get("CXX")
    return next(filter(None, map(shutil.which, [asked] if asked else KNOWN["COMPILERS"])), None)


def wanted() -> list[str]:
    """The levels to compile kernels for."""
    if ASKED == "1":
        return list(KNOWN["shipped_levels"]())
    found = None if ASKED == "0" or not KNOWN["shipped_levels"]() else compiler()
    if found is None:
        return []
    try:
        macros = subprocess.run([found, *KNOWN["probe"]()], input="", capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.SubprocessError):
        return []
    level = KNOWN["level_of"](macros.stdout) if macros.returncode == 0 else None
    return [] if level is None else [level]


def compile_library(level: str, out: Path) -> None:
    """Compile the kernels for a level, each source by itself, and link them."""
    command = [compiler() or "c++", *KNOWN["FLAGS"], *KNOWN["shipped_levels"]()[level]]
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(os.cpu_count()) as pool:
        objects = {str(source): f"{folder}/{source.stem}.o" for source in KNOWN["files"]("*.cc")}
        list(pool.map(lambda names: _run([*command, "-c", names[0], "-o", names[1]]), objects.items()))
        _run([*command, *objects.values(), "-o", f"{folder}/{out.name}"])
        out.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(f"{folder}/{out.name}", out)


def _run(command: list[str]) -> None:
    ran = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=LIMIT)
    if ran.returncode:
        raise OSError(f"{' '.join(command)} fails: {ran.stderr}")


class BuildWithKernels(build_py):
    """Adds the libraries to the package; where it is installed as editable, beside the sources."""

    def run(self) -> None:
        super().run()
        folder = ROOM / "built" if self.editable_mode else Path(self.build_lib) / ROOM / "built"
        names = {level: KNOWN["shipped_name"](level) for level in LEVELS}
        if folder.is_dir():
            for old in folder.iterdir():
                if old.name not in names.values():
                    old.unlink()
        for level, name in names.items():
            try:
                if not (folder / name).exists():
                    compile_library(level, folder / name)
            except (OSError, subprocess.SubprocessError) as error:
                if ASKED == "1":
                    raise
                self.announce(f"no native kernels are compiled, which nothing needs: {error}"[:1000], 3)


class Platform(Distribution):
    """A distribution whose files are of one system and processor family, where kernels are compiled."""

    def has_ext_modules(self) -> bool:
        return bool(LEVELS)


class AnyPython(bdist_wheel):
    """A wheel for every Python 3: kernels are no extension modules."""

    def get_tag(self) -> tuple[str, str, str]:
        return "py3", "none", super().get_tag()[2]


LEVELS = wanted()
if __name__ == "__main__":
    setup(cmdclass={"build_py": BuildWithKernels, "bdist_wheel": AnyPython}, distclass=Platform)

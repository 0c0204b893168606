"""Compiles native kernels into the wheel where GRADGRAPH_COMPILE_KERNELS=1 asks for them; without it the wheel is pure.

All else about the package stands in pyproject.toml.
"""

import os
import runpy
import subprocess
from pathlib import Path

from setuptools import Distribution, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

COMPILES = os.environ.get("GRADGRAPH_COMPILE_KERNELS") == "1"
ROOM = Path("gradgraph/backends/ort_native")


class BuildWithKernels(build_py):
    """Adds a library for each level of processors to the package."""

    def run(self) -> None:
        super().run()
        if not COMPILES or self.editable_mode:
            return
        known = runpy.run_path(str(ROOM / "flags.py"))
        sources = sorted(map(str, (ROOM / "kernels").glob("*.cc")))
        folder = Path(self.build_lib) / ROOM / "built"
        folder.mkdir(parents=True, exist_ok=True)
        for level, flags in known["shipped_levels"]().items():
            library = folder / known["library_name"](level)
            command = [os.environ.get("CXX", "c++"), *known["FLAGS"], *flags, *sources, "-o", str(library)]
            subprocess.run(command, check=True)


class Platform(Distribution):
    """A distribution whose files are of one system and processor family, where kernels are compiled."""

    def has_ext_modules(self) -> bool:
        return COMPILES


class AnyPython(bdist_wheel):
    """A wheel for every Python 3: kernels are no extension modules."""

    def get_tag(self) -> tuple[str, str, str]:
        return "py3", "none", super().get_tag()[2]


setup(cmdclass={"build_py": BuildWithKernels, "bdist_wheel": AnyPython}, distclass=Platform)

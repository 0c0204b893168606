"""Decide whether native kernels are used by default: if a library exists and loads."""

from __future__ import annotations

import functools
import os
import sys
from dataclasses import dataclass
from pathlib import Path

import onnxruntime as ort

from gradgraph.backends.ort_native import library as kernels
from gradgraph.backends.ort_native.flags import COMPILERS, library_name, shipped_levels
from gradgraph.backends.ort_native.library import Library
from gradgraph.errors import RuntimeUnavailableError, shown
from gradgraph.machine import processes
from gradgraph.machine.caches import cache_folder
from gradgraph.machine.hardware import instructions, levels_in_use

VARIABLE = "GRADGRAPH_NATIVE_KERNELS"
OFF, REQUIRED = "0", "1"
UNTIMED = ("arm64",)  # levels of packaged libraries that were only tested for correctness


@dataclass(frozen=True)
class Found:
    """The library for this machine.

    Attributes:
        library: the library, whether it exists or not.
        why_not: why it does not run here, as a clause; empty if it does.
    """

    library: Library
    why_not: str = ""


def by_default() -> bool:
    """Return whether a Trainer on the CPU uses native kernels by default.

    Raises:
        RuntimeUnavailableError: if the environment variable is set to something other than 0 and 1.
    """
    asked = _asked()
    return asked == REQUIRED or (asked != OFF and not found().why_not)


def status() -> str:
    """Return a description of whether native kernels are used here by default, and which ones or why not.

    Raises:
        RuntimeUnavailableError: if an environment variable has an invalid value.
    """
    if _asked() == OFF:
        return f"not in use: the environment variable {VARIABLE} is {OFF}"
    here = found()
    if here.why_not:
        return f"not in use: {here.why_not}"
    whence = "which came with the package" if here.library.came_with_package else "built for this processor"
    return f"in use by default on the CPU: {level_of(here.library)}, {whence} ({shown(here.library.path)})"


def found() -> Found:
    """Return the library for this machine, and why it is not usable here, if so."""
    library = kernels.here()
    if not library.is_built:
        return Found(library, _why_there_is_none())
    if library.came_with_package and (level := level_of(library)) in UNTIMED:
        return Found(library, f"their speed on {level} was never measured; run `gradgraph native build` to use them")
    seen = library.path.stat()
    return Found(library, _why_it_does_not_load(library, seen.st_mtime_ns, seen.st_size))


def level_of(library: Library) -> str:
    """Return the level of processor features that a library was compiled for."""
    if library.came_with_package:
        return library.path.stem.partition("-")[0]
    return next(reversed(kernels.levels_here()), "native")


def _asked() -> str:
    asked = os.environ.get(VARIABLE, "")
    if asked not in ("", OFF, REQUIRED):
        raise RuntimeUnavailableError(
            f"the environment variable {VARIABLE} is '{shown(asked)}'; set it to {OFF} (never use native kernels) or "
            f"{REQUIRED} (require them), or unset it"
        )
    return asked


@functools.cache
def _why_it_does_not_load(library: Library, *_: int) -> str:
    """Return why the library does not load, or ""; cached by modification time and size of its file."""
    try:
        library.add_to(ort.SessionOptions())
    except RuntimeUnavailableError as error:
        return error.problem
    return ""


def _why_there_is_none() -> str:
    if sys.platform == "win32":
        return "they are for Linux and macOS"
    if "avx2" in shipped_levels() and instructions() and "avx2" not in levels_in_use():
        return "they are for processors with AVX2; without it most are slower than onnxruntime's own"
    compilers = [os.environ["CXX"]] if os.environ.get("CXX") else COMPILERS
    first = "" if any(map(processes.program, compilers)) else "install a C++ compiler (g++ or clang), then "
    return f"{_available_libraries()}; {first}run `gradgraph native build`"


def _available_libraries() -> str:
    came = sorted({path.stem.partition("-")[0] for path in kernels.BUILT.glob(library_name("*"))})
    if not set(came).isdisjoint(kernels.levels_here()):
        return "the packaged kernels were compiled from sources other than the installed ones"
    if came:
        return f"the packaged kernels are for processors with {' or '.join(map(shown, came))}"
    if _others(cache_folder()):
        return (
            "the kernels built here are for another processor, version of onnxruntime (now "
            f"{ort.__version__}) or version of gradgraph"
        )
    return "this install has none, and none were built"


def _others(folder: Path) -> bool:
    try:
        return any(folder.glob(library_name("native-*")))
    except OSError:
        return False

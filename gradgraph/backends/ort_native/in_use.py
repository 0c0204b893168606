"""Whether native kernels are used where nobody asks for them or against them: where a library is there and loads."""

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


@dataclass(frozen=True)
class Found:
    """The library for this machine, and in one sentence why it does not run here; "" where it does."""

    library: Library
    why_not: str = ""


def by_default() -> bool:
    """Whether a Trainer on the CPU uses native kernels if its options do not say.

    Raises:
        RuntimeUnavailableError: the environment variable holds anything but 0 or 1.
    """
    asked = _asked()
    return asked == REQUIRED or (asked != OFF and not found().why_not)


def told() -> str:
    """Whether they are in use here by default, which ones, or else why not, in words.

    Raises:
        RuntimeUnavailableError: an environment variable holds what it cannot.
    """
    if _asked() == OFF:
        return f"not in use: the environment variable {VARIABLE} is {OFF}"
    here = found()
    if here.why_not:
        return f"not in use: {here.why_not}"
    whence = "which came with the package" if here.library.came_with_package else "built for this processor"
    return f"in use by default on the CPU: {level_of(here.library)}, {whence} ({shown(here.library.path)})"


def found() -> Found:
    """Look for the library, and load it once."""
    library = kernels.here()
    if not library.is_built:
        return Found(library, _why_there_is_none())
    seen = library.path.stat()
    return Found(library, _why_it_does_not_load(library, seen.st_mtime_ns, seen.st_size))


def level_of(library: Library) -> str:
    """The features of processors that a library was compiled for."""
    if library.came_with_package:
        return library.path.stem.partition("-")[0]
    return next(reversed(kernels.levels_here()), "native")


def _asked() -> str:
    asked = os.environ.get(VARIABLE, "")
    if asked not in ("", OFF, REQUIRED):
        raise RuntimeUnavailableError(
            f"the environment variable {VARIABLE} is '{shown(asked)}'; let it be {OFF} (off) or {REQUIRED} (an error "
            "where there are none), or leave it out"
        )
    return asked


@functools.cache
def _why_it_does_not_load(library: Library, *_: int) -> str:
    """Say why not, "" if it does; times and sizes of the file tell one library from another at its place."""
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
    return f"{_what_lies_there()}; {first}run `gradgraph native build`"


def _what_lies_there() -> str:
    came = sorted({path.stem.partition("-")[0] for path in kernels.BUILT.glob(library_name("*"))})
    if not set(came).isdisjoint(kernels.levels_here()):
        return "what came with the package was compiled from other sources than lie there now"
    if came:
        return f"what came with the package is for processors with {' or '.join(map(shown, came))}"
    if _others(cache_folder()):
        return f"what was built is for another processor, onnxruntime (here {ort.__version__}) or version of gradgraph"
    return "none came with this install, and none was built"


def _others(folder: Path) -> bool:
    try:
        return any(folder.glob(library_name("native-*")))
    except OSError:
        return False

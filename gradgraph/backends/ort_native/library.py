"""The library of native kernels: its path, and building it.

A library is compiled for one processor and checked with one version of onnxruntime. Its name depends on both and on the
sources, so that a library that does not match is not found. Wheels may contain libraries for families of processors; a
library built for this machine takes precedence.
"""

from __future__ import annotations

import ctypes
import functools
import os
import platform
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import onnx.parser
import onnxruntime as ort

from gradgraph.backends.ort_native.flags import (
    COMPILERS,
    FLAGS,
    NO_TILES,
    WIDE,
    digest,
    files,
    library_name,
    shipped_levels,
    shipped_name,
)
from gradgraph.errors import OutputError, RuntimeUnavailableError, shown
from gradgraph.machine import processes
from gradgraph.machine.caches import FILE_MODE, FOLDER_MODE, cache_folder, check_ours, open_private
from gradgraph.machine.hardware import LEVELS, hidden_above, instructions, levels_in_use, processor

DOMAIN = "gradgraph.native"
MOST_AXES = 8  # the maximum rank of tensors in kernels (``kMaxRank``)
_BUILD = "run `gradgraph native build`, which needs a C++ compiler, or remove {}"
REMEDY, SHELL_REMEDY = _BUILD.format("native_kernels"), _BUILD.format("--native-kernels")

BUILT = Path(__file__).parent / "built"  # the libraries in a wheel
_LIMIT = 600  # timeouts in seconds, for the compiler and for the check of its output
_OLDER = {"x86-64-v2": "-march=nehalem", "avx2": "-march=haswell"}


@dataclass(frozen=True)
class Library:
    """The library for this machine, whether it has been built or not.

    Attributes:
        path: its path, whether the file exists or not.
        came_with_package: whether it was installed with the package, and is trusted like the package.
    """

    path: Path
    came_with_package: bool = False

    @property
    def is_built(self) -> bool:
        return self.path.is_file()

    def required(self) -> Path:
        """Return the path of the library.

        Raises:
            RuntimeUnavailableError: if the library is not built, or another user may have written it.
        """
        if not self.is_built:
            raise RuntimeUnavailableError(
                f"there are no native kernels for this processor, onnxruntime {ort.__version__} and this version of "
                "gradgraph",
                remedy=REMEDY,
                shell=SHELL_REMEDY,
            )
        if not self.came_with_package:
            check_ours(self.path)
        return self.path

    @property
    def has_tiles(self) -> bool:
        """Whether the library exists, and its matrix products use AMX tiles (Intel, Sapphire Rapids or newer) here.

        Raises:
            RuntimeUnavailableError: if another user may have written it.
        """
        return self.is_built and _has_tiles(self.required())

    @property
    def has_fast_vectors(self) -> bool:
        """Whether the library exists and its products are faster by vectors (AVX2, AVX512); False if it has AMX tiles.

        Raises:
            RuntimeUnavailableError: if another user may have written it.
        """
        return self.is_built and "avx2" in levels_in_use() and not self.has_tiles

    def add_to(self, options: ort.SessionOptions) -> None:
        """Register the library's kernels in ``options``.

        Raises:
            RuntimeUnavailableError: if the library is not built, does not load, or another user may have written it.
        """
        path = self.required()
        try:
            options.register_custom_ops_library(str(path))
        except Exception as error:  # any error of the system's loader
            reason = " ".join(shown(word) for word in str(error).split()[:40])
            raise RuntimeUnavailableError(
                f"the native kernels in '{shown(path)}' do not load: {reason}", remedy=REMEDY, shell=SHELL_REMEDY
            ) from None


@functools.cache
def _has_tiles(path: Path) -> bool:
    try:
        return bool(ctypes.CDLL(str(path)).gradgraph_has_tiles())
    except OSError:  # the library does not load, which sessions report
        return False


def here() -> Library:
    """Return the library for this processor and onnxruntime: the one in the user's cache, or else the packaged one."""
    own = in_folder(cache_folder())
    return own if own.is_built else shipped() or own


def shipped(folder: Path | None = None) -> Library | None:
    """Return the packaged library for the highest level of this processor; None if there is none."""
    paths = ((folder or BUILT) / shipped_name(level) for level in reversed(levels_here()))
    return next((Library(path, came_with_package=True) for path in paths if path.is_file()), None)


def levels_here() -> list[str]:
    """Return the levels of packaged libraries that run here, the highest last."""
    used = levels_in_use()
    return [level for level in shipped_levels() if level in used or level not in LEVELS]


def in_folder(folder: Path) -> Library:
    """Return the library for this processor and onnxruntime in ``folder``, whether it exists or not."""
    name = digest(processor(), instructions(), ort.__version__, *FLAGS, *_processor_options())
    return Library(folder.absolute() / library_name(f"native-{name}"))


def build(compiler: str | None = None, library: Library | None = None) -> Library:
    """Compile the library, check that onnxruntime runs it, install it, and return it.

    Args:
        compiler: name or path of a C++17 compiler with GCC's options; by default the environment variable CXX, or the
            first of c++, g++ and clang++ that is found.
        library: the library to build; by default the one for this machine.

    Raises:
        RuntimeUnavailableError: if there is no compiler, it fails, or its output does not run; or if other users may
            write to the folder.
        OutputError: if the folder cannot be written.
    """
    library = library or in_folder(cache_folder())
    command = [_compiler(compiler), *FLAGS, *_processor_options(), *map(str, files("*.cc"))]
    try:
        open_private(library.path.parent)
        with tempfile.TemporaryDirectory(dir=library.path.parent) as folder:
            Path(folder).chmod(FOLDER_MODE)  # regardless of the umask
            made = Path(folder) / library.path.name
            _compile([*command, "-o", str(made)])
            _check_that_it_runs(made)
            made.chmod(FILE_MODE)
            made.replace(library.path)
    except OSError as error:
        raise OutputError(
            f"cannot write the native kernels to '{shown(library.path.parent)}' ({error.strerror or error}); check the "
            "permissions and the free space there"
        ) from None
    return library


def _processor_options() -> list[str]:
    """Return compiler options for this processor, or for the level in GRADGRAPH_CPU."""
    level = hidden_above()
    if level in _OLDER:
        return [_OLDER[level], "-mtune=native"]
    if platform.machine() in ("arm64", "aarch64"):
        return ["-mcpu=native"]
    wide = ["-march=native", WIDE]
    return [*wide, NO_TILES] if level == "avx512" else wide


def _compiler(given: str | None) -> str:
    if sys.platform == "win32":
        raise RuntimeUnavailableError("native kernels can be built on Linux and macOS only; train without them")
    asked = given or os.environ.get("CXX")
    for name in [asked] if asked else COMPILERS:
        found = processes.program(name)
        if found:
            return found
    missing = f"no compiler '{shown(asked)}'" if asked else f"no C++ compiler ({', '.join(COMPILERS)})"
    raise RuntimeUnavailableError(
        f"there is {missing} on the PATH",
        remedy="install g++ or clang, or pass another compiler to build",
        shell="install g++ or clang, or pass another --compiler",
    )


def _compile(command: list[str]) -> None:
    try:
        ran = processes.run(command, text=True, errors="replace", timeout=_LIMIT)
    except (OSError, subprocess.SubprocessError) as error:
        raise RuntimeUnavailableError(
            f"the compiler '{shown(command[0])}' does not run: {shown(error)}",
            remedy="pass another compiler to build",
            shell="pass another --compiler",
        ) from None
    if ran.returncode:
        lines = [line.strip() for line in ran.stderr.splitlines() if line.strip()]
        first = next((line for line in lines if "error" in line), (lines or ["it prints no reason"])[0])
        raise RuntimeUnavailableError(
            f"the compiler '{shown(command[0])}' fails: {shown(first)}",
            remedy="pass another compiler to build, one that supports C++17 and GCC's options",
            shell="pass another --compiler, one that supports C++17 and GCC's options",
        )


_TRIAL = f"""<ir_version: 10, opset_import: ["" : 21, "{DOMAIN}" : 1]>
trial (float[40000] p, float[40000] g, float rate, float floor) => (float[40000] a, float[40000] b, float[40000] c) {{
    a, b, c = {DOMAIN}.AdamUpdate <takes = [0.5, 0.25]> (p, g, g, g, rate, floor)
}}"""

_RUN = """
import sys
import numpy as np
import onnxruntime as ort
options = ort.SessionOptions()
options.log_severity_level = 4
options.register_custom_ops_library(sys.argv[1])
session = ort.InferenceSession(sys.stdin.buffer.read(), options, providers=["CPUExecutionProvider"])
ones, half, zero = np.ones(40000, np.float32), np.array(0.5, np.float32), np.array(0, np.float32)
p, m, v = session.run(None, {"p": ones, "g": 4 * ones, "rate": half, "floor": zero})
# m stays 4, v becomes 4 + (16 - 4) / 4 = 7
assert np.allclose(m, 4) and np.allclose(v, 7) and np.allclose(p, 1 + 0.5 * 4 / 7**0.5), "it computes wrong numbers"
"""


def _check_that_it_runs(made: Path) -> None:
    """Run one kernel of ``made`` in a subprocess, as it may crash; raise RuntimeUnavailableError if it fails."""
    model = onnx.parser.parse_model(_TRIAL).SerializeToString()
    ran = processes.run_python(_RUN, str(made), input=model, timeout=_LIMIT)
    if ran.returncode:
        lines = ran.stderr.decode(errors="replace").strip().splitlines()
        reason = lines[-1] if lines else f"the process ended with exit code {ran.returncode}"
        raise RuntimeUnavailableError(
            f"the native kernels were compiled but do not run in onnxruntime {ort.__version__}: {shown(reason)}",
            remedy="pass another compiler to build, or train without native kernels",
            shell="pass another --compiler, or train without native kernels",
        )

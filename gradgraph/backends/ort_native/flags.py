"""The compilation of native kernels: sources, compiler options, and file names.

``setup.py`` executes this file on its own, so it imports nothing from the package.
"""

from __future__ import annotations

import functools
import hashlib
import platform
import sys
from pathlib import Path

SOURCES = Path(__file__).parent / "kernels"
COMPILERS = ("c++", "g++", "clang++")

FLAGS = ("-std=c++17", "-O3", "-fPIC", "-shared", "-fvisibility=hidden", "-fopenmp-simd", "-pthread",
         # these do not change results: sqrt does not set errno, and independent operations may be reordered
         "-fno-math-errno", "-fno-trapping-math")  # fmt: skip

# GCC uses half of AVX512's width by default; polynomials take 0.6 to 0.7 of the time in full width
WIDE = "-mprefer-vector-width=512"
NO_TILES = "-DGRADGRAPH_TILES=0"

# Kernels that a wheel contains, by the level of processors that can run them (hardware.LEVELS). x86-64-v2 has none:
# compiled for it, against an onnxruntime without AVX (Zen 4, one thread), steps of convolutional networks took 1.3 to
# 1.4 times as long as without, those of a perceptron and a GPT 0.95 to 1.0.
_X86: dict[str, tuple[str, ...]] = {
    "avx2": ("-march=haswell",),
    "avx512": ("-march=skylake-avx512", WIDE, NO_TILES),
    "amx": ("-march=sapphirerapids", WIDE),
}
# a macro that compilers define for processors of a level
MACROS = {"avx2": "__AVX2__", "avx512": "__AVX512VL__", "amx": "__AMX_BF16__", "arm64": "__aarch64__"}
_ARM: dict[str, tuple[str, ...]] = {"arm64": ("-mcpu=apple-m1" if sys.platform == "darwin" else "-march=armv8-a",)}


def shipped_levels() -> dict[str, tuple[str, ...]]:
    """Return the levels of this architecture's packaged libraries, with compiler options; none on Windows."""
    if sys.platform == "win32":
        return {}
    return _ARM if platform.machine() in ("arm64", "aarch64") else _X86


def library_name(stem: str) -> str:
    """Return the file name of a shared library on this system."""
    return f"{stem}.{'dylib' if sys.platform == 'darwin' else 'so'}"


def probe() -> list[str]:
    """Return compiler options to read C++ from stdin and print the predefined macros for this processor."""
    return [*([] if shipped_levels() is _ARM else ["-march=native"]), "-dM", "-E", "-x", "c++", "-"]


def level_of(macros: str) -> str | None:
    """Return the highest processor level whose macro is among ``macros``, a compiler's output; else None."""
    known = (level for level in reversed(shipped_levels()) if f"#define {MACROS[level]} " in macros)
    return next(known, None)


def files(*patterns: str) -> list[Path]:
    """Return the C++ files whose names match the patterns, sorted."""
    return sorted(path for pattern in patterns for path in SOURCES.glob(pattern))


@functools.cache
def sources() -> bytes:
    """Return the content of all C++ sources, cached, as forms look up the library hundreds of times per opened step."""
    return b"".join(f.name.encode() + b"\0" + f.read_bytes() + b"\0" for f in files("*.cc", "*.h"))


@functools.cache
def digest(*parts: str) -> str:
    """Return a hash, sixteen hexadecimal digits, of the sources and of ``parts``, such as the compiler options."""
    known = hashlib.sha256()
    for part in parts:
        known.update(part.encode() + b"\0")
    known.update(sources())
    return known.hexdigest()[:16]


def shipped_name(level: str) -> str:
    """Return the file name of the packaged library for a level; it changes with the sources."""
    return library_name(f"{level}-{digest(*FLAGS, *shipped_levels()[level])}")

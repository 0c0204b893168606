"""Options of the compiler for native kernels. ``setup.py`` reads this file alone, so it imports nothing of ours."""

from __future__ import annotations

import platform
import sys

FLAGS = ("-std=c++17", "-O3", "-fPIC", "-shared", "-fvisibility=hidden", "-fopenmp-simd", "-pthread",
         # neither changes a result: errno of sqrt, and which of two results was computed first
         "-fno-math-errno", "-fno-trapping-math")  # fmt: skip

# GCC prefers half of AVX512's width; polynomials take 0.6 to 0.7 of the time in all of it
WIDE = "-mprefer-vector-width=512"
NO_TILES = "-DGRADGRAPH_TILES=0"

# kernels that a wheel carries, by the level of the processors that can run them (hardware.LEVELS)
_X86: dict[str, tuple[str, ...]] = {
    "avx2": ("-march=haswell",),
    "avx512": ("-march=skylake-avx512", WIDE, NO_TILES),
    "amx": ("-march=sapphirerapids", WIDE),
}
_ARM: dict[str, tuple[str, ...]] = {"arm64": ("-mcpu=apple-m1" if sys.platform == "darwin" else "-march=armv8.2-a",)}


def shipped_levels() -> dict[str, tuple[str, ...]]:
    """Return the levels of this architecture, each with the compiler's options; none on Windows."""
    if sys.platform == "win32":
        return {}
    return _ARM if platform.machine() in ("arm64", "aarch64") else _X86


def library_name(stem: str) -> str:
    """Return the file name of a shared library on this system."""
    return f"{stem}.{'dylib' if sys.platform == 'darwin' else 'so'}"

"""Subnormal numbers as zeros while onnxruntime computes, and only then.

Processors take many times as long for an operation that reads or gives a number below 1.2e-38 (in float64, 2.2e-308).
Training meets many: exp of a masked attention score, moments of weights that get no gradient any more. onnxruntime's
setting for it reaches the threads of its pool, but of the threads that call it only the first one in a process, and
that for good. So the calling thread's floating-point environment is set here for each call, and put back after it.
"""

from __future__ import annotations

import ctypes
import functools
import platform
import sys
from collections.abc import Callable
from typing import Any

import onnxruntime as ort

SETTING = "session.set_denormal_as_zero"

_WORDS = 8  # of fenv_t, in Linux on x86-64: 28 bytes of the x87 unit, then the register that matters
_MXCSR, _FLUSH, _READ_AS_ZERO = 7, 1 << 15, 1 << 6
_Environment = ctypes.c_uint32 * _WORDS


class FlushingSession(ort.InferenceSession):  # type: ignore[misc]
    """A session that computes with subnormal numbers as zeros, if its options have ``SETTING``, too."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        with Flushed():  # which also takes back what onnxruntime sets
            super().__init__(*args, **kwargs)

    def run(self, *args: Any) -> Any:
        with Flushed():
            return super().run(*args)

    def run_with_iobinding(self, *args: Any) -> None:
        with Flushed():
            super().run_with_iobinding(*args)


class Flushed:
    """Within it, this thread reads and writes zeros for subnormal numbers, where the platform is known."""

    def __enter__(self) -> None:
        self._access = _access()
        if self._access is not None:
            read, write = self._access
            self._environment = _Environment()
            read(self._environment)
            self._before = self._environment[_MXCSR]
            self._environment[_MXCSR] = self._before | _FLUSH | _READ_AS_ZERO
            write(self._environment)

    def __exit__(self, *_: object) -> None:
        if self._access is not None:
            self._environment[_MXCSR] = self._before
            self._access[1](self._environment)


def known_here() -> bool:
    """Can the calling thread be set on this platform?"""
    return _access() is not None


@functools.cache
def _access() -> tuple[Callable[[Any], int], Callable[[Any], int]] | None:
    """C's ``fegetenv`` and ``fesetenv``, where the layout of what they copy is known."""
    if sys.platform != "linux" or platform.machine() != "x86_64" or platform.libc_ver()[0] != "glibc":
        return None
    try:
        library = ctypes.CDLL("libm.so.6")
        return library.fegetenv, library.fesetenv
    except (OSError, AttributeError):
        return None

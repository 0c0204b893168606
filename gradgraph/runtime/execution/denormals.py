"""Subnormal numbers as zeros while onnxruntime computes, and only then.

Processors take many times as long for an operation that reads or gives a number below 1.2e-38 (in float64, 2.2e-308).
Training meets many: exp of a masked attention score, moments of weights that get no gradient any more. onnxruntime's
setting for it reaches the threads of its pool, but of the threads that call it only the first one in a process, and
that for good. So the calling thread's floating-point environment is set here for each call, and put back after it; or
around many calls, by those who only move numbers in between: setting it takes longer than all else that a call needs.
"""

from __future__ import annotations

import ctypes
import functools
import platform
import sys
import threading
from typing import Any

import onnxruntime as ort

SETTING = "session.set_denormal_as_zero"

_WORDS = 8  # of fenv_t, in Linux on x86-64: 28 bytes of the x87 unit, then the register that matters
_MXCSR, _FLUSH, _READ_AS_ZERO = 7, 1 << 15, 1 << 6
_Environment = ctypes.c_uint32 * _WORDS
_DEFAULT = ctypes.c_void_p(-1)  # FE_DFL_ENV


class _Thread(threading.local):
    flushes = False  # within Flushed


_this = _Thread()


class FlushingSession(ort.InferenceSession):  # type: ignore[misc]
    """A session that computes with subnormal numbers as zeros, if its options have ``SETTING``, too."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        with Flushed():  # which also takes back what onnxruntime sets
            super().__init__(*args, **kwargs)

    def run(self, output_names: Any, input_feed: Any, run_options: Any = None) -> Any:
        with Flushed():
            return super().run(output_names, input_feed, run_options)

    def run_with_iobinding(self, iobinding: Any, run_options: Any = None) -> None:
        if _this.flushes or (control := _control()) is None:
            super().run_with_iobinding(iobinding, run_options)
            return
        before = control.flush()  # not with Flushed(), which takes twice the time
        try:
            super().run_with_iobinding(iobinding, run_options)
        finally:
            control.write(before)


class Flushed:
    """A block in which this thread reads and writes zeros for subnormal numbers, where the platform is known."""

    def __enter__(self) -> None:
        self._control = None if _this.flushes else _control()
        if self._control is not None:
            self._before = self._control.flush()
            _this.flushes = True

    def __exit__(self, *_: object) -> None:
        if self._control is not None:
            self._control.write(self._before)
            _this.flushes = False


def known_here() -> bool:
    """Can the calling thread be set on this platform?"""
    return _control() is not None


class _Control:
    """C's ``fegetenv`` and ``fesetenv``, and the environment to compute in: the default one, as the threads of a pool
    have it, with subnormal numbers as zeros.
    """

    def __init__(self) -> None:
        library = ctypes.PyDLL("libm.so.6")  # for calls so short, the interpreter's lock is not let go
        self.read, self.write = library.fegetenv, library.fesetenv
        self._flushing, before = _Environment(), _Environment()
        self.read(before)
        self.write(_DEFAULT)
        self.read(self._flushing)
        self.write(before)
        self._flushing[_MXCSR] |= _FLUSH | _READ_AS_ZERO

    def flush(self) -> Any:
        """Set this thread; returns the environment to write back."""
        before = _Environment()
        self.read(before)
        self.write(self._flushing)
        return before


@functools.cache
def _control() -> _Control | None:
    """The control of this platform; None where the layout of what C copies is not known."""
    if sys.platform != "linux" or platform.machine() != "x86_64" or platform.libc_ver()[0] != "glibc":
        return None
    try:
        return _Control()
    except (OSError, AttributeError):
        return None

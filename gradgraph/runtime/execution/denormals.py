"""Flush denormals to zero during onnxruntime calls.

Processors take many times as long for an operation that reads or returns a number below 1.2e-38 (in float64, 2.2e-308).
They are common in training: exp of a masked attention score, moments of weights that no longer get a gradient.
onnxruntime's setting affects its thread pool, but of the calling threads only the first one in a process, and
permanently. So the calling thread's floating-point environment is set for each call, and restored after it; or around
many calls by code that only moves data in between, as setting it takes longer than the rest of a call's overhead.
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
    flushes = False  # active Flushed blocks


_this = _Thread()


class FlushingSession(ort.InferenceSession):  # type: ignore[misc]
    """A session that flushes denormals, if its options have ``SETTING``, too."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        with Flushed():  # which also undoes onnxruntime's setting
            super().__init__(*args, **kwargs)

    def run(self, output_names: Any, input_feed: Any, run_options: Any = None) -> Any:
        with Flushed():
            return super().run(output_names, input_feed, run_options)

    def run_with_iobinding(self, iobinding: Any, run_options: Any = None) -> None:
        if _this.flushes or (control := _control()) is None:
            super().run_with_iobinding(iobinding, run_options)
            return
        before = control.flush()  # Flushed() would take twice the time
        try:
            super().run_with_iobinding(iobinding, run_options)
        finally:
            control.write(before)


class Flushed:
    """A block in which this thread flushes denormals to zero, on known platforms."""

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
    """Whether the calling thread can be set on this platform."""
    return _control() is not None


class _Control:
    """C's ``fegetenv`` and ``fesetenv``, and the environment to compute in: the default one of pool threads, with
    denormals flushed.
    """

    def __init__(self) -> None:
        library = ctypes.PyDLL("libm.so.6")  # for calls so short, the interpreter's lock is not released
        self.read, self.write = library.fegetenv, library.fesetenv
        self._flushing, before = _Environment(), _Environment()
        self.read(before)
        self.write(_DEFAULT)
        self.read(self._flushing)
        self.write(before)
        self._flushing[_MXCSR] |= _FLUSH | _READ_AS_ZERO

    def flush(self) -> Any:
        """Set this thread; return the environment to restore."""
        before = _Environment()
        self.read(before)
        self.write(self._flushing)
        return before


@functools.cache
def _control() -> _Control | None:
    """Return the control of this platform; None if the layout of C's struct is unknown."""
    if sys.platform != "linux" or platform.machine() != "x86_64" or platform.libc_ver()[0] != "glibc":
        return None
    try:
        return _Control()
    except (OSError, AttributeError):
        return None

"""Flushing of denormals to zero during onnxruntime calls.

Operations on denormals (numbers below 1.2e-38, in float64 below 2.2e-308) take many times as long on CPUs. They are
common in training: exp of a masked attention score, moments of weights that no longer get a gradient.

onnxruntime's own setting applies to the threads of its pool. Of the calling threads, it affects only the first one in a
process, and permanently. We therefore set the calling thread's floating-point environment before each call and restore
it afterwards. Setting it takes longer than all other overhead of a call, so that code that makes many calls, and only
copies data in between, sets it once for all of them.
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

_WORDS = 8  # size of fenv_t on Linux x86-64: seven words for the x87 unit, then the MXCSR register
_MXCSR, _FLUSH, _READ_AS_ZERO = 7, 1 << 15, 1 << 6
_Environment = ctypes.c_uint32 * _WORDS
_DEFAULT = ctypes.c_void_p(-1)  # FE_DFL_ENV


class _Thread(threading.local):
    flushes = False  # whether a Flushed block is active in this thread


_this = _Thread()


class FlushingSession(ort.InferenceSession):  # type: ignore[misc]
    """A session that flushes denormals in the calling thread during its runs.

    Its session options should also contain ``SETTING``, for the threads of onnxruntime's pool.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        with Flushed():  # restores this thread's environment, which onnxruntime may change
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
    """A context manager in which this thread flushes denormals to zero, on supported platforms."""

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
    """Return whether denormals can be flushed on this platform."""
    return _control() is not None


class _Control:
    """A wrapper of C's ``fegetenv`` and ``fesetenv`` that sets the default floating-point environment plus flushing."""

    def __init__(self) -> None:
        library = ctypes.PyDLL("libm.so.6")  # PyDLL does not release the GIL, which would take longer than the calls
        self.read, self.write = library.fegetenv, library.fesetenv
        self._flushing, before = _Environment(), _Environment()
        self.read(before)
        self.write(_DEFAULT)
        self.read(self._flushing)
        self.write(before)
        self._flushing[_MXCSR] |= _FLUSH | _READ_AS_ZERO

    def flush(self) -> Any:
        """Make this thread flush denormals; return the environment to restore."""
        before = _Environment()
        self.read(before)
        self.write(self._flushing)
        return before


@functools.cache
def _control() -> _Control | None:
    """Return a :class:`_Control` for this platform; None if denormals cannot be flushed here."""
    if sys.platform != "linux" or platform.machine() != "x86_64" or platform.libc_ver()[0] != "glibc":
        return None
    try:
        return _Control()
    except (OSError, AttributeError):
        return None

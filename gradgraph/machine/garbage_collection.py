"""Garbage collection, paused while graphs are written.

A graph is tens of thousands of objects that refer to one another and stay. The collector runs after every few hundred
new objects and would traverse all of them again: a third of the time of a build.
"""

from __future__ import annotations

import contextlib
import gc
import threading
from collections.abc import Iterator

_lock = threading.Lock()
_pauses = 0  # active calls, in all threads
_was_enabled = True


@contextlib.contextmanager
def paused_collection() -> Iterator[None]:
    """Pause garbage collection until the outermost use ends, across threads; also a decorator."""
    global _pauses, _was_enabled
    with _lock:
        if not _pauses:
            _was_enabled = gc.isenabled()
            gc.disable()
        _pauses += 1
    try:
        yield
    finally:
        with _lock:
            _pauses -= 1
            if not _pauses and _was_enabled:
                gc.enable()

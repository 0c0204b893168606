"""Pause garbage collection while graphs are written.

A graph is tens of thousands of objects that refer to each other and stay alive. The collector runs after every few
hundred new objects and would traverse all of them again, which takes a third of the time of a build.
"""

from __future__ import annotations

import contextlib
import gc
import threading
from collections.abc import Iterator

_lock = threading.Lock()
_pauses = 0  # the number of active calls of paused_collection, in all threads
_was_enabled = True


@contextlib.contextmanager
def paused_collection() -> Iterator[None]:
    """Pause garbage collection in a block or decorated function; it resumes when no thread is in such a block."""
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

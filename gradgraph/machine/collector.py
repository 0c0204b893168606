"""Python's garbage collector, paused while graphs are written.

A graph is tens of thousands of objects that refer to one another and stay. The collector, which starts anew after every
few hundred of them, would look through all of them again and again: a third of the time that a build takes.
"""

from __future__ import annotations

import contextlib
import gc
import threading
from collections.abc import Iterator

_lock = threading.Lock()
_pauses = 0  # calls under way, in all threads
_was_enabled = True


@contextlib.contextmanager
def paused_collection() -> Iterator[None]:
    """Pause collection until the last of those who asked for this is done; also a decorator."""
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

"""A limit on memory for calls into libraries that would allocate whatever a file asks for.

ONNX's inference writes a vector out, element by element, whatever its length; and a vector of 2**40 elements takes one
line in a file. A limit on memory also limits the time.
"""

from __future__ import annotations

import contextlib
import mmap
import threading
from collections.abc import Iterator
from pathlib import Path

try:
    import resource
except ImportError:  # Windows has no such limits
    resource = None  # type: ignore[assignment]

FOR_OTHERS = 2_000_000_000  # bytes
_STATUS = Path("/proc/self/statm")
_SIZE, _DATA = 0, 5  # their places there, in pages
_STACK = 32_000_000  # bytes by which the stack may grow; an arena of the C library, which takes 64 MiB, may not begin
_lock = threading.RLock()  # the limit is the process's, and a call within a limit may set a tighter one


@contextlib.contextmanager
def limited_memory(extra: int) -> Iterator[None]:
    """Let the process have ``extra`` bytes of data more than it has; what wants more ends in MemoryError.

    Linux alone keeps such a limit; elsewhere there is none. It is the whole process's, so where there are other threads
    it leaves room for what they may allocate in the meantime. The stack does not count: where it cannot grow, the
    process ends. So data are limited, and the address space to a little more: beyond, the C library would begin arena
    after arena, for as long as it takes.
    """
    if resource is None or not _STATUS.exists():
        yield
        return
    if threading.active_count() > 1:
        extra += FOR_OTHERS
    with _lock, contextlib.ExitStack() as limits:
        used = [int(pages) * mmap.PAGESIZE for pages in _STATUS.read_text().split()]
        limits.enter_context(_limited(resource.RLIMIT_DATA, used[_DATA] + extra))
        limits.enter_context(_limited(resource.RLIMIT_AS, used[_SIZE] + extra + _STACK))
        yield


@contextlib.contextmanager
def _limited(kind: int, limit: int) -> Iterator[None]:
    assert resource is not None
    soft, hard = resource.getrlimit(kind)
    if resource.RLIM_INFINITY not in (soft, limit) and soft < limit:
        limit = soft
    resource.setrlimit(kind, (limit, hard))
    try:
        yield
    finally:
        resource.setrlimit(kind, (soft, hard))

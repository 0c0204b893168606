"""A memory limit for calls of libraries that would allocate as much as a file asks for.

ONNX's shape inference creates vectors element by element, regardless of their length, and a vector of 2**40 elements
takes one line in a file. A limit on memory also limits the time.
"""

from __future__ import annotations

import contextlib
import mmap
import threading
from collections.abc import Iterator
from pathlib import Path

try:
    import resource
except ImportError:  # not available on Windows
    resource = None  # type: ignore[assignment]

FOR_OTHERS = 2_000_000_000  # additional bytes if other threads run
_STATUS = Path("/proc/self/statm")
_SIZE, _DATA = 0, 5  # indices of address space and data in this file, in pages
_STACK = 32_000_000  # bytes for growth of the stack, less than the 64 MiB of a new arena of the C library
_lock = threading.RLock()  # the limit applies to the process; calls within a limit may set a tighter one


@contextlib.contextmanager
def limited_memory(extra: int) -> Iterator[None]:
    """Limit the data of this process to ``extra`` bytes more than now; larger allocations raise MemoryError.

    On Linux only; elsewhere there is no limit. It applies to the whole process, so with other threads it leaves room
    for their allocations. Two limits are set. The first limits data but not the stack, because a process whose stack
    cannot grow dies. The second limits the address space to slightly more, as otherwise the C library would create one
    arena after another, which takes very long.
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

"""A limit on memory for calls into libraries that would allocate whatever a file asks for.

ONNX's inference writes a vector out, element by element, whatever its length: one of 2**40 elements takes a line in a
file. What it allocates bounds the time that it takes, too.
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
_DATA = 5  # its place there
_lock = threading.Lock()  # the limit is the process's


@contextlib.contextmanager
def limited_memory(extra: int) -> Iterator[None]:
    """Let the process have ``extra`` bytes of data more than it has; what wants more ends in MemoryError.

    Linux alone keeps such a limit; elsewhere there is none. It is the whole process's, so where there are other threads
    it leaves room for what they may allocate in the meantime. The stack does not count, as it would in a limit on
    address space: where it cannot grow, the process ends.
    """
    if resource is None or not _STATUS.exists():
        yield
        return
    if threading.active_count() > 1:
        extra += FOR_OTHERS
    with _lock:
        soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
        limit = int(_STATUS.read_text().split()[_DATA]) * mmap.PAGESIZE + extra
        if resource.RLIM_INFINITY not in (soft, limit) and soft < limit:
            limit = soft
        resource.setrlimit(resource.RLIMIT_DATA, (limit, hard))
        try:
            yield
        finally:
            resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))

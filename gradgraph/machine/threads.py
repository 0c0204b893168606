"""Threads for work that NumPy, zlib and reading do without holding Python's lock."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor

_MOST = 4  # such work waits for memory, and each thread holds a part of the data


def workers() -> ThreadPoolExecutor:
    """Return a pool of a thread per core, at most 4."""
    return ThreadPoolExecutor(min(os.cpu_count() or 1, _MOST))

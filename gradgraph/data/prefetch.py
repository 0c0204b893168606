"""Prefetching: threads prepare batches while the caller uses earlier ones."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

Item = TypeVar("Item")
Made = TypeVar("Made")

PREFETCHED = 2  # number of batches loaded in advance


def prefetched(batches: Iterator[Item]) -> Iterator[Item]:
    """Yield the items of ``batches``; a thread computes each item while the caller uses the previous one."""
    with ThreadPoolExecutor(1, "gradgraph-data") as worker:
        following = worker.submit(next, batches, None)
        while (batch := following.result()) is not None:
            following = worker.submit(next, batches, None)
            yield batch


def prefetched_samples(
    batches: Iterator[Sequence[Item]], load: Callable[[Item], Made], threads: int | None, most: int = PREFETCHED
) -> Iterator[list[Made]]:
    """Yield the samples of each batch of sample indices or paths, loaded by ``load`` in ``threads`` threads.

    By default there is one thread per core, at most 8. At most ``most`` batches are loaded in advance.
    """
    waiting: deque[list[Future[Made]]] = deque()
    with ThreadPoolExecutor(threads or min(8, os.cpu_count() or 1), "gradgraph-data") as workers:
        try:
            for batch in batches:
                waiting.append([workers.submit(load, item) for item in batch])
                if len(waiting) > most:
                    yield _first_done(waiting)
            while waiting:
                yield _first_done(waiting)
        finally:
            for futures in waiting:
                for future in futures:
                    future.cancel()


def _first_done(waiting: deque[list[Future[Made]]]) -> list[Made]:
    results = [future.result() for future in waiting[0]]
    waiting.popleft()
    return results

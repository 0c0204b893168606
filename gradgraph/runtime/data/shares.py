"""Partition of batches among processes: every N-th sample, so that together they use the batches of one process."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from gradgraph.runtime.data.batch import Batch, BatchChecker, to_array
from gradgraph.runtime.data.sources import Columns, Samples, Source


class Spare(dict[str, Any]):
    """A batch of a process without a sample of its own: it contains another's, with weight zero."""


def shares(
    source: Source, checker: BatchChecker, epoch: int, start: int = 0, rank: int = 0, ranks: int = 1
) -> Iterator[Batch]:
    """Yield this process's share of the batches of an epoch, from one of them on: by the source's order, or some rows
    of ready batches.
    """
    batches = source.batches(epoch, start)
    if ranks == 1:
        yield from batches
        return
    for i, batch in enumerate(batches, start):
        if isinstance(source, Columns | Samples):
            assert source.rows is not None
            yield Spare(batch) if source.order.lacks(i, source.rows) else batch
            continue
        named = {
            n: to_array(n, value)
            for n, value in checker.arrays_by_name(batch, checker.known(), raw=False, whole=False)[0].items()
        }
        rows = min((len(array) for array in named.values() if array.ndim), default=0)
        is_spare = rows <= rank
        own = {n: array[:1] if is_spare else array[rank::ranks] for n, array in named.items()}
        yield Spare(own) if is_spare else own

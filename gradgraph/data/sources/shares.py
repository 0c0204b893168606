"""Partition of batches among processes, each of which gets every N-th sample of a single process's batches."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from gradgraph.data.arrays.batch import Batch, BatchChecker, to_array
from gradgraph.data.sources.sources import Indexed, Source


class Spare(dict[str, Any]):
    """A placeholder batch for a process without a sample of its own: another process's sample, with weight zero."""


def shares(
    source: Source, checker: BatchChecker, epoch: int, start: int = 0, rank: int = 0, ranks: int = 1
) -> Iterator[Batch]:
    """Yield this process's share of each batch of an epoch (counted from 0), from batch ``start`` on.

    Arrays and datasets load only the samples of this process. From whole batches, every N-th row is selected.
    """
    batches = source.batches(epoch, start)
    if ranks == 1:
        yield from batches
        return
    for i, batch in enumerate(batches, start):
        if isinstance(source, Indexed) and source.rows is not None:
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

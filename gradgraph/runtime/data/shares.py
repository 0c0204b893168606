"""The share of one of several processes in each batch: every N-th sample, so that all take those of one process."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from gradgraph.runtime.data.batch import Batch, BatchChecker, to_array
from gradgraph.runtime.data.sources import Columns, Samples, Source


class Spare(dict[str, Any]):
    """A batch of which a process has no sample: it holds another's, which does not count."""


def shares(
    source: Source, checker: BatchChecker, epoch: int, start: int = 0, rank: int = 0, ranks: int = 1
) -> Iterator[Batch]:
    """The shares of this process in the batches of an epoch from one of them on: those that the source's order says,
    and of ready batches some of their rows.
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

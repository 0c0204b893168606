"""Sources of kept values, in the order of the data that they are computed from."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from gradgraph.data.arrays.batch import Array, Batch, BatchChecker, on_host
from gradgraph.data.dataset import Loadable
from gradgraph.data.record.data_names import DataNames
from gradgraph.data.sources.sources import Columns, Order, Samples
from gradgraph.errors import DataError
from gradgraph.runtime.execution.joining import filled
from gradgraph.runtime.execution.step_session import StepSession
from gradgraph.runtime.features.head import HeadSession


def checked_batches(
    session: StepSession, source: Columns | Samples, fills: bool
) -> Iterator[tuple[Mapping[str, Array], int]]:
    """Yield all samples in order, in checked batches, with their number of samples.

    With ``fills``, the last batch is padded with copies of its last sample.
    """
    whole = replace(source.order, batch_size=source.order.size, rank=0, ranks=1)  # of this process
    order = replace(whole, shuffle=False, drop_last=False, fills=True, augments=False)
    rows = source.rows or 0
    size = min(order.batch_size, rows)
    with session.data.checker.any_may_be_ignored():
        for i, batch in enumerate(session.data.source(source, order).batches(0)):
            assert isinstance(batch, Mapping)
            try:
                checked = {n: on_host(feed) for n, feed in session.data.checker(batch).items()}
            except DataError as error:
                raise error.at(f"batch {i}") from None
            yield filled(checked, size) if fills else (checked, len(next(iter(checked.values()))))


@dataclass(frozen=True)
class OrderOf(Order):
    """An order for kept values that follows the dataset's own sample order, for example by length."""

    dataset: Loadable | None = None

    @classmethod
    def samples(cls, source: Columns | Samples) -> Order:
        """Return the order of ``source`` for arrays with one row per sample."""
        order = source.order
        if isinstance(source, Samples) and isinstance(source.dataset, Loadable) and order.shuffle:
            return cls(**vars(order), dataset=source.dataset)
        return order

    def indices(self, epoch: int, rows: int) -> Array | None:
        """Return the indices of this process's samples in the order of an epoch."""
        assert self.dataset is not None
        return self.share(self.dataset.order(self.seed, epoch, self.batch_size))


class LastBatch:
    """Kept values of incomplete batches, computed by the session for any batch size, which may round differently.

    Args:
        source: the samples.
        keeps: whether to keep the values of each sample in memory.
    """

    def __init__(self, head: HeadSession, source: Columns | Samples, keeps: bool) -> None:
        self._whole, self._source, self._keeps = head.whole, source, keeps
        self._layers, self._names = head.frozen_layers({}), list(head.split.kept)
        self._known: dict[int, dict[str, Array]] = {}

    def __call__(self, numbers: Array) -> dict[str, Array]:
        """Return the kept values of the samples of these numbers by name."""
        wanted = numbers.tolist()
        if not self._known.keys() >= {*wanted}:
            batch = batch_of(self._whole, self._source, numbers)
            found = self._layers.compute({n: feed for n, feed in batch.items() if n in self._layers.inputs})
            if not self._keeps:
                return found
            self._known |= {n: {name: found[name][i] for name in self._names} for i, n in enumerate(wanted)}
        return {name: np.stack([self._known[n][name] for n in wanted]) for name in self._names}


def batch_of(session: StepSession, source: Columns | Samples, numbers: Array) -> dict[str, Array]:
    """Return a checked batch of the samples of these numbers."""
    batch = next(source.at([numbers.tolist()]))
    with session.data.checker.any_may_be_ignored():
        return {name: on_host(feed) for name, feed in session.data.checker(batch).items()}


class KeptColumns(Columns):
    """Kept values as a source of batches.

    Args:
        arrays, checker, order, names: as for ``Columns``.
        exact: a function that computes the values of incomplete batches; None to use the kept values.
    """

    def __init__(
        self, arrays: Mapping[str, Any], checker: BatchChecker, order: Order, names: DataNames, exact: LastBatch | None
    ) -> None:
        super().__init__(arrays, checker, order, names)
        self.exact = exact

    def batches(self, epoch: int, start: int = 0) -> Iterator[Batch]:
        if self.exact is None:
            return super().batches(epoch, start)
        return self._with_exact(epoch, start)

    def _with_exact(self, epoch: int, start: int) -> Iterator[Batch]:
        assert self.rows is not None and self.exact is not None
        full = self.rows // self.order.batch_size
        for i, batch in enumerate(super().batches(epoch, start), start):
            if i < full:
                yield batch
                continue
            order = self.order.indices(epoch, self.rows)
            numbers = np.arange(self.rows) if order is None else order
            assert isinstance(batch, Mapping)
            yield {**batch, **self.exact(numbers[full * self.order.size :])}

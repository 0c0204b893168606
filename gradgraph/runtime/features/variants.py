"""Augmented variants of each sample: kept values of several draws, one of which each epoch trains on."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from gradgraph.data.arrays.batch import Array, Batch, BatchChecker, on_host
from gradgraph.data.record.data_names import DataNames
from gradgraph.data.sources.sources import Columns, Order, Samples
from gradgraph.runtime.execution.joining import filled
from gradgraph.runtime.execution.step_session import StepSession


@dataclass(frozen=True)
class Variants:
    """The augmented variants of each sample that a fit trains on.

    Variant ``v`` of a sample has the random numbers of epoch ``v``.

    Attributes:
        count: the number of variants; epoch ``e`` trains on variant ``e % count``.
        epochs: the remaining epochs of the fit.
    """

    count: int
    epochs: range

    @property
    def used(self) -> list[int]:
        """The variants that the remaining epochs train on."""
        return sorted({epoch % self.count for epoch in self.epochs or [self.epochs.start]})


def batches_of_variant(
    session: StepSession, source: Samples, variant: int
) -> Iterator[tuple[Mapping[str, Array], list[int]]]:
    """Yield all samples, augmented as in epoch ``variant``, in checked batches, with the indices of the samples.

    The batches are those of this epoch, on each rank in turn, so that augmentations that mix the samples of a batch mix
    the same ones. Samples that ``drop_last`` drops follow in a batch that is padded with copies of its last sample.
    """
    whole = source.order
    for rank in range(whole.ranks):
        order = replace(whole, drop_last=False, fills=whole.drop_last, rank=rank)
        share = session.data.source(source, order)
        assert isinstance(share, Samples) and share.rows is not None
        indices, size = share.indices(variant).tolist(), order.size
        for i, batch in enumerate(share.batches(variant)):
            if order.lacks(i, share.rows):
                continue
            with session.data.checker.any_may_be_ignored():
                found: Mapping[str, Array] = {n: on_host(feed) for n, feed in session.data.checker(batch).items()}
            yield filled(found, size)[0] if whole.drop_last else found, indices[i * size : (i + 1) * size]


@dataclass(frozen=True)
class OrderOfVariant(Order):
    """An order of rows that are stored in the order of another epoch.

    Attributes:
        source: the samples.
        places: the row of each sample.
    """

    source: Samples | None = field(default=None, compare=False)
    places: Array | None = field(default=None, compare=False)

    @classmethod
    def of(cls, source: Samples, numbers: list[int]) -> OrderOfVariant:
        """Return the order of ``source`` for rows of the samples ``numbers``."""
        places = np.empty(len(numbers), np.int64)
        places[numbers] = np.arange(len(numbers))
        return cls(**vars(source.order), source=source, places=places)

    def indices(self, epoch: int, rows: int) -> Array:
        """Return the rows of this process's samples in the order of an epoch."""
        assert self.source is not None and self.places is not None
        found: Array = self.places[self.source.indices(epoch)]
        return found


class VariantColumns(Columns):
    """Kept values of several variants of each sample as a source of batches.

    Args:
        arrays: the kept values of each variant, by its number.
        orders: the order of their rows.
        checker, names: as for ``Columns``.
        count: the number of variants; epoch ``e`` reads variant ``e % count``.
    """

    def __init__(
        self,
        arrays: Mapping[int, Mapping[str, Any]],
        orders: Mapping[int, OrderOfVariant],
        checker: BatchChecker,
        names: DataNames,
        count: int,
    ) -> None:
        self._first, *others = arrays
        super().__init__(arrays[self._first], checker, orders[self._first], names)
        self._others = {v: Columns(arrays[v], checker, orders[v], names) for v in others}
        self._count = count

    def batches(self, epoch: int, start: int = 0) -> Iterator[Batch]:
        variant = epoch % self._count
        if variant == self._first:
            return super().batches(epoch, start)
        return self._others[variant].batches(epoch, start)

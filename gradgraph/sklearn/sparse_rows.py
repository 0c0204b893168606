"""A dataset of SciPy's sparse matrices, whose rows are converted to dense batches."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from scipy.sparse import issparse

from gradgraph.data.arrays.batch import Array
from gradgraph.data.dataset import Loadable
from gradgraph.data.record.data_names import NO_NAMES, DataNames
from gradgraph.data.record.specs import Specs


class SparseRows(Loadable):
    """A dataset of named arrays and sparse matrices (CSR) with one row per sample."""

    def __init__(self, arrays: Mapping[str, Any]) -> None:
        self._arrays = arrays

    def __len__(self) -> int:
        return int(next(iter(self._arrays.values())).shape[0])

    def names_for(self, specs: Specs, known: DataNames) -> DataNames:
        """Return empty names, since the estimator itself stores the names of columns and classes."""
        return NO_NAMES

    def load(
        self, batches: Iterator[Sequence[int]], specs: Specs, seed: Sequence[int], known: DataNames = NO_NAMES
    ) -> Iterator[dict[str, Array]]:
        """Yield a dict of dense arrays for each batch of row indices."""
        for rows in batches:
            yield self._at(list(rows), specs)

    def __getitem__(self, i: int) -> dict[str, Array]:
        """Return the sample at index ``i`` as dense arrays by name."""
        return {name: array[0] for name, array in self._at([i], self._arrays).items()}

    def _at(self, rows: list[int], names: Iterable[str]) -> dict[str, Array]:
        found = {name: self._arrays[name][rows] for name in names}
        return {name: part.toarray() if issparse(part) else part for name, part in found.items()}

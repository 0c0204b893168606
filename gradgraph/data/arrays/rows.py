"""Batches defined by row indices, whose arrays are gathered only on request."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from gradgraph.data.arrays.batch import Array
from gradgraph.data.arrays.stored import StoredArray


class Table:
    """Columns with one row per sample, and a buffer for one batch.

    Attributes:
        shapes: shapes of a full batch, by name.
        counts: samples and loss terms in every full batch; None if batches must be checked one by one.
    """

    def __init__(
        self, arrays: Mapping[str, Array | StoredArray], rows: int, counts: tuple[int, int] | None = None
    ) -> None:
        self.arrays, self.counts = dict(arrays), counts
        self.shapes = {name: (rows, *array.shape[1:]) for name, array in arrays.items()}
        self._buffers: dict[str, Array] = {}

    def gather(self, name: str, indices: memoryview) -> Array:
        """Return the rows of a column at ``indices``, in a buffer that the next call overwrites."""
        array = self.arrays[name]
        if name not in self._buffers:
            self._buffers[name] = np.empty(self.shapes[name], array.dtype)
        buffer = self._buffers[name]
        out = buffer if len(indices) == len(buffer) else buffer[: len(indices)]  # the same object stays bound
        # with mode="clip" take writes straight into the buffer; the indices are in range by construction
        array.take(np.asarray(indices), 0, out, "clip")
        return out


class Rows(Mapping[str, Array]):
    """A batch of rows of a table, gathered only when an array is requested.

    Attributes:
        session: the training session that gathers the rows itself, if any.
    """

    __slots__ = ("indices", "session", "table")

    def __init__(self, table: Table, indices: memoryview) -> None:
        self.table, self.indices = table, indices
        self.session: Any = None

    def __getitem__(self, name: str) -> Array:
        return self.table.gather(name, self.indices)

    def __iter__(self) -> Iterator[str]:
        return iter(self.table.arrays)

    def __len__(self) -> int:
        return len(self.table.arrays)

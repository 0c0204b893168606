"""A table's columns made the arrays of a model: in training, by the nodes that an exported model has."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from gradgraph.files.untrusted.documents import json_of
from gradgraph.preprocess.column_nodes import alone
from gradgraph.preprocess.frames import Array
from gradgraph.preprocess.plan import Plan

if TYPE_CHECKING:
    import onnxruntime as ort

ROWS_AT_ONCE = 4096  # so that words of texts, [rows, words], take a few megabytes


@dataclass(frozen=True)
class Preprocessing(Plan):
    """Says what becomes of each column of a table before a model reads it; :func:`gradgraph.preprocess.fit` learns it.

    Attributes:
        columns: of each column that was there, its kind with what was learnt, in the order of the table.
        targets: of each column that is to be predicted, what was learnt.
        rows: how many the training data have.
        numbers, indices: the inputs of the model that are made: float32 and int64, [rows, columns].

    Raises:
        ArgumentError: no table can have given that.
    """

    def arrays(self, table: Any) -> dict[str, Array]:
        """The arrays that a model takes, of a table: computed by the nodes that an exported model has, too.

        Raises:
            UnmatchedError, DataError: as for :meth:`feeds`.
        """
        return self.computed(self.feeds(table))

    def computed(self, feeds: Mapping[str, Array]) -> dict[str, Array]:
        """The arrays that a model takes, of columns as :meth:`feeds` returns them."""
        rows = len(next(iter(feeds.values())))
        session = _session(json.dumps(self.as_data()))
        parts: dict[str, list[Array]] = {name: [] for name in self.features}
        for first in range(0, max(rows, 1), ROWS_AT_ONCE):
            batch = {name: values[first : first + ROWS_AT_ONCE] for name, values in feeds.items()}
            for name, array in zip(parts, session.run(None, batch), strict=True):
                parts[name].append(np.asarray(array))
        return {name: np.concatenate(arrays) for name, arrays in parts.items()}


@functools.lru_cache(maxsize=8)
def _session(data: str) -> ort.InferenceSession:
    """A session for the nodes alone."""
    import onnxruntime as ort

    options = ort.SessionOptions()
    options.log_severity_level = 3
    options.intra_op_num_threads = 1
    model = alone(Preprocessing.from_data(json_of(data)))
    return ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])

"""Application of a preprocessing to a table, by the nodes that an exported model contains, too."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from gradgraph.data.preprocess.column_nodes import alone
from gradgraph.data.preprocess.frames import Array
from gradgraph.data.preprocess.plan import Plan
from gradgraph.files.untrusted.documents import json_of

if TYPE_CHECKING:
    import onnxruntime as ort

ROWS_AT_ONCE = 4096  # keeps the words of texts, [rows, words], at a few megabytes


@dataclass(frozen=True)
class Preprocessing(Plan):
    """The preprocessing of each column of a table, learnt by :func:`gradgraph.preprocess.fit`.

    Attributes:
        columns: the kind of each column with its learnt parameters, in the order of the table.
        targets: the learnt parameters of each target column.
        rows: number of training rows.
        numbers, indices: the names of the model inputs produced: float32 and int64, [rows, columns].

    Raises:
        ArgumentError: the values are inconsistent.
    """

    def arrays(self, table: Any) -> dict[str, Array]:
        """Compute a model's input arrays for a table, by the same nodes as in an exported model.

        Raises:
            UnmatchedError, DataError: as for :meth:`feeds`.
        """
        return self.computed(self.feeds(table))

    def computed(self, feeds: Mapping[str, Array]) -> dict[str, Array]:
        """Compute a model's input arrays from columns as returned by :meth:`feeds`."""
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
    """Return an onnxruntime session of the preprocessing nodes only, from a preprocessing as JSON."""
    import onnxruntime as ort

    options = ort.SessionOptions()
    options.log_severity_level = 3
    options.intra_op_num_threads = 1
    model = alone(Preprocessing.from_data(json_of(data)))
    return ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])

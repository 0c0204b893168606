"""Samples of any kind of data, evenly spaced, with what people know about them: file, text, values of columns."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from gradgraph.data.arrays.batch import Array
from gradgraph.data.dataset import Loadable
from gradgraph.data.preprocess.frames import Frame
from gradgraph.data.record.data_names import DataNames
from gradgraph.data.record.specs import TensorSpec
from gradgraph.data.sources.in_order import in_order
from gradgraph.data.tables import is_table_file, read_table

AT_ONCE = 256  # samples of a file that are read at a time


def read_samples(
    data: Any, specs: Mapping[str, TensorSpec], unread: Collection[str], names: DataNames, most: int
) -> tuple[dict[str, Array], list[dict[str, Any]]]:
    """Read samples that are evenly spaced over the data.

    Args:
        data: a dataset, or the path of arrays or of a table.
        specs: the inputs of the model, by name.
        unread: names of columns to ignore, such as targets.
        names: the record of the model's data.
        most: the number of samples to read; all if there are fewer.

    Returns:
        The inputs, [samples, …] each; and for each sample its ``index``, ``file``, ``text``, and the ``values`` of
        table columns as text.

    Raises:
        DataError: if the data contain no samples, or do not match the model.
    """
    with in_order(data, specs, unread, names) as source:
        rows = np.unique(np.linspace(0, source.rows - 1, min(most, source.rows)).round().astype(np.int64))
        files = source.files
        if isinstance(data, Loadable):
            own = data.names_for(specs, names)
            inputs = dict(next(data.load(iter([rows.tolist()]), specs, (), names.updated(own))))
        else:
            parts, first = [], 0
            for batch in source.batches(AT_ONCE):
                count = len(next(iter(batch.values())))
                here = rows[(rows >= first) & (rows < first + count)] - first
                parts.append({name: np.array(array[here]) for name, array in batch.items()})
                first += count
            inputs = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
    values = _values(data, names, rows)
    return inputs, [
        {"index": i, "file": str(files[i]) if files else "",
         "text": data.text_of(i, names) if isinstance(data, Loadable) else "",
         "values": {name: column[row] for name, column in values.items()}} for row, i in enumerate(rows.tolist())
    ]  # fmt: skip


def _values(data: Any, names: DataNames, rows: Array) -> dict[str, list[str]]:
    """Return the values of all columns of a table in these rows as text, in the units of the data."""
    if isinstance(data, Loadable) or not is_table_file(Path(data)):
        return {}
    table = Frame(read_table(Path(data), known=names))
    return {name: [_said(value) for value in table[name][rows].tolist()] for name in table}


def _said(value: Any) -> str:
    if value is None or (isinstance(value, float) and np.isnan(value)):
        return "(missing)"
    return f"{value:.10g}" if isinstance(value, float) else str(value)

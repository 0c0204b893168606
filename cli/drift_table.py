"""``--drift`` of ``evaluate`` and ``predict``: a comparison of a table with the training data."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from gradgraph.errors import DataError

if TYPE_CHECKING:
    from gradgraph.data.preprocess.drift import Drift
    from gradgraph.data.record.data_names import DataNames


DRIFT = click.option(
    "--drift",
    is_flag=True,
    help="For each column of a table, print the share of missing values and of values outside the training data.",
)


@dataclass(frozen=True)
class DriftTable:
    """A printable comparison of the columns of a table with the columns of the training data."""

    found: Drift

    def __str__(self) -> str:
        from gradgraph.runtime.saved.printed import text_table

        return "\n".join(text_table(self.found.as_rows(), (0, 1, 6)))

    def as_data(self) -> list[dict[str, Any]]:
        """Return the comparison as plain data for JSON."""
        return self.found.as_data()


def drift_of(names: DataNames, data: Path, asked: bool, as_json: bool) -> dict[str, DriftTable]:
    """Return the table of ``--drift`` as ``{"drift": table}``; empty if it is not requested.

    Args:
        names: the ``DataNames`` of the model, which contain the preprocessing.
        data: the path of the data.
        asked: whether ``--drift`` was given.
        as_json: whether ``--json`` was given; then the table is returned whenever it can be computed.

    Raises:
        DataError: if ``--drift`` was given, but the model has no preprocessing of columns, or the data are not a table.
    """
    from gradgraph.data.tables import is_table_file, read_table

    if names.preprocess is not None and is_table_file(data):
        is_wanted = asked or as_json
        return {"drift": DriftTable(names.preprocess.drift(read_table(data, known=names)))} if is_wanted else {}
    if asked:
        raise DataError("--drift requires a table, and a model trained with --model or --preprocess auto, which has "
                        "statistics of its training columns; omit --drift")  # fmt: skip
    return {}

"""The history of a training run: one row per epoch or evaluation, as a dict of columns."""

from __future__ import annotations

import csv
import io
import math
import os
from collections.abc import Mapping
from typing import Any

from gradgraph.errors import DataError
from gradgraph.files.atomic import write_atomically
from gradgraph.files.suffixes import check_suffix
from gradgraph.runtime.saved.curves import Panel, panels_of, svg
from gradgraph.runtime.saved.plots import drawn_panels
from gradgraph.runtime.saved.printed import html_table


class History(dict[str, list[float]]):
    """A dict of columns of equal length: ``epoch``, ``step``, ``loss``, the metrics, ``val_loss`` and so on.

    Missing values are NaN.

    Attributes:
        restored: index of the row whose state was restored (``fit(patience=...)``); None if it is the last.
    """

    restored: int | None = None

    def append(self, row: Mapping[str, float]) -> None:
        """Append a row; earlier values of new columns are NaN."""
        length = len(self)
        for name in row:
            self.setdefault(name, [math.nan] * length)
        for name, column in self.items():
            column.append(row.get(name, math.nan))

    def __len__(self) -> int:
        """Return the number of rows."""
        return max((len(column) for column in self.values()), default=0)

    def __bool__(self) -> bool:
        return len(self) > 0

    def row(self, i: int = -1) -> dict[str, float]:
        """Return row ``i``, by default the last one."""
        return {name: column[i] for name, column in self.items()}

    def to_csv(self, path: str | os.PathLike[str] | None = None) -> str:
        """Return the table as CSV text, also written to ``path`` if given.

        Raises:
            OutputError: if ``path`` cannot be written.
        """
        if path is not None:
            check_suffix(path, ".csv")
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow(self)
        writer.writerows(zip(*self.values(), strict=True))
        if path is not None:
            write_atomically(path, text.getvalue().encode())
        return text.getvalue()

    def plot(self, path: str | os.PathLike[str] | None = None) -> Any:
        """Plot the columns over the epochs, in panels: losses, metrics from 0 to 1, learning rates, and other columns.

        The epoch whose weights were kept is circled, unless it is the last.

        Args:
            path: image file to write (``.png``, ``.svg``, ``.pdf``).

        Returns:
            The matplotlib figure.

        Raises:
            RuntimeUnavailableError: if matplotlib is not installed (:meth:`to_svg` does not need it).
            DataError: if the history is empty, or the suffix of ``path`` is not an image format.
        """
        return drawn_panels(self._panels(), path)

    def to_svg(self, path: str | os.PathLike[str] | None = None) -> str:
        """Return the same curves as :meth:`plot` as SVG text, drawn without matplotlib; also write them to ``path``.

        Raises:
            DataError: if the history is empty.
            OutputError: if ``path`` cannot be written.
        """
        text = svg(self._panels())
        if path is not None:
            check_suffix(path, ".svg")
            write_atomically(path, text.encode())
        return text

    def _panels(self) -> list[Panel]:
        panels = panels_of(self, self.restored)
        if not panels or not len(self):
            raise DataError("the history is empty; train for at least one epoch first")
        return panels

    def _repr_html_(self) -> str:
        """Return a table for notebooks, with the row of the current weights in bold."""
        kept = len(self) - 1 if self.restored is None else self.restored
        return html_table(self, ([f"{value:.6g}" for value in row] for row in zip(*self.values(), strict=True)), kept)


def as_history(columns: Any) -> History:
    """Create a history from plain data.

    Raises:
        ValueError, TypeError, OverflowError: if ``columns`` is not a dict of lists of numbers with equal lengths.
    """
    history = History({str(name): list(column) for name, column in dict(columns).items()})
    for value in (x for column in history.values() for x in column):
        if type(value) not in (int, float):
            raise ValueError("the history contains a value that is not a number")
        float(value)  # raises OverflowError for an integer beyond the range of float
    if len({len(column) for column in history.values()}) > 1:
        raise ValueError("the columns of the history have different lengths")
    return history

"""The history of a training run: one row per epoch, as a dict of columns."""

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
from gradgraph.runtime.saved.plots import drawn
from gradgraph.runtime.saved.printed import html_table

INDEX = ("epoch", "step")


class History(dict[str, list[float]]):
    """Columns of equal length: ``epoch``, ``step``, ``loss``, the metrics, ``val_loss`` and so on.

    A value that an epoch did not have is NaN.

    Attributes:
        restored: the row whose state the trainer has gone back to (``fit(patience=...)``); None if that is the last.
    """

    restored: int | None = None

    def append(self, row: Mapping[str, float]) -> None:
        """Add one row; new columns are filled with NaN upwards."""
        length = len(self)
        for name in row:
            self.setdefault(name, [math.nan] * length)
        for name, column in self.items():
            column.append(row.get(name, math.nan))

    def __len__(self) -> int:
        """The number of rows (epochs)."""
        return max((len(column) for column in self.values()), default=0)

    def __bool__(self) -> bool:
        return len(self) > 0

    def row(self, i: int = -1) -> dict[str, float]:
        """One row; the last by default."""
        return {name: column[i] for name, column in self.items()}

    def to_csv(self, path: str | os.PathLike[str] | None = None) -> str:
        """The table as CSV text, also written to ``path`` if given.

        Raises:
            OutputError: ``path`` cannot be written.
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
        """Curves over the epochs, the loss in one panel and metrics in another; returns the matplotlib figure.

        Args:
            path: also write it there as an image (``.png``, ``.svg``, ``.pdf``).

        Raises:
            RuntimeUnavailableError: matplotlib is not installed.
            DataError: there is nothing to plot, or the suffix names no image format.
        """
        names = [n for n in self if n not in (*INDEX, "learning_rate")]
        losses = [n for n in names if n.endswith("loss")]
        panels = [panel for panel in (losses, [n for n in names if n not in losses]) if panel]
        if not panels:
            raise DataError("the history has no curve yet; train for one epoch first")

        def draw(figure: Any) -> None:
            for axes, names in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True):
                for name in names:
                    axes.plot(self["epoch"], self[name], marker=".", label=name)
                axes.set_xlabel("epoch")
                axes.legend()
                axes.grid(alpha=0.3)

        return drawn(draw, (5 * len(panels), 3.5), path)

    def _repr_html_(self) -> str:
        """A table for notebooks; the row whose weights the trainer has is bold."""
        kept = len(self) - 1 if self.restored is None else self.restored
        return html_table(self, ([f"{value:.6g}" for value in row] for row in zip(*self.values(), strict=True)), kept)


def as_history(columns: Any) -> History:
    """Make a history of plain data.

    Raises:
        ValueError, TypeError, OverflowError: ``columns`` is not a dict of number lists of equal length.
    """
    history = History({str(name): list(column) for name, column in dict(columns).items()})
    for value in (x for column in history.values() for x in column):
        if type(value) not in (int, float):
            raise ValueError("a history holds numbers")
        float(value)  # a whole number beyond any float has no row
    if len({len(column) for column in history.values()}) > 1:
        raise ValueError("columns of different lengths")
    return history

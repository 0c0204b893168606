"""Per-class precision, recall and F1, and the confusions between classes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from gradgraph.data.arrays.batch import Array
from gradgraph.errors import DataError, counted, shown
from gradgraph.runtime.saved.printed import html_table, text_table
from gradgraph.step.finishes import FINISHES

COLUMNS = ("class", "precision", "recall", "f1", "samples")
MOST_CONFUSED = 5  # number of printed pairs


@dataclass(frozen=True, eq=False)
class ClassTable:
    """A confusion matrix with its per-class scores, printed as a table.

    Attributes:
        matrix: [classes, classes]: how often each class (row) was predicted as each class (column).
        names: class names.
    """

    matrix: Array
    names: tuple[str, ...]

    @classmethod
    def of(cls, matrix: Array, names: Sequence[object] | None = None) -> ClassTable:
        """Create the table of a confusion matrix; by default the names are the class indices.

        Raises:
            DataError: if there is not one name per class.
        """
        given = tuple(str(name) for name in (range(len(matrix)) if names is None else names))
        if len(given) != len(matrix):
            raise DataError(
                f"got {counted(len(given), 'class name')} for {len(matrix)} classes; give one name per class"
            )
        return cls(matrix, given)

    @property
    def precision(self) -> Array:
        """The precision of each class; 0 for classes that were never predicted."""
        return np.asarray(FINISHES["precision"](self.matrix, "none"))

    @property
    def recall(self) -> Array:
        """The recall of each class; 0 for classes without samples."""
        return np.asarray(FINISHES["recall"](self.matrix, "none"))

    @property
    def f1(self) -> Array:
        """The F1 score of each class."""
        return np.asarray(FINISHES["f1"](self.matrix, "none"))

    @property
    def samples(self) -> Array:
        """The number of samples of each class."""
        return np.asarray(self.matrix.sum(1))

    @property
    def accuracy(self) -> float:
        """The share of samples whose class was predicted correctly."""
        return float(np.trace(self.matrix) / self.matrix.sum())

    def rows(self) -> Iterator[dict[str, str | float]]:
        """Yield a dict for each class: its name, precision, recall, F1 and number of samples."""
        columns = (self.names, self.precision, self.recall, self.f1, self.samples)
        for name, *numbers in zip(*columns, strict=True):
            yield dict(zip(COLUMNS, (name, *map(float, numbers)), strict=True))

    def as_data(self) -> dict[str, Any]:
        """Return the rows, the matrix and the accuracy as plain data for JSON."""
        return {"classes": list(self.rows()), "matrix": self.matrix.tolist(), "accuracy": self.accuracy}

    def confused(self, most: int = MOST_CONFUSED) -> list[tuple[str, str, int]]:
        """Return the most frequent confusions: (class, predicted class, count)."""
        wrong = self.matrix - np.diag(np.diag(self.matrix))
        order = np.argsort(-wrong, axis=None, kind="stable")[:most]
        pairs = zip(*np.unravel_index(order, wrong.shape), strict=True)
        return [(self.names[i], self.names[j], int(wrong[i, j])) for i, j in pairs if wrong[i, j] > 0]

    def _texts(self) -> list[list[str]]:
        rows = [list(row.values()) for row in self.rows()]
        there = (self.matrix.sum(0) + self.matrix.sum(1)) > 0
        means = [float(column[there].mean()) for column in (self.precision, self.recall, self.f1)]
        rows.append(["mean", *means, float(self.samples.sum())])
        return [[shown(name), *(f"{x:.4f}" for x in shares), f"{int(samples):,}"] for name, *shares, samples in rows]

    def __str__(self) -> str:
        confused = [f"called {shown(b)}, and is {shown(a)}: {count:,}" for a, b, count in self.confused()]
        return "\n".join([*text_table([COLUMNS, *self._texts()]), f"accuracy {self.accuracy:.4f}", *confused])

    def _repr_html_(self) -> str:
        return html_table(COLUMNS, self._texts())

"""Columns of a history from sums that are carried from batch to batch: exact, however the samples are cut into batches.

A step writes the sums of a batch (``<column>.sums``); whoever runs it adds them up and finishes them here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np

from gradgraph.errors import ModelError, shown
from gradgraph.step.manifest import MeasureSpec

Array: TypeAlias = np.ndarray[Any, Any]
AVERAGES = ("macro", "micro", "weighted", "binary", "none")


def ratio(sums: Array) -> Any:
    """`[a, b]`: ``a / b``."""
    return sums[0] / sums[1]


def root(sums: Array) -> Any:
    """`[a, b]`: ``√(a / b)``."""
    return np.sqrt(sums[0] / sums[1])


def exponential(sums: Array) -> Any:
    """`[a, b]`: ``exp(a / b)``."""
    return np.exp(sums[0] / sums[1])


def weighted_ratios(sums: Array, weights: Sequence[float]) -> Any:
    """Rows of `[a, b]`: ``Σ w·a / b``; nothing for a row in which nothing counts, where b is 0."""
    return (np.asarray(weights) * sums[:, 0] / np.where(sums[:, 1] == 0, 1, sums[:, 1])).sum()


def r2(sums: Array) -> Any:
    """`[n, Σ t, Σ t², Σ (t − x)²]`, a column each: the mean of ``1 − Σ (t − x)² / (Σ t² − (Σ t)²/n)``."""
    count, total, squares, errors = sums
    return np.mean(1.0 - errors / (squares - total**2 / count))


# of a confusion matrix: its rows are true classes, its columns predicted ones


def confusion(sums: Array) -> Any:
    """A confusion matrix: itself."""
    return sums


def precision(sums: Array, average: str) -> Any:
    """A confusion matrix: ``hits / called so``."""
    return _averaged(np.diag(sums), sums.sum(0), sums, average)


def recall(sums: Array, average: str) -> Any:
    """A confusion matrix: ``hits / so``."""
    return _averaged(np.diag(sums), sums.sum(1), sums, average)


def f1(sums: Array, average: str) -> Any:
    """A confusion matrix: ``2·hits / (called so + so)``."""
    return _averaged(2.0 * np.diag(sums), sums.sum(0) + sums.sum(1), sums, average)


def iou(sums: Array, average: str) -> Any:
    """A confusion matrix: ``hits / (called so + so − hits)``."""
    hits = np.diag(sums)
    return _averaged(hits, sums.sum(0) + sums.sum(1) - hits, sums, average)


def balanced_accuracy(sums: Array) -> Any:
    """A confusion matrix: the mean of ``hits / so`` over the classes that there are."""
    count = sums.sum(1)
    return np.mean((np.diag(sums) / np.where(count, count, 1.0))[count > 0])


def _averaged(above: Array, below: Array, matrix: Array, average: str) -> Any:
    """A share of each class, 0 where there is nothing, averaged as scikit-learn does."""
    shares = np.where(below > 0, above / np.where(below > 0, below, 1.0), 0.0)
    if average == "none":
        return shares
    if average == "binary":
        return shares[1]
    if average == "micro":
        return above.sum() / below.sum()
    if average == "weighted":
        return (shares * matrix.sum(1)).sum() / matrix.sum()
    return shares[matrix.sum(0) + matrix.sum(1) > 0].mean()


FINISHES: dict[str, Callable[..., Any]] = {
    f.__name__: f
    for f in (ratio, root, exponential, weighted_ratios, r2, confusion, precision, recall, f1, iou, balanced_accuracy)
}

# those whose sums are a confusion matrix
OF_CLASSES = frozenset(f.__name__ for f in (confusion, precision, recall, f1, iou, balanced_accuracy))


def add_sums(totals: dict[str, Array], sums: Mapping[str, Array]) -> None:
    """Add those of a batch to ``totals``, in place, in float64."""
    for name, array in sums.items():
        known = totals.get(name)
        if known is None:
            totals[name] = array.astype(np.float64)
        else:
            known += array


def finished(measures: Iterable[MeasureSpec], totals: Mapping[str, Array]) -> dict[str, Any]:
    """The columns: numbers, or arrays of one number a class.

    Raises:
        ModelError: a step was written by a later version, which knows another way to finish.
    """
    columns: dict[str, Any] = {}
    for measure in measures:
        if measure.name not in totals:
            continue
        if measure.finish not in FINISHES:
            raise ModelError(f"'{shown(measure.name)}' is finished by '{shown(measure.finish)}', which is unknown here")
        with np.errstate(divide="ignore", invalid="ignore"):
            sums = totals[measure.name].astype(np.float64)
            value = np.asarray(FINISHES[measure.finish](sums, **measure.arguments))
        columns[measure.name] = float(value) if value.ndim == 0 else value
    return columns


def as_row(columns: Mapping[str, Any]) -> dict[str, float]:
    """Numbers only: a vector becomes a column for each class, a matrix none."""
    row: dict[str, float] = {}
    for name, value in columns.items():
        if not isinstance(value, np.ndarray):
            row[name] = value
        elif value.ndim == 1:
            row |= {f"{name}.{i}": float(x) for i, x in enumerate(value)}
    return row

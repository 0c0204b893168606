"""History columns from sums that are accumulated over batches: exact, however the samples are batched.

A step outputs the sums of a batch (``<column>.sums``); the caller adds them up and finishes them here. Ranking metrics
are not sums: for them, the evaluation keeps a row for each sample.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np

from gradgraph.errors import ModelError, shown
from gradgraph.step.manifest import MeasureSpec

Array: TypeAlias = np.ndarray[Any, Any]
AVERAGES = ("macro", "micro", "weighted", "binary", "none")
KAPPA_WEIGHTS = (None, "linear", "quadratic")


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
    """Rows of `[a, b]`: ``Σ w·a / b``, skipping rows with b = 0, in which nothing counts."""
    return (np.asarray(weights) * sums[:, 0] / np.where(sums[:, 1] == 0, 1, sums[:, 1])).sum()


def r2(sums: Array) -> Any:
    """`[n, Σ t, Σ t², Σ (t − x)²]`, a column each: the mean of ``1 − Σ (t − x)² / (Σ t² − (Σ t)²/n)``."""
    count, total, squares, errors = sums
    return np.mean(1.0 - errors / (squares - total**2 / count))


def explained_variance(sums: Array) -> Any:
    """`[n, Σ t, Σ t², Σ e, Σ e²]`, a column each: the mean of ``1 − (Σ e² − (Σ e)²/n) / (Σ t² − (Σ t)²/n)``."""
    count, total, squares, errors, squared = sums
    return np.mean(1.0 - (squared - errors**2 / count) / (squares - total**2 / count))


def r2_shifted(sums: Array) -> Any:
    """Three addends of each of `[moments of t, Σ (t − x)²]`, a column each: ``r2``, accurate for a large mean."""
    *moments, errors = sums.sum(0)
    return np.mean(_explained(errors, _spread(*moments)))


def explained_variance_shifted(sums: Array) -> Any:
    """Three addends of each of `[moments of t, moments of e]`, a column each: ``explained_variance`` likewise."""
    rows = sums.sum(0)
    return np.mean(_explained(_spread(*rows[6:]), _spread(*rows[:6])))


def _explained(errors: Array, spread: Array) -> Array:
    """``1 − errors / spread``; for constant targets 1 if there is no error, else 0 (as scikit-learn)."""
    return np.where(spread == 0, np.where(errors == 0, 1.0, 0.0), 1.0 - errors / spread)


def _spread(count: Array, pivots: Array, rests: Array, squares: Array, products: Array, rest_squares: Array) -> Array:
    """``Σ (t − mean t)²`` of moments `[n, Σ p, Σ d, Σ p², Σ 2·p·d, Σ d²]` with ``t = p + d``: the pivots ``p`` have few
    digits, so their sums are exact, and the remainders ``d`` are small.
    """
    shift = pivots / np.where(count, count, 1.0)
    shift = np.ldexp(np.round(np.ldexp(np.frexp(shift)[0], 9)), np.frexp(shift)[1] - 9)
    total = (pivots - count * shift) + rests
    all_ = (squares - 2.0 * shift * pivots + count * shift**2) + (products - 2.0 * shift * rests) + rest_squares
    found = all_ - total**2 / count
    return np.where(np.abs(found) > 1e-13 * all_, found, 0.0 * count / count)  # only rounding is left


# a 2×2 table for each label: rows true no/yes, columns predicted no/yes


def label_precision(sums: Array, average: str) -> Any:
    """`[labels, 2, 2]`: ``hits / predicted`` of each label."""
    return _of_labels(sums, average, lambda hits, called, so: (hits, called))


def label_recall(sums: Array, average: str) -> Any:
    """`[labels, 2, 2]`: ``hits / true`` of each label."""
    return _of_labels(sums, average, lambda hits, called, so: (hits, so))


def label_f1(sums: Array, average: str) -> Any:
    """`[labels, 2, 2]`: ``2·hits / (predicted + true)`` of each label."""
    return _of_labels(sums, average, lambda hits, called, so: (2.0 * hits, called + so))


def label_iou(sums: Array, average: str) -> Any:
    """`[labels, 2, 2]`: ``hits / (predicted + true − hits)`` of each label."""
    return _of_labels(sums, average, lambda hits, called, so: (hits, called + so - hits))


def _of_labels(sums: Array, average: str, parts: Callable[[Array, Array, Array], tuple[Array, Array]]) -> Any:
    """Average a ratio over labels as scikit-learn does, with 0 for 0/0; "binary" pools all answers as those of one
    label, as "micro" does.
    """
    hits, so = sums[:, 1, 1], sums[:, 1].sum(1)
    above, below = parts(hits, sums[:, :, 1].sum(1), so)
    if not sums.sum():
        return np.full(len(sums), np.nan) if average == "none" else np.nan
    if average in ("micro", "binary"):
        return above.sum() / max(below.sum(), 1.0)
    shares = np.where(below > 0, above / np.where(below > 0, below, 1.0), 0.0)
    if average == "weighted":
        return (shares * so).sum() / max(so.sum(), 1.0)
    return shares if average == "none" else shares.mean()


def calibration(sums: Array) -> Any:
    """`[n, Σ p, hits]`, a column for each bin: ``Σ |hits − Σ p| / Σ n``."""
    count, probability, hits = sums
    return np.abs(hits - probability).sum() / count.sum()


# confusion matrices: rows are true classes, columns predicted ones


def confusion(sums: Array) -> Any:
    """Return the confusion matrix itself."""
    return sums


def precision(sums: Array, average: str) -> Any:
    """``hits / predicted``, from a confusion matrix."""
    return _averaged(np.diag(sums), sums.sum(0), sums, average)


def recall(sums: Array, average: str) -> Any:
    """``hits / true``, from a confusion matrix."""
    return _averaged(np.diag(sums), sums.sum(1), sums, average)


def f1(sums: Array, average: str) -> Any:
    """``2·hits / (predicted + true)``, from a confusion matrix."""
    return _averaged(2.0 * np.diag(sums), sums.sum(0) + sums.sum(1), sums, average)


def iou(sums: Array, average: str) -> Any:
    """``hits / (predicted + true − hits)``, from a confusion matrix."""
    hits = np.diag(sums)
    return _averaged(hits, sums.sum(0) + sums.sum(1) - hits, sums, average)


def balanced_accuracy(sums: Array) -> Any:
    """Mean of ``hits / true`` over the classes that occur, from a confusion matrix."""
    count = sums.sum(1)
    return _mean((np.diag(sums) / np.where(count, count, 1.0))[count > 0])


def mcc(sums: Array) -> Any:
    """Correlation of true and predicted classes, from a confusion matrix; 0 if either is constant."""
    so, called, all_ = sums.sum(1), sums.sum(0), sums.sum()
    above = np.trace(sums) * all_ - so @ called
    below = (all_**2 - called @ called) * (all_**2 - so @ so)
    return above / np.sqrt(below) if below > 0 else 0.0


def cohen_kappa(sums: Array, weights: str | None = None) -> Any:
    """``1 − Σ w·matrix / Σ w·expected``, from a confusion matrix, with weights by the distance of two classes."""
    distance = np.abs(np.subtract.outer(*[np.arange(len(sums))] * 2)).astype(np.float64)
    w = {None: distance > 0, "linear": distance, "quadratic": distance**2}[weights]
    expected = np.outer(sums.sum(1), sums.sum(0)) / sums.sum()
    return 1.0 - (w * sums).sum() / (w * expected).sum()


# rows of samples: class scores and the label; or scores of yes, and below them the truth. −1 is ignored


def roc_auc(sums: Array, average: str, probable: bool) -> Any:
    """Area under the ROC curve of each class against the rest, from rows of samples; NaN for a class without positives
    or negatives.
    """
    return _ranked(_area, sums, average, probable)


def average_precision(sums: Array, average: str, probable: bool) -> Any:
    """Mean precision over the positives of each class, from rows of samples; 0 if there are none."""
    return _ranked(_mean_precision, sums, average, probable)


def _ranked(figure: Callable[[Array, Array], float], rows: Array, average: str, probable: bool) -> Any:
    problems = _against_the_rest(rows, probable)
    if average == "micro":
        return figure(*(np.concatenate(parts) for parts in zip(*problems, strict=True)))
    if average == "binary":
        return figure(*problems[min(1, len(problems) - 1)])
    figures = np.array([figure(scores, truth) for scores, truth in problems])
    if average == "none":
        return figures
    yes = np.array([truth.sum() for _, truth in problems], np.float64)
    there = (yes > 0) & ~np.isnan(figures)
    if not there.any() or any(np.isnan(scores).any() for scores, _ in problems):
        return np.nan
    return np.average(figures[there], weights=yes[there] if average == "weighted" else None)


def _against_the_rest(rows: Array, probable: bool) -> list[tuple[Array, Array]]:
    """Return scores and truth of each class, or of each answer."""
    if rows.ndim == 3:
        columns = (rows[..., i] for i in range(rows.shape[2]))
        return [(c[c[:, 1] >= 0, 0], c[c[:, 1] >= 0, 1] > 0) for c in columns]
    rows = rows[rows[:, -1] >= 0]
    scores, labels = rows[:, :-1], rows[:, -1]
    if not probable:
        scores = np.exp(scores - scores.max(1, initial=-np.inf, keepdims=True))
        scores /= scores.sum(1, keepdims=True)
    return [(scores[:, i], labels == i) for i in range(scores.shape[1])]


def _steps(scores: Array, truth: Array) -> tuple[Array, Array]:
    """Count positives and negatives with at least each distinct score, the highest first."""
    order = np.argsort(-scores, kind="stable")
    ends = np.append(np.flatnonzero(np.diff(scores[order])), len(scores) - 1)
    return np.cumsum(truth[order])[ends], np.cumsum(~truth[order])[ends]


def _area(scores: Array, truth: Array) -> float:
    if truth.all() or not truth.any() or np.isnan(scores).any():
        return np.nan
    yes, no = (np.concatenate([[0], counts]).astype(np.float64) for counts in _steps(scores, truth))
    return float((np.diff(no) * (yes[1:] + yes[:-1])).sum() / (2 * yes[-1] * no[-1]))


def _mean_precision(scores: Array, truth: Array) -> float:
    if np.isnan(scores).any() or not truth.size:
        return np.nan
    if not truth.any():
        return 0.0
    yes, no = _steps(scores, truth)
    return float((np.diff(yes, prepend=0) * yes / (yes + no)).sum() / yes[-1])


def _averaged(above: Array, below: Array, matrix: Array, average: str) -> Any:
    """Average a ratio over classes as scikit-learn does, with 0 for 0/0."""
    shares = np.where(below > 0, above / np.where(below > 0, below, 1.0), 0.0)
    if average == "none":
        return shares
    if average == "binary":
        return shares[1]
    if average == "micro":
        return _quotient(above.sum(), below.sum())
    if average == "weighted":
        return _quotient((shares * matrix.sum(1)).sum(), matrix.sum())
    return _mean(shares[matrix.sum(0) + matrix.sum(1) > 0])


def _mean(values: Array) -> float:
    return _quotient(values.sum(), len(values))


def _quotient(above: float, below: float) -> float:
    """Return the quotient; NaN for 0/0, a mean over nothing."""
    return float(above / below) if below else np.nan


FINISHES: dict[str, Callable[..., Any]] = {
    f.__name__: f
    for f in (
        *(ratio, root, exponential, weighted_ratios, r2, explained_variance, calibration),
        *(r2_shifted, explained_variance_shifted, label_precision, label_recall, label_f1, label_iou),
        *(confusion, precision, recall, f1, iou, balanced_accuracy, mcc, cohen_kappa),
        *(roc_auc, average_precision),
    )
}

# finishes of a confusion matrix
OF_CLASSES = frozenset(f.__name__ for f in (confusion, precision, recall, f1, iou, balanced_accuracy, mcc, cohen_kappa))


def add_sums(totals: dict[str, Array], sums: Mapping[str, Array]) -> None:
    """Add the sums of a batch to ``totals``, in place, in float64."""
    for name, array in sums.items():
        known = totals.get(name)
        if known is None:
            totals[name] = array.astype(np.float64)
        else:
            known += array


def finished(measures: Iterable[MeasureSpec], totals: Mapping[str, Array]) -> dict[str, Any]:
    """Compute the columns: numbers, or arrays with one number per class.

    Raises:
        ModelError: the step was written by a later version, with a finish that this one does not have.
    """
    columns: dict[str, Any] = {}
    for measure in measures:
        if measure.name not in totals:
            continue
        if measure.finish not in FINISHES:
            raise ModelError(
                f"'{shown(measure.name)}' is finished by '{shown(measure.finish)}', which this version does not have"
            )
        with np.errstate(divide="ignore", invalid="ignore"):
            sums = totals[measure.name].astype(np.float64)
            value = np.asarray(FINISHES[measure.finish](sums, **measure.arguments))
        columns[measure.name] = float(value) if value.ndim == 0 else value
    return columns


def as_row(columns: Mapping[str, Any], classes: Collection[Sequence[str]] = ()) -> dict[str, float]:
    """Flatten columns to numbers: a vector becomes a column for each class, a matrix is dropped.

    ``classes`` are the class names of each target: a vector of that length uses them in its column names.
    """
    row: dict[str, float] = {}
    for name, value in columns.items():
        if not isinstance(value, np.ndarray):
            row[name] = value
        elif value.ndim == 1:
            fitting = [names for names in classes if len(names) == len(value)]
            names = fitting[0] if len(fitting) == 1 else range(len(value))
            row |= {f"{name}.{one}": float(x) for one, x in zip(names, value, strict=True)}
    return row

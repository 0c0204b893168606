"""Computation of losses and metrics from sums over all samples, so that results do not depend on the batch size.

A step outputs the sums of a batch (``<column>.sums``). The caller adds up the sums of all batches, and a function of
this module (a "finish") computes the history column from the totals. Ranking metrics such as ROC AUC cannot be computed
from sums: for them, the evaluation keeps a row for each sample.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np

from gradgraph.errors import ModelError, shown
from gradgraph.step.manifest import MeasureSpec

Array: TypeAlias = np.ndarray[Any, Any]
AVERAGES = ("macro", "micro", "weighted", "binary", "none")
KAPPA_WEIGHTS = (None, "linear", "quadratic")


def ratio(sums: Array) -> Any:
    """Return ``a / b`` for sums ``[a, b]``."""
    return sums[0] / sums[1]


def root(sums: Array) -> Any:
    """Return ``√(a / b)`` for sums ``[a, b]``."""
    return np.sqrt(sums[0] / sums[1])


def exponential(sums: Array) -> Any:
    """Return ``exp(a / b)`` for sums ``[a, b]``."""
    return np.exp(sums[0] / sums[1])


def weighted_ratios(sums: Array, weights: Sequence[float]) -> Any:
    """Return ``Σ w·a / b`` over the rows ``[a, b]`` with weight w; rows with b = 0, without samples, are skipped."""
    return (np.asarray(weights) * sums[:, 0] / np.where(sums[:, 1] == 0, 1, sums[:, 1])).sum()


def r2(sums: Array) -> Any:
    """Return R² from the sums ``[n, Σ t, Σ t², Σ (t − x)²]`` of n targets t and predictions x.

    Each sum is a vector with one entry per output column; the result is the mean over columns of
    ``1 − Σ (t − x)² / (Σ t² − (Σ t)²/n)``.
    """
    count, total, squares, errors = sums
    return np.mean(1.0 - errors / (squares - total**2 / count))


def explained_variance(sums: Array) -> Any:
    """Return the explained variance from the sums ``[n, Σ t, Σ t², Σ e, Σ e²]`` of n targets t and errors e.

    Each sum is a vector with one entry per output column; the result is the mean over columns of
    ``1 − (Σ e² − (Σ e)²/n) / (Σ t² − (Σ t)²/n)``.
    """
    count, total, squares, errors, squared = sums
    return np.mean(1.0 - (squared - errors**2 / count) / (squares - total**2 / count))


def r2_shifted(sums: Array) -> Any:
    """Return R² as ``r2`` does, but accurate if targets have a large mean.

    ``sums`` has the rows ``[six moments of t (see _spread), Σ (t − x)²]``, each stored as three addends, with one
    entry per output column.
    """
    *moments, errors = sums.sum(0)
    return np.mean(_explained(errors, _spread(*moments)))


def explained_variance_shifted(sums: Array) -> Any:
    """Return the explained variance as ``explained_variance`` does, but accurate if targets have a large mean.

    ``sums`` has the rows ``[six moments of t, six moments of e]`` (see ``_spread``), each stored as three addends, with
    one entry per output column.
    """
    rows = sums.sum(0)
    return np.mean(_explained(_spread(*rows[6:]), _spread(*rows[:6])))


def _explained(errors: Array, spread: Array) -> Array:
    """Return ``1 − errors / spread``; for constant targets 1 if there is no error, else 0, as in scikit-learn."""
    return np.where(spread == 0, np.where(errors == 0, 1.0, 0.0), 1.0 - errors / spread)


def _spread(count: Array, pivots: Array, rests: Array, squares: Array, products: Array, rest_squares: Array) -> Array:
    """Return ``Σ (t − mean t)²`` from six moments of t: ``[n, Σ p, Σ d, Σ p², Σ 2·p·d, Σ d²]``.

    Each t is split as ``t = p + d``: the pivot ``p`` has few digits, so sums of pivots are exact, and the remainder
    ``d`` is small.
    """
    shift = pivots / np.where(count, count, 1.0)
    shift = np.ldexp(np.round(np.ldexp(np.frexp(shift)[0], 9)), np.frexp(shift)[1] - 9)
    total = (pivots - count * shift) + rests
    all_ = (squares - 2.0 * shift * pivots + count * shift**2) + (products - 2.0 * shift * rests) + rest_squares
    found = all_ - total**2 / count
    return np.where(np.abs(found) > 1e-13 * all_, found, 0.0 * count / count)  # only rounding is left


# ratios averaged over classes or labels: the name, the formula, and its parts from hits, predicted and true counts
Parts: TypeAlias = Callable[[Array, Array, Array], tuple[Array, Array]]
_RATIOS: dict[str, tuple[str, str, Parts]] = {
    "precision": ("precision", "hits / predicted", lambda hits, called, so: (hits, called)),
    "recall": ("recall", "hits / true", lambda hits, called, so: (hits, so)),
    "f1": ("F1 score", "2·hits / (predicted + true)", lambda hits, called, so: (2.0 * hits, called + so)),
    "iou": ("IoU", "hits / (predicted + true − hits)", lambda hits, called, so: (hits, called + so - hits)),
}


def _of_labels(parts: Parts, sums: Array, average: str) -> Any:
    """Return the multi-label metric ``parts``, averaged over labels as in scikit-learn, with 0 for 0/0.

    ``sums`` is [labels, 2, 2]: for each label, counts by truth (no, yes) and prediction (no, yes). "binary" pools the
    predictions of all labels, as "micro" does.
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
    """Return the expected calibration error, ``Σ |hits − Σ p| / Σ n`` over bins.

    ``sums`` is ``[n, Σ p, hits]``, with one column per bin: samples, sum of predicted probabilities, correct ones.
    """
    count, probability, hits = sums
    return np.abs(hits - probability).sum() / count.sum()


# class metrics: sums are a confusion matrix, with true classes as rows and predicted classes as columns


def confusion(sums: Array) -> Any:
    """Return the confusion matrix itself."""
    return sums


def balanced_accuracy(sums: Array) -> Any:
    """Return the mean recall over the classes that occur, from a confusion matrix."""
    count = sums.sum(1)
    return _mean((np.diag(sums) / np.where(count, count, 1.0))[count > 0])


def mcc(sums: Array) -> Any:
    """Return the Matthews correlation coefficient from a confusion matrix; 0 if only one class is true or predicted."""
    so, called, all_ = sums.sum(1), sums.sum(0), sums.sum()
    above = np.trace(sums) * all_ - so @ called
    below = (all_**2 - called @ called) * (all_**2 - so @ so)
    return above / np.sqrt(below) if below > 0 else 0.0


def cohen_kappa(sums: Array, weights: str | None = None) -> Any:
    """Return Cohen's kappa, ``1 − Σ w·matrix / Σ w·expected``, from a confusion matrix.

    The weight w of a cell is 1 off the diagonal, or the distance of its two class indices ("linear") or its square
    ("quadratic").
    """
    distance = np.abs(np.subtract.outer(*[np.arange(len(sums))] * 2)).astype(np.float64)
    w = {None: distance > 0, "linear": distance, "quadratic": distance**2}[weights]
    expected = np.outer(sums.sum(1), sums.sum(0)) / sums.sum()
    return 1.0 - (w * sums).sum() / (w * expected).sum()


# ranking metrics: rows [samples, classes + 1] of class scores and the label, or, for independent yes/no predictions,
# [samples, 2, predictions] of scores and truth. A label or truth of −1 is ignored


def roc_auc(sums: Array, average: str, probable: bool) -> Any:
    """Return the area under the ROC curve of each class against the rest, averaged.

    The area is NaN for a class without positives or negatives.

    Args:
        sums: one row per sample, with its scores and label.
        average: how to average over classes.
        probable: whether scores are probabilities, so that Softmax is not applied.
    """
    return _ranked(_area, sums, average, probable)


def average_precision(sums: Array, average: str, probable: bool) -> Any:
    """Return the average precision of each class against the rest, averaged; 0 for a class without positives.

    The arguments are those of ``roc_auc``.
    """
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
    """Return a pair (scores, truth) for each class against the rest, or for each yes/no prediction.

    Softmax is applied to class scores unless they are ``probable``. Samples without a valid label are dropped.
    """
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
    """Return the numbers of positives and negatives with at least each distinct score, from the highest score."""
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


def _of_classes(parts: Parts, matrix: Array, average: str) -> Any:
    """Return the metric ``parts``, averaged over the classes of a confusion matrix as in scikit-learn; 0/0 is 0."""
    above, below = parts(np.diag(matrix), matrix.sum(0), matrix.sum(1))
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
    """Return ``above / below``, or NaN if ``below`` is 0."""
    return float(above / below) if below else np.nan


FINISHES: dict[str, Callable[..., Any]] = {
    f.__name__: f
    for f in (
        *(ratio, root, exponential, weighted_ratios, r2, explained_variance, calibration),
        *(r2_shifted, explained_variance_shifted, confusion, balanced_accuracy, mcc, cohen_kappa),
        *(roc_auc, average_precision),
    )
}
for _name, (_word, _formula, _parts) in _RATIOS.items():
    FINISHES[_name] = functools.partial(_of_classes, _parts)
    FINISHES[_name].__doc__ = f"Return the {_word}, ``{_formula}``, from a confusion matrix."
    FINISHES[f"label_{_name}"] = functools.partial(_of_labels, _parts)
    FINISHES[
        f"label_{_name}"
    ].__doc__ = f"Return the {_word} over labels, ``{_formula}``, from a 2×2 confusion matrix per label."

# finishes of a confusion matrix
OF_CLASSES = frozenset({"confusion", "balanced_accuracy", "mcc", "cohen_kappa", *_RATIOS})


def add_sums(totals: dict[str, Array], sums: Mapping[str, Array]) -> None:
    """Add the sums of a batch to ``totals``, in place, in float64."""
    for name, array in sums.items():
        known = totals.get(name)
        if known is None:
            totals[name] = array.astype(np.float64)
        else:
            known += array


def finished(measures: Iterable[MeasureSpec], totals: Mapping[str, Array]) -> dict[str, Any]:
    """Return history columns computed from totals of sums: numbers, or arrays with one number per class.

    Raises:
        ModelError: if a measure needs a finish that this version does not have; a later version wrote the step.
    """
    columns: dict[str, Any] = {}
    for measure in measures:
        if measure.name not in totals:
            continue
        if measure.finish not in FINISHES:
            raise ModelError(
                f"the metric '{shown(measure.name)}' is computed by '{shown(measure.finish)}', which this version of "
                "gradgraph does not have; upgrade gradgraph"
            )
        with np.errstate(divide="ignore", invalid="ignore"):
            sums = totals[measure.name].astype(np.float64)
            value = np.asarray(FINISHES[measure.finish](sums, **measure.arguments))
        columns[measure.name] = float(value) if value.ndim == 0 else value
    return columns


def as_row(columns: Mapping[str, Any], classes: Collection[Sequence[str]] = ()) -> dict[str, float]:
    """Return columns as a flat dict of numbers: a vector becomes one column per class, and a matrix is dropped.

    Args:
        columns: the results of ``finished``.
        classes: the class names of each target. A vector's columns are named after the classes of the only target with
            as many classes, otherwise after class indices.
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

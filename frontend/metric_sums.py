"""Metrics as sums over the samples of a batch, accumulated over batches and finished at the end.

Ranking metrics, which are not sums, return a row for each sample instead.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeVar

import numpy as np
import onnx_ir as ir

from gradgraph.arguments import Makers
from gradgraph.errors import BuildError, ModelError, shown
from gradgraph.frontend import reductions
from gradgraph.frontend.loss import Loss, recipe
from gradgraph.frontend.losses_classes import classes_at, cross_entropy
from gradgraph.frontend.losses_preferences import preference_margin
from gradgraph.frontend.losses_values import binary_cross_entropy, binary_cross_entropy_with_logits, pair
from gradgraph.frontend.pointwise import cast, logical_and, logical_not, logical_or, real, where
from gradgraph.frontend.reductions import topk
from gradgraph.frontend.shaping import cat, movedim, stack
from gradgraph.frontend.subscripts import one_hot, ones_like, scatter_add, take_along_dim, zeros
from gradgraph.frontend.trace import op, tensor
from gradgraph.rivals import entries
from gradgraph.step.finishes import AVERAGES, KAPPA_WEIGHTS

if TYPE_CHECKING:
    from gradgraph.frontend.tensor import Tensor

Reads = Literal["classes", "scores", "numbers", "sequences"]
Better = Literal["min", "max"] | None


class Sums(NamedTuple):
    """The value of a metric for a batch: sums of a fixed shape, and the name of the finish for their total.

    Attributes:
        rows: ``sums`` has a row of this shape for each sample instead, in an evaluation; the finish gets all rows.
    """

    sums: Tensor
    shape: tuple[int, ...]
    finish: str
    arguments: Mapping[str, Any] = {}
    rows: bool = False


class Share(NamedTuple):
    """A ratio metric of a batch, before accumulation: ``Σ above / Σ below``."""

    above: Tensor
    below: Tensor


@dataclass(frozen=True)
class Metric:
    """A metric with its options. Calling it with a traced prediction and target (and a mask) writes its sums.

    Args:
        name: of the metric.
        function: of prediction, target and mask, with ``arguments`` by name.
        arguments: those of the call.
        column: its column in the history.
        reads: the kind of targets: "classes" (or yes and no), "scores" (a score for each class, never yes and no), or
            "numbers".
        better: whether a low value is better ("min") or a high one ("max"); None if neither is.
        as_number: a step with one plain loss outputs its ``number``, readable in any runtime.
    """

    name: str
    function: Callable[..., Sums | Share]
    arguments: Mapping[str, Any] = field(default_factory=dict)
    column: str = ""
    reads: Reads = "classes"
    better: Better = None
    as_number: bool = False

    def __call__(self, prediction: Tensor, target: Tensor, mask: Tensor | None = None) -> Sums:
        found = self.function(prediction, target, mask, **self.arguments)
        return share(*found) if isinstance(found, Share) else found

    def number(self, prediction: Tensor, target: Tensor) -> Tensor:
        """Return the ratio of one batch, computed in the graph; 0 if everything is ignored."""
        found = self.function(prediction, target, None, **self.arguments)
        assert isinstance(found, Share)
        total = reductions.sum(cast(found.below, ir.DataType.FLOAT))
        return reductions.sum(cast(found.above, ir.DataType.FLOAT)) / op.Max(total, 1.0)

    @property
    def ranks(self) -> bool:
        """Whether it uses scores as such, rather than their sign."""
        return "probable" in self.arguments

    def bound(self, axis: int, ignore_index: int | None, probable: bool = False) -> Metric:
        """Set the class axis, the ignored label, and whether scores are probabilities, unless the options do."""
        known = {"axis": axis, "ignore_index": ignore_index, "probable": probable}
        filled = {name: known[name] if value is None and name in known else value
                  for name, value in self.arguments.items()}  # fmt: skip
        return replace(self, arguments=filled)

    def check_fits(self, loss: Loss) -> None:
        """Raise BuildError unless it fits the target of ``loss``."""
        if loss.labels and self.reads == "numbers":
            raise BuildError(f"the metric '{self.name}' compares numbers, but the loss has class indices")
        if self.reads == "sequences" and loss.spelt:
            return
        fits = self.reads == "numbers" or loss.soft or (self.reads == "classes" and loss.binary)
        if not loss.labels and not fits:
            raise BuildError(f"the metric '{self.name}' requires a loss on class indices, such as cross_entropy")


Formula = TypeVar("Formula", bound=Callable[..., "Sums | Share"])
METRICS: Makers[Metric] = Makers("metric", Metric, "gradgraph.metrics", "top_k(k=3)", entries.METRICS)
_LABELS = " ignore_index axis"
_SCORES = " probable ignore_index axis"


def metric(
    options: str = "", *, reads: Reads = "classes", better: Better = None, column: str = "", as_number: bool = False
) -> Callable[[Formula], Formula]:
    """Register a function of prediction, target and mask in ``gradgraph.metrics`` by its name.

    Args:
        options: the arguments that users may pass, in order; each has a default.
        reads, better, as_number: as for ``Metric``.
        column: of the history, formatted with the options; by default the name.
    """

    def register(function: Formula) -> Formula:
        name = function.__name__

        def make(arguments: dict[str, Any]) -> Metric:
            if (average := arguments.get("average", "macro")) not in AVERAGES:
                words = ", ".join(f"'{a}'" for a in AVERAGES)
                raise BuildError(f"{name} averages by one of {words}, not by '{shown(average)}'")
            if (weights := arguments.get("weights")) not in KAPPA_WEIGHTS:
                raise BuildError(f"{name} takes weights 'linear', 'quadratic' or None, not '{shown(weights)}'")
            if arguments.get("bins", 1) < 1:
                raise BuildError(f"{name} requires at least one bin, not {arguments['bins']}")
            if arguments.get("k", 1) < 1:
                raise BuildError(f"{name} counts the k largest scores; k must be at least 1, not {arguments['k']}")
            return Metric(name, function, arguments, column.format(**arguments) or name, reads, better, as_number)

        METRICS.add(name, recipe(name, function, options, make))
        return function

    return register


def share(above: Tensor, below: Tensor) -> Sums:
    """``Σ above / Σ below``."""
    parts = [reductions.sum(cast(x, ir.DataType.FLOAT)) for x in (above, below)]
    return Sums(stack(parts), (2,), "ratio")


# --- class indices ---------------------------------------------------------------------------------------


def _counted(target: Tensor, mask: Tensor | None, ignore_index: int | None) -> Tensor:
    """Return which labels are not ignored."""
    counted = target != (-100 if ignore_index is None else ignore_index)
    return counted if mask is None else logical_and(counted, mask)


def _along(axis: int | None) -> int:
    return 1 if axis is None else axis


@metric(_LABELS, better="max", as_number=True)
def accuracy(
    x: Tensor, target: Tensor, mask: Tensor | None = None, ignore_index: int | None = None, axis: int | None = None
) -> Share:
    """The share of correctly classified labels, ignoring ``ignore_index``; for numbers, by sign."""
    if target.is_floating_point():
        hit = (real(x) > 0.0) == (target > 0.5)
        counts = ones_like(cast(hit, "float32")) if mask is None else _spread(mask, hit)
        return Share(cast(hit, "float32") * counts, counts)
    counted = _counted(target, mask, ignore_index)
    hit = op.ArgMax(x, axis=classes_at(x, _along(axis)), keepdims=0) == target
    return Share(logical_and(hit, counted), counted)


def _spread(mask: Tensor, x: Tensor) -> Tensor:
    """Broadcast ``mask``, which aligns with the leading axes, to the elements."""
    extra = list(range(mask.ndim, x.ndim))
    factor = cast(mask, ir.DataType.FLOAT)
    return op.Expand(op.Unsqueeze(factor, extra) if extra else factor, op.Shape(x))


@metric(_LABELS, reads="scores", better="max")
def token_accuracy(
    x: Tensor, target: Tensor, mask: Tensor | None = None, ignore_index: int | None = None, axis: int = -1
) -> Share:
    """The share of correct tokens, ignoring padding (``ignore_index``); classes on the last axis."""
    return accuracy(x, target, mask, ignore_index, axis)


@metric(reads="numbers", better="max")
def reward_accuracy(x: Tensor, target: Tensor, mask: Tensor | None = None) -> Share:
    """The share of pairs in which the chosen answer gained more log-probability over the reference than the rejected
    one.
    """
    won = preference_margin(real(x), target) > 0.0
    return Share(won, ones_like(cast(won, "float32")) if mask is None else mask)


@metric("k" + _LABELS, reads="scores", better="max", column="top_{k}")
def top_k(
    x: Tensor,
    target: Tensor,
    mask: Tensor | None = None,
    k: int = 5,
    ignore_index: int | None = None,
    axis: int | None = None,
) -> Share:
    """The share of labels that are among the ``k`` largest scores."""
    at, counted = classes_at(x, _along(axis)), _counted(target, mask, ignore_index)
    classes = x.shape[at]
    best = topk(x, min(k, classes) if isinstance(classes, int) else k, at).indices
    return Share(logical_and(reductions.any(best == target.unsqueeze(at), at), counted), counted)


@metric(_LABELS, reads="scores", better="min")
def perplexity(
    x: Tensor, target: Tensor, mask: Tensor | None = None, ignore_index: int | None = None, axis: int | None = None
) -> Sums:
    """``exp`` of the mean cross entropy of the labels that are not ignored."""
    ignored = -100 if ignore_index is None else ignore_index
    counted = _counted(target, mask, ignored)
    kept = where(counted, target, ignored)
    losses = reductions.sum(cross_entropy(cast(x, ir.DataType.FLOAT), kept, None, ignored, "none", axis=_along(axis)))
    return Sums(stack([losses, reductions.sum(cast(counted, ir.DataType.FLOAT))]), (2,), "exponential")


@metric(_LABELS)
def confusion_matrix(
    x: Tensor, target: Tensor, mask: Tensor | None = None, ignore_index: int | None = None, axis: int | None = None
) -> Sums:
    """Counts by true class (row) and predicted class (column); for numbers, ≤ 0 and > 0."""
    return _from_matrix("confusion", x, target, mask, ignore_index, axis)


def _from_matrix(
    finish: str,
    x: Tensor,
    target: Tensor,
    mask: Tensor | None,
    ignore_index: int | None,
    axis: int | None,
    **arguments: Any,
) -> Sums:
    if target.is_floating_point():
        called, truth, classes = cast(real(x) > 0.0, "int64"), cast(target > 0.5, "int64"), 2
        counted = ones_like(cast(called, "float32")) if mask is None else _spread(mask, called)
        labels = target.shape[classes_at(x, _along(axis))] if target.ndim > 1 else 1
        if isinstance(labels, int) and labels > 1 and "average" in arguments:
            return _of_labels(finish, truth * 2 + called, counted, labels, classes_at(x, _along(axis)), arguments)
    else:
        at, flags = classes_at(x, _along(axis)), _counted(target, mask, ignore_index)
        size = x.shape[at]
        if not isinstance(size, int):
            raise ModelError(f"a confusion matrix requires a fixed number of classes, but there are {size} scores")
        called, truth, classes = op.ArgMax(x, axis=at, keepdims=0), where(flags, target, 0), size
        counted = cast(flags, ir.DataType.FLOAT)
    places, counts = (op.Reshape(y, [-1]) for y in (truth * classes + called, counted))
    matrix = scatter_add(zeros(classes * classes), 0, places, counts)
    return Sums(matrix, (classes, classes), finish, arguments)


def _of_labels(
    finish: str, places: Tensor, counted: Tensor, labels: int, axis: int, arguments: Mapping[str, Any]
) -> Sums:
    """Return a 2×2 table of truth and prediction for each of several labels along an axis."""
    shape = [1] * axis + [labels] + [1] * (places.ndim - axis - 1)
    places = places + np.arange(0, 4 * labels, 4).reshape(shape)
    places, counts = (op.Reshape(y, [-1]) for y in (places, counted))
    return Sums(scatter_add(zeros(4 * labels), 0, places, counts), (labels, 2, 2), f"label_{finish}", arguments)


def _averaged(name: str, doc: str) -> Callable[..., Sums]:
    """Return a metric defined per class."""

    def averaged(
        x: Tensor,
        target: Tensor,
        mask: Tensor | None = None,
        average: str = "macro",
        ignore_index: int | None = None,
        axis: int | None = None,
    ) -> Sums:
        return _from_matrix(name, x, target, mask, ignore_index, axis, average=average)

    averaged.__name__ = averaged.__qualname__ = name
    averaged.__doc__ = doc
    return metric("average" + _LABELS, better="max")(averaged)


precision = _averaged(
    "precision", 'The share of true ones among predictions of a class, averaged over classes; "none" returns each.'
)
recall = _averaged(
    "recall", 'The share of a class that is predicted as such, averaged over classes; "none" returns each.'
)
f1 = _averaged("f1", '``2·precision·recall / (precision + recall)`` of each class, averaged; "none" returns each.')
iou = _averaged(
    "iou",
    'Intersection over union of predicted and true members of a class, averaged over classes; "none" returns each.',
)


@metric(_LABELS, better="max")
def balanced_accuracy(
    x: Tensor, target: Tensor, mask: Tensor | None = None, ignore_index: int | None = None, axis: int | None = None
) -> Sums:
    """The mean recall over the classes that occur."""
    return _from_matrix("balanced_accuracy", x, target, mask, ignore_index, axis)


@metric(_LABELS, better="max")
def mcc(
    x: Tensor, target: Tensor, mask: Tensor | None = None, ignore_index: int | None = None, axis: int | None = None
) -> Sums:
    """Matthews' correlation of predicted and true classes; 0 if either is constant."""
    return _from_matrix("mcc", x, target, mask, ignore_index, axis)


@metric("weights" + _LABELS, better="max")
def cohen_kappa(
    x: Tensor,
    target: Tensor,
    mask: Tensor | None = None,
    weights: str | None = None,
    ignore_index: int | None = None,
    axis: int | None = None,
) -> Sums:
    """Cohen's κ, the agreement beyond chance; with ``weights`` "linear" or "quadratic", for ordered classes."""
    return _from_matrix("cohen_kappa", x, target, mask, ignore_index, axis, weights=weights)


@metric(_LABELS, better="max")
def exact_match(
    x: Tensor, target: Tensor, mask: Tensor | None = None, ignore_index: int | None = None, axis: int = -1
) -> Share:
    """The share of samples whose labels are all correct, ignoring ``ignore_index``: whole texts, or all yes/no
    answers.
    """
    if target.is_floating_point():
        hit = (real(x) > 0.0) == (target > 0.5)
        counted = cast(ones_like(cast(hit, "float32")) if mask is None else _spread(mask, hit), "bool")
    else:
        counted = _counted(target, mask, ignore_index)
        hit = op.ArgMax(x, axis=classes_at(x, axis), keepdims=0) == target
    rest = list(range(1, hit.ndim))
    whole, some = logical_or(hit, logical_not(counted)), counted
    if rest:
        whole, some = reductions.all(whole, rest), reductions.any(some, rest)
    return Share(logical_and(whole, some), some)


# --- probabilities ---------------------------------------------------------------------------------------


class _Scored(NamedTuple):
    """Scores as float32 [rows, classes], their labels [rows] (0 if ignored) and whether these are not ignored."""

    scores: Tensor
    labels: Tensor
    counts: Tensor
    classes: int


def _scored(x: Tensor, target: Tensor, mask: Tensor | None, ignore_index: int | None, axis: int | None) -> _Scored:
    at, flags = classes_at(x, _along(axis)), _counted(target, mask, ignore_index)
    size = x.shape[at]
    if not isinstance(size, int):
        raise ModelError(f"class probabilities require a fixed number of classes, but there are {size} scores")
    scores = op.Reshape(movedim(cast(x, ir.DataType.FLOAT), at, -1), [-1, size])
    labels, counts = (op.Reshape(y, [-1]) for y in (where(flags, target, 0), cast(flags, ir.DataType.FLOAT)))
    return _Scored(scores, labels, counts, size)


def _answers(x: Tensor, target: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Return scores of yes, the truth (1 or 0), and weights: float32, all of one shape."""
    scores, truth = (cast(y, ir.DataType.FLOAT) for y in (x, target > 0.5))
    return scores, truth, ones_like(truth) if mask is None else _spread(mask, truth)


def _share_of(each: Tensor, counts: Tensor) -> Sums:
    """``Σ counts·each / Σ counts``."""
    return Sums(stack([reductions.sum(each * counts), reductions.sum(counts)]), (2,), "ratio")


@metric(_SCORES, better="min")
def log_loss(
    x: Tensor,
    target: Tensor,
    mask: Tensor | None = None,
    probable: bool | None = None,
    ignore_index: int | None = None,
    axis: int | None = None,
) -> Sums:
    """``mean −log p`` of the true class, with ``p`` the Softmax or Sigmoid of scores, or the scores themselves."""
    if target.is_floating_point():
        scores, truth, counts = _answers(x, target, mask)
        loss = binary_cross_entropy if probable else binary_cross_entropy_with_logits
        return _share_of(loss(scores, truth, None, "none"), counts)
    given = _scored(x, target, mask, ignore_index, axis)
    if not probable:
        return _share_of(cross_entropy(given.scores, given.labels, reduction="none"), given.counts)
    true = op.Squeeze(take_along_dim(given.scores, given.labels.unsqueeze(1), 1), [1])
    return _share_of(binary_cross_entropy(true, ones_like(true), None, "none"), given.counts)


@metric(_SCORES, better="min")
def brier(
    x: Tensor,
    target: Tensor,
    mask: Tensor | None = None,
    probable: bool | None = None,
    ignore_index: int | None = None,
    axis: int | None = None,
) -> Sums:
    """Brier's score, ``mean (p − t)²``: for yes, or for one of two classes; summed over three or more classes."""
    if target.is_floating_point():
        scores, truth, counts = _answers(x, target, mask)
        wrong = (scores if probable else op.Sigmoid(scores)) - truth
        return _share_of(wrong * wrong, counts)
    given = _scored(x, target, mask, ignore_index, axis)
    p = given.scores if probable else op.Softmax(given.scores, axis=-1)
    wrong = p - cast(one_hot(given.labels, given.classes), ir.DataType.FLOAT)
    half = 0.5 if given.classes == 2 else 1.0
    return _share_of(reductions.sum(wrong * wrong, 1) * half, given.counts)


@metric("bins" + _SCORES, better="min")
def ece(
    x: Tensor,
    target: Tensor,
    mask: Tensor | None = None,
    bins: int = 15,
    probable: bool | None = None,
    ignore_index: int | None = None,
    axis: int | None = None,
) -> Sums:
    """The expected calibration error ``Σ |hits − Σ p| / n`` over ``bins`` of equal width of the highest probability p.

    After Guo et al., "On Calibration of Modern Neural Networks" (2017), equation 3; a bin holds its upper end.
    """
    if target.is_floating_point():
        scores, truth, counts = _answers(x, target, mask)
        yes = scores if probable else op.Sigmoid(scores)
        p, hit = op.Max(yes, 1.0 - yes), (yes > 0.5) == (truth > 0.5)
    else:
        given = _scored(x, target, mask, ignore_index, axis)
        shares = given.scores if probable else op.Softmax(given.scores, axis=-1)
        p, counts = reductions.amax(shares, 1), given.counts
        hit = op.ArgMax(given.scores, axis=1, keepdims=0) == given.labels
    bin_of = op.Clip(op.Ceil(p * float(bins)) - 1.0, 0.0, float(bins - 1))
    places = op.Reshape(cast(bin_of, "int64"), [-1])
    rows = [scatter_add(zeros(bins), 0, places, op.Reshape(y * counts, [-1]))
            for y in (ones_like(p), p, cast(hit, ir.DataType.FLOAT))]  # fmt: skip
    return Sums(stack(rows), (3, bins), "calibration")


def _ranked(name: str, doc: str) -> Callable[..., Sums]:
    """Return a ranking metric: it outputs scores and labels, which are ranked at the end."""

    def ranked(
        x: Tensor,
        target: Tensor,
        mask: Tensor | None = None,
        average: str = "macro",
        probable: bool | None = None,
        ignore_index: int | None = None,
        axis: int | None = None,
    ) -> Sums:
        arguments = {"average": average, "probable": bool(probable)}
        if target.is_floating_point():
            scores, truth, counts = _answers(x, target, mask)
            width = x.shape[-1] if x.ndim == 2 else 1
            if not isinstance(width, int):
                raise ModelError(f"{name} requires a fixed number of answers, but there are {width} on the last axis")
            pairs = [op.Reshape(y, [-1, width]) for y in (scores, where(counts > 0.0, truth, -1.0))]
            return Sums(stack(pairs, 1), (2, width), name, arguments, rows=True)
        given = _scored(x, target, mask, ignore_index, axis)
        label = where(given.counts > 0.0, cast(given.labels, ir.DataType.FLOAT), -1.0)
        return Sums(cat([given.scores, label.unsqueeze(1)], 1), (given.classes + 1,), name, arguments, rows=True)

    ranked.__name__ = ranked.__qualname__ = name
    ranked.__doc__ = doc
    return metric("average" + _SCORES, better="max")(ranked)


roc_auc = _ranked(
    "roc_auc",
    "The area under the ROC curve, each class against the rest: how often a positive has a higher score than a "
    'negative, with ties counted half. Exact: an evaluation keeps all scores. "macro" skips classes without '
    "positives or negatives.",
)
average_precision = _ranked(
    "average_precision",
    "The mean precision over all positives, each class against the rest: ``Σ (recallₙ − recallₙ₋₁)·precisionₙ`` over "
    "scores. Exact: an evaluation keeps all of them.",
)


# --- numbers ---------------------------------------------------------------------------------------------


@metric(reads="numbers", better="min")
def mae(x: Tensor, target: Tensor, mask: Tensor | None = None) -> Sums:
    """``mean |x − t|``."""
    return _mean_of(lambda d: op.Abs(d), x, target, mask, "ratio")


@metric(reads="numbers", better="min")
def mse(x: Tensor, target: Tensor, mask: Tensor | None = None) -> Sums:
    """``mean (x − t)²``."""
    return _mean_of(lambda d: d * d, x, target, mask, "ratio")


@metric(reads="numbers", better="min")
def rmse(x: Tensor, target: Tensor, mask: Tensor | None = None) -> Sums:
    """``√ mean (x − t)²``."""
    return _mean_of(lambda d: d * d, x, target, mask, "root")


def _mean_of(of: Callable[[Tensor], Tensor], x: Tensor, target: Tensor, mask: Tensor | None, finish: str) -> Sums:
    a, b = pair(x, target)
    each = cast(of(a - b), ir.DataType.FLOAT)
    counted = ones_like(each) if mask is None else _spread(mask, each)
    return Sums(stack([reductions.sum(each * counted), reductions.sum(counted)]), (2,), finish)


@metric(reads="numbers", better="max")
def r2(x: Tensor, target: Tensor, mask: Tensor | None = None) -> Sums:
    """``1 − Σ (t − x)² / Σ (t − mean t)²``, averaged over the last axis if there are several."""
    a, t, counted, width = _columns("r2", x, target, mask)
    errors = op.ReduceSum(op.Reshape((t - a) * (t - a) * counted, [-1, width]), [0], keepdims=0)
    return _shifted("r2_shifted", [*_moments(t, counted, width), cast(errors, ir.DataType.DOUBLE)], width)


@metric(reads="numbers", better="min")
def mape(x: Tensor, target: Tensor, mask: Tensor | None = None) -> Sums:
    """``mean |x − t| / max(|t|, 2.2e-16)``, as a fraction, not in percent; unsuitable for targets near 0."""
    a, b = pair(x, target)
    each = op.Abs(cast(a - b, ir.DataType.FLOAT)) / op.Max(op.Abs(cast(b, ir.DataType.FLOAT)), _EPSILON)
    return _share_of(each, ones_like(each) if mask is None else _spread(mask, each))


_EPSILON = 2.0**-52  # scikit-learn's


@metric(reads="numbers", better="max")
def explained_variance(x: Tensor, target: Tensor, mask: Tensor | None = None) -> Sums:
    """``1 − Var(t − x) / Var t``, averaged over the last axis if there are several: r2 except for a constant error."""
    a, t, counted, width = _columns("explained_variance", x, target, mask)
    moments = [*_moments(t, counted, width), *_moments(t - a, counted, width)]
    return _shifted("explained_variance_shifted", moments, width)


def _moments(t: Tensor, counted: Tensor, width: int) -> list[Tensor]:
    """``[n, Σ p, Σ d, Σ p², Σ 2·p·d, Σ d²]`` in float64 with ``t = p + d``. The pivot ``p`` is the mean of this batch,
    rounded to 9 bits: its sums and those of its square are exact, and ``d`` is small, so no digits are lost between
    them.
    """
    t, counted = (op.Reshape(cast(y, ir.DataType.DOUBLE), [-1, width]) for y in (t, counted))
    count = op.ReduceSum(counted, [0], keepdims=0)
    mean = op.ReduceSum(t * counted, [0], keepdims=0) / op.Max(count, 1.0)
    size = op.Max(op.Abs(mean), 1e-300)
    unit = op.Pow(tensor(2.0, ir.DataType.DOUBLE), op.Floor(op.Log(size) * (1.0 / np.log(2.0))) - 8.0)
    pivot = op.Round(mean / unit) * unit
    rest = (t - pivot) * counted
    rests, squares = (op.ReduceSum(y, [0], keepdims=0) for y in (rest, rest * rest))
    return [count, count * pivot, rests, count * pivot * pivot, 2.0 * pivot * rests, squares]


def _shifted(finish: str, rows: list[Tensor], width: int) -> Sums:
    """Split float64 numbers into three float32 numbers each, which add up to them."""
    rest, addends = stack(rows), []
    for _ in range(3):
        addends.append(cast(rest, ir.DataType.FLOAT))
        rest = rest - cast(addends[-1], ir.DataType.DOUBLE)
    return Sums(stack(addends), (3, len(rows), width), finish)


def _columns(name: str, x: Tensor, target: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor, Tensor, int]:
    """Return prediction, target and mask, as float32, and the number of values on the last axis."""
    a, t = (cast(y, ir.DataType.FLOAT) for y in pair(x, target))
    width = t.shape[-1] if t.ndim > 1 else 1
    if not isinstance(width, int):
        raise ModelError(f"{name} requires a fixed number of values on the last axis, but there are {width}")
    return a, t, ones_like(t) if mask is None else _spread(mask, t), width

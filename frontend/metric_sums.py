"""Metrics, computed from sums over the samples of each batch: sums are added up over batches, and a function in
``FINISHES`` computes the metric from the total.

Ranking metrics are not sums; they return a row for each sample instead.
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
from gradgraph.frontend.losses_values import binary_cross_entropy, binary_cross_entropy_with_logits
from gradgraph.frontend.pointwise import cast, logical_and, logical_not, logical_or, real, where
from gradgraph.frontend.reductions import topk
from gradgraph.frontend.shaping import cat, movedim, stack
from gradgraph.frontend.subscripts import one_hot, ones_like, scatter_add, take_along_dim, zeros
from gradgraph.frontend.trace import op
from gradgraph.rivals import entries
from gradgraph.step.finishes import AVERAGES, KAPPA_WEIGHTS

if TYPE_CHECKING:
    from gradgraph.frontend.tensor import Tensor

Reads = Literal["classes", "scores", "numbers", "sequences"]
Better = Literal["min", "max"] | None


class Sums(NamedTuple):
    """The contribution of a batch to a metric.

    Attributes:
        sums: sums over the samples.
        shape: the shape of ``sums``, which is fixed.
        finish: the name of the function that computes the value of the metric from the total of all batches.
        arguments: further arguments of that function.
        rows: whether ``sums`` contains a row of shape ``shape`` per sample instead of sums; the function ``finish``
            then gets the rows of all batches.
    """

    sums: Tensor
    shape: tuple[int, ...]
    finish: str
    arguments: Mapping[str, Any] = {}
    rows: bool = False


class Share(NamedTuple):
    """Numerators and denominators of a metric, per element of a batch; it is ``Σ above / Σ below`` over all batches."""

    above: Tensor
    below: Tensor


@dataclass(frozen=True)
class Metric:
    """A metric with its options, called with a traced prediction and target (and a mask); it returns ``Sums``.

    Args:
        name: the name of the metric.
        function: the function of prediction, target and mask, which gets ``arguments`` by name.
        arguments: the options of the metric.
        column: the name of the metric's column in the history.
        reads: the kind of data that the metric compares: "classes" (class indices or binary targets), "scores" (scores
            of classes with class indices), "numbers" or "sequences" (of labels).
        better: "min" if low values are better, "max" if high values are better, else None.
        as_number: whether a step with a single loss also outputs ``number``, the value for a batch, for other runtimes.
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
        """Return the value of a ratio metric for a single batch, computed in the graph; 0 if all labels are ignored."""
        found = self.function(prediction, target, None, **self.arguments)
        assert isinstance(found, Share)
        total = reductions.sum(cast(found.below, ir.DataType.FLOAT))
        return reductions.sum(cast(found.above, ir.DataType.FLOAT)) / op.Max(total, 1.0)

    @property
    def ranks(self) -> bool:
        """Whether the metric depends on the values of scores, and not only on the predicted class."""
        return "probable" in self.arguments

    def bound(self, axis: int, ignore_index: int | None, probable: bool = False) -> Metric:
        """Return a copy whose options ``axis``, ``ignore_index`` and ``probable``, where None, are set to these values.

        Args:
            axis: the class axis.
            ignore_index: the ignored label.
            probable: whether scores are probabilities.
        """
        known = {"axis": axis, "ignore_index": ignore_index, "probable": probable}
        filled = {name: known[name] if value is None and name in known else value
                  for name, value in self.arguments.items()}  # fmt: skip
        return replace(self, arguments=filled)

    def check_fits(self, loss: Loss) -> None:
        """Raise BuildError unless the metric applies to the kind of target of ``loss``."""
        if loss.labels and self.reads == "numbers":
            raise BuildError(
                f"the metric '{self.name}' compares numbers, but the targets of the loss are class indices; use a "
                "metric of classes, such as accuracy"
            )
        if self.reads == "sequences" and loss.spelt:
            return
        fits = self.reads == "numbers" or loss.soft or (self.reads == "classes" and loss.binary)
        if not loss.labels and not fits:
            raise BuildError(
                f"the metric '{self.name}' requires a loss whose targets are class indices, such as cross_entropy"
            )


Formula = TypeVar("Formula", bound=Callable[..., "Sums | Share"])
METRICS: Makers[Metric] = Makers("metric", Metric, "gradgraph.metrics", "top_k(k=3)", entries.METRICS)
_LABELS = " ignore_index axis"
_SCORES = " probable ignore_index axis"


def metric(
    options: str = "", *, reads: Reads = "classes", better: Better = None, column: str = "", as_number: bool = False
) -> Callable[[Formula], Formula]:
    """Return a decorator that registers a function of prediction, target and mask in ``gradgraph.metrics``, under the
    name of the function.

    Args:
        options: the arguments that users may pass, in order, separated by spaces; each has a default.
        reads, better, as_number: as for ``Metric``.
        column: the column in the history, a template that is formatted with the options; by default the name.
    """

    def register(function: Formula) -> Formula:
        name = function.__name__

        def make(arguments: dict[str, Any]) -> Metric:
            if (average := arguments.get("average", "macro")) not in AVERAGES:
                words = ", ".join(f"'{a}'" for a in AVERAGES)
                raise BuildError(f"the average of {name} is '{shown(average)}'; use one of {words}")
            if (weights := arguments.get("weights")) not in KAPPA_WEIGHTS:
                raise BuildError(f"the weights of {name} are '{shown(weights)}'; use 'linear', 'quadratic' or None")
            if arguments.get("bins", 1) < 1:
                raise BuildError(f"bins of {name} is {arguments['bins']}, but must be at least 1")
            if arguments.get("k", 1) < 1:
                raise BuildError(f"k of {name}, the number of best scores, is {arguments['k']}, but must be at least 1")
            return Metric(name, function, arguments, column.format(**arguments) or name, reads, better, as_number)

        METRICS.add(name, recipe(name, function, options, make))
        return function

    return register


def share(above: Tensor, below: Tensor) -> Sums:
    """Return the sums of the ratio metric ``Σ above / Σ below``."""
    parts = [reductions.sum(cast(x, ir.DataType.FLOAT)) for x in (above, below)]
    return Sums(stack(parts), (2,), "ratio")


# --- class indices ---------------------------------------------------------------------------------------


def _counted(target: Tensor, mask: Tensor | None, ignore_index: int | None) -> Tensor:
    """Return a boolean mask of the labels that are neither ignored nor masked."""
    counted = target != (-100 if ignore_index is None else ignore_index)
    return counted if mask is None else logical_and(counted, mask)


def _along(axis: int | None) -> int:
    return 1 if axis is None else axis


@metric(_LABELS, better="max", as_number=True)
def accuracy(
    x: Tensor, target: Tensor, mask: Tensor | None = None, ignore_index: int | None = None, axis: int | None = None
) -> Share:
    """The share of correctly classified labels other than ``ignore_index``; for binary targets, by the sign of x."""
    if target.is_floating_point():
        hit = (real(x) > 0.0) == (target > 0.5)
        counts = counts_of(mask, hit)
        return Share(cast(hit, "float32") * counts, counts)
    counted = _counted(target, mask, ignore_index)
    hit = op.ArgMax(x, axis=classes_at(x, _along(axis)), keepdims=0) == target
    return Share(logical_and(hit, counted), counted)


def counts_of(mask: Tensor | None, x: Tensor) -> Tensor:
    """Return float32 weights of the shape of ``x``: all 1, or ``mask``, whose axes are the leading axes of ``x``."""
    if mask is None:
        return ones_like(cast(x, ir.DataType.FLOAT))
    extra = list(range(mask.ndim, x.ndim))
    factor = cast(mask, ir.DataType.FLOAT)
    return op.Expand(op.Unsqueeze(factor, extra) if extra else factor, op.Shape(x))


@metric(_LABELS, reads="scores", better="max")
def token_accuracy(
    x: Tensor, target: Tensor, mask: Tensor | None = None, ignore_index: int | None = None, axis: int = -1
) -> Share:
    """The share of correct tokens, without padding (``ignore_index``); classes are on the last axis."""
    return accuracy(x, target, mask, ignore_index, axis)


@metric(reads="numbers", better="max")
def reward_accuracy(x: Tensor, target: Tensor, mask: Tensor | None = None) -> Share:
    """The share of pairs in which the log-probability of the chosen answer increased more, relative to the reference
    model, than that of the rejected one.
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
    """The share of labels whose score is among the ``k`` largest scores of the classes."""
    at, counted = classes_at(x, _along(axis)), _counted(target, mask, ignore_index)
    classes = x.shape[at]
    best = topk(x, min(k, classes) if isinstance(classes, int) else k, at).indices
    return Share(logical_and(reductions.any(best == target.unsqueeze(at), at), counted), counted)


@metric(_LABELS, reads="scores", better="min")
def perplexity(
    x: Tensor, target: Tensor, mask: Tensor | None = None, ignore_index: int | None = None, axis: int | None = None
) -> Sums:
    """``exp`` of the mean cross entropy, over the labels that are not ignored."""
    ignored = -100 if ignore_index is None else ignore_index
    counted = _counted(target, mask, ignored)
    kept = where(counted, target, ignored)
    losses = reductions.sum(cross_entropy(cast(x, ir.DataType.FLOAT), kept, None, ignored, "none", axis=_along(axis)))
    return Sums(stack([losses, reductions.sum(cast(counted, ir.DataType.FLOAT))]), (2,), "exponential")


@metric(_LABELS)
def confusion_matrix(
    x: Tensor, target: Tensor, mask: Tensor | None = None, ignore_index: int | None = None, axis: int | None = None
) -> Sums:
    """The number of samples by true class (row) and predicted class (column); for binary targets, negative is first."""
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
        counted = counts_of(mask, called)
        labels = target.shape[classes_at(x, _along(axis))] if target.ndim > 1 else 1
        if isinstance(labels, int) and labels > 1 and "average" in arguments:
            return _of_labels(finish, truth * 2 + called, counted, labels, classes_at(x, _along(axis)), arguments)
    else:
        at, flags = classes_at(x, _along(axis)), _counted(target, mask, ignore_index)
        size = x.shape[at]
        if not isinstance(size, int):
            raise ModelError(
                "a confusion matrix requires a fixed number of classes, but the class axis has the symbolic size "
                f"{size}"
            )
        called, truth, classes = op.ArgMax(x, axis=at, keepdims=0), where(flags, target, 0), size
        counted = cast(flags, ir.DataType.FLOAT)
    places, counts = (op.Reshape(y, [-1]) for y in (truth * classes + called, counted))
    matrix = scatter_add(zeros(classes * classes), 0, places, counts)
    return Sums(matrix, (classes, classes), finish, arguments)


def _of_labels(
    finish: str, places: Tensor, counted: Tensor, labels: int, axis: int, arguments: Mapping[str, Any]
) -> Sums:
    """Return the sums of a metric that ``finish`` computes from a 2×2 table per label, of true (row) and predicted
    (column) values. ``places`` is the cell of each element in its table: ``2·truth + prediction``.
    """
    shape = [1] * axis + [labels] + [1] * (places.ndim - axis - 1)
    places = places + np.arange(0, 4 * labels, 4).reshape(shape)
    places, counts = (op.Reshape(y, [-1]) for y in (places, counted))
    return Sums(scatter_add(zeros(4 * labels), 0, places, counts), (labels, 2, 2), f"label_{finish}", arguments)


def _of_matrix(name: str, doc: str, option: str = "average") -> Callable[..., Sums]:
    """Register and return the metric ``name`` of a confusion matrix, with the docstring ``doc``.

    ``option`` is its own option: "average", "weights" or, if it has none, "".
    """

    def of_matrix(
        x: Tensor,
        target: Tensor,
        mask: Tensor | None = None,
        average: str = "macro",
        weights: str | None = None,
        ignore_index: int | None = None,
        axis: int | None = None,
    ) -> Sums:
        own = {key: value for key, value in (("average", average), ("weights", weights)) if key == option}
        return _from_matrix(name, x, target, mask, ignore_index, axis, **own)

    of_matrix.__name__ = of_matrix.__qualname__ = name
    of_matrix.__doc__ = doc
    return metric(option + _LABELS, better="max")(of_matrix)


precision = _of_matrix(
    "precision",
    'The share of correct predictions among the predictions of a class, averaged over classes; "none" returns one '
    "value per class.",
)
recall = _of_matrix(
    "recall",
    'The share of the samples of a class that are predicted as such, averaged over classes; "none" returns one value '
    "per class.",
)
f1 = _of_matrix(
    "f1",
    '``2·precision·recall / (precision + recall)`` of each class, averaged over classes; "none" returns one value per '
    "class.",
)
iou = _of_matrix(
    "iou",
    "Intersection over union of the predicted and the true samples of a class, averaged over classes; "
    '"none" returns one value per class.',
)


balanced_accuracy = _of_matrix("balanced_accuracy", "The mean recall over the classes that occur in the targets.", "")
mcc = _of_matrix("mcc", "Matthews' correlation coefficient of predicted and true classes; 0 if either is constant.", "")
cohen_kappa = _of_matrix(
    "cohen_kappa",
    'Cohen\'s κ, the agreement beyond chance; for ordered classes, ``weights`` are "linear" or "quadratic".',
    "weights",
)


@metric(_LABELS, better="max")
def exact_match(
    x: Tensor, target: Tensor, mask: Tensor | None = None, ignore_index: int | None = None, axis: int = -1
) -> Share:
    """The share of samples (such as texts) whose labels, other than ``ignore_index``, are all correct."""
    if target.is_floating_point():
        hit = (real(x) > 0.0) == (target > 0.5)
        counted = cast(counts_of(mask, hit), "bool")
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
    """Scores ``[rows, classes]``, class indices (0 if ignored) and weights (0 if ignored, else 1) per label."""

    scores: Tensor
    labels: Tensor
    counts: Tensor
    classes: int


def _scored(x: Tensor, target: Tensor, mask: Tensor | None, ignore_index: int | None, axis: int | None) -> _Scored:
    at, flags = classes_at(x, _along(axis)), _counted(target, mask, ignore_index)
    size = x.shape[at]
    if not isinstance(size, int):
        raise ModelError(
            f"class probabilities require a fixed number of classes, but the class axis has the symbolic size {size}"
        )
    scores = op.Reshape(movedim(cast(x, ir.DataType.FLOAT), at, -1), [-1, size])
    labels, counts = (op.Reshape(y, [-1]) for y in (where(flags, target, 0), cast(flags, ir.DataType.FLOAT)))
    return _Scored(scores, labels, counts, size)


def _answers(x: Tensor, target: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Return scores, binary targets (1 or 0) and weights (0 if masked, else 1), in float32 and of equal shapes."""
    scores, truth = (cast(y, ir.DataType.FLOAT) for y in (x, target > 0.5))
    return scores, truth, counts_of(mask, truth)


def mean_of(each: Tensor, counts: Tensor, finish: str = "ratio") -> Sums:
    """Return the sums of the metric ``Σ counts·each / Σ counts``, or of its square root (``finish="root"``)."""
    return Sums(stack([reductions.sum(each * counts), reductions.sum(counts)]), (2,), finish)


@metric(_SCORES, better="min")
def log_loss(
    x: Tensor,
    target: Tensor,
    mask: Tensor | None = None,
    probable: bool | None = None,
    ignore_index: int | None = None,
    axis: int | None = None,
) -> Sums:
    """The mean of ``−log p`` of the true class; ``p`` is the Softmax or Sigmoid of the scores, or, if ``probable``, the
    scores themselves.
    """
    if target.is_floating_point():
        scores, truth, counts = _answers(x, target, mask)
        loss = binary_cross_entropy if probable else binary_cross_entropy_with_logits
        return mean_of(loss(scores, truth, None, "none"), counts)
    given = _scored(x, target, mask, ignore_index, axis)
    if not probable:
        return mean_of(cross_entropy(given.scores, given.labels, reduction="none"), given.counts)
    true = op.Squeeze(take_along_dim(given.scores, given.labels.unsqueeze(1), 1), [1])
    return mean_of(binary_cross_entropy(true, ones_like(true), None, "none"), given.counts)


@metric(_SCORES, better="min")
def brier(
    x: Tensor,
    target: Tensor,
    mask: Tensor | None = None,
    probable: bool | None = None,
    ignore_index: int | None = None,
    axis: int | None = None,
) -> Sums:
    """Brier's score, ``mean (p − t)²``: of one class for binary targets or two classes; else summed over classes."""
    if target.is_floating_point():
        scores, truth, counts = _answers(x, target, mask)
        wrong = (scores if probable else op.Sigmoid(scores)) - truth
        return mean_of(wrong * wrong, counts)
    given = _scored(x, target, mask, ignore_index, axis)
    p = given.scores if probable else op.Softmax(given.scores, axis=-1)
    wrong = p - cast(one_hot(given.labels, given.classes), ir.DataType.FLOAT)
    half = 0.5 if given.classes == 2 else 1.0
    return mean_of(reductions.sum(wrong * wrong, 1) * half, given.counts)


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
    """The expected calibration error ``Σ |hits − Σ p| / n`` over ``bins`` of equal width, by the highest probability p.

    After Guo et al., "On Calibration of Modern Neural Networks" (2017), equation 3; bins include their upper end.
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
    """Register and return the metric ``name``, computed at the end by ranking the samples of all batches."""

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
                raise ModelError(
                    f"{name} requires a fixed number of outputs, but the last axis has the symbolic size {width}"
                )
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
    'negative; ties count one half. It is exact, as an evaluation keeps all scores. "macro" skips classes without '
    "positives or negatives.",
)
average_precision = _ranked(
    "average_precision",
    "The mean precision over all positives, each class against the rest: ``Σ (recallₙ − recallₙ₋₁)·precisionₙ`` over "
    "scores. It is exact, as an evaluation keeps all scores.",
)

"""Metrics as sums over the samples of a batch, which are carried from batch to batch and finished at the end."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeVar

import onnx_ir as ir

from gradgraph.arguments import Makers
from gradgraph.errors import BuildError, ModelError, shown
from gradgraph.frontend import reductions
from gradgraph.frontend.loss import Loss, recipe
from gradgraph.frontend.losses_classes import classes_at, cross_entropy
from gradgraph.frontend.losses_values import pair
from gradgraph.frontend.pointwise import cast, logical_and, real, where
from gradgraph.frontend.reductions import topk
from gradgraph.frontend.shaping import stack
from gradgraph.frontend.subscripts import ones_like, scatter_add, zeros
from gradgraph.frontend.trace import op, tensor
from gradgraph.rivals import entries
from gradgraph.step.finishes import AVERAGES

if TYPE_CHECKING:
    from gradgraph.frontend.tensor import Tensor

Reads = Literal["classes", "scores", "numbers"]
Better = Literal["min", "max"] | None


class Sums(NamedTuple):
    """The value of a metric for a batch: sums of a fixed shape, and the name of the finish for their total."""

    sums: Tensor
    shape: tuple[int, ...]
    finish: str
    arguments: Mapping[str, Any] = {}


class Share(NamedTuple):
    """A metric of a batch that is a quotient, before it is added up: ``Σ above / Σ below``."""

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
        reads: targets that it compares with: "classes" (or yes and no), "scores" (a score for each class, never yes
            and no), or "numbers".
        better: whether a low value is better ("min") or a high one ("max"); None if neither is.
        as_number: a step with one plain loss gives its ``number``, which everyone who runs the step can read.
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
        """The share of one batch, finished in the graph; 0 where nothing counts."""
        found = self.function(prediction, target, None, **self.arguments)
        assert isinstance(found, Share)
        total = reductions.sum(cast(found.below, ir.DataType.FLOAT))
        return reductions.sum(cast(found.above, ir.DataType.FLOAT)) / op.Max(total, 1.0)

    def bound(self, axis: int, ignore_index: int | None) -> Metric:
        """Take the class axis and the ignored label from a loss if the options do not set them."""
        known = {"axis": axis, "ignore_index": ignore_index}
        filled = {name: known[name] if value is None and name in known else value
                  for name, value in self.arguments.items()}  # fmt: skip
        return replace(self, arguments=filled)

    def check_fits(self, loss: Loss) -> None:
        """Raise BuildError unless it can compare what ``loss`` compares."""
        if loss.labels and self.reads == "numbers":
            raise BuildError(f"the metric '{self.name}' compares numbers, and the loss has class numbers")
        if not loss.labels and not (self.reads == "numbers" or (self.reads == "classes" and loss.binary)):
            raise BuildError(f"the metric '{self.name}' needs a loss on class numbers, such as cross_entropy")


Formula = TypeVar("Formula", bound=Callable[..., "Sums | Share"])
METRICS: Makers[Metric] = Makers("metric", Metric, "gradgraph.metrics", "top_k(k=3)", entries.METRICS)
_LABELS = " ignore_index axis"


def metric(
    options: str = "", *, reads: Reads = "classes", better: Better = None, column: str = "", as_number: bool = False
) -> Callable[[Formula], Formula]:
    """Make a function of prediction, target and mask known to ``gradgraph.metrics`` by its name.

    Args:
        options: its arguments that users give, in their order; each has a default.
        reads, better, as_number: as for ``Metric``.
        column: of the history, formatted with the options; by default the name.
    """

    def register(function: Formula) -> Formula:
        name = function.__name__

        def make(arguments: dict[str, Any]) -> Metric:
            if (average := arguments.get("average", "macro")) not in AVERAGES:
                words = ", ".join(f"'{a}'" for a in AVERAGES)
                raise BuildError(f"{name} averages by one of {words}, not by '{shown(average)}'")
            if arguments.get("k", 1) < 1:
                raise BuildError(f"{name} counts the k largest scores, at least one, not {arguments['k']}")
            return Metric(name, function, arguments, column.format(**arguments) or name, reads, better, as_number)

        METRICS.add(name, recipe(name, function, options, make))
        return function

    return register


def share(above: Tensor, below: Tensor) -> Sums:
    """``Σ above / Σ below``."""
    parts = [reductions.sum(cast(x, ir.DataType.FLOAT)) for x in (above, below)]
    return Sums(stack(parts), (2,), "ratio")


# --- class numbers ---------------------------------------------------------------------------------------


def _counted(target: Tensor, mask: Tensor | None, ignore_index: int | None) -> Tensor:
    """Return which labels count."""
    counted = target != (-100 if ignore_index is None else ignore_index)
    return counted if mask is None else logical_and(counted, mask)


def _along(axis: int | None) -> int:
    return 1 if axis is None else axis


@metric(_LABELS, better="max", as_number=True)
def accuracy(
    x: Tensor, target: Tensor, mask: Tensor | None = None, ignore_index: int | None = None, axis: int | None = None
) -> Share:
    """The share of labels that the largest score hits, over those that count; of numbers, by their side of 0."""
    if target.is_floating_point():
        hit = (real(x) > 0.0) == (target > 0.5)
        counts = ones_like(cast(hit, "float32")) if mask is None else _spread(mask, hit)
        return Share(cast(hit, "float32") * counts, counts)
    counted = _counted(target, mask, ignore_index)
    hit = op.ArgMax(x, axis=classes_at(x, _along(axis)), keepdims=0) == target
    return Share(logical_and(hit, counted), counted)


def _spread(mask: Tensor, x: Tensor) -> Tensor:
    """``mask``, which belongs to the first axes, as a factor of each element."""
    extra = list(range(mask.ndim, x.ndim))
    factor = cast(mask, ir.DataType.FLOAT)
    return op.Expand(op.Unsqueeze(factor, extra) if extra else factor, op.Shape(x))


@metric(_LABELS, reads="scores", better="max")
def token_accuracy(
    x: Tensor, target: Tensor, mask: Tensor | None = None, ignore_index: int | None = None, axis: int = -1
) -> Share:
    """The share of tokens that are hit, over those that are no padding (``ignore_index``); classes on the last axis."""
    return accuracy(x, target, mask, ignore_index, axis)


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
    """``exp`` of the mean cross entropy of the labels that count."""
    ignored = -100 if ignore_index is None else ignore_index
    counted = _counted(target, mask, ignored)
    kept = where(counted, target, ignored)
    losses = reductions.sum(cross_entropy(cast(x, ir.DataType.FLOAT), kept, None, ignored, "none", axis=_along(axis)))
    return Sums(stack([losses, reductions.sum(cast(counted, ir.DataType.FLOAT))]), (2,), "exponential")


@metric(_LABELS)
def confusion_matrix(
    x: Tensor, target: Tensor, mask: Tensor | None = None, ignore_index: int | None = None, axis: int | None = None
) -> Sums:
    """How often each class (row) was called each class (column); of numbers, ≤ 0 and > 0."""
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
    else:
        at, flags = classes_at(x, _along(axis)), _counted(target, mask, ignore_index)
        size = x.shape[at]
        if not isinstance(size, int):
            raise ModelError(f"a confusion matrix needs a fixed number of classes, but there are {size} scores")
        called, truth, classes = op.ArgMax(x, axis=at, keepdims=0), where(flags, target, 0), size
        counted = cast(flags, ir.DataType.FLOAT)
    places, counts = (op.Reshape(y, [-1]) for y in (truth * classes + called, counted))
    matrix = scatter_add(zeros(classes * classes), 0, places, counts)
    return Sums(matrix, (classes, classes), finish, arguments)


def _averaged(name: str, doc: str) -> Callable[..., Sums]:
    """Make a metric that each class has."""

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
    "precision", 'Of what is called a class the share that is one, averaged over classes; "none" gives each.'
)
recall = _averaged("recall", 'Of what is a class the share that is found, averaged over classes; "none" gives each.')
f1 = _averaged("f1", '``2·precision·recall / (precision + recall)`` of each class, averaged; "none" gives each.')
iou = _averaged(
    "iou",
    'What is a class and called so over what is the one or the other, averaged over classes; "none" gives each.',
)


@metric(_LABELS, better="max")
def balanced_accuracy(
    x: Tensor, target: Tensor, mask: Tensor | None = None, ignore_index: int | None = None, axis: int | None = None
) -> Sums:
    """The mean recall of the classes that there are."""
    return _from_matrix("balanced_accuracy", x, target, mask, ignore_index, axis)


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
    """``1 − Σ (t − x)² / Σ (t − mean t)²``, the mean over the last axis where there are several."""
    a, t = (cast(y, ir.DataType.FLOAT) for y in pair(x, target))
    width = t.shape[-1] if t.ndim > 1 else 1
    if not isinstance(width, int):
        raise ModelError(f"r2 needs a fixed number of values on the last axis, but there are {width}")
    counted = ones_like(t) if mask is None else _spread(mask, t)
    rows = [op.ReduceSum(op.Reshape(y * counted, [-1, width]), [0], keepdims=0)
            for y in (tensor(1.0), t, t * t, (t - a) * (t - a))]  # fmt: skip
    return Sums(stack(rows), (4, width), "r2")

"""Losses and metrics, written as plain ONNX nodes on a model's output.

Names, arguments and defaults are those of ``torch.nn.functional``; ``axis`` (the classes, default 1) is ours, so that
models with classes on the last axis need no transpose.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx_ir as ir

from gradgraph.arguments import NUMBER, NUMBERS, TEXT, WHOLE, Kind, checked
from gradgraph.builder import Builder, Var
from gradgraph.errors import BuildError, shown
from gradgraph.named import make_named
from gradgraph.shapes import Shape

Emit = Callable[[Builder, Var, Var], Var]


@dataclass(frozen=True)
class Loss:
    """How a prediction and a target become a scalar.

    Args:
        name, arguments: for the manifest.
        emit: ``emit(op, prediction, target)`` gives the scalar.
        labels: targets are class numbers (int64, the class axis left out); else they look like the prediction.
        axis: the class axis of the prediction, where targets are class numbers.
        ignore_index: the label that does not count.
    """

    name: str
    emit: Emit
    labels: bool = False
    axis: int = 1
    ignore_index: int | None = None
    arguments: Mapping[str, Any] = field(default_factory=dict)

    def target_type(self, prediction: Var) -> tuple[ir.DataType, Shape | None]:
        """Element type and shape of the target that belongs to ``prediction``."""
        shape = prediction.shape
        if not self.labels:
            return prediction.dtype, shape
        if shape is not None:
            axis = class_axis(shape, self.axis)
            shape = (*shape[:axis], *shape[axis + 1 :])
        return ir.DataType.INT64, shape

    def classes(self, prediction: Var) -> int | None:
        """How many classes there are, where targets are class numbers and the model says so."""
        if not self.labels or prediction.shape is None:
            return None
        size = prediction.shape[class_axis(prediction.shape, self.axis)]
        return size if isinstance(size, int) else None


def class_axis(shape: Shape, axis: int) -> int:
    """``axis`` counted from the front; a prediction without a batch axis has its classes on axis 0, as in PyTorch."""
    rank = len(shape)
    if rank == 0:
        raise BuildError("a classification loss needs an axis of classes, but the model's output is a scalar")
    if rank == 1:
        return 0
    if not -rank <= axis < rank:
        raise BuildError(f"the model's output has {rank} axes, so the classes cannot lie on axis {axis}")
    return axis % rank


# --- classification --------------------------------------------------------------------------------------


_WEIGHTS = Kind("a number or a list of numbers", lambda value: NUMBER.fits(value) or NUMBERS.fits(value))


@checked(weight=NUMBERS.or_none(), ignore_index=WHOLE, reduction=TEXT, label_smoothing=NUMBER, axis=WHOLE)
def cross_entropy(
    weight: Sequence[float] | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    axis: int = 1,
) -> Loss:
    """``−Σ w[t]·log softmax(x)[t] / Σ w[t]`` over labels other than ``ignore_index`` (``F.cross_entropy``)."""
    _check_reduction(reduction)
    if not 0.0 <= label_smoothing <= 1.0:
        raise BuildError(f"label_smoothing must lie in [0, 1], but is {label_smoothing}")

    def emit(op: Builder, x: Var, target: Var) -> Var:
        log_p = op.LogSoftmax(x, axis=class_axis(x.shape or (None,) * x.rank, axis))
        return _likelihood(op, log_p, target, axis, ignore_index, weight, reduction, label_smoothing)

    arguments = {
        "weight": weight,
        "ignore_index": ignore_index,
        "reduction": reduction,
        "label_smoothing": label_smoothing,
    }
    return Loss("cross_entropy", emit, True, axis, ignore_index, {**arguments, "axis": axis})


@checked(weight=NUMBERS.or_none(), ignore_index=WHOLE, reduction=TEXT, axis=WHOLE)
def nll(
    weight: Sequence[float] | None = None, ignore_index: int = -100, reduction: str = "mean", axis: int = 1
) -> Loss:
    """``−Σ w[t]·x[t] / Σ w[t]``, where the model gives log-probabilities (``F.nll_loss``)."""
    _check_reduction(reduction)

    def emit(op: Builder, x: Var, target: Var) -> Var:
        return _likelihood(op, x, target, axis, ignore_index, weight, reduction, 0.0)

    arguments = {"weight": weight, "ignore_index": ignore_index, "reduction": reduction, "axis": axis}
    return Loss("nll", emit, True, axis, ignore_index, arguments)


def _likelihood(
    op: Builder,
    log_p: Var,
    target: Var,
    axis: int,
    ignore_index: int,
    weight: Sequence[float] | None,
    reduction: str,
    smoothing: float,
) -> Var:
    at = class_axis(log_p.shape or (None,) * log_p.rank, axis)
    counted = op.Not(op.Equal(target, ignore_index))
    safe = op.Where(counted, target, 0)
    picked = op.Squeeze(op.GatherElements(log_p, op.Unsqueeze(safe, [at]), axis=at), [at])
    picked = op.Where(counted, picked, 0.0)  # not times 0: the class that stands in for an ignored label may be at −∞
    share = op.cast(counted, log_p.dtype)
    if weight is not None:
        weights = op.const(np.asarray(weight, log_p.dtype.numpy()))
        share = share * op.Gather(weights, safe)
    total = -_sum(op, picked * share)
    if smoothing:
        spread = log_p if weight is None else log_p * _along(op, weights, log_p, at)
        even = op.Where(counted, op.ReduceMean(spread, [at], keepdims=0), 0.0)
        total = (1.0 - smoothing) * total - smoothing * _sum(op, even)
    return op.cast(total if reduction == "sum" else total / _sum(op, share), log_p.dtype)


def _sum(op: Builder, x: Var) -> Var:
    """Σ x; in float32 where x is float16, which ends at 65,504: so many labels, or so large a sum of their losses."""
    return op.ReduceSum(op.cast(x, ir.DataType.FLOAT) if x.dtype == ir.DataType.FLOAT16 else x, keepdims=0)


def _along(op: Builder, vector: Var, x: Var, axis: int) -> Var:
    """``vector`` reshaped so that it broadcasts along ``axis`` of ``x``."""
    return op.Reshape(vector, [-1] + [1] * (x.rank - axis - 1))


# --- regression ------------------------------------------------------------------------------------------


@checked(reduction=TEXT)
def mse(reduction: str = "mean") -> Loss:
    """``mean (x − t)²`` (``F.mse_loss``)."""

    def each(op: Builder, x: Var, t: Var) -> Var:
        d = x - t
        return d * d

    return _regression("mse", each, reduction)


@checked(reduction=TEXT)
def l1(reduction: str = "mean") -> Loss:
    """``mean |x − t|`` (``F.l1_loss``)."""
    return _regression("l1", lambda op, x, t: op.Abs(x - t), reduction)


@checked(delta=NUMBER, reduction=TEXT)
def huber(delta: float = 1.0, reduction: str = "mean") -> Loss:
    """``d²/2`` where ``d = |x − t| < δ``, else ``δ·(d − δ/2)`` (``F.huber_loss``)."""
    if not 0.0 < delta < math.inf:
        raise BuildError(f"delta must be a finite number above zero, but is {delta}")

    def each(op: Builder, x: Var, t: Var) -> Var:
        d = op.Abs(x - t)
        near = op.Min(d, delta)
        return near * (d - 0.5 * near)

    return _regression("huber", each, reduction, delta=delta)


@checked(
    pos_weight=Kind("a number or a list of numbers", lambda v: NUMBER.fits(v) or NUMBERS.fits(v)).or_none(),
    reduction=TEXT,
)
def bce_with_logits(pos_weight: float | Sequence[float] | None = None, reduction: str = "mean") -> Loss:
    """``mean max(x, 0) − x·t + log(1 + e^−|x|)`` (``F.binary_cross_entropy_with_logits``)."""

    def each(op: Builder, x: Var, t: Var) -> Var:
        if pos_weight is None:
            return _softplus(op, x) - x * t
        weights = op.const(np.asarray(pos_weight, x.dtype.numpy()))
        # (1 − t)·x + (1 + (w − 1)·t)·softplus(−x)
        return (1.0 - t) * x + (1.0 + (weights - 1.0) * t) * _softplus(op, -x)

    return _regression("bce_with_logits", each, reduction, pos_weight=pos_weight)


def _softplus(op: Builder, x: Var) -> Var:
    """``log(1 + eˣ)``; onnxruntime's CPU provider has no float64 kernel for it."""
    if x.dtype != ir.DataType.DOUBLE:
        return op.Softplus(x)
    return op.Max(x, 0.0) + op.Log(1.0 + op.Exp(-op.Abs(x)))


def _regression(name: str, each: Emit, reduction: str, **arguments: Any) -> Loss:
    _check_reduction(reduction)
    reduce = "ReduceMean" if reduction == "mean" else "ReduceSum"

    def emit(op: Builder, x: Var, t: Var) -> Var:
        return op.emit(reduce, each(op, x, t), keepdims=0)

    return Loss(name, emit, arguments={**arguments, "reduction": reduction})


def _check_reduction(reduction: str) -> None:
    if reduction not in ("mean", "sum"):
        raise BuildError(f"a loss reduces by 'mean' or 'sum', not by '{shown(reduction)}'")


# --- metrics ---------------------------------------------------------------------------------------------


def accuracy(op: Builder, x: Var, target: Var, loss: Loss) -> Var:
    """The share of labels that the largest prediction hits, over those that count."""
    at = class_axis(x.shape or (None,) * x.rank, loss.axis)
    counted = op.Not(op.Equal(target, loss.ignore_index if loss.ignore_index is not None else -100))
    hit = op.And(op.Equal(op.ArgMax(x, axis=at, keepdims=0), target), counted)
    total = op.ReduceSum(op.cast(counted, ir.DataType.FLOAT), keepdims=0)
    return op.ReduceSum(op.cast(hit, ir.DataType.FLOAT), keepdims=0) / op.Max(total, 1.0)


METRICS: dict[str, Callable[[Builder, Var, Var, Loss], Var]] = {f.__name__: f for f in (accuracy,)}

LOSSES: dict[str, Callable[..., Loss]] = {f.__name__: f for f in (cross_entropy, mse, l1, huber, bce_with_logits, nll)}


def by_name(name: str, **arguments: Any) -> Loss:
    """The loss called ``name``.

    Raises:
        BuildError: there is no such loss, or it has no such argument.
    """
    return make_named("loss", LOSSES, name, arguments)

"""Losses on class indices and probabilities, under PyTorch's names and arguments."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import onnx_ir as ir

from gradgraph.errors import BuildError, ModelError
from gradgraph.frontend.loss import Spec, Target, class_weights, named, over, rank_of, reduced
from gradgraph.frontend.pointwise import cast, real
from gradgraph.frontend.trace import TensorLike, op, tensor, tensors
from gradgraph.graph.builder import Var
from gradgraph.graph.shapes import Shape

if TYPE_CHECKING:
    from gradgraph.frontend.tensor import Tensor

__all__ = ["cross_entropy", "nll_loss", "soft_cross_entropy"]


def class_axis(shape: Shape, axis: int) -> int:
    """Return the class axis of a prediction as a non-negative number; 0 if the prediction has a single axis."""
    rank = len(shape)
    if rank == 0:
        raise BuildError(
            "a classification loss requires an axis of classes, but the model's output is a scalar; choose another "
            "output"
        )
    if rank == 1:
        return 0
    if not -rank <= axis < rank:
        raise BuildError(
            f"the model's output has {rank} axes, so axis {axis} cannot be the class axis; correct the axis of the loss"
        )
    return axis % rank


def classes_at(x: Tensor, axis: int) -> int:
    """Return ``axis``, the class axis of ``x``, as a non-negative number."""
    return class_axis((None,) * x.traced.rank, axis)


def labels(axis: int, ignore_index: int | None = None) -> Target:
    """Return a target of class indices (int64) that has the shape of the logits without the class axis ``axis``."""

    def spec(outputs: Sequence[Var]) -> Spec:
        scores = outputs[0]
        shape = scores.shape or (None,) * scores.rank
        at = class_axis(shape, axis)
        classes = shape[at]
        if classes == 1:
            raise BuildError(
                "a classification loss requires one output per class, but the model has a single output "
                f"(axis {at} has size 1)",
                remedy="use the loss mse for a number, or bce_with_logits for one of two classes",
                shell="add --loss mse for a number, or --loss bce_with_logits for one of two classes",
            )
        spec = over(scores, [i for i in range(len(shape)) if i != at], ir.DataType.INT64)
        if isinstance(classes, int):
            return spec._replace(classes=classes, ignore_index=ignore_index)
        return spec._replace(ignore_index=ignore_index, most="classes" if ignore_index is None else None)

    return Target("target", "class indices (int64), the prediction's shape without the class axis", spec, True)


# --- cross entropy and likelihood ------------------------------------------------------------------------


def cross_entropy(
    logits: TensorLike,
    target: TensorLike,
    weight: TensorLike | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    *,
    axis: int = 1,
    z_loss: float = 0.0,
) -> Tensor:
    """``−Σ w[t]·log softmax(x)[t] / Σ w[t]`` over labels ``t`` other than ``ignore_index`` (``F.cross_entropy``).

    Args:
        logits: ``[N, C, ...]``.
        target: class indices ``[N, ...]``; or probabilities ``[N, C, ...]``, as in ``soft_cross_entropy``.
        weight: a weight for each class.
        ignore_index: the label that is ignored, in the sum and in the divisor.
        reduction: "mean", "sum", or "none" for the loss of each label.
        label_smoothing: the share of the target probability that is spread evenly over all classes.
        axis: the class axis.
        z_loss: for class indices, the factor of ``(log Σ exp x)²``, which keeps logits near 0 (PaLM, Chowdhery et al.,
            2022, section 5, uses 1e-4).
    """
    x, target = real(logits), tensor(target)
    if target.is_floating_point():
        if z_loss:
            raise BuildError("z_loss requires class indices, but the targets are probabilities; remove z_loss")
        return soft_cross_entropy(x, target, weight, reduction, label_smoothing, axis=axis)
    log_p = op.LogSoftmax(x, axis=classes_at(x, axis))
    loss = _likelihood(log_p, target, axis, ignore_index, weight, reduction, label_smoothing)
    if not z_loss:
        return loss
    share = label_shares(x, target, ignore_index=ignore_index, weight=weight, axis=axis)
    squares = op.ReduceLogSumExp(x, [classes_at(x, axis)], keepdims=0) ** 2 * share
    if reduction != "none":
        squares = _sum(squares)
    if reduction == "mean":
        below = _sum(share)
        squares = squares / op.Where(below == 0.0, 1.0, below)
    return loss + cast(z_loss * squares, loss.dtype)


def nll_loss(
    log_probabilities: TensorLike,
    target: TensorLike,
    weight: TensorLike | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    *,
    axis: int = 1,
) -> Tensor:
    """``−Σ w[t]·x[t] / Σ w[t]`` over labels ``t``, for a model that outputs log-probabilities (``F.nll_loss``)."""
    return _likelihood(real(log_probabilities), tensor(target), axis, ignore_index, weight, reduction, 0.0)


def _likelihood(
    log_p: Tensor,
    target: Tensor,
    axis: int,
    ignore_index: int,
    weight: TensorLike | None,
    reduction: str,
    smoothing: float,
) -> Tensor:
    at = classes_at(log_p, axis)
    ranks = rank_of(log_p), rank_of(target)
    if ranks[1] is not None and ranks[0] != ranks[1] + 1:
        raise ModelError(
            f"class scores of shape {log_p.shape} got targets of shape {target.shape}; expected the shape of the "
            f"scores without axis {at}"
        )
    counted = op.Not(op.Equal(target, ignore_index))
    safe = op.Where(counted, target, 0)
    picked = op.Squeeze(op.GatherElements(log_p, op.Unsqueeze(safe, [at]), axis=at), [at])
    picked = op.Where(counted, picked, 0.0)  # not times 0: the substitute class of an ignored label may be at −∞
    share = cast(counted, log_p.dtype)
    weights = None if weight is None else class_weights(weight, log_p, at)
    if weights is not None:
        share = share * op.Gather(weights, safe)
    losses = picked * share
    if reduction != "none":
        reduced(log_p, "none" if reduction in ("mean", "sum") else reduction)
        losses = _sum(losses)
    losses = -losses
    if smoothing:
        spread = log_p if weights is None else log_p * _along(weights, log_p, at)
        even = op.Where(counted, op.ReduceMean(spread, [at], keepdims=0), 0.0)
        losses = (1.0 - smoothing) * losses - smoothing * (even if reduction == "none" else _sum(even))
    if reduction == "mean":
        below = _sum(share)
        losses = losses / op.Where(below == 0.0, 1.0, below)  # if everything is ignored, the loss is 0
    return cast(losses, log_p.dtype)


def label_shares(x: Tensor, target: Tensor, **arguments: Any) -> Tensor:
    """Return the weight of each label in the mean loss: 0 for ignored labels, else the weight of the class."""
    counted = op.Not(op.Equal(target, arguments["ignore_index"]))
    share, weight = cast(counted, x.dtype), arguments["weight"]
    if weight is None:
        return share
    weights = class_weights(weight, x, classes_at(x, arguments["axis"]))
    return share * op.Gather(weights, op.Where(counted, target, 0))


def _sum(x: Tensor) -> Tensor:
    """Return the sum of all elements, in float32 for float16 ``x``, as float16 overflows at 65,504."""
    return op.ReduceSum(cast(x, ir.DataType.FLOAT) if x.dtype == ir.DataType.FLOAT16 else x, keepdims=0)


def _along(vector: Tensor, x: Tensor, axis: int) -> Tensor:
    """Return ``vector`` reshaped to broadcast along ``axis`` of ``x``."""
    return op.Reshape(vector, [-1] + [1] * (x.traced.rank - axis - 1))


def soft_cross_entropy(
    logits: TensorLike,
    target: TensorLike,
    weight: TensorLike | None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    *,
    axis: int = 1,
) -> Tensor:
    """``mean −Σ w[c]·t[c]·log softmax(x)[c]`` over classes c, for targets t that are class probabilities
    (``F.cross_entropy``).
    """
    x, target = tensors(real(logits), target)
    at = classes_at(x, axis)
    if label_smoothing:
        target = target * (1.0 - label_smoothing) + label_smoothing / tensor(x.shape[at], x.dtype)
    products = -target * op.LogSoftmax(x, axis=at)
    if weight is not None:
        products = products * _along(class_weights(weight, x, at), x, at)
    return reduced(op.ReduceSum(products, [at], keepdims=0), reduction)


# --- names -----------------------------------------------------------------------------------------------


def _check_smoothing(arguments: Mapping[str, Any]) -> None:
    if not 0.0 <= arguments["label_smoothing"] <= 1.0:
        raise BuildError(f"label_smoothing must be in [0, 1], but is {arguments['label_smoothing']}")
    if not 0.0 <= arguments.get("z_loss", 0.0) < math.inf:
        raise BuildError(f"z_loss must be finite and not negative, but is {arguments['z_loss']}")


def by_class(arguments: Mapping[str, Any]) -> tuple[Target]:
    """Return the target of a loss on class indices, for its options ``axis`` and ``ignore_index``."""
    return (labels(arguments["axis"], arguments.get("ignore_index")),)


named("cross_entropy", cross_entropy, "weight ignore_index reduction label_smoothing axis z_loss", by_class,
      shares=label_shares, activation="Softmax", check=_check_smoothing)  # fmt: skip
named("soft_cross_entropy", soft_cross_entropy, "weight reduction label_smoothing axis", activation="Softmax",
      soft=True, check=_check_smoothing)  # fmt: skip
named("nll", nll_loss, "weight ignore_index reduction axis", by_class, shares=label_shares, of_logs=True)

"""Losses for unbalanced classes: focal losses, and losses of region overlap (Dice, Tversky, Lovász)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from gradgraph.errors import BuildError, ModelError, shown
from gradgraph.frontend import reductions
from gradgraph.frontend.dims import product
from gradgraph.frontend.loss import named, rank_of, reduced
from gradgraph.frontend.losses_classes import by_class, classes_at, cross_entropy, label_shares
from gradgraph.frontend.losses_values import binary_cross_entropy_with_logits, pair
from gradgraph.frontend.pointwise import cast, maximum, real, where
from gradgraph.frontend.subscripts import arange
from gradgraph.frontend.trace import TensorLike, op, tensor

if TYPE_CHECKING:
    from gradgraph.frontend.tensor import Tensor

__all__ = ["dice_loss", "focal_loss", "lovasz_softmax_loss", "sigmoid_focal_loss", "tversky_loss"]

ACTIVATIONS = ("sigmoid", "softmax", "none")


def focal_loss(
    logits: TensorLike,
    target: TensorLike,
    gamma: float = 2.0,
    weight: TensorLike | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    *,
    axis: int = 1,
) -> Tensor:
    """Cross entropy that down-weights easy labels: ``−Σ w[t]·(1 − p[t])^γ·log p[t] / Σ w[t]`` over labels t, where
    ``p = softmax(x)``.
    """
    x, target = real(logits), tensor(target)
    plain = cross_entropy(x, target, None, ignore_index, "none", axis=axis)  # −log p[t]
    hard = (1.0 - op.Exp(-plain)) ** gamma
    share = label_shares(x, target, ignore_index=ignore_index, weight=weight, axis=axis)
    losses = plain * hard * share
    return reductions.sum(losses) / reductions.sum(share) if reduction == "mean" else reduced(losses, reduction)


def sigmoid_focal_loss(
    x: TensorLike, target: TensorLike, alpha: float = 0.25, gamma: float = 2.0, reduction: str = "mean"
) -> Tensor:
    """``mean −αₜ·(1 − pₜ)^γ·log pₜ`` with ``p = σ(x)``, where ``α`` is the weight of positives and ``1 − α`` that of
    negatives; a negative ``α`` means no weights (``torchvision.ops.sigmoid_focal_loss``).
    """
    x, target = pair(x, target)
    p = op.Sigmoid(x)
    missed = p + target - 2.0 * p * target  # 1 − pₜ
    losses = binary_cross_entropy_with_logits(x, target, None, "none") * missed**gamma
    if alpha >= 0:
        losses = losses * (alpha * target + (1.0 - alpha) * (1.0 - target))
    return reduced(losses, reduction)


def dice_loss(
    x: TensorLike,
    target: TensorLike,
    smooth: float = 1.0,
    activation: str = "sigmoid",
    reduction: str = "mean",
) -> Tensor:
    """``mean 1 − (2·Σ p·t + s)/(Σ p + Σ t + s)`` over samples and classes, where ``p`` is ``σ(x)``, ``softmax(x)`` or
    ``x``, depending on ``activation``, and ``s`` is ``smooth``.

    The sums are over all axes after the first two; for inputs of two axes, over the second. If prediction and target
    are both empty and ``s = 0``, the loss is 0.
    """
    x, target = pair(x, target)
    if activation not in ACTIVATIONS:
        raise ModelError(f"the activations of dice are 'sigmoid', 'softmax' and 'none', not '{shown(activation)}'")
    p = x
    if activation != "none":
        p = op.Sigmoid(x) if activation == "sigmoid" else op.Softmax(x, axis=classes_at(x, 1))
    axes = list(range(2, rank_of(x) or 0)) or [-1]
    both, either = reductions.sum(p * target, axes), reductions.sum(p, axes) + reductions.sum(target, axes)
    empty = either + smooth == 0.0
    overlap = (2.0 * both + smooth) / where(empty, 1.0, either + smooth)
    return reduced(1.0 - overlap - cast(empty, x.dtype), reduction)


def tversky_loss(
    logits: TensorLike,
    target: TensorLike,
    alpha: float = 0.5,
    beta: float = 0.5,
    smooth: float = 1.0,
    ignore_index: int = -100,
    reduction: str = "mean",
    *,
    axis: int = 1,
) -> Tensor:
    """``mean 1 − (Σ p·t + s)/(Σ p·t + α·Σ p·(1 − t) + β·Σ (1 − p)·t + s)`` over samples and classes, ``p = softmax(x)``
    (Salehi et al. 2017). With the defaults it is Dice on class indices; ``β > α`` weights false negatives more.

    Args:
        logits: scores ``[N, C, ...]``.
        target: class indices ``[N, ...]``.
        alpha, beta: the weights of false positives and of false negatives.
        smooth: ``s``, which defines the loss of classes that are absent from a sample.
        ignore_index: the label that is ignored.
        reduction: "mean", "sum", or "none" for each sample and class ``[N, C]``.
        axis: the class axis.
    """
    p, t, _ = _shares_of_classes(logits, target, ignore_index, axis)
    both, called, there = (reductions.sum(x, -1) for x in (p * t, p, t))
    below = both + alpha * (called - both) + beta * (there - both) + smooth
    empty = below == 0.0
    return reduced(1.0 - (both + smooth) / where(empty, 1.0, below) - cast(empty, p.dtype), reduction)


def lovasz_softmax_loss(logits: TensorLike, target: TensorLike, ignore_index: int = -100, *, axis: int = 1) -> Tensor:
    """The mean over present classes of the Lovász extension of the IoU loss of errors ``|t − p|``, ``p = softmax(x)``,
    over all positions of the batch (Berman et al. 2018).

    Args:
        logits: ``[N, C, ...]``.
        target: class indices ``[N, ...]``.
        ignore_index: the label that is ignored.
        axis: the class axis.
    """
    p, t, counted = (
        op.Reshape(x.transpose(0, 1), [x.shape[1], -1]) for x in _shares_of_classes(logits, target, ignore_index, axis)
    )
    errors, order = op.several("TopK", op.Abs(t - p) * counted, op.Slice(op.Shape(p), [1], [2]), axis=1, outputs=2)
    t, counted = (op.GatherElements(x, order, axis=1) for x in (t, counted))
    all_ = reductions.sum(t, 1, keepdim=True)
    missing = all_ - op.CumSum(t, 1)
    union = all_ + op.CumSum(counted - t, 1)
    jaccard = 1.0 - missing / where(union == 0.0, 1.0, union)
    steps = jaccard - op.Concat(op.Slice(jaccard, [0], [1], [1]) * 0.0, op.Slice(jaccard, [0], [-1], [1]), axis=1)
    each, is_there = reductions.sum(errors * steps, 1), cast(all_.squeeze(1) > 0.0, p.dtype)
    return reductions.sum(each * is_there) / maximum(reductions.sum(is_there), 1.0)


def _shares_of_classes(
    logits: TensorLike, target: TensorLike, ignore_index: int, axis: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Return class probabilities and one-hot labels, 0 at ignored positions, and their mask: ``[N, C, places]``."""
    x, target = real(logits), tensor(target)
    at = classes_at(x, axis)
    classes = x.shape[at]
    counted = target != ignore_index
    numbers = op.Reshape(arange(classes), [-1] + [1] * (x.traced.rank - at - 1))
    is_class = cast(target.unsqueeze(at) == numbers, x.dtype)
    flags = cast(counted, x.dtype).unsqueeze(at)
    p = op.Softmax(x, axis=at) * flags
    places = [y if at == 1 else y.movedim(at, 1) for y in (p, is_class * flags, flags + 0.0 * is_class)]
    p, is_class, flags = (op.Reshape(y, [0, 0, -1], shape=[*y.shape[:2], product(y.shape[2:])]) for y in places)
    return p, is_class, flags


# --- names -----------------------------------------------------------------------------------------------


def _not_negative(*names: str) -> Callable[[Mapping[str, Any]], None]:
    """Return a function that raises BuildError if one of the options ``names`` is below zero."""

    def check(arguments: Mapping[str, Any]) -> None:
        for name in names:
            if not arguments[name] >= 0:
                raise BuildError(f"{name} must be 0 or above, but is {arguments[name]}")

    return check


def _check_dice(arguments: Mapping[str, Any]) -> None:
    if arguments["activation"] not in ACTIVATIONS:
        words = shown(arguments["activation"])
        raise BuildError(f"the activations of dice are 'sigmoid', 'softmax' and 'none', not '{words}'")
    _not_negative("smooth")(arguments)


named("focal", focal_loss, "gamma weight ignore_index reduction axis", by_class, shares=label_shares,
      activation="Softmax", check=_not_negative("gamma"))  # fmt: skip
named("sigmoid_focal", sigmoid_focal_loss, "alpha gamma reduction", check=_not_negative("gamma"), binary=True,
      activation="Sigmoid")  # fmt: skip
named("dice", dice_loss, "smooth activation reduction", check=_check_dice, binary=True,
      activation=lambda given: "" if given["activation"] == "none" else given["activation"].capitalize())  # fmt: skip
named("tversky", tversky_loss, "alpha beta smooth ignore_index reduction axis", by_class, activation="Softmax",
      check=_not_negative("alpha", "beta", "smooth"))  # fmt: skip
named("lovasz", lovasz_softmax_loss, "ignore_index axis", by_class, activation="Softmax")

"""Losses where few of the elements matter: focal losses, and overlap of regions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from gradgraph.errors import BuildError, ModelError, shown
from gradgraph.frontend import reductions
from gradgraph.frontend.loss import named, rank_of, reduced
from gradgraph.frontend.losses_classes import by_class, classes_at, cross_entropy, label_shares
from gradgraph.frontend.losses_values import binary_cross_entropy_with_logits, pair
from gradgraph.frontend.pointwise import cast, real, where
from gradgraph.frontend.trace import TensorLike, op, tensor

if TYPE_CHECKING:
    from gradgraph.frontend.tensor import Tensor

__all__ = ["dice_loss", "focal_loss", "sigmoid_focal_loss"]

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
    """``−Σ w[t]·(1 − p[t])^γ·log p[t] / Σ w[t]``, ``p = softmax(x)``: cross entropy that passes over easy labels."""
    x, target = real(logits), tensor(target)
    plain = cross_entropy(x, target, None, ignore_index, "none", axis=axis)  # −log p[t]
    hard = (1.0 - op.Exp(-plain)) ** gamma
    share = label_shares(x, target, ignore_index=ignore_index, weight=weight, axis=axis)
    losses = plain * hard * share
    return reductions.sum(losses) / reductions.sum(share) if reduction == "mean" else reduced(losses, reduction)


def sigmoid_focal_loss(
    x: TensorLike, target: TensorLike, alpha: float = 0.25, gamma: float = 2.0, reduction: str = "mean"
) -> Tensor:
    """``mean −αₜ·(1 − pₜ)^γ·log pₜ`` with ``p = σ(x)``, ``α`` being the share of positives; below 0 it is left out
    (``torchvision.ops.sigmoid_focal_loss``).
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
    """``mean 1 − (2·Σ p·t + s)/(Σ p + Σ t + s)`` over samples and classes, ``p`` being ``σ(x)``, ``softmax(x)``, ``x``.

    The sums are over all axes behind the first two; of vectors, over the second. Where both are empty and ``s = 0``,
    the loss is 0.
    """
    x, target = pair(x, target)
    if activation not in ACTIVATIONS:
        raise ModelError(f"dice has the activations 'sigmoid', 'softmax' and 'none', not '{shown(activation)}'")
    p = x
    if activation != "none":
        p = op.Sigmoid(x) if activation == "sigmoid" else op.Softmax(x, axis=classes_at(x, 1))
    axes = list(range(2, rank_of(x) or 0)) or [-1]
    both, either = reductions.sum(p * target, axes), reductions.sum(p, axes) + reductions.sum(target, axes)
    empty = either + smooth == 0.0
    overlap = (2.0 * both + smooth) / where(empty, 1.0, either + smooth)
    return reduced(1.0 - overlap - cast(empty, x.dtype), reduction)


# --- names -----------------------------------------------------------------------------------------------


def _check_gamma(arguments: Mapping[str, Any]) -> None:
    if not arguments["gamma"] >= 0:
        raise BuildError(f"gamma must be 0 or above, but is {arguments['gamma']}")


def _check_dice(arguments: Mapping[str, Any]) -> None:
    if arguments["activation"] not in ACTIVATIONS:
        words = shown(arguments["activation"])
        raise BuildError(f"dice has the activations 'sigmoid', 'softmax' and 'none', not '{words}'")
    if not arguments["smooth"] >= 0:
        raise BuildError(f"smooth must be 0 or above, but is {arguments['smooth']}")


named("focal", focal_loss, "gamma weight ignore_index reduction axis", by_class, shares=label_shares,
      activation="Softmax", check=_check_gamma)  # fmt: skip
named("sigmoid_focal", sigmoid_focal_loss, "alpha gamma reduction", check=_check_gamma, binary=True,
      activation="Sigmoid")  # fmt: skip
named("dice", dice_loss, "smooth activation reduction", check=_check_dice, binary=True,
      activation=lambda given: "" if given["activation"] == "none" else given["activation"].capitalize())  # fmt: skip

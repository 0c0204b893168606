"""Margin losses, under PyTorch's names and arguments."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import onnx_ir as ir

from gradgraph.errors import BuildError
from gradgraph.frontend import reductions
from gradgraph.frontend.loss import Target, class_weights, like, named, over, reduced
from gradgraph.frontend.losses_classes import labels
from gradgraph.frontend.losses_values import binary_cross_entropy_with_logits, pair, softplus
from gradgraph.frontend.pointwise import cast, real, where
from gradgraph.frontend.reductions import amax, cumsum, mean
from gradgraph.frontend.subscripts import arange, gather
from gradgraph.frontend.trace import TensorLike, op, tensor

if TYPE_CHECKING:
    from gradgraph.frontend.tensor import Tensor

__all__ = [
    "hinge_embedding_loss",
    "hinge_loss",
    "multi_margin_loss",
    "multilabel_margin_loss",
    "multilabel_soft_margin_loss",
    "soft_margin_loss",
]


def hinge_loss(
    x: TensorLike, target: TensorLike, margin: float = 1.0, squared: bool = False, reduction: str = "mean"
) -> Tensor:
    """``mean max(0, margin − t·x)`` for targets −1 and 1; squared if ``squared``."""
    x, target = pair(x, target)
    losses = op.Relu(margin - target * x)
    return reduced(losses * losses if squared else losses, reduction)


def hinge_embedding_loss(x: TensorLike, target: TensorLike, margin: float = 1.0, reduction: str = "mean") -> Tensor:
    """``x`` for targets 1, ``max(0, margin − x)`` for targets −1 (``F.hinge_embedding_loss``)."""
    x = real(x)
    return reduced(where(tensor(target) > 0, x, op.Relu(margin - x)), reduction)


def soft_margin_loss(x: TensorLike, target: TensorLike, reduction: str = "mean") -> Tensor:
    """``mean log(1 + e^(−t·x))`` for targets −1 and 1 (``F.soft_margin_loss``)."""
    x, target = pair(x, target)
    return reduced(softplus(-target * x), reduction)


def multi_margin_loss(
    x: TensorLike,
    target: TensorLike,
    p: int = 1,
    margin: float = 1.0,
    weight: TensorLike | None = None,
    reduction: str = "mean",
) -> Tensor:
    """``Σ w[t]·max(0, margin − x[t] + x[c])ᵖ / C`` over the other classes ``c`` (``F.multi_margin_loss``)."""
    x, target = real(x), tensor(target)
    at = target.unsqueeze(-1)
    losses = op.Relu(margin - gather(x, -1, at) + x)
    losses = losses * losses if p == 2 else losses
    if weight is not None:
        losses = losses * class_weights(weight, x, -1)[target].unsqueeze(-1)
    return reduced(mean(where(arange(x.shape[-1]) == at, 0.0, losses), -1), reduction)


def multilabel_margin_loss(x: TensorLike, target: TensorLike, reduction: str = "mean") -> Tensor:
    """``Σ max(0, 1 − x[t] + x[c]) / C`` over labels ``t`` and other classes ``c`` (``F.multilabel_margin_loss``).

    The labels of a row end at the first −1.
    """
    x, target = real(x), tensor(target)
    holds = cumsum(target < 0, -1) == 0
    safe = where(holds, target, 0)
    is_label = cast(amax(cast((safe.unsqueeze(-1) == arange(x.shape[-1])) & holds.unsqueeze(-1), "int32"), -2), "bool")
    apart = op.Relu(1.0 - gather(x, -1, safe).unsqueeze(-1) + x.unsqueeze(-2))
    counted = holds.unsqueeze(-1) & ~is_label.unsqueeze(-2)
    return reduced(reductions.sum(where(counted, apart, 0.0), (-2, -1)) / tensor(x.shape[-1], x.dtype), reduction)


def multilabel_soft_margin_loss(
    x: TensorLike, target: TensorLike, weight: TensorLike | None = None, reduction: str = "mean"
) -> Tensor:
    """``mean −t·log σ(x) − (1 − t)·log σ(−x)``, weighted by class (``F.multilabel_soft_margin_loss``)."""
    return reduced(mean(binary_cross_entropy_with_logits(x, target, weight, "none"), -1), reduction)


# --- names -----------------------------------------------------------------------------------------------


def _check_power(arguments: Mapping[str, Any]) -> None:
    if arguments["p"] not in (1, 2):
        raise BuildError(f"multi_margin supports p=1 and p=2, not {arguments['p']}")


SIGNS = (like("−1 or 1, as the prediction", is_sign=True),)
PADDED = (Target("target", "class indices (int64), as the prediction, padded with −1",
                 lambda outputs: over(outputs[0], range(outputs[0].rank), ir.DataType.INT64)),)  # fmt: skip

named("hinge", hinge_loss, "margin squared reduction", SIGNS, binary=True)
named("hinge_embedding", hinge_embedding_loss, "margin reduction", SIGNS)
named("soft_margin", soft_margin_loss, "reduction", SIGNS, binary=True)
named("multi_margin", multi_margin_loss, "p margin weight reduction", (labels(-1),), check=_check_power)
named("multilabel_margin", multilabel_margin_loss, "reduction", PADDED)
named("multilabel_soft_margin", multilabel_soft_margin_loss, "weight reduction", binary=True,
      activation="Sigmoid")  # fmt: skip

"""Loss functions, under PyTorch's names and arguments, as plain differentiable graphs."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import onnx_ir as ir

from gradgraph.errors import ModelError
from gradgraph.frontend.activations import log_softmax
from gradgraph.frontend.pointwise import cast, real, where
from gradgraph.frontend.reductions import mean, sum
from gradgraph.frontend.trace import TensorLike, op, tensor, tensors

if TYPE_CHECKING:
    from gradgraph.frontend.tensor import Tensor

__all__ = [
    "binary_cross_entropy",
    "binary_cross_entropy_with_logits",
    "cosine_embedding_loss",
    "cross_entropy",
    "gaussian_nll_loss",
    "hinge_embedding_loss",
    "huber_loss",
    "kl_div",
    "l1_loss",
    "mse_loss",
    "nll_loss",
    "poisson_nll_loss",
    "smooth_l1_loss",
]


def reduced(losses: Tensor, reduction: str) -> Tensor:
    """``losses`` as they are ("none"), their mean or their sum."""
    if reduction == "mean":
        return mean(losses)
    if reduction == "sum":
        return sum(losses)
    if reduction != "none":
        raise ModelError(f"a loss has no reduction {reduction!r}; use 'mean', 'sum' or 'none'")
    return losses


def cross_entropy(
    logits: TensorLike,
    target: TensorLike,
    weight: TensorLike | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Tensor:
    """Cross entropy of ``logits`` ``[N, C, ...]`` with class indices ``[N, ...]`` or probabilities ``[N, C, ...]``.

    Indices equal to ``ignore_index`` count neither above nor below the line; ``weight`` holds one factor per class.
    """
    logits, target = real(logits), tensor(target)
    if target.is_floating_point():
        return _soft_cross_entropy(logits, target, weight, reduction, label_smoothing)
    if label_smoothing:
        return _smooth_cross_entropy(logits, target, weight, ignore_index, reduction, label_smoothing)
    return _on_classes("SoftmaxCrossEntropyLoss", logits, target, weight, ignore_index, reduction)


def nll_loss(
    log_probabilities: TensorLike,
    target: TensorLike,
    weight: TensorLike | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
) -> Tensor:
    """The negative log-likelihood of class indices ``[N, ...]`` under ``log_probabilities`` ``[N, C, ...]``."""
    return _on_classes(
        "NegativeLogLikelihoodLoss", real(log_probabilities), tensor(target), weight, ignore_index, reduction
    )


def _on_classes(
    op_type: str, scores: Tensor, target: Tensor, weight: TensorLike | None, ignore_index: int, reduction: str
) -> Tensor:
    reduced(scores, "none" if reduction in ("mean", "sum") else reduction)
    if scores.ndim != target.ndim + 1:
        raise ModelError(
            f"class scores of shape {scores.shape} met targets of shape {target.shape}; "
            "targets have the shape of the scores without axis 1"
        )
    weights = [] if weight is None else [tensor(weight, scores.dtype)]
    indices = cast(target, ir.DataType.INT64)
    shape = target.shape if reduction == "none" else ()
    return op.emit(op_type, scores, indices, *weights, ignore_index=ignore_index, reduction=reduction, shape=shape)


def _soft_cross_entropy(
    logits: Tensor, target: Tensor, weight: TensorLike | None, reduction: str, smoothing: float
) -> Tensor:
    classes = logits.shape[1 if logits.ndim > 1 else 0]
    if smoothing:
        target = target * (1.0 - smoothing) + smoothing / tensor(classes, logits.dtype)
    products = -target * log_softmax(logits, 1)
    if weight is not None:
        products = products * _per_class(weight, logits)
    losses = sum(products, 1)
    if reduction != "mean":
        return reduced(losses, reduction)
    return sum(losses) / tensor(losses.numel(), logits.dtype)


def _per_class(weight: TensorLike, logits: Tensor) -> Tensor:
    return tensor(weight, logits.dtype).reshape(-1, *[1] * (logits.ndim - 2))


def _smooth_cross_entropy(
    logits: Tensor, target: Tensor, weight: TensorLike | None, ignore_index: int, reduction: str, smoothing: float
) -> Tensor:
    """``(1 - s)`` of the loss of the target and ``s`` of the mean loss over all classes."""
    log_p = log_softmax(logits, 1)
    counted = target != ignore_index
    uniform = -log_p if weight is None else -log_p * _per_class(weight, logits)
    uniform = where(counted, mean(uniform, 1), 0.0)
    hard = nll_loss(log_p, target, weight, ignore_index, "none")
    losses = hard * (1.0 - smoothing) + uniform * smoothing
    if reduction != "mean":
        return reduced(losses, reduction)
    if weight is None:
        return sum(losses) / cast(sum(counted), logits.dtype)
    factors = tensor(weight, logits.dtype)[where(counted, target, 0)]
    return sum(losses) / sum(where(counted, factors, 0.0))


def mse_loss(x: TensorLike, target: TensorLike, reduction: str = "mean") -> Tensor:
    difference = _difference(x, target)
    return reduced(difference * difference, reduction)


def l1_loss(x: TensorLike, target: TensorLike, reduction: str = "mean") -> Tensor:
    return reduced(op.Abs(_difference(x, target)), reduction)


def smooth_l1_loss(x: TensorLike, target: TensorLike, reduction: str = "mean", beta: float = 1.0) -> Tensor:
    """``0.5 d² / beta`` where ``|d| < beta``, else ``|d| - 0.5 beta``."""
    if beta == 0:
        return l1_loss(x, target, reduction)
    return huber_loss(x, target, reduction, beta) * (1.0 / beta)


def huber_loss(x: TensorLike, target: TensorLike, reduction: str = "mean", delta: float = 1.0) -> Tensor:
    """``0.5 d²`` where ``|d| < delta``, else ``delta (|d| - 0.5 delta)``."""
    distance = op.Abs(_difference(x, target))
    losses = where(distance < delta, distance * distance * 0.5, (distance - 0.5 * delta) * delta)
    return reduced(losses, reduction)


def _difference(x: TensorLike, target: TensorLike) -> Tensor:
    a, b = tensors(real(x), target)
    if a.ndim != b.ndim:
        raise ModelError(f"a loss met a prediction of shape {a.shape} and a target of shape {b.shape}; they must agree")
    return a - b


def binary_cross_entropy_with_logits(
    x: TensorLike,
    target: TensorLike,
    weight: TensorLike | None = None,
    reduction: str = "mean",
    pos_weight: TensorLike | None = None,
) -> Tensor:
    """``softplus(x) - target * x``: cross entropy with a sigmoid; positives count ``pos_weight`` times."""
    x, target = tensors(real(x), target)
    if pos_weight is None:
        losses = op.Softplus(x) - target * x
    else:
        factor = 1.0 + (tensor(pos_weight, x.dtype) - 1.0) * target
        losses = (1.0 - target) * x + factor * op.Softplus(-x)
    return reduced(losses if weight is None else losses * weight, reduction)


def binary_cross_entropy(
    p: TensorLike, target: TensorLike, weight: TensorLike | None = None, reduction: str = "mean"
) -> Tensor:
    """Cross entropy with probabilities; logarithms are held above -100, as in PyTorch."""
    p, target = tensors(real(p), target)
    log_p, log_q = (op.Max(op.Log(v), tensor(-100.0, v.dtype)) for v in (p, 1.0 - p))
    losses = -(target * log_p + (1.0 - target) * log_q)
    return reduced(losses if weight is None else losses * weight, reduction)


def kl_div(x: TensorLike, target: TensorLike, reduction: str = "mean", log_target: bool = False) -> Tensor:
    """``target * (log(target) - x)`` for log-probabilities ``x``; "batchmean" divides by the batch."""
    x, target = tensors(real(x), target)
    if log_target:
        losses = op.Exp(target) * (target - x)
    else:
        safe = where(target > 0.0, target, 1.0)  # 0 log 0 counts 0
        losses = target * (op.Log(safe) - x)
    if reduction == "batchmean":
        return sum(losses) / tensor(losses.shape[0], losses.dtype)
    return reduced(losses, reduction)


def poisson_nll_loss(x: TensorLike, target: TensorLike, log_input: bool = True, reduction: str = "mean") -> Tensor:
    """``exp(x) - target * x``, or ``x - target * log(x)`` where ``x`` is the rate itself."""
    x, target = tensors(real(x), target)
    losses = op.Exp(x) - target * x if log_input else x - target * op.Log(x + 1e-8)
    return reduced(losses, reduction)


def gaussian_nll_loss(
    x: TensorLike, target: TensorLike, var: TensorLike, full: bool = False, eps: float = 1e-6, reduction: str = "mean"
) -> Tensor:
    """``0.5 (log(var) + (x - target)² / var)``, ``var`` being at least ``eps``."""
    x, target, var = tensors(real(x), target, var)
    var = op.Max(var, tensor(eps, var.dtype))
    difference = x - target
    losses = (op.Log(var) + difference * difference / var) * 0.5
    return reduced(losses + 0.5 * math.log(2.0 * math.pi) if full else losses, reduction)


def hinge_embedding_loss(x: TensorLike, target: TensorLike, margin: float = 1.0, reduction: str = "mean") -> Tensor:
    """``x`` for targets 1, ``max(0, margin - x)`` for targets -1."""
    x = real(x)
    return reduced(where(tensor(target) > 0, x, op.Relu(margin - x)), reduction)


def cosine_embedding_loss(
    x1: TensorLike, x2: TensorLike, target: TensorLike, margin: float = 0.0, reduction: str = "mean"
) -> Tensor:
    """``1 - cos`` for targets 1, ``max(0, cos - margin)`` for targets -1."""
    a, b = tensors(real(x1), x2)
    square_a, square_b = sum(a * a, -1) + 1e-12, sum(b * b, -1) + 1e-12
    cosine = sum(a * b, -1) / (square_a * square_b).sqrt()
    return reduced(where(tensor(target) > 0, 1.0 - cosine, op.Relu(cosine - margin)), reduction)

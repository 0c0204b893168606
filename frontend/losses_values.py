"""Losses on numbers and distributions, under PyTorch's names and arguments."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import onnx_ir as ir

from gradgraph.errors import BuildError, ModelError
from gradgraph.frontend import reductions
from gradgraph.frontend.loss import REDUCTIONS, element_weights, named, positive, rank_of, reduced
from gradgraph.frontend.pointwise import real, where
from gradgraph.frontend.trace import TensorLike, op, tensor, tensors

if TYPE_CHECKING:
    from gradgraph.frontend.tensor import Tensor

__all__ = [
    "binary_cross_entropy",
    "binary_cross_entropy_with_logits",
    "gaussian_nll_loss",
    "huber_loss",
    "kl_div",
    "l1_loss",
    "log_cosh_loss",
    "mse_loss",
    "poisson_nll_loss",
    "smooth_l1_loss",
]


def pair(x: TensorLike, target: TensorLike) -> list[Tensor]:
    """Return prediction and target, cast to their common type; raise ModelError if their ranks differ."""
    a, b = tensors(real(x), target)
    if None not in (ranks := {rank_of(a), rank_of(b)}) and len(ranks) > 1:
        raise ModelError(
            f"a loss got a prediction of shape {a.shape} and a target of shape {b.shape}; both must have the same shape"
        )
    return [a, b]


# --- differences -----------------------------------------------------------------------------------------


def mse_loss(x: TensorLike, target: TensorLike, reduction: str = "mean") -> Tensor:
    """``mean (x − t)²`` (``F.mse_loss``)."""
    x, target = pair(x, target)
    d = x - target
    return reduced(d * d, reduction)


def l1_loss(x: TensorLike, target: TensorLike, reduction: str = "mean") -> Tensor:
    """``mean |x − t|`` (``F.l1_loss``)."""
    x, target = pair(x, target)
    return reduced(op.Abs(x - target), reduction)


def huber_loss(x: TensorLike, target: TensorLike, reduction: str = "mean", delta: float = 1.0) -> Tensor:
    """``d²/2`` where ``d = |x − t| < δ``, else ``δ·(d − δ/2)`` (``F.huber_loss``)."""
    x, target = pair(x, target)
    d = op.Abs(x - target)
    near = op.Min(d, delta)
    return reduced(near * (d - 0.5 * near), reduction)


def smooth_l1_loss(x: TensorLike, target: TensorLike, reduction: str = "mean", beta: float = 1.0) -> Tensor:
    """``d²/2β`` where ``d = |x − t| < β``, else ``d − β/2``; ``β = 0`` is the absolute difference
    (``F.smooth_l1_loss``).
    """
    if beta == 0:
        return l1_loss(x, target, reduction)
    return huber_loss(x, target, reduction, beta) * (1.0 / beta)


def log_cosh_loss(x: TensorLike, target: TensorLike, reduction: str = "mean") -> Tensor:
    """``mean log cosh(x − t)``: quadratic near 0, linear far from it."""
    x, target = pair(x, target)
    d = op.Abs(x - target)
    return reduced(d + softplus(-2.0 * d) - math.log(2.0), reduction)


# --- probabilities ---------------------------------------------------------------------------------------


def binary_cross_entropy_with_logits(
    x: TensorLike,
    target: TensorLike,
    weight: TensorLike | None = None,
    reduction: str = "mean",
    pos_weight: TensorLike | None = None,
) -> Tensor:
    """``mean max(x, 0) − x·t + log(1 + e^−|x|)`` (``F.binary_cross_entropy_with_logits``).

    ``weight`` is a factor of all losses, ``pos_weight`` of the losses of positive targets.
    """
    x, target = pair(x, target)
    if pos_weight is None:
        losses = softplus(x) - x * target
    else:
        weights = element_weights("pos_weight", pos_weight, x)
        # (1 − t)·x + (1 + (w − 1)·t)·softplus(−x)
        losses = (1.0 - target) * x + (1.0 + (weights - 1.0) * target) * softplus(-x)
    return reduced(losses if weight is None else losses * element_weights("weight", weight, x, signed=True), reduction)


def softplus(x: Tensor) -> Tensor:
    """Return ``log(1 + eˣ)``; float64 avoids Softplus, which has no float64 kernel in onnxruntime's CPU provider."""
    if x.dtype != ir.DataType.DOUBLE:
        return op.Softplus(x)
    return op.Max(x, 0.0) + op.Log(1.0 + op.Exp(-op.Abs(x)))


def binary_cross_entropy(
    p: TensorLike, target: TensorLike, weight: TensorLike | None = None, reduction: str = "mean"
) -> Tensor:
    """``mean −t·log p − (1 − t)·log(1 − p)`` of probabilities ``p`` (``F.binary_cross_entropy``).

    ``log 0`` is −100, without a gradient.
    """
    p, target = pair(p, target)
    losses = -(target * _held_log(p) + (1.0 - target) * _held_log(1.0 - p))
    return reduced(losses if weight is None else losses * element_weights("weight", weight, p, signed=True), reduction)


def _held_log(p: Tensor) -> Tensor:
    """Return ``max(log p, −100)``, as in PyTorch, with the gradient 0 instead of NaN at ``p = 0``."""
    return where(p > 0.0, op.Log(where(p > 0.0, p, 1.0)), -100.0)


def kl_div(x: TensorLike, target: TensorLike, reduction: str = "mean", log_target: bool = False) -> Tensor:
    """``mean t·(log t − x)`` for log-probabilities ``x`` and probabilities ``t`` (``F.kl_div``).

    With ``log_target``, targets are ``log t``. The reduction "batchmean" divides the sum by the batch size.
    """
    x, target = pair(x, target)
    if log_target:
        losses = op.Exp(target) * (target - x)
    else:
        safe = where(target > 0.0, target, 1.0)  # 0 log 0 is 0
        losses = target * (op.Log(safe) - x)
    if reduction == "batchmean":
        return reductions.sum(losses) / tensor(losses.shape[0], losses.dtype)
    return reduced(losses, reduction)


# --- distributions ---------------------------------------------------------------------------------------


def poisson_nll_loss(
    x: TensorLike,
    target: TensorLike,
    log_input: bool = True,
    full: bool = False,
    eps: float = 1e-8,
    reduction: str = "mean",
) -> Tensor:
    """``mean eˣ − t·x``, or ``x − t·log(x + ε)`` where ``x`` is the rate itself (``F.poisson_nll_loss``).

    ``full`` adds Stirling's ``t·log t − t + log(2πt)/2`` where ``t > 1``.
    """
    x, target = pair(x, target)
    losses = op.Exp(x) - target * x if log_input else x - target * op.Log(x + eps)
    if full:
        t = where(target > 1.0, target, 1.0)
        losses = losses + where(target > 1.0, t * op.Log(t) - t + 0.5 * op.Log(2.0 * math.pi * t), 0.0)
    return reduced(losses, reduction)


def gaussian_nll_loss(
    x: TensorLike, target: TensorLike, var: TensorLike, full: bool = False, eps: float = 1e-6, reduction: str = "mean"
) -> Tensor:
    """``mean (log v + (x − t)²/v) / 2``, with the variance ``v`` at least ``ε`` (``F.gaussian_nll_loss``).

    ``full`` adds ``log(2π)/2``.
    """
    x, target, var = tensors(real(x), target, var)
    var = op.Max(var, eps)
    difference = x - target
    losses = (op.Log(var) + difference * difference / var) * 0.5
    return reduced(losses + 0.5 * math.log(2.0 * math.pi) if full else losses, reduction)


# --- names -----------------------------------------------------------------------------------------------


def _gaussian_nll(
    x: TensorLike, var: TensorLike, target: TensorLike, full: bool = False, eps: float = 1e-6, reduction: str = "mean"
) -> Tensor:
    return gaussian_nll_loss(x, target, var, full, eps, reduction)


def _check_beta(arguments: Mapping[str, Any]) -> None:
    if not 0.0 <= arguments["beta"] < math.inf:
        raise BuildError(f"beta must be a finite number, 0 or above, but is {arguments['beta']}")


_gaussian_nll.__doc__ = gaussian_nll_loss.__doc__
named("mse", mse_loss, "reduction")
named("l1", l1_loss, "reduction")
named("huber", huber_loss, "delta reduction", check=positive("delta"))
named("smooth_l1", smooth_l1_loss, "beta reduction", check=_check_beta)
named("log_cosh", log_cosh_loss, "reduction")
named("bce_with_logits", binary_cross_entropy_with_logits, "pos_weight reduction", binary=True,
      activation="Sigmoid")  # fmt: skip
named("bce", binary_cross_entropy, "reduction", binary=True, middle=0.5)
named("kl_div", kl_div, "log_target reduction", of_logs=True, reductions=(*REDUCTIONS, "batchmean"))
named("poisson_nll", poisson_nll_loss, "log_input full eps reduction", check=positive("eps"))
named("gaussian_nll", _gaussian_nll, "full eps reduction", reads=("mean", "variance"), check=positive("eps"))

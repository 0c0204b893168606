"""Preference losses, which fine-tune a language model on pairs of a preferred and a rejected answer.

Each reads ``log_probability`` ``[pairs, 2]``, the log-probabilities of the chosen and the rejected answer, an output of
models converted by ``gradgraph.surgery.pair_model``; some also read the number of ``tokens``. ``reference`` are the
log-probabilities under the reference model (``gradgraph.surgery.reference``).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from gradgraph.errors import BuildError, ModelError
from gradgraph.frontend.gradients import detach
from gradgraph.frontend.loss import Target, like, named, over, positive, reduced
from gradgraph.frontend.losses_values import softplus
from gradgraph.frontend.pointwise import expm1, real, where
from gradgraph.frontend.reductions import mean
from gradgraph.frontend.trace import TensorLike, op, tensors

if TYPE_CHECKING:
    from gradgraph.frontend.tensor import Tensor

__all__ = ["dpo_loss", "ipo_loss", "kto_loss", "orpo_loss", "simpo_loss"]

_CERTAIN = -1e-6  # nats per token: log-probabilities are clamped to this, above which odds are infinite in float32


def dpo_loss(
    log_probability: TensorLike,
    reference: TensorLike,
    beta: float = 0.1,
    label_smoothing: float = 0.0,
    reduction: str = "mean",
) -> Tensor:
    """``−(1 − ε)·log σ(β·m) − ε·log σ(−β·m)`` with the margin ``m = (p₀ − r₀) − (p₁ − r₁)``: direct preference
    optimization (Rafailov et al. 2023, arXiv:2305.18290; with ``ε``, the share of wrong preferences, conservative DPO).

    Args:
        log_probability: p, the log-probabilities in nats of the chosen (0) and rejected (1) answer, ``[pairs, 2]``.
        reference: r, the log-probabilities of both answers under the reference model, ``[pairs, 2]``.
        beta: strength of the penalty for deviating from the reference.
        label_smoothing: ε, from 0 to below 1/2.
        reduction: "mean", "sum", or "none" for the loss of each pair.
    """
    p, r = tensors(real(log_probability), reference)
    return reduced(_preferred(beta * preference_margin(p, r), label_smoothing), reduction)


def ipo_loss(
    log_probability: TensorLike,
    tokens: TensorLike,
    reference: TensorLike,
    beta: float = 0.1,
    reduction: str = "mean",
) -> Tensor:
    """``(m − 1/(2β))²`` with the margin m of DPO, computed from log-probabilities per token (Azar et al. 2023,
    arXiv:2310.12036).
    """
    p, n, r = tensors(real(log_probability), tokens, reference)
    gap = preference_margin(_by_token(p, n), _by_token(r, n)) - 1.0 / (2.0 * beta)
    return reduced(gap * gap, reduction)


def orpo_loss(log_probability: TensorLike, tokens: TensorLike, beta: float = 0.1, reduction: str = "mean") -> Tensor:
    """``−a₀ − β·log σ(log odds₀ − log odds₁)`` with ``odds = eᵃ/(1 − eᵃ)`` of log-probabilities per token ``a``: the
    odds ratio added to the likelihood of the chosen answer, without a reference (Hong et al. 2024, arXiv:2403.07691,
    equation 6; ``beta`` is its λ).
    """
    p, n = tensors(real(log_probability), tokens)
    a = _by_token(p, n)
    held = op.Min(a, _CERTAIN)
    odds = a - op.Log(-expm1(held))
    return reduced(_preferred(odds[:, 0] - odds[:, 1], 0.0) * beta - a[:, 0], reduction)


def simpo_loss(
    log_probability: TensorLike,
    tokens: TensorLike,
    beta: float = 2.0,
    gamma: float = 1.0,
    label_smoothing: float = 0.0,
    reduction: str = "mean",
) -> Tensor:
    """``−log σ(β·(a₀ − a₁) − γ)`` of log-probabilities per token ``a``, without a reference (Meng et al. 2024,
    arXiv:2405.14734, equation 6). ``label_smoothing`` as in ``dpo_loss``.
    """
    p, n = tensors(real(log_probability), tokens)
    a = _by_token(p, n)
    return reduced(_preferred(beta * (a[:, 0] - a[:, 1]) - gamma, label_smoothing), reduction)


def kto_loss(
    log_probability: TensorLike,
    reference: TensorLike,
    desirable: TensorLike,
    beta: float = 0.1,
    desirable_weight: float = 1.0,
    undesirable_weight: float = 1.0,
    reduction: str = "mean",
) -> Tensor:
    """``w·(1 − σ(±β·(p₀ − r₀ − z)))``, with + for desirable answers, and ``z = max(0, mean(p₁ − r₁))`` of the batch,
    without a gradient (Ethayarajh et al. 2024, arXiv:2402.01306).

    Args:
        log_probability: p ``[rows, 2]``, the log-probabilities of the row's own answer, and of an answer to another
            prompt, both conditioned on the row's prompt.
        reference: r, the log-probabilities of both answers under the reference model, ``[rows, 2]``.
        desirable: 1 if the row's own answer is desirable, else 0: ``[rows]``.
        beta: strength of the penalty for deviating from the reference.
        desirable_weight, undesirable_weight: w, for rows with a desirable and with an undesirable answer.
        reduction: "mean", "sum", or "none" for the loss of each row.
    """
    p, r, wanted = tensors(real(log_probability), reference, desirable)
    gain = _of_two(p) - r
    z = detach(op.Max(mean(gain[:, 1]), 0.0))
    gap = beta * (gain[:, 0] - z)
    losses = where(wanted > 0.5, desirable_weight * op.Sigmoid(-gap), undesirable_weight * op.Sigmoid(gap))
    return reduced(losses, reduction)


# --- shared --------------------------------------------------------------------------------------------------


def preference_margin(log_probability: Tensor, reference: Tensor) -> Tensor:
    """Return the margin ``(p₀ − r₀) − (p₁ − r₁)`` of each pair ``[pairs]``, in nats, with log-probabilities p, and r
    under the reference model, of the chosen (0) and the rejected (1) answer.
    """
    gain = _of_two(log_probability) - reference
    return gain[:, 0] - gain[:, 1]


def _of_two(x: Tensor) -> Tensor:
    shape = x.traced.shape
    if shape is not None and (len(shape) != 2 or (isinstance(shape[1], int) and shape[1] != 2)):
        raise ModelError(
            f"a preference loss got log-probabilities of shape {x.shape}; expected [pairs, 2], as in models converted "
            "by gradgraph.surgery.pair_model"
        )
    return x


def _by_token(x: Tensor, tokens: Tensor) -> Tensor:
    """Return log-probabilities per token, ``x / tokens``; 0 for answers without tokens."""
    return _of_two(x) / where(tokens > 0.0, tokens, 1.0)


def _preferred(gap: Tensor, smoothing: float) -> Tensor:
    """Return ``(1 − smoothing)·(−log σ(gap)) + smoothing·(−log σ(−gap))``."""
    losses = softplus(-gap)
    return (1.0 - smoothing) * losses + smoothing * softplus(gap) if smoothing else losses


# --- names -----------------------------------------------------------------------------------------------


def _check(arguments: Mapping[str, Any]) -> None:
    positive("beta")(arguments)
    if not 0.0 <= arguments.get("label_smoothing", 0.0) < 0.5:
        raise BuildError(
            f"label_smoothing is {arguments['label_smoothing']}, but the share of wrong preferences must be at least "
            "0 and below 0.5; swap chosen and rejected answers if more than half are wrong"
        )
    for name in ("gamma", "desirable_weight", "undesirable_weight"):
        if not 0.0 <= arguments.get(name, 0.0) < math.inf:
            raise BuildError(f"{name} must be a finite number, 0 or above, but is {arguments[name]}")


_P, _BOTH = ("log_probability",), ("log_probability", "tokens")
_REFERENCE = (like("log-probabilities under the reference model `[pairs, 2]`"),)
_WITH_KINDS = (*_REFERENCE, Target("desirable", "1 or 0, one per row",
                                   lambda outputs: over(outputs[0], [0], outputs[0].dtype)))  # fmt: skip

PREFERENCES: list[str] = []  # the names of the losses in this module

for _name, _function, _options, _targets, _reads in (
    ("dpo", dpo_loss, "beta label_smoothing reduction", _REFERENCE, _P),
    ("ipo", ipo_loss, "beta reduction", _REFERENCE, _BOTH),
    ("orpo", orpo_loss, "beta reduction", (), _BOTH),
    ("simpo", simpo_loss, "beta gamma label_smoothing reduction", (), _BOTH),
    ("kto", kto_loss, "beta desirable_weight undesirable_weight reduction", _WITH_KINDS, _P),
):
    named(_name, _function, _options, _targets, reads=_reads, check=_check)
    PREFERENCES.append(_name)

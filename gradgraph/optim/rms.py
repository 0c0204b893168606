"""Gradients divided by the root of their mean square: RMSprop, Adagrad, Adadelta."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import onnx_ir as ir

from gradgraph.graph.builder import Builder, Var
from gradgraph.optim.descent import momentum_links
from gradgraph.optim.modifiers import Rate
from gradgraph.optim.recipe_parts import below_one, check_range, checked_recipe, decay_links, made, not_negative
from gradgraph.optim.transform import Context, Optimizer, Slots, Transform, Vars, parameterwise, zeros
from gradgraph.optim.weight_groups import Grouping

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = ["adadelta", "adagrad", "rmsprop", "scale_by_rms"]


def scale_by_rms(alpha: float = 0.99, eps: float = 1e-8, centered: bool = False) -> Transform:
    """Return a transform that computes RMSprop's direction ``g / (√v + ε)``, with ``v ← αv + (1−α)g²``.

    With ``centered``, the square of a running mean of g is subtracted from ``v``, which makes it a variance.
    """
    slots_used = ("square_avg", "grad_avg") if centered else ("square_avg",)

    def update(op: Builder, grads: Vars, slots: Slots, params: Vars, context: Context) -> tuple[Vars, Slots]:
        check_range("rmsprop", grads)
        v = [alpha * v + (1.0 - alpha) * (g * g) for v, g in zip(slots["square_avg"], grads, strict=True)]
        new: dict[str, Vars] = {"square_avg": v}
        spread: Vars = v
        if centered:
            mean = [alpha * m + (1.0 - alpha) * g for m, g in zip(slots["grad_avg"], grads, strict=True)]
            new["grad_avg"] = mean
            spread = [vi - mi * mi for vi, mi in zip(v, mean, strict=True)]
        return [g / (op.Sqrt(s) + eps) for g, s in zip(grads, spread, strict=True)], new

    return Transform("scale_by_rms", update, zeros(*slots_used), {"alpha": alpha, "eps": eps, "centered": centered})


@checked_recipe()
def rmsprop(
    lr: Rate = 1e-2,
    alpha: float = 0.99,
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    momentum: float = 0.0,
    centered: bool = False,
    **grouping: Unpack[Grouping],
) -> Optimizer:
    """RMSprop, as ``torch.optim.RMSprop``."""
    not_negative(lr=lr, alpha=alpha, eps=eps, weight_decay=weight_decay, momentum=momentum)
    links = [*decay_links(weight_decay), scale_by_rms(alpha, eps, centered), *momentum_links(momentum)]
    return made(lr, links)


# --- Adagrad ---------------------------------------------------------------------------------------------


def _scale_by_sums(lr_decay: float, initial: float, eps: float) -> Transform:
    """Return a transform for Adagrad's direction ``g / (√s + ε) / (1 + (t−1)·lr_decay)``, with ``s ← s + g²``."""

    def init(op: Builder, params: Vars) -> Slots:
        return {"sum": [op.zeros_like(p) + initial if initial else op.zeros_like(p) for p in params]}

    def numbers(op: Builder, context: Context) -> list[Var]:
        return [1.0 / (1.0 + op.cast(context.step(), ir.DataType.FLOAT) * lr_decay)] if lr_decay else []

    def each(op: Builder, g: Var, p: Var, slots: Mapping[str, Var], *decay: Var) -> tuple[Var, Mapping[str, Var]]:
        check_range("adagrad", [g])
        total = slots["sum"] + g * g
        direction = g / (op.Sqrt(total) + eps)
        return direction * decay[0] if decay else direction, {"sum": total}

    arguments = {"lr_decay": lr_decay, "initial_accumulator_value": initial, "eps": eps}
    return parameterwise("scale_by_sums", arguments, each, init, numbers)


@checked_recipe()
def adagrad(
    lr: Rate = 1e-2,
    lr_decay: float = 0.0,
    weight_decay: float = 0.0,
    initial_accumulator_value: float = 0.0,
    eps: float = 1e-10,
    **grouping: Unpack[Grouping],
) -> Optimizer:
    """Gradients divided by the root of the sum of their squares, as ``torch.optim.Adagrad``."""
    not_negative(lr=lr, lr_decay=lr_decay, weight_decay=weight_decay, eps=eps,
                 initial_accumulator_value=initial_accumulator_value)  # fmt: skip
    links = [*decay_links(weight_decay), _scale_by_sums(lr_decay, initial_accumulator_value, eps)]
    return made(lr, links)


# --- Adadelta --------------------------------------------------------------------------------------------


def _scale_by_deltas(rho: float, eps: float) -> Transform:
    """Return a transform that computes Adadelta's direction ``Δ = √(d + ε)/√(v + ε)·g``.

    The moving averages are ``v ← ρv + (1−ρ)g²`` and ``d ← ρd + (1−ρ)Δ²``.
    """

    def each(op: Builder, g: Var, p: Var, slots: Mapping[str, Var]) -> tuple[Var, Mapping[str, Var]]:
        check_range("adadelta", [g])
        v = slots["square_avg"] + (1.0 - rho) * (g * g - slots["square_avg"])
        delta = op.Sqrt(slots["acc_delta"] + eps) / op.Sqrt(v + eps) * g
        return delta, {
            "square_avg": v,
            "acc_delta": slots["acc_delta"] + (1.0 - rho) * (delta * delta - slots["acc_delta"]),
        }

    return parameterwise("scale_by_deltas", {"rho": rho, "eps": eps}, each, zeros("square_avg", "acc_delta"))


@checked_recipe()
def adadelta(
    lr: Rate = 1.0, rho: float = 0.9, eps: float = 1e-6, weight_decay: float = 0.0, **grouping: Unpack[Grouping]
) -> Optimizer:
    """Adaptive updates scaled by the size of previous ones, as ``torch.optim.Adadelta``."""
    not_negative(lr=lr, eps=eps, weight_decay=weight_decay)
    below_one(rho=rho)
    return made(lr, [*decay_links(weight_decay), _scale_by_deltas(rho, eps)])

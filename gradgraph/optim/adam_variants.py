"""NAdam, RAdam and Adamax: Adam with Nesterov momentum, variance rectification, and the infinity norm."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np
import onnx_ir as ir

from gradgraph.graph.builder import Builder, Var
from gradgraph.optim.adam_family import bias_corrections
from gradgraph.optim.modifiers import Rate
from gradgraph.optim.recipe_parts import check_adam, check_range, checked_recipe, decay_links, made, not_negative
from gradgraph.optim.transform import Context, Optimizer, Transform, parameterwise, zeros
from gradgraph.optim.updates import moments
from gradgraph.optim.weight_groups import Grouping

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = ["adamax", "nadam", "radam"]


def _scale_by_nadam(betas: tuple[float, float], eps: float, momentum_decay: float) -> Transform:
    """Return a transform that computes NAdam's direction ``((1−μᵗ)/(1−Π)·g + μᵗ⁺¹/(1−Πμᵗ⁺¹)·m) / (√(v/c₂) + ε)``.

    ``m`` and ``v`` are Adam's moments and ``c₂ = 1 − β₂ᵗ``. The momentum of step t is ``μᵗ = β₁(1 − 0.96^{tψ}/2)`` with
    ψ the argument ``momentum_decay``, and ``Π = μ¹⋯μᵗ``.
    """
    takes = [1.0 - b for b in betas]

    def numbers(op: Builder, context: Context) -> list[Var]:
        t = op.cast(context.step() + 1, ir.DataType.DOUBLE)
        base = op.const(np.float64(0.96))
        now, then = (betas[0] * (1.0 - 0.5 * op.Pow(base, n * momentum_decay)) for n in (t, t + 1.0))
        narrow = op.cast(now, ir.DataType.FLOAT)
        before = context.scalar("mu_product", 1.0, lambda product: product * narrow)
        product = op.cast(before * narrow, ir.DataType.DOUBLE)
        root = op.Sqrt(bias_corrections(op, context, betas[1:])[0])
        return [root * (1.0 - now) / (1.0 - product), root * then / (1.0 - product * then), root * eps]

    def each(
        op: Builder, g: Var, p: Var, slots: Mapping[str, Var], fresh: Var, kept: Var, floor: Var
    ) -> tuple[Var, Mapping[str, Var]]:
        check_range("nadam", [g])
        m, v = moments(g, slots["exp_avg"], slots["exp_avg_sq"], takes)
        return (g * fresh + m * kept) / (op.Sqrt(v) + floor), {"exp_avg": m, "exp_avg_sq": v}

    arguments = {"betas": list(betas), "eps": eps, "momentum_decay": momentum_decay}
    return parameterwise("scale_by_nadam", arguments, each, zeros("exp_avg", "exp_avg_sq"), numbers)


@checked_recipe()
def nadam(
    lr: Rate = 2e-3,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    momentum_decay: float = 4e-3,
    decoupled_weight_decay: bool = False,
    **grouping: Unpack[Grouping],
) -> Optimizer:
    """Adam with Nesterov momentum, as ``torch.optim.NAdam``."""
    check_adam(lr, betas, eps, weight_decay)
    not_negative(momentum_decay=momentum_decay)
    scaled, decay = _scale_by_nadam(betas, eps, momentum_decay), decay_links(weight_decay)
    return made(lr, [scaled, *decay] if decoupled_weight_decay else [*decay, scaled])


def _scale_by_radam(betas: tuple[float, float], eps: float) -> Transform:
    """Return a transform for RAdam's direction: ``m/c₁ · r·√c₂/(√v + ε)`` once ``ρ > 5``, and ``m/c₁`` before.

    ``m``, ``v`` and ``cᵢ = 1 − βᵢᵗ`` are as in Adam. The length of the average is ``ρ = ρ∞ − 2tβ₂ᵗ/c₂`` with ``ρ∞ =
    2/(1−β₂) − 1``, and the rectification is ``r² = (ρ−4)(ρ−2)ρ∞ / ((ρ∞−4)(ρ∞−2)ρ)``.
    """
    takes = [1.0 - b for b in betas]
    longest = 2.0 / takes[1] - 1.0

    def numbers(op: Builder, context: Context) -> list[Var]:
        c1, c2 = bias_corrections(op, context, betas)
        t = op.cast(context.step() + 1, ir.DataType.DOUBLE)
        length = longest - 2.0 * t * (1.0 - c2) / c2
        square = (length - 4.0) * (length - 2.0) * longest / ((longest - 4.0) * (longest - 2.0) * length)
        scaled = op.Sqrt(op.Max(square, 0.0) * c2) / c1
        begun = length > 5.0
        # the direction is m / (√v·a + b) · c: with a = 1, b = ε it is divided by √v, with a = 0, b = 1 it is not
        single = [op.cast(n, ir.DataType.FLOAT) for n in (scaled, 1.0 / c1)]
        return [op.Where(begun, *single), op.cast(begun, ir.DataType.FLOAT), op.Where(begun, op.const(eps), 1.0)]

    def each(
        op: Builder, g: Var, p: Var, slots: Mapping[str, Var], factor: Var, share: Var, floor: Var
    ) -> tuple[Var, Mapping[str, Var]]:
        check_range("radam", [g])
        m, v = moments(g, slots["exp_avg"], slots["exp_avg_sq"], takes)
        return m / (op.Sqrt(v) * share + floor) * factor, {"exp_avg": m, "exp_avg_sq": v}

    arguments = {"betas": list(betas), "eps": eps}
    return parameterwise("scale_by_radam", arguments, each, zeros("exp_avg", "exp_avg_sq"), numbers)


@checked_recipe()
def radam(
    lr: Rate = 1e-3,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    decoupled_weight_decay: bool = False,
    **grouping: Unpack[Grouping],
) -> Optimizer:
    """Adam that uses momentum only until its variance estimate is reliable, as ``torch.optim.RAdam``."""
    check_adam(lr, betas, eps, weight_decay)
    scaled, decay = _scale_by_radam(betas, eps), decay_links(weight_decay)
    return made(lr, [scaled, *decay] if decoupled_weight_decay else [*decay, scaled])


def _scale_by_adamax(betas: tuple[float, float], eps: float) -> Transform:
    """Return a transform that computes Adamax's direction ``(m/c₁) / u``.

    ``m`` and ``c₁ = 1 − β₁ᵗ`` are as in Adam, and ``u ← max(β₂u, |g| + ε)``.
    """

    def numbers(op: Builder, context: Context) -> list[Var]:
        return [1.0 / bias_corrections(op, context, betas[:1])[0]]

    def each(op: Builder, g: Var, p: Var, slots: Mapping[str, Var], factor: Var) -> tuple[Var, Mapping[str, Var]]:
        check_range("adamax", [g])  # ε is zero in float16
        m = slots["exp_avg"] + (1.0 - betas[0]) * (g - slots["exp_avg"])
        u = op.Max(betas[1] * slots["exp_inf"], op.Abs(g) + eps)
        return m / u * factor, {"exp_avg": m, "exp_inf": u}

    return parameterwise(
        "scale_by_adamax", {"betas": list(betas), "eps": eps}, each, zeros("exp_avg", "exp_inf"), numbers
    )


@checked_recipe()
def adamax(
    lr: Rate = 2e-3,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    **grouping: Unpack[Grouping],
) -> Optimizer:
    """Adam based on the infinity norm, as ``torch.optim.Adamax``."""
    check_adam(lr, betas, eps, weight_decay)
    return made(lr, [*decay_links(weight_decay), _scale_by_adamax(betas, eps)])

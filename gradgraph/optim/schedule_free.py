"""Schedule-free optimizers (Defazio et al., arXiv 2405.15682): a running average of weights replaces a schedule.

The model trains with the weights ``y``, at which gradients are computed. Updates change ``z``, and evaluation reads the
average ``x``; ``y`` lies between ``z`` and ``x``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import onnx_ir as ir

from gradgraph.graph.builder import Builder, Var
from gradgraph.optim.adam_family import bias_corrections
from gradgraph.optim.modifiers import Rate, learning_rate
from gradgraph.optim.recipe_parts import below_one, check_adam, check_range, checked_recipe, made, not_negative
from gradgraph.optim.transform import Context, Optimizer, Slots, Transform, Vars, copies, parameterwise
from gradgraph.optim.weight_groups import Grouping

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = ["schedule_free_adamw", "schedule_free_sgd"]


def _averaged_steps(
    lr: Rate,
    betas: Sequence[float],
    eps: float,
    weight_decay: float,
    warmup_steps: int,
    r: float,
    weight_lr_power: float,
) -> Transform:
    """Return the transform of a schedule-free optimizer.

    It computes ``z ← z − γd``, ``x ← x + w/Σw·(z − x)``, ``y ← z + β₁(x − z)``. γ is the learning rate, and d the
    direction: ``g/(√(v/c₂) + ε) + λy`` for AdamW and ``g + λy`` for SGD, with the weight decay λ. The weight of a step
    is ``w = tʳ·(the largest γ so far)^weight_lr_power``.
    """
    is_adam = len(betas) > 1

    def init(op: Builder, params: Vars) -> Slots:
        squares = {"exp_avg_sq": [op.zeros_like(p) for p in params]} if is_adam else {}
        return {**copies("z", "x")(op, params), **squares}

    def numbers(op: Builder, context: Context) -> list[Var]:
        t = op.cast(context.step() + 1, ir.DataType.FLOAT)
        rate = learning_rate(op, context, lr)
        if warmup_steps:
            rate = rate * op.Min(t / float(warmup_steps), 1.0)
        largest = op.Max(context.scalar("largest_rate", 0.0, lambda before: op.Max(before, rate)), rate)
        weight = op.Pow(largest, float(weight_lr_power))
        weight = weight * op.Pow(t, float(r)) if r else weight
        total = context.scalar("weight_sum", 0.0, lambda before: before + weight) + weight
        share = weight / op.Where(total > 0.0, total, 1.0)
        if not is_adam:
            return [rate, share]
        root = op.Sqrt(bias_corrections(op, context, betas[1:])[0])
        return [rate, share, root, root * eps]

    def each(
        op: Builder, g: Var, p: Var, slots: Mapping[str, Var], rate: Var, share: Var, *adam: Var
    ) -> tuple[Var, Mapping[str, Var]]:
        new, d = dict[str, Var](), g
        if is_adam:
            check_range("schedule_free_adamw", [g])
            v = new["exp_avg_sq"] = slots["exp_avg_sq"] + (1.0 - betas[1]) * (g * g - slots["exp_avg_sq"])
            d = g / (op.Sqrt(v) + adam[1]) * adam[0]
        d = d + weight_decay * p if weight_decay else d
        z = new["z"] = slots["z"] - rate * d
        x = new["x"] = slots["x"] + share * (z - slots["x"])
        return z + betas[0] * (x - z) - p, new

    arguments = {"betas": list(betas), "eps": eps, "weight_decay": weight_decay}
    steps = parameterwise("averaged_steps", arguments, each, init, numbers)
    return replace(steps, averages="x")


@checked_recipe()
def schedule_free_adamw(
    lr: Rate = 2.5e-3,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    warmup_steps: int = 0,
    r: float = 0.0,
    weight_lr_power: float = 2.0,
    **grouping: Unpack[Grouping],
) -> Optimizer:
    """AdamW without a schedule: evaluation reads an average of the weights (Defazio et al., arXiv 2405.15682)."""
    check_adam(lr, betas, eps, weight_decay)
    not_negative(warmup_steps=warmup_steps)
    steps = _averaged_steps(lr, betas, eps, weight_decay, warmup_steps, r, weight_lr_power)
    return made(lr, [steps], scaled=False)


@checked_recipe()
def schedule_free_sgd(
    lr: Rate = 1.0,
    momentum: float = 0.9,
    weight_decay: float = 0.0,
    warmup_steps: int = 0,
    r: float = 0.0,
    weight_lr_power: float = 2.0,
    **grouping: Unpack[Grouping],
) -> Optimizer:
    """SGD without a schedule: evaluation reads an average of the weights (Defazio et al., arXiv 2405.15682)."""
    not_negative(lr=lr, weight_decay=weight_decay, warmup_steps=warmup_steps)
    below_one(momentum=momentum)
    steps = _averaged_steps(lr, [momentum], 0.0, weight_decay, warmup_steps, r, weight_lr_power)
    return made(lr, [steps], scaled=False)

"""Adam and AdamW."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import onnx_ir as ir

from gradgraph.graph.builder import Builder, Var
from gradgraph.optim.modifiers import Rate
from gradgraph.optim.recipe_parts import check_adam, check_range, checked_recipe, decay_links, made
from gradgraph.optim.transform import Context, Line, Optimizer, Slots, Transform, Vars, zeros
from gradgraph.optim.updates import adam_update, moments
from gradgraph.optim.weight_groups import Grouping

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = ["adam", "adamw", "scale_by_adam"]


def bias_corrections(op: Builder, context: Context, betas: Sequence[float]) -> list[Var]:
    """Return ``1 − βᵗ`` for each β, as scalars in float64, since 1 − 0.999ᵗ loses five digits in float32."""
    t = op.cast(context.step() + 1, ir.DataType.DOUBLE)
    return [1.0 - op.Pow(op.const(np.float64(b)), t) for b in betas]


def scale_by_adam(betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8, amsgrad: bool = False) -> Transform:
    """Return a transform that computes Adam's direction ``(m/c₁) / (√v/√c₂ + ε)``, with ``cᵢ = 1 − βᵢᵗ``.

    The moments are ``m ← β₁m + (1−β₁)g`` and ``v ← β₂v + (1−β₂)g²``. With ``amsgrad``, it divides by the largest ``v``
    so far.
    """
    takes = [1.0 - b for b in betas]

    def corrections(op: Builder, context: Context) -> tuple[Var, Var]:
        """Return ``√c₂/c₁`` and ``ε·√c₂`` of the equal direction ``√c₂/c₁·m / (√v + ε·√c₂)``, which saves one pass."""
        c1, c2 = bias_corrections(op, context, betas)
        root = op.Sqrt(c2)
        return root / c1, root * eps

    def update(op: Builder, grads: Vars, slots: Slots, params: Vars, context: Context) -> tuple[Vars, Slots]:
        check_range("adam", grads)
        rate, floor = corrections(op, context)
        rows = zip(grads, slots["exp_avg"], slots["exp_avg_sq"], strict=True)
        m, v = zip(*(moments(g, m, v, takes) for g, m, v in rows), strict=True)
        new: dict[str, Vars] = {"exp_avg": m, "exp_avg_sq": v}
        if amsgrad:
            v = tuple(op.Max(*row) for row in zip(slots["max_exp_avg_sq"], v, strict=True))
            new["max_exp_avg_sq"] = v
        scaled = [
            mi / (op.Sqrt(vi) + op.cast(floor, vi.dtype)) * op.cast(rate, mi.dtype) for mi, vi in zip(m, v, strict=True)
        ]
        return scaled, new

    def apply(op: Builder, grads: Vars, slots: Slots, params: Vars, context: Context, line: Line) -> tuple[Vars, Slots]:
        rate, floor = corrections(op, context)
        rate = op.cast(rate * op.cast(line.rate, rate.dtype), ir.DataType.FLOAT)
        floor = op.cast(floor, ir.DataType.FLOAT)
        rows = zip(params, grads, slots["exp_avg"], slots["exp_avg_sq"], strict=True)
        new = [adam_update(op, *row, rate, floor, line.keep, takes=takes) for row in rows]
        p, m, v = zip(*new, strict=True)
        return p, {"exp_avg": m, "exp_avg_sq": v}

    slots_from = zeros("exp_avg", "exp_avg_sq", *(["max_exp_avg_sq"] if amsgrad else []))
    arguments = {"betas": list(betas), "eps": eps, **({"amsgrad": True} if amsgrad else {})}
    return Transform("scale_by_adam", update, slots_from, arguments, apply=None if amsgrad else apply)


@checked_recipe()
def adam(
    lr: Rate = 1e-3,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    amsgrad: bool = False,
    **grouping: Unpack[Grouping],
) -> Optimizer:
    """Adam with L2 regularisation, as ``torch.optim.Adam``."""
    check_adam(lr, betas, eps, weight_decay)
    return made(lr, [*decay_links(weight_decay), scale_by_adam(betas, eps, amsgrad)])


@checked_recipe()
def adamw(
    lr: Rate = 1e-3,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 1e-2,
    amsgrad: bool = False,
    **grouping: Unpack[Grouping],
) -> Optimizer:
    """Adam with decoupled weight decay, as ``torch.optim.AdamW``."""
    check_adam(lr, betas, eps, weight_decay)
    return made(lr, [scale_by_adam(betas, eps, amsgrad), *decay_links(weight_decay)])

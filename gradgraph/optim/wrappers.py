"""What goes around an optimizer's step: averages of the weights that it gave (EMA), Lookahead; SAM before it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import onnx_ir as ir

from gradgraph.arguments import FLAG, NUMBER, WHOLE, checked, instance
from gradgraph.errors import BuildError
from gradgraph.graph.builder import Builder, Var
from gradgraph.optim.recipe_parts import below_one, not_negative
from gradgraph.optim.transform import Context, Optimizer, Slots, Transform, Vars, copies

__all__ = ["ema", "lookahead", "sam"]

_OPTIMIZER = instance(Optimizer, "an optimizer, such as gradgraph.optim.adamw(1e-3)")


@checked(optimizer=_OPTIMIZER, decay=NUMBER, warmup=FLAG)
def ema(optimizer: Optimizer, decay: float = 0.999, warmup: bool = False) -> Optimizer:
    """``optimizer``, and an average of the weights that evaluation, prediction and export read:
    ``a ← decay·a + (1 − decay)·p`` after each step, after the first ``a ← p``; with ``warmup`` the decay of step t is
    at most ``(1 + t)/(10 + t)``.
    """
    below_one(decay=decay)

    def update(op: Builder, new: Vars, slots: Slots, old: Vars, context: Context) -> tuple[Vars, Slots]:
        s = context.step()
        kept: Var = op.const(float(decay))
        if warmup:
            t = op.cast(s, ir.DataType.FLOAT)
            kept = op.Min(kept, (1.0 + t) / (10.0 + t))
        take = op.Where(op.Equal(s, np.int64(0)), 1.0, 1.0 - kept)
        rows = zip(slots["ema"], new, strict=True)
        return new, {"ema": [a + op.cast(take, p.dtype) * (p - a) for a, p in rows]}

    averages = Transform("ema", update, copies("ema"), {"decay": decay, "warmup": warmup}, averages="ema")
    return _followed(optimizer, averages)


@checked(optimizer=_OPTIMIZER, k=WHOLE, alpha=NUMBER)
def lookahead(optimizer: Optimizer, k: int = 5, alpha: float = 0.5) -> Optimizer:
    """``optimizer`` for k steps from slow weights, which then go ``alpha`` of the way: ``s ← s + α(p − s)``, ``p ← s``
    (Zhang et al., arXiv 1907.08610).
    """
    if k < 1 or not 0.0 < alpha <= 1.0:
        raise BuildError(f"k must be at least 1 and alpha in (0, 1], but they are {k} and {alpha}")

    def update(op: Builder, new: Vars, slots: Slots, old: Vars, context: Context) -> tuple[Vars, Slots]:
        due = op.Equal(op.Mod(context.step() + 1, np.int64(k)), np.int64(0))
        share = op.Where(due, op.const(float(alpha)), 0.0)
        slow = [s + op.cast(share, p.dtype) * (p - s) for s, p in zip(slots["slow"], new, strict=True)]
        return [op.Where(due, s, p) for s, p in zip(slow, new, strict=True)], {"slow": slow}

    return _followed(optimizer, Transform("lookahead", update, copies("slow"), {"k": k, "alpha": alpha}))


@checked(optimizer=_OPTIMIZER, rho=NUMBER, adaptive=FLAG)
def sam(optimizer: Optimizer, rho: float = 0.05, adaptive: bool = False) -> Optimizer:
    """``optimizer`` with gradients taken at ``p + ρ·g/‖all g‖₂``, where the loss is higher: sharpness-aware
    minimisation (Foret et al., arXiv 2010.01412), for two passes a step. ``adaptive``: at ``p + ρ·p²g/‖all |p|g‖₂``.
    """
    not_negative(rho=rho)
    if optimizer.ascent is not None:
        raise BuildError("this optimizer is wrapped in sam already")

    def update(op: Builder, grads: Vars, slots: Slots, params: Vars, context: Context) -> tuple[Vars, Slots]:
        rows = list(zip(grads, params, strict=True))
        scaled = [op.Abs(p) * g for g, p in rows] if adaptive else grads
        squares = [op.ReduceSumSquare(op.cast(g, ir.DataType.FLOAT), keepdims=0) for g in scaled]
        factor = rho / (op.Sqrt(op.sum_of(squares)) + 1e-12)
        up = [p * p * g for g, p in rows] if adaptive else grads
        return [g * op.cast(factor, g.dtype) for g in up], {}

    inner: dict[str, Any] = {"name": optimizer.name, "arguments": dict(optimizer.arguments)}
    arguments = {"optimizer": inner, "rho": rho, "adaptive": adaptive}
    return replace(optimizer, name="sam", arguments=arguments, ascent=Transform("sam", update))


def _followed(optimizer: Optimizer, last: Transform) -> Optimizer:
    """``optimizer`` with one more transform of its new weights."""
    inner: dict[str, Any] = {"name": optimizer.name, "arguments": dict(optimizer.arguments)}
    return replace(
        optimizer,
        name=last.name,
        arguments={"optimizer": inner, **last.arguments},
        after=(*optimizer.after, last),
    )

"""Transforms that scale gradients: by their history, by the learning rate.

``g`` gradient, ``p`` parameter, ``t`` the number of this step, counted from 1. Formulas and slot names are those of
``torch.optim``, so that trajectories can be compared.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from gradgraph.builder import Builder, Var
from gradgraph.errors import BuildError
from gradgraph.optim.schedules import Schedule
from gradgraph.optim.transform import Context, Line, Slots, Transform, Vars, zeros
from gradgraph.optim.updates import adam_update, moments, momentum_update


def scale_by_learning_rate(lr: float | Schedule) -> Transform:
    """``g ← −lr·g``; a number becomes the input ``learning_rate``, a schedule part of the graph."""

    def factor(op: Builder, context: Context) -> Var:
        if isinstance(lr, Schedule):
            return -lr.emit(op, op.cast(context.step(), ir.DataType.FLOAT))
        return -context.hyperparameter("learning_rate", lr)

    def update(op: Builder, grads: Vars, slots: Slots, params: Vars, context: Context) -> tuple[Vars, Slots]:
        minus = factor(op, context)
        return [g * op.cast(minus, g.dtype) for g in grads], {}

    shown = lr.describe() if isinstance(lr, Schedule) else lr
    return Transform("scale_by_learning_rate", update, arguments={"lr": shown}, factor=factor)


def momentum(decay: float, dampening: float = 0.0, nesterov: bool = False) -> Transform:
    """``m ← decay·m + (1 − dampening)·g``, at the first step ``m ← g``; gives ``m``, or ``g + decay·m`` (Nesterov)."""

    def update(op: Builder, grads: Vars, slots: Slots, params: Vars, context: Context) -> tuple[Vars, Slots]:
        keep: Var | float = 1.0 - dampening
        if dampening:  # with none, a buffer of zeros gives the first step by itself
            keep = op.Where(op.Equal(context.step(), 0), op.const(1.0), op.const(1.0 - dampening))
        fresh = [g if keep == 1.0 else g * (op.cast(keep, g.dtype) if isinstance(keep, Var) else keep) for g in grads]
        buffers = [decay * m + g for m, g in zip(slots["momentum_buffer"], fresh, strict=True)]
        looking_ahead = [g + decay * m for g, m in zip(grads, buffers, strict=True)] if nesterov else buffers
        return looking_ahead, {"momentum_buffer": buffers}

    def apply(op: Builder, grads: Vars, slots: Slots, params: Vars, context: Context, line: Line) -> tuple[Vars, Slots]:
        new = [
            momentum_update(op, p, g, m, line.rate, line.keep, decay=decay, nesterov=int(nesterov))
            for p, g, m in zip(params, grads, slots["momentum_buffer"], strict=True)
        ]
        return [p for p, _ in new], {"momentum_buffer": [m for _, m in new]}

    arguments = {"decay": decay, "dampening": dampening, "nesterov": nesterov}
    return Transform("momentum", update, zeros("momentum_buffer"), arguments, apply=None if dampening else apply)


def _check_range(name: str, grads: Vars) -> None:
    """g² of a usual gradient, and ε, are zero in float16: the quotient would be infinite at the third step or so."""
    if any(g.dtype == ir.DataType.FLOAT16 for g in grads):
        raise BuildError(
            f"{name} squares gradients, which float16 weights cannot hold",
            remedy=f"keep float32 copies with gradgraph.optim.master_weights({name}(...)), or use sgd",
            shell="keep float32 copies with --master-weights, or use --optimizer sgd",
        )


def scale_by_adam(betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8) -> Transform:
    """``m ← β₁m + (1−β₁)g``, ``v ← β₂v + (1−β₂)g²``; gives ``(m/c₁) / (√v/√c₂ + ε)``, ``cᵢ = 1 − βᵢᵗ``."""
    takes = [1.0 - b for b in betas]

    def corrections(op: Builder, context: Context) -> tuple[Var, Var]:
        """``√c₂/c₁`` and ``ε·√c₂``: the same quotient, with one pass less over each parameter."""
        t = op.cast(context.step() + 1, ir.DataType.DOUBLE)
        # in float64, since 1 − 0.999ᵗ loses five digits in float32; these are scalars
        c1, c2 = (1.0 - op.Pow(op.const(np.float64(b)), t) for b in betas)
        root = op.Sqrt(c2)
        return root / c1, root * eps

    def update(op: Builder, grads: Vars, slots: Slots, params: Vars, context: Context) -> tuple[Vars, Slots]:
        _check_range("adam", grads)
        rate, floor = corrections(op, context)
        rows = zip(grads, slots["exp_avg"], slots["exp_avg_sq"], strict=True)
        m, v = zip(*(moments(g, m, v, takes) for g, m, v in rows), strict=True)
        scaled = [
            mi / (op.Sqrt(vi) + op.cast(floor, vi.dtype)) * op.cast(rate, mi.dtype) for mi, vi in zip(m, v, strict=True)
        ]
        return scaled, {"exp_avg": m, "exp_avg_sq": v}

    def apply(op: Builder, grads: Vars, slots: Slots, params: Vars, context: Context, line: Line) -> tuple[Vars, Slots]:
        rate, floor = corrections(op, context)
        rate = op.cast(rate * op.cast(line.rate, rate.dtype), ir.DataType.FLOAT)
        floor = op.cast(floor, ir.DataType.FLOAT)
        rows = zip(params, grads, slots["exp_avg"], slots["exp_avg_sq"], strict=True)
        new = [adam_update(op, *row, rate, floor, line.keep, takes=takes) for row in rows]
        p, m, v = zip(*new, strict=True)
        return p, {"exp_avg": m, "exp_avg_sq": v}

    slots_from = zeros("exp_avg", "exp_avg_sq")
    return Transform("scale_by_adam", update, slots_from, {"betas": list(betas), "eps": eps}, apply=apply)


def scale_by_rms(alpha: float = 0.99, eps: float = 1e-8, centered: bool = False) -> Transform:
    """``v ← αv + (1−α)g²``; gives ``g / (√v + ε)``; centered subtracts the square of the running mean from ``v``."""
    slots_used = ("square_avg", "grad_avg") if centered else ("square_avg",)

    def update(op: Builder, grads: Vars, slots: Slots, params: Vars, context: Context) -> tuple[Vars, Slots]:
        _check_range("rmsprop", grads)
        v = [alpha * v + (1.0 - alpha) * (g * g) for v, g in zip(slots["square_avg"], grads, strict=True)]
        new: dict[str, Vars] = {"square_avg": v}
        spread: Vars = v
        if centered:
            mean = [alpha * m + (1.0 - alpha) * g for m, g in zip(slots["grad_avg"], grads, strict=True)]
            new["grad_avg"] = mean
            spread = [vi - mi * mi for vi, mi in zip(v, mean, strict=True)]
        return [g / (op.Sqrt(s) + eps) for g, s in zip(grads, spread, strict=True)], new

    return Transform("scale_by_rms", update, zeros(*slots_used), {"alpha": alpha, "eps": eps, "centered": centered})

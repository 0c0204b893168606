"""The optimizers people know: the mathematics of each, and its recipe, with PyTorch's names, arguments and defaults.

``g`` gradient, ``p`` parameter, ``t`` the number of this step, counted from 1. Formulas and slot names are those of
``torch.optim``, so that trajectories can be compared. To add one, write both here, name the recipe in ``RECIPES`` and
all that is public in ``__all__``, and add its cases to ``tests/test_optim.py``: command line, help, errors and
docs/names.md read the table.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import onnx_ir as ir

from gradgraph.arguments import FINITE, FLAG, NUMBER, checked
from gradgraph.builder import Builder, Var
from gradgraph.errors import BuildError
from gradgraph.named import make_named
from gradgraph.optim.kinds import PAIR, RATE
from gradgraph.optim.modifiers import add_decayed_weights, scale_by_learning_rate
from gradgraph.optim.schedules import Schedule
from gradgraph.optim.transform import Context, Line, Optimizer, Slots, Transform, Vars, zeros
from gradgraph.optim.updates import adam_update, moments, momentum_update

__all__ = ["adam", "adamw", "by_name", "momentum", "rmsprop", "scale_by_adam", "scale_by_rms", "sgd"]

Rate = float | Schedule

# --- stochastic gradient descent -------------------------------------------------------------------------


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


@checked(lr=RATE, momentum=NUMBER, dampening=FINITE, weight_decay=NUMBER, nesterov=FLAG)
def sgd(
    lr: Rate = 1e-3, momentum: float = 0.0, dampening: float = 0.0, weight_decay: float = 0.0, nesterov: bool = False
) -> Optimizer:
    """Stochastic gradient descent, as ``torch.optim.SGD``."""
    _not_negative(lr=lr, momentum=momentum, weight_decay=weight_decay)
    if nesterov and (momentum <= 0 or dampening != 0):
        raise BuildError("Nesterov momentum needs a momentum above zero and no dampening")
    links = [*_decay(weight_decay), *_momentum(momentum, dampening, nesterov)]
    arguments = {"momentum": momentum, "dampening": dampening, "weight_decay": weight_decay, "nesterov": nesterov}
    return _recipe("sgd", lr, links, arguments)


# --- Adam ------------------------------------------------------------------------------------------------


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


@checked(lr=RATE, betas=PAIR, eps=NUMBER, weight_decay=NUMBER)
def adam(
    lr: Rate = 1e-3, betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8, weight_decay: float = 0.0
) -> Optimizer:
    """Adam with L2 regularisation, as ``torch.optim.Adam``."""
    _check_adam(lr, betas, eps, weight_decay)
    arguments = {"betas": list(betas), "eps": eps, "weight_decay": weight_decay}
    return _recipe("adam", lr, [*_decay(weight_decay), scale_by_adam(betas, eps)], arguments)


@checked(lr=RATE, betas=PAIR, eps=NUMBER, weight_decay=NUMBER)
def adamw(
    lr: Rate = 1e-3, betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8, weight_decay: float = 1e-2
) -> Optimizer:
    """Adam with decoupled weight decay, as ``torch.optim.AdamW``."""
    _check_adam(lr, betas, eps, weight_decay)
    arguments = {"betas": list(betas), "eps": eps, "weight_decay": weight_decay}
    return _recipe("adamw", lr, [scale_by_adam(betas, eps), *_decay(weight_decay)], arguments)


# --- RMSprop ---------------------------------------------------------------------------------------------


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


@checked(lr=RATE, alpha=NUMBER, eps=NUMBER, weight_decay=NUMBER, momentum=NUMBER, centered=FLAG)
def rmsprop(
    lr: Rate = 1e-2,
    alpha: float = 0.99,
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    momentum: float = 0.0,
    centered: bool = False,
) -> Optimizer:
    """RMSprop, as ``torch.optim.RMSprop``."""
    _not_negative(lr=lr, alpha=alpha, eps=eps, weight_decay=weight_decay, momentum=momentum)
    links = [*_decay(weight_decay), scale_by_rms(alpha, eps, centered), *_momentum(momentum)]
    arguments = {"alpha": alpha, "eps": eps, "weight_decay": weight_decay, "momentum": momentum, "centered": centered}
    return _recipe("rmsprop", lr, links, arguments)


# --- by name, and what recipes share ---------------------------------------------------------------------


RECIPES: dict[str, Callable[..., Optimizer]] = {f.__name__: f for f in (sgd, adam, adamw, rmsprop)}


def by_name(name: str, **arguments: Any) -> Optimizer:
    """The recipe called ``name``.

    Raises:
        BuildError: there is no such recipe, or it has no such argument.
    """
    return make_named("optimizer", RECIPES, name, arguments)


def _recipe(name: str, lr: Rate, links: list[Transform], arguments: dict[str, Any]) -> Optimizer:
    rate = lr.describe() if isinstance(lr, Schedule) else lr
    return Optimizer(name, (*links, scale_by_learning_rate(lr)), {"lr": rate, **arguments})


def _decay(weight_decay: float) -> list[Transform]:
    return [add_decayed_weights(weight_decay)] if weight_decay else []


def _momentum(decay: float, dampening: float = 0.0, nesterov: bool = False) -> list[Transform]:
    return [momentum(decay, dampening, nesterov)] if decay else []


def _check_adam(lr: Rate, betas: tuple[float, float], eps: float, weight_decay: float) -> None:
    _not_negative(lr=lr, eps=eps, weight_decay=weight_decay)
    if len(betas) != 2 or not all(0.0 <= b < 1.0 for b in betas):
        raise BuildError(f"betas must be two numbers in [0, 1), not {betas}")


def _not_negative(**values: Rate) -> None:
    for name, value in values.items():
        if not isinstance(value, Schedule) and not 0.0 <= value < math.inf:
            raise BuildError(f"{name} must {'not be negative' if value < 0.0 else 'be finite'}, but is {value}")


def _check_range(name: str, grads: Vars) -> None:
    """g² of a usual gradient, and ε, are zero in float16: the quotient would be infinite at the third step or so."""
    if any(g.dtype == ir.DataType.FLOAT16 for g in grads):
        raise BuildError(
            f"{name} squares gradients, which float16 weights cannot hold",
            remedy=f"keep float32 copies with gradgraph.optim.master_weights({name}(...)), or use sgd",
            shell="keep float32 copies with --master-weights, or use --optimizer sgd",
        )

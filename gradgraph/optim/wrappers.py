"""Wrappers around an optimizer: moving averages of its weights (EMA), Lookahead, SAM, magnitude pruning."""

from __future__ import annotations

import re
from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

from gradgraph.arguments import FLAG, NAMES, NUMBER, TEXT, WHOLE, Kind, as_names, checked, instance
from gradgraph.errors import BuildError, shown
from gradgraph.graph.builder import Builder, Var
from gradgraph.optim.pruning import Pruning
from gradgraph.optim.recipe_parts import below_one, not_negative
from gradgraph.optim.transform import Context, Optimizer, Slots, Transform, Vars, copies

__all__ = ["ema", "lookahead", "magnitude_pruning", "sam"]

_OPTIMIZER = instance(Optimizer, "an optimizer, such as gradgraph.optim.adamw(1e-3)")


@checked(optimizer=_OPTIMIZER, decay=NUMBER, warmup=FLAG)
def ema(optimizer: Optimizer, decay: float = 0.999, warmup: bool = False) -> Optimizer:
    """Return ``optimizer`` with a moving average of the weights, which evaluation, prediction and export read.

    The average is ``a ← decay·a + (1 − decay)·p`` after each step, starting with ``a ← p`` after the first. With
    ``warmup``, the decay of step t is at most ``(1 + t)/(10 + t)``.
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
    """Return ``optimizer`` with slow weights: every k steps, ``s ← s + α(p − s)``, ``p ← s``.

    See Zhang et al., arXiv 1907.08610.
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
    """Return ``optimizer`` with gradients at ``p + ρ·g/‖all g‖₂``: sharpness-aware minimisation.

    Each step takes two forward and backward passes. With ``adaptive``, gradients are computed at ``p + ρ·p²g/‖all
    |p|g‖₂``. See Foret et al., arXiv 2010.01412.
    """
    not_negative(rho=rho)
    if optimizer.ascent is not None:
        raise BuildError("this optimizer is already wrapped in sam")

    def update(op: Builder, grads: Vars, slots: Slots, params: Vars, context: Context) -> tuple[Vars, Slots]:
        rows = list(zip(grads, params, strict=True))
        scaled = [op.Abs(p) * g for g, p in rows] if adaptive else grads
        squares = [op.ReduceSumSquare(op.cast(g, ir.DataType.FLOAT), keepdims=0) for g in scaled]
        factor = rho / (op.Sqrt(op.sum_of(squares)) + 1e-12)
        up = [p * p * g for g, p in rows] if adaptive else grads
        return [g * op.cast(factor, g.dtype) for g in up], {}

    return optimizer.wrapped("sam", {"rho": rho, "adaptive": adaptive}, ascent=Transform("sam", update))


_N_OF_M = re.compile(r"([1-9]\d*):([1-9]\d*)")
_SPARSITY = Kind(
    "a share above 0 and below 1, or a pattern such as '2:4'",
    lambda v: (
        (isinstance(v, str) and _N_OF_M.fullmatch(v) is not None)
        or (isinstance(v, int | float) and not isinstance(v, bool) and 0 < v < 1)
    ),
)
_COUNT = Kind("a whole number from 0 on", lambda v: WHOLE.fits(v) and v >= 0)


@checked(optimizer=_OPTIMIZER, sparsity=_SPARSITY, target=NAMES, scope=TEXT, begin=_COUNT, end=_COUNT, every=_COUNT)
def magnitude_pruning(
    optimizer: Optimizer,
    sparsity: float | str = 0.9,
    *,
    begin: int = 0,
    end: int = 1000,
    every: int = 100,
    target: str | Sequence[str] = "*",
    scope: str = "layer",
) -> Optimizer:
    """``optimizer`` with magnitude pruning: every few updates, the smallest weights are set to 0 and stay 0.

    From update ``begin`` to update ``end`` the share of zeros grows as ``sparsity·(1 − (1 − (t − begin)/(end −
    begin))³)`` (Zhu and Gupta 2017, arXiv:1710.01878). Pruned weights have no gradient; masks are state
    (``<weight>.mask``), so a run resumes bit for bit, and averages of weights (``ema``) are masked, too.

    Args:
        optimizer: trains the remaining weights.
        sparsity: the final share of zeros, such as 0.9; or ``"2:4"``: of each 4 consecutive numbers along a layer's
            inputs, only the 2 largest are kept, from ``begin`` on (by default in all weights whose inputs are divisible
            by 4).
        begin: the number of finished updates before the first change of the masks.
        end: the number of finished updates before the last change. If ``end <= begin``, all pruning happens at once.
        every: the number of updates between changes.
        target: names or globs of weights; globs match only weights with two axes or more.
        scope: ``"layer"``: each weight has this sparsity; ``"global"``: all weights together have it, and the smallest
            of all are pruned.

    Raises:
        BuildError: if the arguments are inconsistent.
    """
    if optimizer.pruning is not None:
        raise BuildError("this optimizer is already wrapped in magnitude_pruning")
    if scope not in ("layer", "global"):
        raise BuildError(f"scope must be 'layer' or 'global', not '{shown(scope)}'")
    if every < 1:
        raise BuildError("every must be at least 1")
    kept, group = 0, 0
    if isinstance(sparsity, str):
        kept, group = (int(part) for part in sparsity.split(":"))
        if kept >= group:
            raise BuildError(f"in N:M, N must be less than M, but they are {kept} and {group}")
        if scope == "global":
            raise BuildError("N:M sparsity applies to each layer separately, so scope must be 'layer'")
    part = 1 - kept / group if group else float(sparsity)
    pruning = Pruning(tuple(as_names(target)), part, kept, group, scope, begin, end, every)
    arguments = {"sparsity": sparsity, "begin": begin, "end": end, "every": every, "target": list(pruning.target),
                 "scope": scope}  # fmt: skip
    return optimizer.wrapped("magnitude_pruning", arguments, pruning=pruning)


def _followed(optimizer: Optimizer, last: Transform) -> Optimizer:
    """Return ``optimizer`` with ``last`` appended to the transforms that are applied to new weights."""
    return optimizer.wrapped(last.name, last.arguments, after=(*optimizer.after, last))

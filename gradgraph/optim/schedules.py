"""Learning rates as functions of the number of finished steps, written into the graph.

``s`` is that number, a float32 scalar: 0 during the first step.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from gradgraph.arguments import FINITE, checked, instance
from gradgraph.builder import Builder, Var

__all__ = ["Schedule", "constant", "cosine", "exponential", "linear", "step_decay", "warmup"]


@dataclass(frozen=True)
class Schedule:
    """A learning rate that follows the step count.

    Args:
        name, arguments: for the manifest.
        emit: ``emit(op, s)`` gives the rate, a float32 scalar.
    """

    name: str
    emit: Callable[[Builder, Var], Var]
    arguments: dict[str, Any]

    def describe(self) -> dict[str, Any]:
        return {"schedule": self.name, **self.arguments}


@checked(lr=FINITE)
def constant(lr: float) -> Schedule:
    """``lr``, fixed in the graph."""
    return Schedule("constant", lambda op, s: op.const(float(lr)), {"lr": lr})


@checked(lr=FINITE, total_steps=FINITE, end=FINITE)
def linear(lr: float, total_steps: int, end: float = 0.0) -> Schedule:
    """From ``lr`` to ``end`` in a straight line over ``total_steps``, then ``end``."""
    return Schedule(
        "linear",
        lambda op, s: lr + (end - lr) * _progress(op, s, total_steps),
        {"lr": lr, "total_steps": total_steps, "end": end},
    )


@checked(lr=FINITE, total_steps=FINITE, end=FINITE)
def cosine(lr: float, total_steps: int, end: float = 0.0) -> Schedule:
    """``end + (lr − end)·(1 + cos(π·s/total_steps))/2``, then ``end`` (CosineAnnealingLR without restarts)."""
    return Schedule(
        "cosine",
        lambda op, s: end + (lr - end) * 0.5 * (1.0 + op.Cos(math.pi * _progress(op, s, total_steps))),
        {"lr": lr, "total_steps": total_steps, "end": end},
    )


@checked(lr=FINITE, gamma=FINITE)
def exponential(lr: float, gamma: float) -> Schedule:
    """``lr·gammaˢ``."""
    return Schedule("exponential", lambda op, s: lr * op.Pow(op.const(float(gamma)), s), {"lr": lr, "gamma": gamma})


@checked(lr=FINITE, step_size=FINITE, gamma=FINITE)
def step_decay(lr: float, step_size: int, gamma: float = 0.1) -> Schedule:
    """``lr·gamma^⌊s/step_size⌋``."""
    return Schedule(
        "step_decay",
        lambda op, s: lr * op.Pow(op.const(float(gamma)), op.Floor(s / float(step_size))),
        {"lr": lr, "step_size": step_size, "gamma": gamma},
    )


@checked(steps=FINITE, then=instance(Schedule, "a schedule, such as gradgraph.optim.constant(1e-3)"), start=FINITE)
def warmup(steps: int, then: Schedule, start: float = 0.0) -> Schedule:
    """``then``, its clock started after ``steps``; before that its first rate, times a line from ``start`` to 1."""

    def emit(op: Builder, s: Var) -> Var:
        later = then.emit(op, op.Max(s - float(steps), 0.0))
        share = start + (1.0 - start) * _progress(op, s, steps)
        return later * share

    return Schedule("warmup", emit, {"steps": steps, "then": then.describe(), "start": start})


SCHEDULES: dict[str, Callable[..., Schedule]] = {
    f.__name__: f for f in (constant, linear, cosine, exponential, step_decay, warmup)
}


def _progress(op: Builder, s: Var, total: int) -> Var:
    """``s/total``, at most 1."""
    return op.Min(s / float(max(total, 1)), 1.0)

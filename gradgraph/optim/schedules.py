"""Learning rates as functions of the number of finished steps, written into the graph.

In formulas, ``s`` is the number of finished steps, a float32 scalar: 0 during the first step.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ParamSpec, TypeVar

import numpy as np
import onnx_ir as ir

from gradgraph.arguments import FINITE, FLAG, FUNCTION, NUMBER, NUMBERS, TEXT, Kind, Makers, checked, instance
from gradgraph.errors import BuildError, shown
from gradgraph.graph.builder import Builder, Var
from gradgraph.rivals import entries

__all__ = [
    "Schedule", "constant", "cosine", "cosine_restarts", "exponential", "function", "inverse_square_root", "linear",
    "multi_step", "one_cycle", "polynomial", "sequential", "step_decay", "warmup",
]  # fmt: skip

P = ParamSpec("P")
T = TypeVar("T")


@dataclass(frozen=True)
class Schedule:
    """A learning rate that depends on the number of finished steps.

    Args:
        name, arguments: name and arguments for the manifest.
        emit: ``emit(op, s)`` writes nodes and returns the rate, a float32 scalar.
        multiple: (schedule, factor) if this schedule is the product of another one and a number, else None.
    """

    name: str
    emit: Callable[[Builder, Var], Var]
    arguments: dict[str, Any]
    multiple: tuple[Schedule, float] | None = None

    def describe(self) -> dict[str, Any]:
        """Return name and arguments for the manifest."""
        return {"schedule": self.name, **self.arguments}

    @property
    def peak(self) -> float | None:
        """The argument ``lr`` of the schedule, or of the schedule after a warm-up; None if it has no such argument."""
        described: Any = self.arguments
        while isinstance(described, dict) and "then" in described:
            described = described["then"]
        lr = described.get("lr")
        return None if lr is None else float(lr)

    def scaled(self, factor: float) -> Schedule:
        """Return a schedule whose rate is ``factor`` times the rate of this one."""
        arguments = {"of": self.describe(), "factor": factor}
        return Schedule("scaled", lambda op, s: self.emit(op, s) * factor, arguments, (self, factor))


SCHEDULES: Makers[Any] = Makers("schedule", Schedule, "gradgraph.optim", "constant(lr=1e-3)", entries.SCHEDULES)


def schedule(**kinds: Kind) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Decorate a function that returns a schedule: check its arguments by ``kinds``, and register it by its name."""

    def register(function: Callable[P, T]) -> Callable[P, T]:
        call = checked(**kinds)(function)
        SCHEDULES.add(function.__name__, call)
        return call

    return register


@schedule(lr=FINITE)
def constant(lr: float) -> Schedule:
    """A constant rate, stored in the graph."""
    return Schedule("constant", lambda op, s: op.const(float(lr)), {"lr": lr})


@schedule(lr=FINITE, total_steps=FINITE, end=FINITE)
def linear(lr: float, total_steps: int, end: float = 0.0) -> Schedule:
    """Linear change from ``lr`` to ``end`` over ``total_steps``, then ``end`` (LinearLR)."""
    return Schedule(
        "linear",
        lambda op, s: lr + (end - lr) * _progress(op, s, total_steps),
        {"lr": lr, "total_steps": total_steps, "end": end},
    )


@schedule(lr=FINITE, total_steps=FINITE, end=FINITE)
def cosine(lr: float, total_steps: int, end: float = 0.0) -> Schedule:
    """``end + (lr − end)·(1 + cos(π·s/total_steps))/2`` after ``s`` steps, then ``end`` (CosineAnnealingLR).

    Unlike PyTorch's, the rate does not rise again after ``total_steps``.
    """
    return Schedule(
        "cosine",
        lambda op, s: end + (lr - end) * 0.5 * (1.0 + op.Cos(math.pi * _progress(op, s, total_steps))),
        {"lr": lr, "total_steps": total_steps, "end": end},
    )


@schedule(lr=FINITE, gamma=FINITE)
def exponential(lr: float, gamma: float) -> Schedule:
    """``lr·gammaˢ`` after ``s`` steps (ExponentialLR)."""
    return Schedule("exponential", lambda op, s: lr * op.Pow(op.const(float(gamma)), s), {"lr": lr, "gamma": gamma})


@schedule(lr=FINITE, step_size=FINITE, gamma=FINITE)
def step_decay(lr: float, step_size: int, gamma: float = 0.1) -> Schedule:
    """``lr·gamma^⌊s/step_size⌋`` after ``s`` steps (StepLR)."""
    return Schedule(
        "step_decay",
        lambda op, s: lr * op.Pow(op.const(float(gamma)), op.Floor(s / float(step_size))),
        {"lr": lr, "step_size": step_size, "gamma": gamma},
    )


@schedule(steps=FINITE, then=instance(Schedule, "a schedule, such as gradgraph.optim.constant(1e-3)"), start=FINITE)
def warmup(steps: int, then: Schedule, start: float = 0.0) -> Schedule:
    """Linear warm-up from ``start`` times the first rate of ``then`` over ``steps``, followed by ``then``.

    The steps of ``then`` are counted from the end of the warm-up.
    """

    def emit(op: Builder, s: Var) -> Var:
        later = then.emit(op, op.Max(s - float(steps), 0.0))
        share = start + (1.0 - start) * _progress(op, s, steps)
        return later * share

    return Schedule("warmup", emit, {"steps": steps, "then": then.describe(), "start": start})


@schedule(lr=FINITE, milestones=NUMBERS, gamma=FINITE)
def multi_step(lr: float, milestones: Sequence[int], gamma: float = 0.1) -> Schedule:
    """``lr`` times ``gamma`` for each milestone reached (MultiStepLR)."""
    points = _increasing("milestones", milestones)

    def emit(op: Builder, s: Var) -> Var:
        reached = op.cast(op.const(np.array(points, np.float32)) <= s, ir.DataType.FLOAT)
        return lr * op.Pow(op.const(float(gamma)), op.ReduceSum(reached, keepdims=0))

    return Schedule("multi_step", emit, {"lr": lr, "milestones": points, "gamma": gamma})


@schedule(lr=FINITE, total_steps=FINITE, power=FINITE, end=FINITE)
def polynomial(lr: float, total_steps: int, power: float = 1.0, end: float = 0.0) -> Schedule:
    """``end + (lr − end)·(1 − s/total_steps)^power`` after ``s`` steps, then ``end`` (PolynomialLR)."""
    if power <= 0.0:
        raise BuildError(f"power must be above zero, but is {power}")
    return Schedule(
        "polynomial",
        lambda op, s: end + (lr - end) * op.Pow(1.0 - _progress(op, s, total_steps), float(power)),
        {"lr": lr, "total_steps": total_steps, "power": power, "end": end},
    )


@schedule(lr=FINITE, first=FINITE, factor=FINITE, end=FINITE)
def cosine_restarts(lr: float, first: int, factor: int = 1, end: float = 0.0) -> Schedule:
    """Cosine decay from ``lr`` to ``end`` with warm restarts (CosineAnnealingWarmRestarts).

    The first cycle takes ``first`` steps, and each further cycle ``factor`` times as many as the one before.
    """
    if first < 1 or factor < 1 or factor != int(factor):
        raise BuildError(f"first and factor must be whole numbers of at least 1, but are {first} and {factor}")

    def emit(op: Builder, s: Var) -> Var:
        if factor == 1:
            done = s - op.Floor(s / float(first)) * float(first)
            return end + (lr - end) * 0.5 * (1.0 + op.Cos(done * (math.pi / first)))
        lengths = list(itertools.takewhile(lambda n: n < LAST_STEP, (first * int(factor) ** i for i in range(26))))
        begins = [float(b) for b in itertools.accumulate([0, *lengths[:-1]])]
        begun = op.const(np.array(begins, np.float32)) <= s

        def latest(values: Sequence[float]) -> Var:
            return op.ReduceMax(op.Where(begun, op.const(np.array(values, np.float32)), 0.0), keepdims=0)

        return end + (lr - end) * 0.5 * (1.0 + op.Cos((s - latest(begins)) / latest(lengths) * math.pi))

    return Schedule("cosine_restarts", emit, {"lr": lr, "first": first, "factor": factor, "end": end})


@schedule(lr=FINITE, total_steps=FINITE, pct_start=FINITE, anneal_strategy=TEXT, div_factor=FINITE,
          final_div_factor=FINITE, three_phase=FLAG)  # fmt: skip
def one_cycle(
    lr: float,
    total_steps: int,
    pct_start: float = 0.3,
    anneal_strategy: str = "cos",
    div_factor: float = 25.0,
    final_div_factor: float = 1e4,
    three_phase: bool = False,
) -> Schedule:
    """A rise from ``lr/div_factor`` to ``lr`` and a fall to ``lr/div_factor/final_div_factor`` (OneCycleLR).

    The rise takes a share ``pct_start`` of the steps. Momentum does not change.
    """
    if anneal_strategy not in ("cos", "linear"):
        raise BuildError(f"anneal_strategy must be cos or linear, not '{shown(anneal_strategy)}'")
    low, peak = lr / div_factor, pct_start * total_steps - 1.0
    points = [(0.0, low), (peak, lr), (total_steps - 1.0, low / final_div_factor)]
    if three_phase:
        points[2:2] = [(2.0 * peak, low)]
    if not all(a < b for (a, _), (b, _) in itertools.pairwise(points)):
        raise BuildError(f"one_cycle cannot rise and fall within {total_steps} steps with pct_start {pct_start}; "
                         "increase total_steps or change pct_start")  # fmt: skip

    def emit(op: Builder, s: Var) -> Var:
        rate = op.const(float(points[0][1]))
        for (begin, start), (finish, stop) in itertools.pairwise(points):
            share = op.Clip((s - begin) / (finish - begin), op.const(0.0), op.const(1.0))
            part = (1.0 - op.Cos(share * math.pi)) * 0.5 if anneal_strategy == "cos" else share
            rate = op.Where(s > begin, start + (stop - start) * part, rate)
        return rate

    arguments = {
        "lr": lr, "total_steps": total_steps, "pct_start": pct_start, "anneal_strategy": anneal_strategy,
        "div_factor": div_factor, "final_div_factor": final_div_factor, "three_phase": three_phase,
    }  # fmt: skip
    return Schedule("one_cycle", emit, arguments)


@schedule(lr=FINITE, warmup_steps=FINITE)
def inverse_square_root(lr: float, warmup_steps: int) -> Schedule:
    """``lr·min(s/warmup_steps, √(warmup_steps/s))`` after ``s`` steps (T5, fairseq).

    The rate rises linearly during the warm-up, then decays with the inverse square root of ``s``.
    """
    if warmup_steps < 1:
        raise BuildError(f"warmup_steps must be at least 1, but is {warmup_steps}")
    steps = float(warmup_steps)
    return Schedule(
        "inverse_square_root",
        lambda op, s: lr * op.Min(s / steps, op.Sqrt(steps / op.Max(s, 1.0))),
        {"lr": lr, "warmup_steps": warmup_steps},
    )


@schedule(schedules=Kind("a list of schedules", lambda value: isinstance(value, list | tuple) and bool(value)
                         and all(isinstance(s, Schedule) for s in value)), milestones=NUMBERS)  # fmt: skip
def sequential(schedules: Sequence[Schedule], milestones: Sequence[int]) -> Schedule:
    """Schedules in sequence (SequentialLR): each starts at its milestone, and counts steps from there."""
    points = _increasing("milestones", milestones)
    if len(points) != len(schedules) - 1:
        raise BuildError(f"{len(schedules)} schedules need {len(schedules) - 1} milestones, not {len(points)}")

    def emit(op: Builder, s: Var) -> Var:
        rate = schedules[0].emit(op, s)
        for point, following in zip(points, schedules[1:], strict=True):
            after = s - float(point)
            rate = op.Where(after >= 0.0, following.emit(op, op.Max(after, 0.0)), rate)
        return rate

    return Schedule("sequential", emit, {"schedules": [each.describe() for each in schedules], "milestones": points})


@schedule(rate=FUNCTION, total_steps=FINITE)
def function(rate: Callable[[int], float], total_steps: int) -> Schedule:
    """A Python function ``rate(s)`` of the number of finished steps, stored as a table (LambdaLR).

    The table has ``total_steps`` numbers; after these steps, the last number applies.
    """
    if not 1 <= total_steps <= LARGEST_TABLE:
        raise BuildError(f"total_steps must be between 1 and {LARGEST_TABLE:,}, but is {total_steps}")
    values = []
    for s in range(int(total_steps)):
        NUMBER.check(f"the result of the schedule for step {s}", value := rate(s))
        if not math.isfinite(value):
            raise BuildError(f"the schedule returns {value} for step {s}; a learning rate must be a finite number")
        values.append(float(value))
    table = np.array(values, np.float32)

    def emit(op: Builder, s: Var) -> Var:
        return op.Gather(op.const(table), op.cast(op.Min(s, float(len(table) - 1)), ir.DataType.INT64))

    name = getattr(rate, "__name__", type(rate).__name__)
    moving = np.flatnonzero(table)
    ends = {"ends": int(moving[-1]) + 1 if moving.size else 0} if table[-1] == 0 else {}
    return Schedule("function", emit, {"rate": name, "total_steps": int(total_steps), **ends})


def rates_end(optimizer: Mapping[str, Any]) -> float | None:
    """Return the number of finished steps after which all learning rates of an optimizer are 0.

    Args:
        optimizer: its entry in the manifest.

    Returns:
        The number, or None if the rates do not end at 0 or this is unknown: if a rate is an input of the step or
            constant, or if groups start later.
    """
    ends = list(_ends_in({"arguments": optimizer.get("arguments")}))
    known = [end for end in ends if end is not None]
    return max(known) if known and len(known) == len(ends) else None


def _ends_in(described: Any, of_optimizer: bool = False) -> Iterator[float | None]:
    """Yield, for each rate in ``described`` (a part of the manifest), the step from which on it is 0; None if never.

    In the arguments of an optimizer (``of_optimizer``), a number ``lr`` is a constant learning rate, which never
    becomes 0; in the arguments of a group, it is a factor.
    """
    if isinstance(described, Mapping) and "schedule" in described:
        try:
            yield _end_of(described)
        except (KeyError, TypeError, IndexError, ValueError):  # manifests are untrusted
            yield None
    elif isinstance(described, Mapping):
        for name, value in described.items():
            if NUMBER.fits(value) and (name == "start" or (name == "lr" and of_optimizer)):
                yield None
            else:
                yield from _ends_in(value, name == "arguments")
    elif isinstance(described, list | tuple):
        for value in described:
            yield from _ends_in(value)


def _end_of(schedule: Mapping[str, Any]) -> float | None:
    """Return the number of steps after which a schedule's rate stays 0; None if it does not end at 0."""
    kind = schedule["schedule"]
    if kind in ("linear", "cosine", "polynomial"):
        return max(float(schedule["total_steps"]), 1.0) if schedule["end"] == 0 else None
    if kind == "function":
        return float(schedule["ends"]) if "ends" in schedule else None
    if kind == "scaled":
        return _end_of(schedule["of"])
    if kind in ("warmup", "sequential"):
        later = _end_of(schedule["then"] if kind == "warmup" else schedule["schedules"][-1])
        before = schedule["steps"] if kind == "warmup" else schedule["milestones"][-1]
        return None if later is None else float(before) + later
    return None


LAST_STEP = 1 << 24  # maximum number of steps that float32 can count
LARGEST_TABLE = 10_000_000


def _increasing(name: str, values: Sequence[float]) -> list[float]:
    points = list(values)
    if any(p < 1 for p in points) or any(a >= b for a, b in itertools.pairwise(points)):
        raise BuildError(f"{name} must be increasing numbers of steps, from 1 on, not {shown(points)}")
    return points


def _progress(op: Builder, s: Var, total: int) -> Var:
    """Return ``s/total``, but at most 1."""
    return op.Min(s / float(max(total, 1)), 1.0)

"""Diagnostic runs: learning-rate search and overfitting a batch; the state is restored afterwards."""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from gradgraph.data.sources.sources import Source
from gradgraph.errors import DataError, DivergedError
from gradgraph.runtime.execution.part import Part
from gradgraph.runtime.execution.step_session import StepSession
from gradgraph.runtime.loop.moving import MovingRates, Rate
from gradgraph.runtime.saved.plots import drawn
from gradgraph.step.manifest import LEARNING_RATE

WIDTH = 0.04  # standard deviation of the Gaussian that smooths the curve, as a share of the swept range
BLOWN_UP = 4.0  # stop when the loss exceeds the first one by this many times the range of losses so far
SMOOTHING = 0.9  # decay of the bias-corrected exponential average of the losses
APART = math.sqrt(10.0)  # ratio of the rates of neighbouring short runs
AT_MOST = 12  # maximum number of short runs
LONGER = 2  # ratio of the steps of a short run to those of the sweep
LEARNED = 0.1  # share of the first loss that counts as learned


@dataclass(frozen=True)
class RateCurve:
    """The losses over learning rates, as returned by ``Trainer.find_lr``.

    Attributes:
        rates, losses: learning rates of a sweep, in which the rate grows from step to step, and the loss of each step.
        smoothed: the smoothed losses.
        steepest: the rate at which the smoothed loss falls fastest; None if it never falls.
        tried: for each short run from the initial state, the rate and the mean loss over the last quarter of its steps
            (infinite if it diverged).
        suggestion: the rate with the lowest loss of short runs, interpolated; without short runs, a third of
            ``steepest``; None if no rate lowers the loss.
    """

    rates: tuple[float, ...]
    losses: tuple[float, ...]
    smoothed: tuple[float, ...]
    steepest: float | None
    tried: tuple[tuple[float, float], ...] = ()
    suggestion: float | None = None

    def __str__(self) -> str:
        swept = f"of {len(self.rates)} learning rates from {self.rates[0]:.2g} to {self.rates[-1]:.2g}"
        if self.suggestion is None:
            return f"{swept}, none lowers the loss; check the data and the frozen weights"
        fastest = "" if self.steepest is None else f"{swept}, the loss falls fastest at {self.steepest:.2g}; "
        if not self.tried:
            return f"{fastest}suggested: a third of it, {self.suggestion:.2g}"
        return f"{fastest}after {len(self.tried)} short runs it is lowest near {self.suggestion:.2g}"

    def plot(self, path: str | os.PathLike[str] | None = None) -> Any:
        """Plot the loss over the rate, also to ``path`` (``.png``, ``.svg``, ``.pdf``); return the matplotlib figure.

        Raises:
            RuntimeUnavailableError: if matplotlib is not installed.
            DataError: if the suffix of ``path`` is not an image format.
        """

        def draw(figure: Any) -> None:
            axes = figure.subplots()
            axes.plot(self.rates, self.losses, alpha=0.3, label="loss")
            axes.plot(self.rates, self.smoothed, label="smoothed")
            known = [(rate, loss) for rate, loss in self.tried if math.isfinite(loss)]
            if known:
                axes.plot(*zip(*sorted(known), strict=True), "o:", color="tab:green", label="after a short run")
            if self.suggestion is not None:
                axes.axvline(self.suggestion, color="tab:red", linestyle="--", label=f"{self.suggestion:.2g}")
            axes.set_xscale("log")
            axes.set_title("Loss while the learning rate grows")
            axes.set_xlabel("learning rate")
            axes.set_ylabel("loss")
            axes.legend()
            axes.grid(alpha=0.3)

        return drawn(draw, (6, 3.5), path)


@dataclass(frozen=True)
class Overfit:
    """The losses of repeated steps on one batch, as returned by ``Trainer.overfit``."""

    losses: tuple[float, ...]

    @property
    def learned(self) -> bool:
        """Whether the loss fell to a tenth or less."""
        return self.losses[-1] <= LEARNED * self.losses[0]

    def __str__(self) -> str:
        moved = (
            f"the loss on one batch went from {self.losses[0]:.4g} to {self.losses[-1]:.4g} in {len(self.losses)} steps"
        )
        if self.learned:
            return f"{moved}: the model can memorize the batch"
        if max(self.losses) == min(self.losses):
            return (
                f"the loss on one batch stays at {self.losses[0]:.4g} for {len(self.losses)} steps: it does not depend "
                "on any trained weight"
            )
        return f"{moved}, but should fall to nearly its minimum; try other learning rates, then check labels and model"


@dataclass(frozen=True)
class Trial:
    """A step and its data for a diagnostic run; weights are updated after ``accumulate`` batches, as in ``fit``."""

    session: StepSession
    source: Source
    part: Part
    accumulate: int | None = None

    def batches(self) -> Iterator[tuple[Any, bool]]:
        """Yield pairs (batch, whether the weights are updated after it), in endless epochs; stop at an empty epoch."""
        every, total = self.accumulate or 1, self.source.batches_per_epoch
        for epoch in itertools.count():
            done = 0
            for done, batch in enumerate(self.source.batches(epoch), 1):
                yield batch, done % every == 0 or done == total
            if not done:
                return

    def step(self, batch: Any, rates: Mapping[str, Any], moves: bool = True) -> tuple[float, int]:
        """Train on a batch; return its loss and number of loss terms.

        With gradient accumulation, ``moves`` is whether to update the weights after this batch.
        """
        session, part = self.session, self.part
        feeds = session.data.batch_of(part, batch, raw=False)
        counted = session.data.counted(part.name, feeds)
        if self.accumulate is not None:
            rates = {**rates, **part.told_to_add_up(moves, counted)}
        return float(session.train(feeds, rates, part).numbers["loss"]), counted

    def update(self, batches: Iterator[tuple[Any, bool]], rates: Mapping[str, Any]) -> float | None:
        """Train until the weights are updated; return the mean loss of these batches, or None if the data end first."""
        total, weight = 0.0, 0
        for batch, moves in batches:
            loss, counted = self.step(batch, rates, moves)
            total, weight = total + loss * counted, weight + counted
            if moves:
                return total / weight if weight else loss
        return None


def find_rate(trial: Trial, start: float, end: float, steps: int) -> RateCurve:
    """Return the curve of :meth:`gradgraph.Trainer.find_lr`.

    First a sweep, in which the rate grows from step to step, shows where the loss falls and where it diverges (L.
    Smith, 2017, "Cyclical Learning Rates for Training Neural Networks"). The rate at which the loss falls fastest in a
    few steps is too high for long training. So short runs are compared: each has twice as many steps at a constant
    rate, from equal weights and on equal batches. They begin below the fastest rate and continue upwards or downwards
    until both neighbours of the lowest loss are known.

    Raises:
        DataError: if the range is empty, or the data have no batch.
    """
    if not 0 < start < end < math.inf:
        raise DataError(
            f"the argument start is {start} and end is {end}; they should be positive learning rates, with start below "
            "end"
        )
    with trial.session.undone():
        beginning = trial.session.state.read()
        rates, losses = _swept(trial, np.geomspace(start, end, steps))
        smoothed = _smoothed(losses, steps)
        steepest = _steepest(rates, smoothed)
        tried: dict[float, float] = {}
        if steepest is not None:
            tried = _compared(
                lambda rate: _after(trial, beginning, rate, LONGER * steps), max(steepest / APART, start), start, end
            )
    best = _vertex(tried, smoothed[0])
    if best is None and steepest is not None and not tried:
        best = steepest / APART
    return RateCurve(rates, losses, smoothed, steepest, tuple(sorted(tried.items())), best)


def _swept(trial: Trial, rates: Any) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Train one update at each of ``rates`` until the loss diverges; return the rates used and their losses.

    Raises:
        DataError: if the loss is not finite at the first rate.
    """
    losses: list[float] = []
    averages: list[float] = []
    average = 0.0
    batches = trial.batches()
    for rate in rates:
        try:
            loss = trial.update(batches, {LEARNING_RATE: float(rate)})
        except DivergedError:
            break
        if loss is None:
            break
        average = SMOOTHING * average + (1 - SMOOTHING) * loss
        losses.append(loss)
        averages.append(average / (1 - SMOOTHING ** len(losses)))
        if _is_blown_up(averages):
            break
    if not losses:
        raise DataError("the loss is not finite even at the first learning rate; lower start, or check the data")
    return tuple(float(rate) for rate in rates[: len(losses)]), tuple(losses)


def _is_blown_up(averages: Sequence[float]) -> bool:
    first, least = averages[0], min(averages)
    return averages[-1] > first + BLOWN_UP * max(first - least, abs(first) * 0.25)


def _smoothed(losses: Sequence[float], steps: int) -> tuple[float, ...]:
    """Return the losses of a sweep smoothed by a Gaussian with a standard deviation of ``WIDTH * steps`` steps."""
    places = np.arange(len(losses))
    bells = np.exp(-0.5 * ((places[:, None] - places) / max(steps * WIDTH, 1e-9)) ** 2)
    return tuple(float(x) for x in bells @ np.asarray(losses) / bells.sum(1))


def _steepest(rates: Sequence[float], smoothed: Sequence[float]) -> float | None:
    """Return the rate at which the loss falls fastest before its minimum; None if it never falls."""
    least = int(np.argmin(smoothed))
    if least < 2:
        return None
    slopes = np.gradient(np.asarray(smoothed[: least + 1]), np.log(np.asarray(rates[: least + 1])))
    return float(rates[int(np.argmin(slopes))]) if slopes.min() < 0 else None


def _after(trial: Trial, beginning: Mapping[str, Any], rate: float, steps: int) -> float | None:
    """Return the mean loss over the last quarter of a short run from the state ``beginning``; infinite if it diverges.

    None if the data are a generator that was already consumed. The loss of each batch is computed before training on
    it, so it is a loss on unseen samples unless samples repeat.
    """
    trial.session.state.write(beginning)
    losses: list[float] = []
    batches = trial.batches()
    try:
        while len(losses) < steps and (loss := trial.update(batches, {LEARNING_RATE: rate})) is not None:
            losses.append(loss)
            if len(losses) > steps // 4 and losses[-1] > losses[0] * (1 + BLOWN_UP) > 0:
                return math.inf
    except DivergedError:
        return math.inf
    except DataError:  # a generator that the sweep has consumed
        if losses:
            raise
    return float(np.mean(losses[-max(len(losses) // 4, 1) :])) if losses else None


def _vertex(tried: Mapping[float, float], before: float) -> float | None:
    """Return the rate with the lowest loss, interpolated between short runs; None if no loss is below ``before``.

    This is the vertex of the parabola through the lowest loss in ``tried`` and its neighbours, in log-log scale.
    """
    rates = sorted(tried)
    lowest = min(range(len(rates)), key=lambda i: tried[rates[i]], default=0)
    if not rates or not tried[rates[lowest]] < before:
        return None
    near = [tried[rate] for rate in rates[max(lowest - 1, 0) : lowest + 2]]
    if len(near) < 3 or not all(0 < loss < math.inf for loss in near):
        return rates[lowest]
    below, least, above = map(math.log, near)
    bend = below - 2 * least + above
    return rates[lowest] * math.exp(math.log(APART) * (0.5 * (below - above) / bend if bend > 0 else 0.0))


def _compared(after: Callable[[float], float | None], first: float, start: float, end: float) -> dict[float, float]:
    """Return the losses of short runs by rate: at ``first``, then at higher or lower rates while the loss falls.

    ``after`` returns the loss of a short run at a rate, or None if the data are consumed; the result is then empty.
    """
    found: dict[int, float] = {}

    def at(place: int) -> float:
        rate = first * APART**place
        if place not in found and len(found) < AT_MOST and start <= rate <= end and (loss := after(rate)) is not None:
            found[place] = loss
        return found.get(place, math.inf)

    best = 0
    while at(best) < math.inf or best in found:
        # if this rate diverges, only lower rates are tried
        near = (best, best - 1, best + 1) if at(best) < math.inf else (best - 1,)
        lowest = min(near, key=at)
        if lowest == best or lowest not in found:
            break
        best = lowest
    return {first * APART**place: loss for place, loss in found.items()}


def overfit(trial: Trial, steps: int, rates: Mapping[str, Rate]) -> Overfit:
    """Return the losses of :meth:`gradgraph.Trainer.overfit`."""
    with trial.session.undone():
        batch = next(iter(trial.source.batches(0)))
        moving = MovingRates(rates)
        now = ({name: moving.at(name, i, {}) for name in rates} for i in range(steps))
        return Overfit(tuple(trial.step(batch, fed)[0] for fed in now))

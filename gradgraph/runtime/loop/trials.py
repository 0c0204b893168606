"""Trials: short runs that say something of a step and its data, and leave all as it was."""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from gradgraph.errors import DataError, DivergedError
from gradgraph.runtime.data.sources import Source
from gradgraph.runtime.execution.executor import Executor
from gradgraph.runtime.execution.part import Part
from gradgraph.runtime.loop.moving import MovingRates, Rate
from gradgraph.runtime.saved.plots import drawn
from gradgraph.step.manifest import LEARNING_RATE

WIDTH = 0.04  # of the bell over which losses are averaged for the curve: a share of the range
BLOWN_UP = 4.0  # times the range of the losses so far, above the least of them: the search ends
SMOOTHING = 0.9  # of the losses so far: an exponential average, corrected for its beginning
APART = math.sqrt(10.0)  # from the rate of one short run to that of the next
AT_MOST = 12  # short runs
LONGER = 2  # times as many steps as the sweep has a short run
LEARNED = 0.1  # of the first loss


@dataclass(frozen=True)
class RateCurve:
    """The losses at some learning rates, as ``Trainer.find_lr`` found them.

    Attributes:
        rates, losses: the learning rates of one run in which the rate grows from step to step, and the loss at each.
        smoothed: an average of the losses around each.
        steepest: the rate at which the smoothed loss falls fastest; None if it never falls.
        tried: of short runs from the same beginning, the rate and the mean loss of the last quarter of its steps;
            infinite where it blew up.
        suggestion: the rate at which the loss of short runs is least, between those that were tried; without any, a
            third of ``steepest``; None if no rate lowers the loss.
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
            return f"{swept}, none lowers the loss; look at the data and the frozen weights"
        fastest = "" if self.steepest is None else f"{swept}, the loss falls fastest at {self.steepest:.2g}; "
        if not self.tried:
            return f"{fastest}{self.suggestion:.2g} is a third of it"
        return f"{fastest}after {len(self.tried)} short runs it is least near {self.suggestion:.2g}"

    def plot(self, path: str | os.PathLike[str] | None = None) -> Any:
        """Loss over rate as an image (``.png``, ``.svg``, ``.pdf``) at ``path``; returns the matplotlib figure.

        Raises:
            RuntimeUnavailableError: matplotlib is not installed.
            DataError: the suffix names no image format.
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
            axes.set_title("Loss at rates that grow step by step")
            axes.set_xlabel("learning rate")
            axes.set_ylabel("loss")
            axes.legend()
            axes.grid(alpha=0.3)

        return drawn(draw, (6, 3.5), path)


@dataclass(frozen=True)
class Overfit:
    """The losses of steps on one batch, as ``Trainer.overfit`` found them."""

    losses: tuple[float, ...]

    @property
    def learned(self) -> bool:
        """Whether the loss fell to a tenth."""
        return self.losses[-1] <= LEARNED * self.losses[0]

    def __str__(self) -> str:
        moved = (
            f"the loss on one batch went from {self.losses[0]:.4g} to {self.losses[-1]:.4g} in {len(self.losses)} steps"
        )
        if self.learned:
            return f"{moved}: the step can learn it by heart"
        if max(self.losses) == min(self.losses):
            return f"{moved}, and does not move: no weight that is trained has an influence on it"
        return (
            f"{moved}: it should fall to near its least value; try other learning rates, then look at labels and model"
        )


@dataclass(frozen=True)
class Trial:
    """A step that is tried, with the data for it; its weights move after ``accumulate`` batches, as in ``fit``."""

    executor: Executor
    source: Source
    part: Part
    accumulate: int | None = None

    def batches(self) -> Iterator[tuple[Any, bool]]:
        """The batches of epoch after epoch, and after which of them the weights move; an epoch without any ends all."""
        every, total = self.accumulate or 1, self.source.batches_per_epoch
        for epoch in itertools.count():
            done = 0
            for done, batch in enumerate(self.source.batches(epoch), 1):
                yield batch, done % every == 0 or done == total
            if not done:
                return

    def step(self, batch: Any, rates: Mapping[str, Any], moves: bool = True) -> tuple[float, int]:
        """Train once, and return the loss and the number of its terms."""
        executor, part = self.executor, self.part
        feeds = executor.batch_of(part, batch, raw=False) if part.name else executor.check_batch(batch)
        counted = executor.counted(part.name, feeds)
        if self.accumulate is not None:
            rates = {**rates, **part.told_to_add_up(moves, counted)}
        return float(executor.train(feeds, rates, part).numbers["loss"]), counted

    def update(self, batches: Iterator[tuple[Any, bool]], rates: Mapping[str, Any]) -> float | None:
        """Train until the weights move, and return the mean loss over the batches; None where the data end before."""
        total, weight = 0.0, 0
        for batch, moves in batches:
            loss, counted = self.step(batch, rates, moves)
            total, weight = total + loss * counted, weight + counted
            if moves:
                return total / weight if weight else loss
        return None


def find_rate(trial: Trial, start: float, end: float, steps: int) -> RateCurve:
    """The curve of :meth:`gradgraph.Trainer.find_lr`.

    One run in which the rate grows from step to step shows where the loss falls and where it blows up (L. Smith, 2017,
    "Cyclical Learning Rates for Training Neural Networks"). What falls fastest within a few steps of it is no good rate
    for many: so short runs of twice as many steps, each at one rate, from the same weights and on the same batches, are
    compared from there up and down, until both neighbours of the lowest are known.

    Raises:
        DataError: the range is none; the data hold no batch.
    """
    if not 0 < start < end < math.inf:
        raise DataError(f"start and end must be rates, one above the other, but are {start} and {end}")
    with trial.executor.undone():
        beginning = trial.executor.state.read()
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
    """The loss of a step at each rate, one after the other, until it blows up."""
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
        raise DataError("not even the first learning rate gives a finite loss; lower start, or look at the data")
    return tuple(float(rate) for rate in rates[: len(losses)]), tuple(losses)


def _is_blown_up(averages: Sequence[float]) -> bool:
    first, least = averages[0], min(averages)
    return averages[-1] > first + BLOWN_UP * max(first - least, abs(first) * 0.25)


def _smoothed(losses: Sequence[float], steps: int) -> tuple[float, ...]:
    """Each loss with its neighbours in a bell of a tenth of the range to both sides."""
    places = np.arange(len(losses))
    bells = np.exp(-0.5 * ((places[:, None] - places) / max(steps * WIDTH, 1e-9)) ** 2)
    return tuple(float(x) for x in bells @ np.asarray(losses) / bells.sum(1))


def _steepest(rates: Sequence[float], smoothed: Sequence[float]) -> float | None:
    """The rate at which the loss falls fastest, before its least value."""
    least = int(np.argmin(smoothed))
    if least < 2:
        return None
    slopes = np.gradient(np.asarray(smoothed[: least + 1]), np.log(np.asarray(rates[: least + 1])))
    return float(rates[int(np.argmin(slopes))]) if slopes.min() < 0 else None


def _after(trial: Trial, beginning: Mapping[str, Any], rate: float, steps: int) -> float | None:
    """The mean loss of the last quarter of so many updates, each taken before its batch is trained on: where samples do
    not repeat, a loss on fresh ones. None if the data can be read once only.
    """
    trial.executor.state.write(beginning)
    losses: list[float] = []
    batches = trial.batches()
    try:
        while len(losses) < steps and (loss := trial.update(batches, {LEARNING_RATE: rate})) is not None:
            losses.append(loss)
            if len(losses) > steps // 4 and losses[-1] > losses[0] * (1 + BLOWN_UP) > 0:
                return math.inf
    except DivergedError:
        return math.inf
    except DataError:  # a generator that the sweep has used up
        if losses:
            raise
    return float(np.mean(losses[-max(len(losses) // 4, 1) :])) if losses else None


def _vertex(tried: Mapping[float, float], before: float) -> float | None:
    """The rate at which the loss of short runs is least: the vertex of the parabola through the least and its two
    neighbours, over logarithms; None if none comes below the loss ``before``.
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
    """The losses of runs at ``first`` and at rates above and below it, as far as they get lower; none of data that can
    be read once only.
    """
    found: dict[int, float] = {}

    def at(place: int) -> float:
        rate = first * APART**place
        if place not in found and len(found) < AT_MOST and start <= rate <= end and (loss := after(rate)) is not None:
            found[place] = loss
        return found.get(place, math.inf)

    best = 0
    while at(best) < math.inf or best in found:
        # from a rate that blows up, only down
        near = (best, best - 1, best + 1) if at(best) < math.inf else (best - 1,)
        lowest = min(near, key=at)
        if lowest == best or lowest not in found:
            break
        best = lowest
    return {first * APART**place: loss for place, loss in found.items()}


def overfit(trial: Trial, steps: int, rates: Mapping[str, Rate]) -> Overfit:
    """The losses of :meth:`gradgraph.Trainer.overfit`."""
    with trial.executor.undone():
        batch = next(iter(trial.source.batches(0)), None)
        if batch is None:
            raise DataError("the data gave no batch; check the iterable (a generator can be used once only)")
        moving = MovingRates(rates)
        now = ({name: moving.at(name, i, {}) for name in rates} for i in range(steps))
        return Overfit(tuple(trial.step(batch, fed)[0] for fed in now))

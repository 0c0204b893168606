"""Trials: short runs that say something of a step and its data, and leave all as it was."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any

import numpy as np

from gradgraph.errors import BuildError, DataError, DivergedError
from gradgraph.runtime.data.sources import Source
from gradgraph.runtime.execution.executor import Executor
from gradgraph.runtime.execution.part import Part
from gradgraph.runtime.loop.moving import LEARNING_RATE, MovingRates, Rate
from gradgraph.runtime.saved.plots import drawn

SMOOTHING = 0.9  # of the losses so far: an exponential average, corrected for its beginning
WIDTH = 0.04  # of the bell over which losses are averaged for the curve: a share of the range
BLOWN_UP = 4.0  # times the range of the losses so far, above the least of them: the search ends
LEARNED = 0.1  # of the first loss


@dataclass(frozen=True)
class RateCurve:
    """The losses at some learning rates, as ``Trainer.find_lr`` found them.

    Attributes:
        rates, losses: the learning rates that were tried, and the loss at each.
        smoothed: an average of the losses around each.
        suggestion: the rate at which the smoothed loss falls fastest; None if it never falls.
    """

    rates: tuple[float, ...]
    losses: tuple[float, ...]
    smoothed: tuple[float, ...]
    suggestion: float | None

    def __str__(self) -> str:
        tried = f"of {len(self.rates)} learning rates from {self.rates[0]:.2g} to {self.rates[-1]:.2g}"
        if self.suggestion is None:
            return f"{tried}, none lowers the loss; look at the data and the frozen weights"
        return f"{tried}, the loss falls fastest at {self.suggestion:.2g}"

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
            if self.suggestion is not None:
                axes.axvline(self.suggestion, color="tab:red", linestyle="--", label=f"{self.suggestion:.2g}")
            axes.set_xscale("log")
            axes.set_xlabel("learning rate")
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
    """A step that is tried, with the data for it."""

    executor: Executor
    source: Source
    part: Part

    def batches(self) -> Iterator[Any]:
        """The batches of epoch after epoch; one that has none ends all."""
        for epoch in count():
            found = False
            for batch in self.source.batches(epoch):
                found = True
                yield batch
            if not found:
                return

    def step(self, batch: Any, rates: Mapping[str, Any]) -> float:
        """Train once, and return the loss."""
        executor, part = self.executor, self.part
        feeds = executor.batch_of(part, batch) if part.name else executor.check_batch(batch)
        return float(executor.train(feeds, rates, part).numbers["loss"])


def find_rate(trial: Trial, start: float, end: float, steps: int) -> RateCurve:
    """The curve of :meth:`gradgraph.Trainer.find_lr`.

    Raises:
        BuildError: the learning rate is part of the graph.
        DataError: the range is none; the data hold no batch.
    """
    if LEARNING_RATE not in trial.executor.manifest.parts[trial.part.name].hyperparameters:
        raise BuildError(
            "the learning rate is part of the graph, where a schedule moves it",
            remedy="build the step with a number, such as adamw(1e-3), to find one",
            shell="leave --schedule out, or build the step without one",
        )
    if not 0 < start < end < math.inf:
        raise DataError(f"start and end must be rates, one above the other, but are {start} and {end}")
    rates = np.geomspace(start, end, steps)
    losses: list[float] = []
    averages: list[float] = []
    average = 0.0
    with trial.executor.undone():
        for rate, batch in zip(rates, trial.batches(), strict=False):
            try:
                loss = trial.step(batch, {LEARNING_RATE: float(rate)})
            except DivergedError:
                break
            average = SMOOTHING * average + (1 - SMOOTHING) * loss
            losses.append(loss)
            averages.append(average / (1 - SMOOTHING ** len(losses)))
            first, least = averages[0], min(averages)
            if averages[-1] > first + BLOWN_UP * max(first - least, abs(first) * 0.25):
                break
    if not losses:
        raise DataError("not even the first learning rate gives a finite loss; lower start, or look at the data")
    tried = tuple(float(rate) for rate in rates[: len(losses)])
    # each loss with its neighbours in a bell of a tenth of the range to both sides
    places = np.arange(len(losses))
    bells = np.exp(-0.5 * ((places[:, None] - places) / max(steps * WIDTH, 1e-9)) ** 2)
    smoothed = tuple(float(x) for x in bells @ np.asarray(losses) / bells.sum(1))
    return RateCurve(tried, tuple(losses), smoothed, _steepest(tried, smoothed))


def _steepest(rates: Sequence[float], smoothed: Sequence[float]) -> float | None:
    """The rate at which the loss falls fastest, before its least value."""
    least = int(np.argmin(smoothed))
    if least < 2:
        return None
    slopes = np.gradient(np.asarray(smoothed[: least + 1]), np.log(np.asarray(rates[: least + 1])))
    return float(rates[int(np.argmin(slopes))]) if slopes.min() < 0 else None


def overfit(trial: Trial, steps: int, rates: Mapping[str, Rate]) -> Overfit:
    """The losses of :meth:`gradgraph.Trainer.overfit`."""
    with trial.executor.undone():
        batch = next(iter(trial.source.batches(0)), None)
        if batch is None:
            raise DataError("the data gave no batch; check the iterable (a generator can be used once only)")
        moving = MovingRates(rates)
        now = ({name: moving.at(name, i, {}) for name in rates} for i in range(steps))
        return Overfit(tuple(trial.step(batch, fed) for fed in now))

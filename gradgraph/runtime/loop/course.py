"""How far a fit has come, and how long the rest takes."""

from __future__ import annotations

import time

from gradgraph.runtime.saved.printed import clock


class Course:
    """The way from the first batch of a fit to its last. What lies between epochs (validation, checkpoints) counts.

    Args:
        epochs: the number of the last epoch, counted from 1; None where it is not known.
        most_steps: steps after which the fit stops earlier.
        deadline: the time (``time.monotonic()``) at which it does.

    Attributes:
        is_begun: whether a step is done; time counts from then on, as the first one takes longer than others.
    """

    def __init__(self, epochs: int | None = None, most_steps: int | None = None, deadline: float | None = None) -> None:
        self.epochs, self._most_steps, self._deadline = epochs, most_steps, deadline
        self.is_begun = False
        self._per_epoch: int | None = None
        self._first, self._since = 0, 0.0

    def begin(self, epoch: int, done: int, per_epoch: int | None) -> None:
        """Note that the first step is done: batch ``done`` of ``epoch`` (from 0), which has ``per_epoch`` of them."""
        self.is_begun, self._per_epoch = True, per_epoch
        self._first, self._since = epoch * (per_epoch or 0) + done, time.monotonic()

    def name(self, epoch: int) -> str:
        """``epoch 8/12``, of an epoch that is counted from 0."""
        return f"epoch {epoch + 1}/{self.epochs}" if self.epochs else f"epoch {epoch + 1}"

    def left(self, epoch: int, done: int) -> str:
        """``1:02:03 left`` of the whole fit, after batch ``done`` of ``epoch``; nothing where that is not known."""
        now = time.monotonic()
        limits = [] if self._deadline is None else [max(self._deadline - now, 0.0)]
        if self._per_epoch and self.epochs:
            at, end = epoch * self._per_epoch + done, self.epochs * self._per_epoch
            if self._most_steps is not None:
                end = min(end, self._first - 1 + self._most_steps)
            if at < end and at <= self._first:
                return ""
            limits.append(max(end - at, 0) * (now - self._since) / max(at - self._first, 1))
        return f"{clock(min(limits))} left" if limits else ""

"""The estimated remaining time of a fit."""

from __future__ import annotations

import time

from gradgraph.runtime.saved.printed import clock


class Course:
    """An estimator of a fit's remaining time, including the time between epochs (validation, checkpoints).

    Args:
        epochs: number of the last epoch, counted from 1; None if unknown.
        most_steps: maximum number of steps; None for no limit.
        deadline: the time (``time.monotonic()``) at which the fit stops; None for no limit.

    Attributes:
        is_begun: whether timing has begun: after the first step, which is slower than later steps.
    """

    def __init__(self, epochs: int | None = None, most_steps: int | None = None, deadline: float | None = None) -> None:
        self.epochs, self._most_steps, self._deadline = epochs, most_steps, deadline
        self.is_begun = False
        self._per_epoch: int | None = None
        self._first, self._since = 0, 0.0

    def begin(self, epoch: int, done: int, per_epoch: int | None) -> None:
        """Start timing, after the first step of a fit.

        Args:
            epoch: the epoch of this step.
            done: the number of batches of this epoch that are done.
            per_epoch: the number of batches per epoch; None if unknown.
        """
        self.is_begun, self._per_epoch = True, per_epoch
        self._first, self._since = epoch * (per_epoch or 0) + done, time.monotonic()

    def name(self, epoch: int) -> str:
        """Return ``epoch 8/12`` for an epoch counted from 0."""
        return f"epoch {epoch + 1}/{self.epochs}" if self.epochs else f"epoch {epoch + 1}"

    def left(self, epoch: int, done: int) -> str:
        """Return ``1:02:03 left`` for the whole fit after batch ``done`` of ``epoch``; empty if unknown."""
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

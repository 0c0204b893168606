"""A learning rate that is reduced when a validation metric stops improving."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from gradgraph.arguments import FINITE, TEXT, WHOLE
from gradgraph.errors import BuildError, DataError, shown, suggestion
from gradgraph.optim.schedules import schedule

__all__ = ["Plateau", "reduce_on_plateau"]


@dataclass(frozen=True)
class Plateau:
    """A learning rate rule for ``fit(learning_rate=…)``; see :func:`reduce_on_plateau`."""

    lr: float
    factor: float
    patience: int
    threshold: float
    threshold_mode: str
    cooldown: int
    min_lr: float
    mode: str
    monitor: str | None

    def rate(self, history: Mapping[str, Sequence[float]]) -> float:
        """Return the learning rate after the epochs in ``history``.

        It depends on ``history`` only, so a resumed fit continues with the same rate.

        Raises:
            DataError: if the history does not have the monitored column.
        """
        lr, best, bad, waiting = self.lr, float("inf") if self.mode == "min" else float("-inf"), 0, 0
        for value in self._column(history):
            if self._is_better(value, best):
                best, bad = value, 0
            else:
                bad += 1
            if waiting:
                waiting, bad = waiting - 1, 0
            if bad > self.patience:
                lr, waiting, bad = max(lr * self.factor, self.min_lr), self.cooldown, 0
        return lr

    def _column(self, history: Mapping[str, Sequence[float]]) -> Sequence[float]:
        if not history:
            return ()
        name = self.monitor or ("val_loss" if "val_loss" in history else "loss")
        if name not in history:
            known = suggestion(name, history)
            raise DataError(f"reduce_on_plateau monitors '{shown(name)}', but the history has no such column{known}")
        return history[name]

    def _is_better(self, value: float, best: float) -> bool:
        sign = 1.0 if self.mode == "max" else -1.0
        bound = best * (1.0 + sign * self.threshold) if self.threshold_mode == "rel" else best + sign * self.threshold
        return sign * value > sign * bound


@schedule(lr=FINITE, factor=FINITE, patience=WHOLE, threshold=FINITE, threshold_mode=TEXT, cooldown=WHOLE,
          min_lr=FINITE, mode=TEXT, monitor=TEXT.or_none())  # fmt: skip
def reduce_on_plateau(
    lr: float,
    factor: float = 0.1,
    patience: int = 10,
    threshold: float = 1e-4,
    threshold_mode: str = "rel",
    cooldown: int = 0,
    min_lr: float = 0.0,
    mode: str = "min",
    monitor: str | None = None,
) -> Plateau:
    """Return a rule that multiplies ``lr`` by ``factor`` when ``monitor`` stops improving, as ReduceLROnPlateau.

    It is a rule for ``fit(learning_rate=…)``: the rate is reduced after more than ``patience`` epochs in which
    ``monitor`` (by default ``val_loss``, or ``loss`` without validation) did not improve by ``threshold``.
    """
    if not 0.0 < factor < 1.0:
        raise BuildError(f"factor must be between 0 and 1, but is {factor}")
    for name, value, known in (("mode", mode, ("min", "max")), ("threshold_mode", threshold_mode, ("rel", "abs"))):
        if value not in known:
            raise BuildError(f"{name} must be {known[0]} or {known[1]}, not '{shown(value)}'")
    if min(patience, cooldown, threshold, min_lr) < 0:
        raise BuildError("patience, cooldown, threshold and min_lr must not be negative")
    return Plateau(lr, factor, patience, threshold, threshold_mode, cooldown, min_lr, mode, monitor)

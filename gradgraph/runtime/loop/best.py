"""Early stopping: tracking, keeping and restoring the best epoch (or evaluation) of a fit with ``patience``."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping

import numpy as np

from gradgraph.data.arrays.batch import Array
from gradgraph.errors import CheckpointError, shown
from gradgraph.runtime.execution.step_session import StepSession
from gradgraph.runtime.loop.reporter import Reporter
from gradgraph.runtime.loop.saves import Saves
from gradgraph.runtime.saved.checkpoint import load_checkpoint, previous_path
from gradgraph.runtime.saved.monitor import Monitor

log = logging.getLogger("gradgraph")


class Best:
    """The best epoch of a fit so far, with a copy of its state.

    Args:
        patience: epochs (or evaluations) without improvement after which the fit stops; None disables early stopping.
        monitor: the history column and direction by which epochs are compared.

    Attributes:
        state: a copy of the state after the best epoch; None before the first epoch.
    """

    def __init__(self, session: StepSession, saves: Saves, patience: int | None, monitor: Monitor) -> None:
        self.session, self.progress, self.patience = session, session.progress, patience
        self._monitor = monitor
        self._saves, self._path = saves, saves.beside("best")
        self.state: dict[str, Array] | None = None

    @property
    def is_over(self) -> bool:
        """Whether patience is exhausted, counting epochs without improvement before a resume, too."""
        return self.patience is not None and self.progress.stale >= self.patience

    def is_out_of_patience(self, row: Mapping[str, float]) -> bool:
        """Compare a new history row with the best so far; return whether patience is exhausted.

        A better row's state is copied, and saved as the best checkpoint.
        """
        p = self.progress
        if self.patience is None:
            return False
        value = self._monitor.value(row)
        if self._monitor.is_better(value, p.best):
            p.best, p.stale = value, 0
            self.state = None  # so that there is only one copy at a time
            with self.session.turns.lock:
                self.state = self.session.state.read(self.session.state.here)
            if self._path is not None:
                self._saves.try_save(self._path)
            return False
        p.stale += 1
        return self.is_over

    def restore(self, report: Reporter) -> int | None:
        """Restore the best state at the end of a fit with ``patience``, and report it.

        Return the history index of the best row; None if it is the last one, or without ``patience``.
        """
        p = self.progress
        if self.patience is None or p.stale == 0:
            return None
        best = len(p.history) - 1 - p.stale
        row = p.history.row(best)
        monitored = self._monitor.of(row)
        rows = "evaluations" if p.eval_every else "epochs"
        cause = f"stopped early, since {monitored} did not improve for {p.stale} {rows}: " if self.is_over else ""
        assert self.state is not None  # copied after the best epoch, or recovered on resume
        with self.session.turns.lock:
            self.session.state.go_back(self.state)
        where = f"step {row['step']:.0f}" if p.eval_every else f"epoch {row['epoch']:.0f}"
        report.say(f"{cause}restored the weights of {where}, with the best {monitored} ({row[monitored]:.6g})")
        return best

    def recovered(self) -> tuple[float | None, int, dict[str, Array] | None]:
        """Call :meth:`recover`; return the best monitored value, the number of rows since, and the best state."""
        self.recover()
        return self.progress.best, self.progress.stale, self.state

    def recover(self) -> None:
        """Find the state of the best epoch after a resume, and store it in ``state``.

        It is the current state, or in a checkpoint. If it is not found, warn and search for the best epoch anew.
        """
        p = self.progress
        if self.patience is None or p.best is None:
            return
        best = len(p.history) - 1 - p.stale
        row = {"epoch": 0.0, "step": -1.0, **(p.history.row(best) if best >= 0 else {})}
        monitored = self._monitor.of(row)
        if best >= 0 and not _same(row.get(monitored), p.best):
            log.warning("the best epoch so far was determined by a column other than '%s'; the search starts anew",
                        shown(monitored))  # fmt: skip
            p.best, p.stale = None, 0
            return
        if p.steps == row["step"]:
            with self.session.turns.lock:
                self.state = self.session.state.read()
            return
        reasons = []
        for path in () if self._path is None else (self._path, previous_path(self._saves.path or "")):
            try:
                values, progress = load_checkpoint(path, self.session.manifest.state)
            except CheckpointError as error:
                reasons.append(str(error).rpartition(";")[0])
                continue
            if (progress.steps, progress.best) == (row["step"], p.best):
                self.state = {name: np.array(value) for name, value in values.items()}  # copied from the mapped file
                return
            reasons.append(f"'{shown(path)}' is from step {progress.steps}")
        log.warning("the weights of the best epoch so far (epoch %d, %s %.6g) were not found (%s); the search for the "
                    "best epoch starts anew", row["epoch"], monitored, p.best,
                    reasons[0] if reasons else "it was not saved")  # fmt: skip
        p.best, p.stale = None, 0


def _same(value: float | None, best: float) -> bool:
    return value == best or (value is not None and math.isnan(value) and math.isnan(best))

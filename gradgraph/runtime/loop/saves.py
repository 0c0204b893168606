"""When a fit saves, and where: the checkpoint, the one before it, and others beside it."""

from __future__ import annotations

import contextlib
import logging
import os
from pathlib import Path

from gradgraph.errors import OutputError
from gradgraph.runtime.execution.executor import Executor
from gradgraph.runtime.saved.checkpoint import keep_previous, previous_path

log = logging.getLogger("gradgraph")


class Saves:
    """The checkpoints of one fit.

    Args:
        executor: what is saved.
        path: of the checkpoint; None saves nothing.

    Attributes:
        continues: whether this fit goes on with another one, whose checkpoint may lie at ``path``.
    """

    def __init__(self, executor: Executor, path: str | os.PathLike[str] | None) -> None:
        self.executor, self.path = executor, path
        self.continues = False
        self._saved_at = (-1, -1)  # steps and epochs done at the last save
        self._has_saved = False

    def save(self, final: bool = False) -> None:
        """Save the checkpoint. A full disk stops no training: only the last save must succeed."""
        if self.path is None:
            return
        if self._has_saved:  # before, what lies there is another run's, or what this one went on from in its place
            keep_previous(self.path)
        if final:
            self.executor.save(self.path)
        elif not self.try_save(self.path):
            return
        if not (self._has_saved or self.continues):
            with contextlib.suppress(OSError):
                previous_path(self.path).unlink(missing_ok=True)  # of a run that this one has replaced
        self._has_saved, self._saved_at = True, self._position

    def finish(self) -> None:
        """Save for the last time, unless there is nothing new."""
        if self._saved_at != self._position:
            self.save(final=True)

    def try_save(self, path: str | os.PathLike[str]) -> bool:
        """Try to save there, and return whether it worked; if not, that is logged."""
        try:
            self.executor.save(path)
        except OutputError as error:
            log.error("%s; training goes on", error)
            return False
        return True

    def beside(self, what: str) -> Path | None:
        """The path of a file beside the checkpoint: ``run.best.ckpt`` for ``run.ckpt``."""
        path = Path(self.path or "")
        if not path.name:  # nothing is saved, or the path is refused when the fit begins
            return None
        return path.with_name(f"{path.stem}.{what}{path.suffix}")

    @property
    def _position(self) -> tuple[int, int]:
        return self.executor.progress.steps, self.executor.progress.epoch

"""The checkpoint files of a fit: the last, the previous, and others in the same folder."""

from __future__ import annotations

import contextlib
import logging
import os
from pathlib import Path

from gradgraph.errors import OutputError
from gradgraph.runtime.execution.step_session import StepSession
from gradgraph.runtime.saved.checkpoint import keep_previous, previous_path

log = logging.getLogger("gradgraph")


class Saves:
    """The checkpoint files of one fit.

    Args:
        session: saves the state.
        path: path of the checkpoint; None disables saving.

    Attributes:
        continues: whether this fit resumes an earlier one, whose checkpoint may be at ``path``.
    """

    def __init__(self, session: StepSession, path: str | os.PathLike[str] | None) -> None:
        self.session, self.path = session, path
        self.continues = False
        self._saved_at = (-1, -1)  # steps and epochs done at the last save
        self._has_saved = False

    def save(self, final: bool = False) -> None:
        """Save the checkpoint at ``path``, keeping the previous checkpoint of this run.

        If the file cannot be written, the final save raises OutputError; earlier saves log it, and training continues.
        """
        if self.path is None:
            return
        if self._has_saved:  # otherwise a file at this path is from another run, or the one that was resumed
            keep_previous(self.path)
        if final:
            self.session.save(self.path)
        elif not self.try_save(self.path):
            return
        if not (self._has_saved or self.continues):
            with contextlib.suppress(OSError):
                previous_path(self.path).unlink(missing_ok=True)  # it is from another run, now replaced
        self._has_saved, self._saved_at = True, self._position

    def finish(self) -> None:
        """Save the final checkpoint unless it is up to date."""
        if self._saved_at != self._position:
            self.save(final=True)

    def try_save(self, path: str | os.PathLike[str]) -> bool:
        """Save to ``path`` and return True; on failure, log an error and return False."""
        try:
            self.session.save(path)
        except OutputError as error:
            log.error("%s; training continues", error)
            return False
        return True

    def beside(self, what: str) -> Path | None:
        """Return the path of a related checkpoint, such as ``run.best.ckpt`` for ``run.ckpt`` and "best".

        None if checkpoints are disabled.
        """
        path = Path(self.path or "")
        if not path.name:  # no checkpoint, or an invalid path that fit rejects
            return None
        return path.with_name(f"{path.stem}.{what}{path.suffix}")

    @property
    def _position(self) -> tuple[int, int]:
        return self.session.progress.steps, self.session.progress.epoch

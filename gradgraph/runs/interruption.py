"""Messages and learning curves after an interrupted or failed run."""

from __future__ import annotations

import contextlib
import logging
import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from gradgraph.errors import DivergedError, GradgraphError
from gradgraph.runs.run_folder import RunFolder

if TYPE_CHECKING:
    from gradgraph.runtime.trainer import Trainer

log = logging.getLogger("gradgraph.runs")


@contextlib.contextmanager
def drawn_if_stopped(folder: RunFolder | None, trainer: Trainer) -> Iterator[None]:
    """Return a context that draws the learning curves into the run folder if the block fails or is interrupted."""
    try:
        yield
    except BaseException:
        if folder is not None:
            with contextlib.suppress(GradgraphError, OSError):
                folder.draw(trainer.history)
        raise


@contextlib.contextmanager
def how_to_resume(checkpoint: Path | None, folder: Path | None, words: Sequence[str], *, force: bool) -> Iterator[None]:
    """Return a context that logs how to resume if the block is interrupted by Ctrl-C or SIGTERM.

    Args:
        checkpoint: the path of the checkpoint, if any.
        folder: the path of the run folder, if any.
        words: the command line as typed; empty in Python.
        force: whether the run overwrites files, which a resumed run must not.
    """
    try:
        yield
    except (KeyboardInterrupt, SystemExit):
        if checkpoint is not None and checkpoint.exists():
            if not words:
                log.info("resume with: gradgraph.train(dataclasses.replace(run, resume=True, force=False))")
            elif folder is not None:
                log.info("resume with: %s", shlex.join(["gradgraph", "train", str(folder), "--resume"]))
            else:
                kept = ["--no-force"] if force and "--force" not in words else []  # a recipe sets force
                typed = [word for word in words if word not in ("--force", "--resume")]
                log.info("resume with: %s", shlex.join(["gradgraph", *typed, *kept, "--resume"]))
        raise


@contextlib.contextmanager
def where_it_diverged(trainer: Trainer) -> Iterator[None]:
    """Return a context that logs the first non-finite value and its node if the block raises DivergedError."""
    try:
        yield
    except DivergedError as error:
        with contextlib.suppress(GradgraphError):
            which = (error.batch,) if error.step is None else (error.step, error.batch)
            found = trainer.find_nonfinite(*which, **error.hyperparameters)
            if found is not None:
                log.info("the first non-finite value: %s", found)
        raise

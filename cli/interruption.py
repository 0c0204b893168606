"""Messages and learning curves of ``gradgraph train`` and ``finetune`` after an interrupted or failed run."""

from __future__ import annotations

import contextlib
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from gradgraph.cli import output
from gradgraph.errors import DivergedError, GradgraphError
from gradgraph.runs.run_folder import RunFolder

if TYPE_CHECKING:
    from gradgraph.runtime.trainer import Trainer


@contextlib.contextmanager
def drawn_if_stopped(folder: RunFolder | None, trainer: Trainer) -> Iterator[None]:
    """If the block raises an error or is interrupted, draw the training curves so far into the run folder."""
    try:
        yield
    except BaseException:
        if folder is not None:
            with contextlib.suppress(GradgraphError, OSError):
                folder.draw(trainer.history)
        raise


@contextlib.contextmanager
def how_to_resume(checkpoint: Path | None, folder: RunFolder | None, *, force: bool) -> Iterator[None]:
    """If the block is interrupted by Ctrl-C or SIGTERM, print the command to resume from the checkpoint, if any."""
    try:
        yield
    except (KeyboardInterrupt, SystemExit):
        if folder is not None and checkpoint is not None and checkpoint.exists():
            output.say(f"resume with: {shlex.join(['gradgraph', 'train', str(folder.path), '--resume'])}")
        elif checkpoint is not None and checkpoint.exists():
            words = [w for w in output.talk.arguments if w not in ("--force", "--resume")]
            kept = ["--no-force"] if force and "--force" not in output.talk.arguments else []  # a recipe sets force
            output.say(f"resume with: {shlex.join(['gradgraph', *words, *kept, '--resume'])}")
        raise


@contextlib.contextmanager
def where_it_diverged(trainer: Trainer) -> Iterator[None]:
    """If the block raises DivergedError, print the step's first non-finite value, and the node that computed it."""
    try:
        yield
    except DivergedError as error:
        with contextlib.suppress(GradgraphError):
            which = (error.batch,) if error.step is None else (error.step, error.batch)
            found = trainer.find_nonfinite(*which, **error.hyperparameters)
            if found is not None:
                output.say(f"the first non-finite value: {found}")
        raise

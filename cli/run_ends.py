"""The last words of ``gradgraph train``, and what it keeps, where a run does not come to its end."""

from __future__ import annotations

import contextlib
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from gradgraph.cli import output
from gradgraph.cli.run_folder import RunFolder
from gradgraph.errors import DivergedError, GradgraphError

if TYPE_CHECKING:
    from gradgraph.runtime.trainer import Trainer


@contextlib.contextmanager
def drawn_if_stopped(folder: RunFolder | None, trainer: Trainer) -> Iterator[None]:
    """Draw the curves so far in the run's folder where the run does not come to its end."""
    try:
        yield
    except BaseException:
        if folder is not None:
            with contextlib.suppress(GradgraphError, OSError):
                folder.draw(trainer.history)
        raise


@contextlib.contextmanager
def how_to_resume(checkpoint: Path | None, folder: RunFolder | None, *, force: bool) -> Iterator[None]:
    """Print, after Ctrl-C or SIGTERM, the command that goes on from the checkpoint, if there is one."""
    try:
        yield
    except (KeyboardInterrupt, SystemExit):
        if folder is not None and checkpoint is not None and checkpoint.exists():
            output.say(f"go on with: {shlex.join(['gradgraph', 'train', str(folder.path), '--resume'])}")
        elif checkpoint is not None and checkpoint.exists():
            words = [w for w in output.talk.arguments if w not in ("--force", "--resume")]
            kept = ["--no-force"] if force and "--force" not in output.talk.arguments else []  # by a recipe
            output.say(f"go on with: {shlex.join(['gradgraph', *words, *kept, '--resume'])}")
        raise


@contextlib.contextmanager
def where_it_diverged(trainer: Trainer) -> Iterator[None]:
    """Say, after a loss that is not finite, which node of the model made the first such value."""
    try:
        yield
    except DivergedError as error:
        with contextlib.suppress(GradgraphError):
            which = (error.batch,) if error.step is None else (error.step, error.batch)
            found = trainer.find_nonfinite(*which, **error.hyperparameters)
            if found is not None:
                output.say(f"the first value that is not finite: {found}")
        raise

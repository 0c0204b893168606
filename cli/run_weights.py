"""The weights of a step folder that ``evaluate``, ``predict`` and ``export`` use."""

from __future__ import annotations

from pathlib import Path

import click

from gradgraph.cli import output
from gradgraph.errors import CheckpointError, shown
from gradgraph.files.path_kinds import Kind, checkpoint_of, kind_of, weights_of


def checkpoint_to_use(step: Path, checkpoint: Path | None, untrained: bool, required: bool = True) -> Path | None:
    """Return the given checkpoint, or else that of the run that ``step`` is or belongs to; None for ``untrained``.

    Raises:
        CheckpointError: there is none, and one is ``required``.
    """
    if untrained and checkpoint is not None:
        raise click.UsageError("--untrained uses the initial weights and --checkpoint trained ones; give one of them")
    if untrained or checkpoint is not None:
        return checkpoint
    found = checkpoint_of(step)
    if found is not None:
        output.say(f"with the weights of {found}")
    elif kind_of(step) is Kind.RUN:
        return weights_of(step)  # so that the caller reports that there are none
    elif required and kind_of(step) is Kind.STEP:
        raise CheckpointError(
            f"'{shown(step)}' contains the initial weights, and no checkpoint is given; add --checkpoint run.ckpt, or "
            "--untrained to use the initial weights"
        )
    return found

"""Whose weights ``evaluate``, ``predict`` and ``export`` take of a step folder."""

from __future__ import annotations

from pathlib import Path

import click

from gradgraph.cli import output
from gradgraph.errors import CheckpointError, shown
from gradgraph.files.path_kinds import Kind, checkpoint_of, kind_of, weights_of


def checkpoint_to_use(step: Path, checkpoint: Path | None, untrained: bool, required: bool = True) -> Path | None:
    """The checkpoint that is given, or else that of the run that ``step`` is or lies in; None for ``untrained``.

    Raises:
        CheckpointError: there is none, and one is ``required``.
    """
    if untrained and checkpoint is not None:
        raise click.UsageError("--untrained takes the weights before training, and --checkpoint others; give one")
    if untrained or checkpoint is not None:
        return checkpoint
    found = checkpoint_of(step)
    if found is not None:
        output.say(f"with the weights of {found}")
    elif kind_of(step) is Kind.RUN:
        return weights_of(step)  # which says that there are none
    elif required and kind_of(step) is Kind.STEP:
        raise CheckpointError(
            f"'{shown(step)}' holds the weights before training, and no checkpoint is given; "
            "add --checkpoint run.ckpt, or --untrained where these are meant"
        )
    return found

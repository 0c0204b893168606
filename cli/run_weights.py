"""The choice of the weights that ``evaluate``, ``predict`` and ``export`` use with a step folder."""

from __future__ import annotations

from pathlib import Path

import click

from gradgraph.cli import output
from gradgraph.errors import CheckpointError, shown
from gradgraph.files.path_kinds import Kind, checkpoint_of, kind_of, weights_of


def checkpoint_to_use(step: Path, checkpoint: Path | None, untrained: bool, required: bool = True) -> Path | None:
    """Return the checkpoint to use with ``step``, a step folder or run folder; None for the initial weights.

    Args:
        step: the step folder or run folder.
        checkpoint: the value of --checkpoint; by default, the checkpoint of the run to which ``step`` belongs.
        untrained: whether --untrained requests the initial weights.
        required: whether a missing checkpoint is an error; ignored if ``untrained``.

    Raises:
        CheckpointError: if a checkpoint is required, and there is none.
        click.UsageError: if both ``untrained`` and ``checkpoint`` are set.
    """
    if untrained and checkpoint is not None:
        raise click.UsageError("--untrained (initial weights) and --checkpoint (trained weights) exclude each other; "
                               "give one of them")  # fmt: skip
    if untrained or checkpoint is not None:
        return checkpoint
    found = checkpoint_of(step)
    if found is not None:
        output.say(f"with the weights of {found}")
    elif kind_of(step) is Kind.RUN:
        return weights_of(step)  # raises an error: the run has no weights yet
    elif required and kind_of(step) is Kind.STEP:
        raise CheckpointError(
            f"'{shown(step)}' contains the initial weights, and no checkpoint is given; add --checkpoint run.ckpt, or "
            "--untrained to use the initial weights"
        )
    return found

"""The checkpoint of the run that a step folder was written by (``gradgraph train --run FOLDER``)."""

from __future__ import annotations

from pathlib import Path

STEP, RECIPE = "step", "recipe.toml"
LAST, BEST = "run.ckpt", "run.best.ckpt"


def checkpoint_in(run: Path) -> Path:
    """The checkpoint of a run folder whose weights count: of its best epoch, where one was looked for."""
    best = run / BEST
    return best if best.is_file() else run / LAST


def checkpoint_of(step: Path) -> Path | None:
    """The checkpoint of the run folder that ``step`` lies in; None if it lies in none, or nothing is saved yet."""
    run = step.absolute().parent
    found = checkpoint_in(run)
    if step.absolute().name != STEP or not (run / RECIPE).is_file() or not found.is_file():
        return None
    return step.parent / found.name

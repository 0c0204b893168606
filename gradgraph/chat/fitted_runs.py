"""Training of a prepared step in the folder of a run: evaluation, checkpoints and the history as the recipe asks."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gradgraph.chat.chat_recipe import Recipe
from gradgraph.chat.run_place import CHECKPOINT, HISTORY, TRAINING
from gradgraph.data.dataset import Loadable
from gradgraph.runtime.loop.logs import JsonLines
from gradgraph.runtime.saved.history import History
from gradgraph.runtime.trainer import Trainer


def fitted(
    trainer: Trainer,
    train: Loadable,
    held: Loadable | None,
    recipe: Recipe,
    place: Path,
    lines: JsonLines,
    progress: bool | None,
    callbacks: Sequence[Any] = (),
) -> History:
    """Train on ``train``, evaluate on ``held`` if there is any, and write checkpoints and history to ``place``.

    The history has a row per evaluation.
    """
    kept = place / TRAINING
    history = trainer.fit(
        train,
        epochs=recipe.epochs,
        batch_size=recipe.batch_size,
        validation=held,
        accumulate=recipe.accumulate if recipe.accumulate > 1 else None,
        eval_every=recipe.eval_every if held is not None else None,
        patience=recipe.patience if held is not None else None,
        max_steps=recipe.max_steps,
        checkpoint=kept / CHECKPOINT,
        checkpoint_every=recipe.checkpoint_every,
        keep_features=recipe.keep_features,
        log=lines,
        callbacks=callbacks,
        progress=progress,
    )
    history.to_csv(kept / HISTORY)
    return history


def last_row(history: History) -> dict[str, float]:
    """Return the last row of a history as floats; empty without rows."""
    return {name: float(value) for name, value in (history.row(-1) if history else {}).items()}

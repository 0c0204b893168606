"""A request to fine-tune: the checks, the training step and the training loop that all tasks share."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any, TypeVar

from gradgraph.building.pipeline import build
from gradgraph.chat.chat_recipe import Recipe, optimizer_of
from gradgraph.chat.folder_tasks import check_task
from gradgraph.chat.model_folder import ModelFolder
from gradgraph.chat.run_place import (
    CHECKPOINT,
    HISTORY,
    LOG,
    TRAINING,
    Finetuned,
    begin,
    check_place,
    removed_unless_begun,
)
from gradgraph.data.dataset import Loadable
from gradgraph.data.shuffling import permutation
from gradgraph.data.texts.tokenizer import NAME, Tokenizer
from gradgraph.errors import ArgumentError, DataError, listed, shown
from gradgraph.files.models import Source
from gradgraph.runtime.loop.logs import JsonLines, peak_memory
from gradgraph.runtime.saved.history import History
from gradgraph.runtime.trainer import Trainer
from gradgraph.step.step import Step

POSITIONS = "max_position_embeddings"
Rows = TypeVar("Rows")


@dataclass(frozen=True)
class Request:
    """The arguments of ``gradgraph.finetune``, after they were parsed.

    Attributes:
        base: the folder of the model.
        data, validation: the data; without ``validation``, a fraction of ``data`` may be held out.
        out: the output folder.
        recipe: the options.
        columns: the data's column names, by the expected ones.
        template: another chat template.
        resume: whether to resume the run in ``out``.
        progress: as for ``Trainer.fit``.
    """

    base: ModelFolder
    data: Any
    out: Path
    recipe: Recipe
    validation: Any = None
    columns: Mapping[str, str] = field(default_factory=dict)
    template: str | Path | None = None
    resume: bool = False
    progress: bool | None = None

    @property
    def place(self) -> Path:
        """The folder of checkpoint, history and log."""
        return self.out / TRAINING

    def check(self, used: Collection[str] | None = None, columns: Collection[str] | None = None) -> None:
        """Check options, model and output folder, before the data are read.

        Args:
            used, columns: as for :meth:`check_options`.

        Raises:
            ModelError: the model, or a file that is copied with it, cannot be read.
            OutputError: the output folder is not empty; or contains no run to resume.
        """
        self.check_options(used, columns)
        check_place(self.out, self.resume)
        self.base.beside()  # raises if one of these files, which are copied at the end, cannot be

    def check_options(self, used: Collection[str] | None, columns: Collection[str] | None = None) -> None:
        """Check options and model.

        Args:
            used: the options that the task uses; None for all, and a chat template.
            columns: the columns that may be mapped; None for any.

        Raises:
            ArgumentError: the recipe sets other options, or ``columns`` has another column.
            DataError: the model was exported for another task.
            ModelError: the model cannot be read.
        """
        if used is not None:
            self._check_unused(used)
        if columns is not None and (stray := [name for name in self.columns if name not in columns]):
            raise ArgumentError(
                f"the task {self.recipe.task} has no column '{shown(stray[0])}'; name {', '.join(columns)}"
            )
        check_task(self.base, self.recipe.task)

    def _check_unused(self, used: Collection[str]) -> None:
        usual = Recipe()
        unused = [f.name for f in dataclasses.fields(self.recipe)
                  if f.name not in used and getattr(self.recipe, f.name) != getattr(usual, f.name)]  # fmt: skip
        unused += ["template"] * (self.template is not None)
        if unused:
            raise ArgumentError(
                f"the task {self.recipe.task} does not use {listed(unused)}",
                remedy="omit them" if len(unused) > 1 else "omit it",
                shell=f"omit {', '.join('--' + name.replace('_', '-') for name in unused)}",
            )

    def check_validation(self) -> None:
        """Raise ArgumentError if the recipe evaluates during training, but there are no validation data."""
        if self.validation is None and (self.recipe.patience or self.recipe.eval_every):
            raise ArgumentError(
                f"the task {self.recipe.task} evaluates validation data, and none are given",
                remedy="pass validation=, or omit patience and eval_every",
                shell="add --validation, or omit --patience and --eval-every",
            )

    @functools.cached_property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer of the folder; raises DataError without one."""
        if not (self.base.path / NAME).is_file():
            raise DataError(
                f"the folder '{shown(self.base.path)}' has no {NAME}; download it, or save it with transformers"
            )
        return Tokenizer(self.base.path / NAME, inside=True)

    def longest(self, usual: int, positions: str = POSITIONS) -> int:
        """Return the maximum number of tokens of a text: the recipe's, or ``usual`` if the model has as many positions.

        ``positions`` is the key of the number of positions in ``config.json``.

        Raises:
            DataError: the recipe asks for more tokens than the model has positions.
        """
        stated, length = self.base.described.get(positions), self.recipe.length
        most = stated if isinstance(stated, int) and stated > 0 else None
        if most is not None and length is not None and length > most:
            raise DataError(f"length is {length:,}, but the model has {most:,} positions; lower length")
        return length or min(most or usual, usual)

    def split(self, read: Callable[[Any], Rows], select: Callable[[Rows, list[int]], Rows]) -> tuple[Rows, Rows]:
        """Return the rows for training, and for validation.

        Without validation data, at least one row remains for training.

        Args:
            read: reads data.
            select: returns the rows with these indices.
        """
        every: Any = read(self.data)
        if self.validation is not None:
            return every, read(self.validation)
        order = permutation(self.recipe.seed, 0, len(every)).tolist()
        count = max(min(round(len(every) * self.recipe.held_out), len(every) - 1), 0)
        return select(every, sorted(order[count:])), select(every, sorted(order[:count]))

    def trained(
        self, model: Source, loss: Any, train: Loadable, held: Loadable | None, digests: Mapping[str, str]
    ) -> Finetuned:
        """Train a model; return the result without the model's files, which the caller writes.

        Args:
            model: the model to train, or with adapters.
            loss: as for ``gradgraph.build``.
            train, held: training and validation data.
            digests: the digests of data and models, by name; a resumed run must have the same.
        """
        trainer = Trainer(built(model, loss, train, self.recipe), seed=self.recipe.seed)
        with removed_unless_begun(self.out, self.resume):
            begin(self.out, self.recipe, {**digests, "model": self.base.digest}, datetime.now().replace(microsecond=0),
                  self.resume)  # fmt: skip
            self.load(trainer)
            history = self.fit(trainer, train, held, JsonLines(self.place / LOG))
        figures = {**last_row(history), "steps": trainer.progress.steps, **peak_memory()}
        return Finetuned(self.out, history, figures, {}, trainer)

    def load(self, trainer: Trainer) -> bool:
        """Load the checkpoint of a resumed run; return whether there is one."""
        found = self.resume and (self.place / CHECKPOINT).is_file()
        if found:
            trainer.load(self.place / CHECKPOINT)
        return found

    def fit(
        self,
        trainer: Trainer,
        train: Loadable,
        held: Loadable | None,
        lines: JsonLines,
        callbacks: Sequence[Any] = (),
    ) -> History:
        """Train, evaluate on ``held`` if there is any, and write checkpoints and history.

        The history has a row per evaluation.
        """
        recipe = self.recipe
        history = trainer.fit(
            train,
            epochs=recipe.epochs,
            batch_size=recipe.batch_size,
            validation=held,
            accumulate=recipe.accumulate if recipe.accumulate > 1 else None,
            eval_every=recipe.eval_every if held is not None else None,
            patience=recipe.patience if held is not None else None,
            max_steps=recipe.max_steps,
            checkpoint=self.place / CHECKPOINT,
            checkpoint_every=recipe.checkpoint_every,
            keep_features=recipe.keep_features,
            log=lines,
            callbacks=callbacks,
            progress=self.progress,
        )
        history.to_csv(self.place / HISTORY)
        return history


def built(model: Source, loss: Any, train: Loadable, recipe: Recipe, metrics: Sequence[Any] = ()) -> Step:
    """Build the training step of a model, with AdamW over all updates of the recipe."""
    updates = math.ceil(math.ceil(len(train) / recipe.batch_size) / recipe.accumulate)
    return build(
        model,
        loss,
        optimizer_of(recipe, recipe.epochs * updates),
        metrics=metrics,
        recompute="sqrt" if recipe.recompute else None,
        accumulate=recipe.accumulate > 1,
    )


def last_row(history: History) -> dict[str, float]:
    """Return the last row of a history as floats; empty without rows."""
    return {name: float(value) for name, value in (history.row(-1) if history else {}).items()}

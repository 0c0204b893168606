"""Fine-tuning of classifiers of texts or tokens, from a folder of optimum to a folder of the same kind.

Data, losses and files are those of ``gradgraph train``: a task is a :class:`gradgraph.Run` with options derived from
the folder's ``config.json``.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from gradgraph import losses, metrics
from gradgraph.arguments import PATH, described
from gradgraph.chat.chat_recipe import Recipe, optimizer_of
from gradgraph.chat.model_folder import ModelFolder
from gradgraph.chat.run_place import CHECKPOINT, HISTORY, LOG, TRAINING, Finetuned, check_place, create
from gradgraph.data.texts.tokenizer import NAME
from gradgraph.errors import ArgumentError, DataError, listed, shown
from gradgraph.runs.run_options import Run
from gradgraph.runs.training import train
from gradgraph.runtime.loop.logs import peak_memory

log = logging.getLogger("gradgraph.chat")

LABEL = "label"
_TEXTS = ("text", "pair", "words")  # names of columns, as in --text of gradgraph train
_MULTI_LABEL, _REGRESSION = "multi_label_classification", "regression"  # problem types of transformers


@dataclass(frozen=True)
class Task:
    """A task with labels.

    Attributes:
        architecture: the end of the architecture's name in ``config.json``.
        of_tokens: whether each token has a label.
    """

    architecture: str
    of_tokens: bool = False


TASKS = {
    "text-classification": Task("ForSequenceClassification"),
    "token-classification": Task("ForTokenClassification", of_tokens=True),
}
USED = ("task", "epochs", "batch_size", "accumulate", "learning_rate", "warmup", "weight_decay", "clip_norm", "length",
        "label_smoothing", "eval_every", "patience", "max_steps", "seed")  # fmt: skip


def finetune_labels(
    base: ModelFolder,
    data: Any,
    out: Path,
    recipe: Recipe,
    *,
    validation: Any = None,
    columns: Mapping[str, str] | None = None,
    template: str | Path | None = None,
    resume: bool = False,
    progress: bool | None = None,
) -> Finetuned:
    """Train all weights of a classifier, and write its folder with the trained model; see ``gradgraph.finetune``.

    Raises:
        ArgumentError: the task does not use one of the recipe's options, or has no column of a name in ``columns``.
        DataError: the folder has no tokenizer, or is that of another task.
        GradgraphError: any error of ``gradgraph.train``.
    """
    check_unused(recipe, USED, template)
    _check_files(recipe, data, validation)
    task = _checked_task(base, recipe)
    check_place(out, resume)
    base.beside()  # raises before training if one of these files, which are copied at the end, cannot be
    run = _run(base, data, out, recipe, task, validation, columns or {}, resume)
    create(out / TRAINING)
    done = train(run, progress=progress)
    base.copy_beside(out)
    last = {name: float(value) for name, value in (done.history.row(-1) if done.history else {}).items()}
    figures = {"steps": done.trainer.progress.steps, **last, **peak_memory()}
    return Finetuned(out, done.history, figures, {}, done.trainer)


def check_unused(recipe: Recipe, used: Collection[str], template: Any) -> None:
    """Raise ArgumentError if the recipe sets options that its task does not use, or there is a chat template."""
    usual = Recipe()
    unused = [f.name for f in dataclasses.fields(recipe)
              if f.name not in used and getattr(recipe, f.name) != getattr(usual, f.name)]  # fmt: skip
    unused += ["template"] * (template is not None)
    if unused:
        raise ArgumentError(
            f"the task {recipe.task} does not use {listed(unused)}",
            remedy="omit them",
            shell=f"omit {', '.join('--' + name.replace('_', '-') for name in unused)}",
        )


def _check_files(recipe: Recipe, data: Any, validation: Any) -> None:
    for given in (data, validation):
        if given is not None and not PATH.fits(given):
            raise ArgumentError(
                f"the task {recipe.task} reads files, but data is {described(given)}; write a .csv or .jsonl"
            )


def _checked_task(base: ModelFolder, recipe: Recipe) -> Task:
    """Return the task of a recipe; raise DataError if the folder is known to be that of another task."""
    task = TASKS[recipe.task]
    named = base.described.get("architectures") or []
    if named and not any(str(name).endswith(task.architecture) for name in named):
        other = next((t for t, known in TASKS.items() if str(named[0]).endswith(known.architecture)), None)
        remedy = f"pass the task {other}" if other else "export the model for this task"
        raise DataError(
            f"the folder '{shown(base.path)}' has a {shown(named[0])}, which is no model for {recipe.task}; {remedy}"
        )
    if not (base.path / NAME).is_file():
        raise DataError(f"the folder '{shown(base.path)}' has no {NAME}; download it, or save it with transformers")
    return task


def _run(
    base: ModelFolder,
    data: Any,
    out: Path,
    recipe: Recipe,
    task: Task,
    validation: Any,
    columns: Mapping[str, str],
    resume: bool,
) -> Run:
    """Return the run of a task, with its learning rate over all steps."""
    if stray := [name for name in columns if name not in (*_TEXTS, LABEL)]:
        raise ArgumentError(
            f"the task {recipe.task} has no column '{shown(stray[0])}'; name {', '.join(_TEXTS)} or {LABEL}"
        )
    texts: dict[str, Any] = {name: columns[name] for name in _TEXTS if name in columns}
    if recipe.length is not None:
        texts["length"] = recipe.length
    place = out / TRAINING
    run = Run(
        base.model, data=data, validation=validation, tokenizer=base.path / NAME, text=texts,
        target=columns.get(LABEL, ()), epochs=recipe.epochs, batch_size=recipe.batch_size,
        accumulate=recipe.accumulate if recipe.accumulate > 1 else None, eval_every=recipe.eval_every,
        patience=recipe.patience, max_steps=recipe.max_steps, seed=recipe.seed, resume=resume,
        checkpoint=place / CHECKPOINT, history=place / HISTORY, log=place / LOG, export=out / base.model.name,
        build=_scores(base, recipe, task),
    )  # fmt: skip
    total = run.total_steps()
    assert total is not None  # the batch size is a number
    return replace(run, build={**run.build, "optimizer": optimizer_of(recipe, total)})


def _scores(base: ModelFolder, recipe: Recipe, task: Task) -> dict[str, Any]:
    """Return the loss and the metrics of a task."""
    problem = base.described.get("problem_type")
    if problem in (_REGRESSION, _MULTI_LABEL) and recipe.label_smoothing:
        raise ArgumentError(f"label smoothing applies to classes, but the model's problem_type is {problem}; omit it")
    if problem == _REGRESSION:
        return {"loss": losses.mse()}
    if problem == _MULTI_LABEL:
        return {"loss": losses.bce_with_logits()}
    if task.of_tokens:
        return {"loss": losses.cross_entropy(label_smoothing=recipe.label_smoothing, axis=-1)}
    return {"loss": losses.cross_entropy(label_smoothing=recipe.label_smoothing), "metrics": [metrics.accuracy()]}

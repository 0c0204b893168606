"""Fine-tuning of classifiers of texts or tokens, from a folder of optimum to a folder of the same kind.

Data, losses and files are those of ``gradgraph train``: a task is a :class:`gradgraph.Run` with options derived from
the folder's ``config.json``.
"""

from __future__ import annotations

import contextlib
import json
import logging
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from gradgraph import losses, metrics
from gradgraph.arguments import PATH, described
from gradgraph.chat.chat_recipe import Recipe, optimizer_of
from gradgraph.chat.folder_tasks import OF_TEXTS, OF_TOKENS
from gradgraph.chat.model_folder import ModelFolder
from gradgraph.chat.run_place import CHECKPOINT, HISTORY, LOG, TRAINING, Finetuned, create, removed_unless_begun
from gradgraph.chat.task_request import Request, last_row
from gradgraph.data.record.data_names import DataNames
from gradgraph.data.record.label_names import CONFIG, LABELS, names_beside
from gradgraph.data.texts.tokenizer import LONGEST, NAME
from gradgraph.errors import ArgumentError, GradgraphError
from gradgraph.files.atomic import write_atomically
from gradgraph.files.untrusted.documents import json_of
from gradgraph.files.untrusted.regular import regular_bytes
from gradgraph.runs.run_options import Run
from gradgraph.runs.training import train
from gradgraph.runtime.loop.logs import peak_memory

log = logging.getLogger("gradgraph.chat")

LABEL = "label"
_TEXTS = ("text", "pair", "words")  # names of columns, as in --text of gradgraph train
_MULTI_LABEL, _REGRESSION = "multi_label_classification", "regression"  # problem types of transformers
USED = ("task", "epochs", "batch_size", "accumulate", "learning_rate", "warmup", "weight_decay", "clip_norm", "length",
        "label_smoothing", "eval_every", "patience", "max_steps", "seed")  # fmt: skip


def finetune_labels(request: Request) -> Finetuned:
    """Train all weights of a classifier, and write its folder with the trained model; see ``gradgraph.finetune``.

    Raises:
        ArgumentError: the task does not use one of the recipe's options, or has no column of a name in ``columns``.
        DataError: the folder has no tokenizer, or its model was exported for another task.
        GradgraphError: any error of ``gradgraph.train``.
    """
    base, out = request.base, request.out
    _check_files(request)
    request.check(USED, (*_TEXTS, LABEL))
    request.check_validation()
    run = _run(request)
    with _naming_columns(), removed_unless_begun(out, request.resume):
        create(out / TRAINING)
        done = train(run, progress=request.progress)
    base.copy_beside(out)
    _write_classes(out / CONFIG, done.trainer.names)
    figures = {"steps": done.trainer.progress.steps, **last_row(done.history), **peak_memory()}
    return Finetuned(out, done.history, figures, {}, done.trainer)


@contextlib.contextmanager
def _naming_columns() -> Iterator[None]:
    """Return a context whose errors name ``columns`` in place of an argument of ``gradgraph.text.table``."""
    try:
        yield
    except GradgraphError as error:
        if (other := _with_columns(error)) is not error:
            raise other from None
        raise


def _with_columns(error: GradgraphError) -> GradgraphError:
    """Return an error whose remedy names ``columns`` in place of an argument of ``gradgraph.text.table``."""
    found = re.fullmatch(r"(.*)\b(text|pair|words|label)=(['\"])(.*)\3", error.remedy or "")
    if found is None:
        return error
    before, name, _, column = found.groups()
    return type(error)(
        error.problem, remedy=f"{before}columns={{{name!r}: {column!r}}}", shell=f"{before}--column {name}={column}"
    )


def _write_classes(file: Path, names: DataNames) -> None:
    """Write the class names of the training data to the ``config.json`` of the trained model, if it has others."""
    classes = [named for target, named in names.classes.items() if target not in names.numbered]
    if len(classes) != 1 or not file.is_file():
        return
    config = json_of(regular_bytes(file))
    before = config.get(LABELS)
    known = before if isinstance(before, dict) and all(map(str.isdecimal, before)) else {}
    others = {i: f"LABEL_{i}" if name in classes[0] else name for i, name in known.items()}
    labels = {**others, **{str(i): name for i, name in enumerate(classes[0])}}
    if labels != before:
        changed = {**config, LABELS: labels, "label2id": {str(name): int(i) for i, name in labels.items()}}
        write_atomically(file, json.dumps(changed, indent=2).encode())


def _check_files(request: Request) -> None:
    for given in (request.data, request.validation):
        if given is not None and not PATH.fits(given):
            raise ArgumentError(
                f"the task {request.recipe.task} reads files, but data is {described(given)}; write a .csv or .jsonl"
            )


def _run(request: Request) -> Run:
    """Return the run of a task, with its learning rate over all steps."""
    base, recipe, columns, place = request.base, request.recipe, request.columns, request.place
    texts: dict[str, Any] = {name: columns[name] for name in _TEXTS if name in columns}
    texts["length"] = request.longest(request.tokenizer.longest or LONGEST)
    if base.described.get("problem_type") == _MULTI_LABEL and (named := names_beside(base.model).classes):
        texts["classes"] = list(next(iter(named.values())))
    run = Run(
        base.model, data=request.data, validation=request.validation, tokenizer=base.path / NAME, text=texts,
        target=columns.get(LABEL, ()), epochs=recipe.epochs, batch_size=recipe.batch_size,
        accumulate=recipe.accumulate if recipe.accumulate > 1 else None, eval_every=recipe.eval_every,
        patience=recipe.patience, max_steps=recipe.max_steps, seed=recipe.seed, resume=request.resume,
        checkpoint=place / CHECKPOINT, history=place / HISTORY, log=place / LOG, export=request.out / base.model.name,
        build=_scores(base, recipe),
    )  # fmt: skip
    total = run.total_steps()
    assert total is not None  # the batch size is a number
    return replace(run, build={**run.build, "optimizer": optimizer_of(recipe, total)})


def _of_several_labels() -> losses.Loss:
    """Return the binary cross entropy of a number from 0 to 1 per class."""
    loss = losses.bce_with_logits()
    (target,) = loss.targets
    return replace(loss, targets=(replace(target, spec=lambda outputs: target.spec(outputs)._replace(most=1)),))


def _scores(base: ModelFolder, recipe: Recipe) -> dict[str, Any]:
    """Return the loss and the metrics of a task."""
    named = base.described.get(LABELS)
    is_number = recipe.task == OF_TEXTS and isinstance(named, Mapping) and len(named) == 1  # as for transformers
    problem = base.described.get("problem_type") or (_REGRESSION if is_number else None)
    if problem in (_REGRESSION, _MULTI_LABEL) and recipe.label_smoothing:
        raise ArgumentError(f"label smoothing applies to classes, but the model's problem_type is {problem}; omit it")
    if problem == _REGRESSION:
        return {"loss": losses.mse()}
    if problem == _MULTI_LABEL:
        return {"loss": _of_several_labels()}
    if recipe.task == OF_TOKENS:
        return {"loss": losses.cross_entropy(label_smoothing=recipe.label_smoothing, axis=-1)}
    return {"loss": losses.cross_entropy(label_smoothing=recipe.label_smoothing), "metrics": [metrics.accuracy()]}

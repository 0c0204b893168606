"""Fine-tuning of extractive question answering: all weights of a model that marks the answer in a context."""

from __future__ import annotations

import functools
import hashlib
import json
import math
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

from gradgraph import losses
from gradgraph.building.pipeline import build
from gradgraph.chat.chat_recipe import QUESTIONS, Recipe, optimizer_of
from gradgraph.chat.fitted_runs import fitted, last_row
from gradgraph.chat.folder_tasks import check_task
from gradgraph.chat.labelled_tasks import check_unused, check_validation, longest_of
from gradgraph.chat.model_folder import ModelFolder
from gradgraph.chat.question_answers import agreement, answers_of
from gradgraph.chat.question_windows import COLUMNS, ENDS, STARTS, QuestionWindows, read_questions, windows_of
from gradgraph.chat.run_place import CHECKPOINT, LOG, TRAINING, Finetuned, begin, check_place, create
from gradgraph.chat.template import table_in
from gradgraph.data.texts.tokenizer import NAME, Tokenizer
from gradgraph.errors import ArgumentError, DataError, shown
from gradgraph.files.atomic import write_atomically
from gradgraph.files.models import load_model
from gradgraph.runtime.loop.logs import JsonLines, peak_memory
from gradgraph.runtime.trainer import Trainer

LONGEST, SHARED = 384, 1 / 3  # default maximum number of tokens of a window, and the part that is in the next, too
PREDICTIONS = "predictions.json"
USED = ("task", "epochs", "batch_size", "accumulate", "learning_rate", "warmup", "weight_decay", "clip_norm", "length",
        "stride", "label_smoothing", "recompute", "eval_every", "patience", "max_steps", "checkpoint_every",
        "seed")  # fmt: skip


def finetune_questions(
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
    """Train all weights on questions, contexts and answers in the format of SQuAD; see ``gradgraph.finetune``.

    The loss is the mean cross-entropy of the first and of the last token of the answer, as in transformers. With
    validation data, the answers of the trained model are written to ``predictions.json``, by the id of the question.

    Raises:
        ArgumentError: the task does not use one of the recipe's options, or has no column of a name in ``columns``.
        DataError: the data have other columns, or the folder has no tokenizer.
        BuildError: the model cannot be trained in this way.
    """
    check_unused(recipe, USED, template)
    if stray := [name for name in columns or () if name not in COLUMNS]:
        raise ArgumentError(f"the task {recipe.task} has no column '{shown(stray[0])}'; name {', '.join(COLUMNS)}")
    check_validation(recipe, validation)
    check_task(base, QUESTIONS)
    check_place(out, resume)
    base.beside()  # raises before training if one of these files, which are copied at the end, cannot be
    if not (base.path / NAME).is_file():
        raise DataError(f"the folder '{shown(base.path)}' has no {NAME}; download it, or save it with transformers")
    windows = functools.partial(_windows, columns=columns, base=base, recipe=recipe)
    train, held = windows(data), None if validation is None else windows(validation)
    loss = losses.cross_entropy(label_smoothing=recipe.label_smoothing), 0.5
    step = build(
        load_model(base.model),
        {STARTS: loss, ENDS: loss},
        optimizer_of(recipe, recipe.epochs * math.ceil(math.ceil(len(train) / recipe.batch_size) / recipe.accumulate)),
        recompute="sqrt" if recipe.recompute else None,
        accumulate=recipe.accumulate > 1,
    )
    trainer, place = Trainer(step, seed=recipe.seed), out / TRAINING
    begin(out, recipe, {"data": _digest(train, held), "model": base.digest}, datetime.now().replace(microsecond=0),
          resume)  # fmt: skip
    if resume and (place / CHECKPOINT).is_file():
        trainer.load(place / CHECKPOINT)
    history = fitted(trainer, train, held, recipe, out, JsonLines(place / LOG), progress)
    figures: dict[str, Any] = {"rows": len(train.questions), "windows": len(train), "tokens": train.tokens,
                               **last_row(history), "steps": trainer.progress.steps}  # fmt: skip
    if held is not None:
        answers = answers_of(trainer, held, recipe.batch_size)
        figures |= {f"val_{name}": value for name, value in agreement(answers, held.questions).items()}
        write_atomically(out / PREDICTIONS, json.dumps(answers, indent=1, ensure_ascii=False).encode())
    target = out / base.model.relative_to(base.path)
    create(target.parent)
    trainer.export_file(target)
    base.copy_beside(out)
    return Finetuned(out, history, figures | peak_memory(), {}, trainer)


def _windows(data: Any, columns: Mapping[str, str] | None, base: ModelFolder, recipe: Recipe) -> QuestionWindows:
    """Return the rows of ``data`` as windows of tokens."""
    rows, tokenizer = read_questions(data, columns), Tokenizer(base.path / NAME, inside=True)
    longest = longest_of(base, recipe, LONGEST)
    stride = int(longest * SHARED) if recipe.stride is None else recipe.stride
    if stride >= longest:
        raise ArgumentError(f"stride is {stride}, but windows have {longest} tokens; use a lower stride")
    found = windows_of(rows, tokenizer, longest, stride)
    made = QuestionWindows(found, rows.rows, tokenizer, _none(base, tokenizer), longest)
    most = max(int(window.ids.max()) for window in made.windows)
    if base.vocabulary is not None and most >= base.vocabulary:
        raise DataError(
            f"{rows.where} has the token id {most:,}, but the model's vocabulary has {base.vocabulary:,}; use the "
            f"{NAME} that belongs to the model"
        )
    return made


def _none(base: ModelFolder, tokenizer: Tokenizer) -> list[int]:
    """Return the ids of the classification token and of the token that begins a text, if the folder names them."""
    named = table_in(base.path, "tokenizer_config.json")
    tokens = [named.get(name) for name in ("cls_token", "bos_token")]
    texts = [token.get("content") if isinstance(token, Mapping) else token for token in tokens]
    found = [tokenizer.number_of(text) for text in texts if isinstance(text, str)]
    return [number for number in found if number is not None]


def _digest(*parts: QuestionWindows | None) -> str:
    """Return the SHA-256 of all tokens and labels."""
    found = hashlib.sha256()
    for part in parts:
        for window in () if part is None else part.windows:
            found.update(len(window).to_bytes(8, "little") + window.ids.tobytes())
        found.update(b"" if part is None else part.answers.tobytes())
    return found.hexdigest()

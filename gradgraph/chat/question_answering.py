"""Fine-tuning of extractive question answering: all weights of a model that marks the answer in a context."""

from __future__ import annotations

import hashlib
import json
import logging
from typing import Any

from gradgraph import losses
from gradgraph.chat.question_answers import agreement, answers_of
from gradgraph.chat.question_windows import COLUMNS, ENDS, STARTS, QuestionWindows, read_questions, windows_of
from gradgraph.chat.run_place import Finetuned, create
from gradgraph.chat.task_request import Request
from gradgraph.data.texts.tokenizer import NAME, Tokenizer
from gradgraph.errors import ArgumentError, DataError
from gradgraph.files.atomic import write_atomically
from gradgraph.files.models import load_model

log = logging.getLogger("gradgraph.chat")

LONGEST, SHARED = 384, 1 / 3  # default maximum number of tokens of a window, and the part that is in the next, too
PREDICTIONS = "predictions.json"
CLASSIFYING = ("[CLS]", "<cls>")  # the classification tokens of tokenizers whose folder names none
USED = ("task", "epochs", "batch_size", "accumulate", "learning_rate", "warmup", "weight_decay", "clip_norm", "length",
        "stride", "label_smoothing", "recompute", "eval_every", "patience", "max_steps", "checkpoint_every",
        "seed")  # fmt: skip


def finetune_questions(request: Request) -> Finetuned:
    """Train all weights on questions, contexts and answers in the format of SQuAD; see ``gradgraph.finetune``.

    The loss is the mean cross-entropy of the first and of the last token of the answer, as in transformers. With
    validation data, the answers of the trained model are written to ``predictions.json``, by the id of the question.

    Raises:
        ArgumentError: the task does not use one of the recipe's options, or has no column of a name in ``columns``.
        DataError: the data have other columns, or the folder has no tokenizer.
        BuildError: the model cannot be trained in this way.
    """
    base, recipe = request.base, request.recipe
    request.check(USED, COLUMNS)
    request.check_validation()
    train = _windows(request, request.data)
    held = None if request.validation is None else _windows(request, request.validation)
    loss = losses.cross_entropy(label_smoothing=recipe.label_smoothing), 0.5
    found = request.trained(load_model(base.model), {STARTS: loss, ENDS: loss}, train, held,
                            {"data": _digest(train, held)})  # fmt: skip
    found.figures |= {"rows": len(train.questions), "windows": len(train), "tokens": train.tokens}
    if held is not None:
        answers = answers_of(found.trainer, held, recipe.batch_size)
        found.figures |= {f"val_{name}": value for name, value in agreement(answers, held.questions).items()}
        write_atomically(request.out / PREDICTIONS, json.dumps(answers, indent=1, ensure_ascii=False).encode())
    target = request.out / base.model.relative_to(base.path)
    create(target.parent)
    found.trainer.export_file(target)
    base.copy_beside(request.out)
    return found


def _windows(request: Request, data: Any) -> QuestionWindows:
    """Return the rows of ``data`` as windows of tokens."""
    rows, tokenizer, recipe = read_questions(data, request.columns), request.tokenizer, request.recipe
    longest, known = request.longest(LONGEST), request.base.vocabulary
    stride = int(longest * SHARED) if recipe.stride is None else recipe.stride
    if stride >= longest:
        raise ArgumentError(f"stride is {stride}, but windows have {longest} tokens; use a lower stride")
    found = windows_of(rows, tokenizer, longest, stride)
    made = QuestionWindows(found, rows.rows, tokenizer, _none(tokenizer), longest)
    if made.lost:
        log.warning("%d of %d questions of %s are trained without their answer, which is longer than what windows "
                    "share; raise length or stride", made.lost, len(rows.rows), rows.where)  # fmt: skip
    most = max(int(window.ids.max()) for window in made.windows)
    if known is not None and most >= known:
        raise DataError(
            f"{rows.where} has the token id {most:,}, but the model's vocabulary has {known:,}; use the {NAME} that "
            "belongs to the model"
        )
    return made


def _none(tokenizer: Tokenizer) -> list[int]:
    """Return the ids of the classification token and of the token that begins a text, if the tokenizer has them."""
    named = tokenizer.special_tokens
    first = [named["cls_token"]] if "cls_token" in named else CLASSIFYING
    found = map(tokenizer.number_of, (*first, *(named[name] for name in ("bos_token",) if name in named)))
    return [number for number in found if number is not None]


def _digest(*parts: QuestionWindows | None) -> str:
    """Return the SHA-256 of all tokens and labels."""
    found = hashlib.sha256()
    for part in parts:
        for window in () if part is None else part.windows:
            found.update(len(window).to_bytes(8, "little") + window.ids.tobytes())
        found.update(b"" if part is None else part.answers.tobytes())
    return found.hexdigest()

"""Answers of an extractive model to questions, and their agreement with reference answers, as SQuAD counts it."""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from gradgraph.chat.question_windows import ENDS, STARTS, QuestionWindows
from gradgraph.data.arrays.batch import Array
from gradgraph.runtime.trainer import Trainer

CANDIDATES = 20  # starts and ends of each window that are combined, as in transformers' example
LONGEST = 30  # maximum number of tokens of an answer, as there


def answers_of(trainer: Trainer, windows: QuestionWindows, batch_size: int) -> dict[str, str]:
    """Return the likeliest answer to each question by its name, from all windows of its context.

    The score of an answer is the sum of the scores of its first and its last token. If some of the questions have no
    answer, the answer is empty wherever the score of "no answer", the lowest of all windows, is higher.
    """
    scores = _scores(trainer, windows, batch_size)
    may_be_none = any(not question.answers for question in windows.questions)
    best: list[tuple[float, str] | None] = [None] * len(windows.questions)
    none = np.full(len(windows.questions), np.inf)
    for i, (starts, ends) in enumerate(scores):
        owner, place = windows.owners[i], windows.none[i]
        none[owner] = min(none[owner], float(starts[place]) + float(ends[place]))
        found = _best(starts, ends, windows.windows[i].spans)
        known = best[owner]
        if found is not None and (known is None or found[0] > known[0]):
            begin, end = found[1]
            best[owner] = found[0], windows.questions[owner].context[begin:end]
    answers = {}
    for question, of_question, nothing in zip(windows.questions, best, none, strict=True):
        is_none = of_question is None or (may_be_none and nothing > of_question[0])
        answers[question.name] = "" if is_none or of_question is None else of_question[1]
    return answers


def _scores(trainer: Trainer, windows: QuestionWindows, batch_size: int) -> list[tuple[Array, Array]]:
    """Return the scores of the tokens of each window as the first and as the last token of the answer."""
    found: list[tuple[Array, Array]] = []
    for batch in trainer.predict(windows, batch_size, per_batch=True):
        for starts, ends in zip(batch[STARTS], batch[ENDS], strict=True):
            first, count = windows.begin(len(found), len(starts)), len(windows[len(found)])
            found.append((starts[first : first + count], ends[first : first + count]))
    return found


def _best(starts: Array, ends: Array, spans: Array) -> tuple[float, tuple[int, int]] | None:
    """Return the highest score of an answer in a window, and its characters in the context; None if there is none."""
    inside = spans[:, 0] >= 0
    firsts, lasts = ((order := np.argsort(scores)[::-1][:CANDIDATES])[inside[order]] for scores in (starts, ends))
    sums = starts[firsts][:, None].astype(np.float64) + ends[lasts][None, :]
    lengths = lasts[None, :] - firsts[:, None] + 1
    sums[(lengths < 1) | (lengths > LONGEST)] = -np.inf
    if not sums.size or not np.isfinite(sums.max()):
        return None
    row, column = np.unravel_index(int(sums.argmax()), sums.shape)
    return float(sums.max()), (int(spans[firsts[row], 0]), int(spans[lasts[column], 1]))


# --- agreement ---------------------------------------------------------------------------------------------------


def agreement(answers: Mapping[str, str], questions: Sequence[Any]) -> dict[str, float]:
    """Return ``exact_match`` and ``f1`` of answers to :class:`Question` rows, each in per cent, as SQuAD's script does.

    Case, punctuation, articles and spaces are ignored. ``f1`` compares words. Of several reference answers, the most
    similar one counts.
    """
    exact = total = 0.0
    for question in questions:
        given = _words(answers[question.name])
        references = [_words(text) for text, _ in question.answers] or [[]]
        references = [words for words in references if words] or [[]]
        exact += max(given == words for words in references)
        total += max(_f1(given, words) for words in references)
    return {"exact_match": 100 * exact / len(questions), "f1": 100 * total / len(questions)}


def _words(text: str) -> list[str]:
    without = "".join(letter for letter in text.lower() if letter not in string.punctuation)
    return re.sub(r"\b(a|an|the)\b", " ", without).split()


def _f1(given: Sequence[str], reference: Sequence[str]) -> float:
    if not given or not reference:
        return float(given == reference)
    common = sum((Counter(given) & Counter(reference)).values())
    return 2 * common / (len(given) + len(reference))

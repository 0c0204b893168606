"""Questions on contexts, with answers in the contexts, as tokens: windows over each context, for extractive answering.

A context that is too long for the model is split into windows that overlap. Each window begins with the whole question.
The label of a window is the first and the last token of the answer; of a window without the whole answer, both are the
token that stands for "no answer": the classification token of the tokenizer.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from gradgraph.arguments import described
from gradgraph.chat.chat_batches import filled_up
from gradgraph.data.arrays.batch import Array
from gradgraph.data.dataset import Loadable
from gradgraph.data.preprocess.frames import EXACT
from gradgraph.data.record.data_names import NO_NAMES, DataNames
from gradgraph.data.record.specs import Specs, TargetSpec, numpy_dtype
from gradgraph.data.texts.json_rows import Row
from gradgraph.data.texts.records import records_in
from gradgraph.data.texts.token_inputs import TokenInputs
from gradgraph.data.texts.tokenizer import Tokenizer, Window
from gradgraph.errors import DataError, listed, shown, suggestion
from gradgraph.files.untrusted.documents import json_of
from gradgraph.files.untrusted.regular import UnreadableError

log = logging.getLogger("gradgraph.chat")

STARTS, ENDS = "start_logits", "end_logits"  # outputs of optimum's models
COLUMNS = ("question", "context", "answers", "id")


@dataclass(frozen=True)
class Question:
    """A question on a context.

    Attributes:
        name: its ``id``, or its index in data without ids.
        question, context: the texts.
        answers: each answer and the index of its first character in the context; empty if the context has none.
    """

    name: str
    question: str
    context: str
    answers: tuple[tuple[str, int], ...]


@dataclass(frozen=True)
class Questions:
    """Validated rows.

    Attributes:
        rows: the rows.
        where: the name of the data in messages.
        place: a function from the index of a row to its place in messages.
    """

    rows: Sequence[Question]
    where: str
    place: Callable[[int], str]


def read_questions(source: Any, columns: Mapping[str, str] | None = None) -> Questions:
    """Read rows of ``question``, ``context`` and ``answers``, in the format of SQuAD.

    ``answers`` is ``{"text": [...], "answer_start": [...]}``, or a list of objects with one ``text`` and
    ``answer_start`` each. Both are empty if the context does not contain the answer. ``id``, a text or a whole number,
    is optional: without any, rows are numbered from 0.

    Args:
        source: anything that ``chat_rows.read`` reads.
        columns: your column names, if they differ.

    Raises:
        DataError: the data cannot be read, lack a column, or contain an invalid row, which the message names.
    """
    records = records_in(source)
    if not records.rows:
        raise DataError(f"{records.where} has no rows; add at least one")
    own = {name: (columns or {}).get(name, name) for name in COLUMNS}
    required = [column for name, column in own.items() if name in COLUMNS[:3] or name in (columns or {})]
    missing = next((column for column in required if column not in records.rows[0]), None)
    if missing is not None:
        raise DataError(
            f"{records.where} has no column '{shown(missing)}'{suggestion(missing, [*records.rows[0]])}",
            remedy="name your columns: columns={'question': …, 'context': …, 'answers': …}",
            shell="name your columns: --column question=… --column context=… --column answers=…",
        )
    unread = [name for name in records.rows[0] if name not in own.values()]
    if unread:
        log.info("columns of %s that are ignored: %s", records.where, listed(map(shown, unread), 12))
    rows = [{name: row.get(column) for name, column in own.items()} for row in records.rows]
    if all(_is_empty(row["id"]) for row in rows):
        rows = [{**row, "id": i} for i, row in enumerate(rows)]
    found, places = list[Question](), dict[str, int]()
    for i, row in enumerate(rows):
        made = _question(row)
        if isinstance(made, str):
            raise DataError(f"{records.place(i)}: {made}")
        if places.setdefault(made.name, i) != i:
            raise DataError(
                f"{records.place(i)} has the id '{shown(made.name)}' of {records.place(places[made.name])}; use an id "
                "of its own for each question"
            )
        found.append(made)
    return Questions(found, records.where, records.place)


def _question(row: Row) -> Question | str:
    """Return a row as a Question, or a sentence on its fault."""
    if _is_empty(row["id"]):
        return "'id' is missing, but other rows have it; add it, or remove the column"
    name = _name(row["id"])
    if name is None:
        return f"'id' is {described(row['id'])}, but should be text or a whole number"
    texts = row["question"], row["context"]
    for column, text in zip(COLUMNS, texts, strict=False):
        if not isinstance(text, str) or not text.strip():
            return f"'{column}' is {described(text)}, but should be text; correct the row, or drop it"
    answers = _answers(row["answers"])
    if answers is None:
        return (
            f"'answers' is {described(row['answers'])}, but should be {{'text': […], 'answer_start': […]}}, with as "
            "many texts as numbers"
        )
    for text, start in answers:
        if not text or start < 0 or not row["context"].startswith(text, start):
            return (
                f"the answer '{shown(text)}' is not in the context at character {start:,}; correct answer_start, or "
                "drop the row"
            )
    return Question(name, row["question"], row["context"], answers)


def _is_empty(value: Any) -> bool:
    return value is None or (isinstance(value, str) and not value.strip())


def _name(value: Any) -> str | None:
    """Return an id as text, a whole number without a decimal point; None if it is neither text nor a whole number.

    Table libraries convert whole numbers to floats if some are missing.
    """
    if isinstance(value, float) and value.is_integer() and abs(value) < EXACT:
        value = int(value)
    return str(value) if isinstance(value, str | int) and not isinstance(value, bool) else None


def _answers(value: Any) -> tuple[tuple[str, int], ...] | None:
    """Return the answers of a row with their first characters; None if they have another form."""
    if isinstance(value, str):  # in a .csv
        try:
            value = json_of(value)
        except UnreadableError:
            return None
    if isinstance(value, list) and all(isinstance(each, Mapping) for each in value):
        value = {name: [each.get(name) for each in value] for name in ("text", "answer_start")}
    texts, starts = (value.get(name) for name in ("text", "answer_start")) if isinstance(value, Mapping) else (0, 0)
    if not isinstance(texts, list) or not isinstance(starts, list) or len(texts) != len(starts):
        return None
    pairs = zip(texts, (int(s) if isinstance(s, str) and s.isdecimal() else s for s in starts), strict=True)
    found = [(text, start) for text, start in pairs if isinstance(text, str) and type(start) is int]
    return tuple(found) if len(found) == len(texts) else None


class QuestionWindows(Loadable):
    """Windows of questions on contexts, for a step with the losses of ``start_logits`` and ``end_logits``.

    Batches are padded to their longest window, rounded up to a multiple of 16 tokens.

    Args:
        windows: the windows of each question.
        questions: the questions.
        tokenizer: determines the padding token, and the side of padding.
        none: the ids of tokens that stand for "no answer": the first of them in a window is used, or its first token.
        longest: the maximum number of tokens of a window.

    Attributes:
        owners: for each window, the index of its question.
        none: for each window, the index of the token that stands for "no answer".
        answers: for each window, the first and the last token of its label: int64 [windows, 2].
        lost: the number of questions with an answer of which no window has all.
    """

    def __init__(
        self,
        windows: Sequence[Sequence[Window]],
        questions: Sequence[Question],
        tokenizer: Tokenizer,
        none: Sequence[int],
        longest: int,
    ) -> None:
        self.windows = [window for each in windows for window in each]
        self.owners = [i for i, each in enumerate(windows) for _ in each]
        self.questions, self.longest = questions, longest
        self._pad, self._pads_left = tokenizer.pad, tokenizer.pads_left
        self.none = [_place_of_none(window, none) for window in self.windows]
        labels = [_labels(each, question) for each, question in zip(windows, questions, strict=True)]
        self.lost = sum(bool(q.answers) and not any(each) for q, each in zip(questions, labels, strict=True))
        every = itertools.chain.from_iterable(labels)
        self.answers = np.array(
            [label or (none, none) for label, none in zip(every, self.none, strict=True)], np.int64
        ).reshape(-1, 2)

    def __len__(self) -> int:
        return len(self.windows)

    def __getitem__(self, i: int) -> Window:
        return self.windows[i]

    @property
    def lengths(self) -> Array:
        """The number of tokens of each window."""
        return np.array([len(window) for window in self.windows], np.int64)

    @property
    def tokens(self) -> int:
        """The number of tokens of all windows."""
        return int(self.lengths.sum())

    def names_for(self, specs: Specs, known: DataNames) -> DataNames:
        """Return empty names, since answers have no classes; raise DataError if the step requires other inputs."""
        _inputs(specs)
        return NO_NAMES

    def begin(self, i: int, width: int) -> int:
        """Return the index of the first token of window ``i`` in a row of ``width`` tokens."""
        return width - len(self.windows[i]) if self._pads_left else 0

    def load(
        self, batches: Iterator[Sequence[int]], specs: Specs, seed: Sequence[int], known: DataNames = NO_NAMES
    ) -> Iterator[dict[str, Array]]:
        """Yield batches of windows: the model's inputs, and the first and the last token of each answer."""
        inputs = _inputs(specs)
        targets = [spec for spec in specs.values() if isinstance(spec, TargetSpec)]
        for numbers in batches:
            widest = max(len(self.windows[i]) for i in numbers)
            width = inputs.fixed_length or max(widest, min(filled_up(widest), self.longest))
            ids, types, there = self._padded(numbers, width)
            arrays = inputs.arrays(ids, types, there)
            begins = np.array([self.begin(i, width) for i in numbers], np.int64)
            for spec in targets:
                labels = self.answers[list(numbers), int(spec.name.startswith(ENDS))] + begins
                arrays[spec.name] = labels.astype(numpy_dtype(spec.dtype))
            yield arrays

    def _padded(self, numbers: Sequence[int], width: int) -> tuple[Array, Array, Array]:
        """Return token ids, token types, and False for padding: [windows, width] each."""
        ids, types = np.full((len(numbers), width), self._pad, np.int64), np.zeros((len(numbers), width), np.int64)
        there = np.zeros((len(numbers), width), bool)
        for row, i in enumerate(numbers):
            window, first = self.windows[i], self.begin(i, width)
            place = slice(first, first + len(window))
            ids[row, place], types[row, place], there[row, place] = window.ids, window.types, True
        return ids, types, there


def _inputs(specs: Specs) -> TokenInputs:
    """Return the inputs of a step; raise DataError unless windows provide them."""
    targets = [spec.name for spec in specs.values() if isinstance(spec, TargetSpec)]
    inputs = TokenInputs.of({name: spec for name, spec in specs.items() if not isinstance(spec, TargetSpec)})
    if inputs.has_choices or not all(name.startswith((STARTS, ENDS)) for name in targets):
        raise DataError(
            f"questions provide tokens and the positions of answers, but the step expects "
            f"{', '.join(map(str, specs.values()))}; build it on a model with {STARTS} and {ENDS}"
        )
    return inputs


def _place_of_none(window: Window, none: Sequence[int]) -> int:
    """Return the index of the first token of a window that is one of ``none``, in their order; 0 without any."""
    places = (np.flatnonzero(window.ids == number) for number in none)
    return next((int(found[0]) for found in places if len(found)), 0)


def _labels(windows: Sequence[Window], question: Question) -> list[tuple[int, int] | None]:
    """Return the first and the last token of the question's first answer in each window; None where it is not whole.

    If no window has all of the answer, characters at its ends that have no token, such as spaces, are ignored.
    """
    if not question.answers:
        return [None] * len(windows)
    text, begin = question.answers[0]
    end = begin + len(text)
    found = [label_of(window, begin, end) for window in windows]
    if any(found):
        return found
    spans = np.concatenate([window.spans for window in windows]).clip(begin, end)
    spans = spans[spans[:, 0] < spans[:, 1]]
    if not len(spans):
        return found
    return [label_of(window, int(spans[:, 0].min()), int(spans[:, 1].max())) for window in windows]


def label_of(window: Window, begin: int, end: int) -> tuple[int, int] | None:
    """Return the first and the last token of characters ``begin`` to ``end``; None unless all are in the window.

    They are those of transformers' example, except for an answer within one character of several tokens, whose span
    they share: there, the example's first token comes after its last one.
    """
    inside = np.flatnonzero(window.spans[:, 0] >= 0)
    begins, ends = window.spans[inside].T
    if not len(inside) or begins[0] > begin or ends[-1] < end:
        return None
    first = np.flatnonzero(begins <= begin)[-1]
    last = np.flatnonzero(ends >= end)[0]
    return int(inside[min(first, last)]), int(inside[max(first, last)])


def windows_of(data: Questions, tokenizer: Tokenizer, longest: int, stride: int) -> list[list[Window]]:
    """Return the windows of each question, of at most ``longest`` tokens; ``stride`` of them are in the next, too.

    Questions begin with a word, as in transformers, which strips spaces before them.

    Raises:
        DataError: a question leaves too few tokens to the context, or the tokenizer fails.
    """
    questions = [row.question.lstrip() for row in data.rows]
    rooms = tokenizer.rooms(questions, longest)
    small = [i for i, room in enumerate(rooms) if room <= stride]
    sizes = (len(ids) for ids in tokenizer.ids([data.rows[i].context for i in small], False))
    full = next((i for i, size in zip(small, sizes, strict=True) if size > rooms[i]), None)
    if full is not None:
        raise DataError(
            f"{data.place(full)}: the question leaves {max(rooms[full], 0)} of {longest} tokens of a window to its "
            f"context, but windows share {stride} tokens; shorten the question, or drop the row",
        )
    pairs = [(question, row.context) for question, row in zip(questions, data.rows, strict=True)]
    return list(tokenizer.windows(pairs, longest, stride))

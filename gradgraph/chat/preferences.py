"""Preference data: rows of two answers as tokens, and batches of them for a step on ``surgery.pair_model``."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from gradgraph.chat.chat_batches import ChatBatches, TokenBatches, filled_up, fixed_width
from gradgraph.chat.chat_recipe import DESIRABLE, reads_labels
from gradgraph.chat.chat_rows import Rows
from gradgraph.chat.tokens import Encoder, Tokens
from gradgraph.data.arrays.batch import Array
from gradgraph.data.record.data_names import NO_NAMES, DataNames
from gradgraph.data.record.specs import Specs, numpy_dtype
from gradgraph.data.texts.json_rows import Row
from gradgraph.errors import DataError
from gradgraph.surgery.language_models import IGNORED
from gradgraph.surgery.pair_models import LABELS

IDS, TARGET = "input_ids", "target"


@dataclass(frozen=True)
class Pair:
    """A prompt with two answers, as tokens; only the answers are trained on.

    Attributes:
        first: the prompt with the chosen answer; for a row with one answer, with this answer.
        second: the prompt with the rejected answer; for a row with one answer, with the answer of another row.
        good: for a row with one answer, whether the answer is good.
    """

    first: Tokens
    second: Tokens
    good: bool = True

    def __len__(self) -> int:
        return max(len(self.first), len(self.second))


def pairs_of(rows: Rows, encoder: Encoder, loss: str) -> list[Pair]:
    """Return the rows as pairs of tokenised answers, as the preference loss called ``loss`` requires them.

    Raises:
        DataError: the rows do not have the columns that the loss requires; an answer has no tokens; both answers of a
            row are equal; or the template rejects a row.
    """
    unpaired = reads_labels(loss)
    if rows.kind != ("unpaired" if unpaired else "preference"):
        columns = "prompt, completion and label" if unpaired else "chosen and rejected, with a prompt"
        raise DataError(f"the loss {loss} requires {columns}, but {rows.where} has other columns; provide these")
    if unpaired:
        firsts: list[Row] = [{**row, "completion": row["completion"]} for row in rows]
        seconds: list[Row] = [{**row, "completion": _of_another(rows, i)} for i, row in enumerate(rows)]
    else:
        firsts, seconds = (
            [_answered(row, name, rows.place(i)) for i, row in enumerate(rows)] for name in ("chosen", "rejected")
        )
    first, second = (encoder(Rows("prompt", each, rows.where, rows.place)) for each in (firsts, seconds))
    good = [bool(row.get("label", True)) for row in rows]
    return [Pair(*parts) for parts in zip(first, second, good, strict=True)]


def _of_another(rows: Rows, i: int) -> Any:
    """Return the completion of the next row after row ``i`` (cyclically) that has another prompt."""
    ways = (rows[(i + k) % len(rows)] for k in range(1, len(rows)))
    found = next((row for row in ways if row["prompt"] != rows[i]["prompt"]), None)
    if found is None:
        raise DataError(
            f"all rows of {rows.where} have the same prompt, but this loss requires answers to other prompts; add some"
        )
    return found["completion"]


def _answered(row: Row, name: str, place: str) -> Row:
    """Return a preference row with the answer ``name`` as completion, and common messages as a missing prompt."""
    answers = row["chosen"], row["rejected"]
    if answers[0] == answers[1]:
        raise DataError(f"{place}: 'chosen' and 'rejected' are equal; drop the row")
    if row.get("prompt") is not None:
        return {**row, "completion": row[name]}
    if not all(isinstance(answer, list) for answer in answers):
        raise DataError(f"{place} has texts as answers and no 'prompt'; add it, or use messages")
    alike = zip(*answers, strict=False)
    same = next((i for i, (a, b) in enumerate(alike) if a != b), min(map(len, answers)))
    if not same:
        raise DataError(f"{place}: 'chosen' and 'rejected' do not begin with the same messages; add a 'prompt'")
    return {**row, "prompt": row[name][:same], "completion": row[name][same:]}


class PairBatches(TokenBatches):
    """Pairs as tokens, for a step on the result of ``surgery.pair_model``; rows of similar lengths share a batch.

    Args:
        samples: the pairs.
        pad: the padding token, used on the right.
        length: the maximum number of tokens per row, with padding; by default the length of the longest row.

    Attributes:
        reference: the log-probabilities ``[pairs, 2]`` before training, once computed.
    """

    def __init__(self, samples: Sequence[Pair], pad: int = 0, length: int | None = None) -> None:
        self.samples, self.pad, self._length = samples, pad, length
        self.reference: Array | None = None
        self._lengths = np.array([len(pair) for pair in samples], np.int64)

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, i: int) -> Pair:
        return self.samples[i]

    @property
    def good(self) -> Array:
        """Whether the first answer of each pair is good ``[pairs]``."""
        return np.array([pair.good for pair in self.samples], bool)

    @property
    def answers(self) -> ChatBatches | None:
        """The good answers with their prompts, as batches to evaluate; None if no answer is good."""
        texts = [pair.first for pair in self.samples if pair.good]
        return ChatBatches(texts, self._length or self.longest, pad=self.pad) if texts else None

    @property
    def tokens(self) -> int:
        """The number of tokens of all texts."""
        return sum(len(pair.first) + len(pair.second) for pair in self.samples)

    def _width(self, tokens: int) -> int:
        return filled_up(tokens) if self._length is None else max(int(tokens), min(filled_up(tokens), self._length))

    def names_for(self, specs: Specs, known: DataNames) -> DataNames:
        """Return empty names, since pairs have no classes; raise DataError if the step requires other inputs."""
        extra = sorted(set(specs) - {IDS, LABELS, TARGET, DESIRABLE})
        if extra or not {IDS, LABELS} <= set(specs):
            takes = ", ".join(map(str, specs.values()))
            raise DataError(
                f"pairs provide tokens and labels, but the step expects {takes}; build it on the result "
                "of surgery.pair_model"
            )
        if TARGET in specs and self.reference is None:
            raise DataError("the loss requires a reference; set reference= to the result of surgery.reference")
        return NO_NAMES

    @property
    def lengths(self) -> Array:
        """The number of tokens of the longer answer of each pair, with its prompt."""
        return self._lengths

    def load(
        self, batches: Iterator[Sequence[int]], specs: Specs, seed: Sequence[int], known: DataNames = NO_NAMES
    ) -> Iterator[dict[str, Array]]:
        """Yield batches padded to their longest row, rounded up to a multiple of 16 tokens."""
        fixed = fixed_width(specs[IDS], self._lengths)
        for numbers in batches:
            pairs = [self.samples[i] for i in numbers]
            shape = len(pairs), 2, fixed or self._width(max(map(len, pairs)))
            ids, labels = np.full(shape, self.pad, np.int64), np.full(shape, IGNORED, np.int64)
            for i, pair in enumerate(pairs):
                for k, tokens in enumerate((pair.first, pair.second)):
                    ids[i, k, : len(tokens)] = tokens.ids
                    labels[i, k, : len(tokens) - 1] = tokens.labels
            named: dict[str, Any] = {IDS: ids, LABELS: labels, DESIRABLE: self.good[list(numbers)]}
            if self.reference is not None:
                named[TARGET] = self.reference[list(numbers)]
            yield {name: named[name].astype(numpy_dtype(spec.dtype)) for name, spec in specs.items()}

"""Texts and their answers, as tokens in batches for an encoder with a decoder."""

from __future__ import annotations

import hashlib
import json
import logging
from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from gradgraph.chat.chat_batches import filled_up
from gradgraph.chat.chat_rows import read
from gradgraph.chat.task_request import Request
from gradgraph.chat.tokens import check_number
from gradgraph.data.arrays.batch import Array
from gradgraph.data.dataset import Loadable
from gradgraph.data.record.data_names import NO_NAMES, DataNames
from gradgraph.data.record.specs import Specs, TargetSpec, TensorSpec, numpy_dtype
from gradgraph.data.texts.tokenizer import NOWHERE
from gradgraph.errors import DataError, shown
from gradgraph.surgery.encoder_decoders import TOKENS
from gradgraph.surgery.language_models import IGNORED, MASK

log = logging.getLogger("gradgraph.chat")

LONGEST = 512  # default maximum number of tokens of a text, and of an answer


class Pairs(Loadable):
    """Inputs of an encoder, and the answers as tokens, for the model of ``surgery.encoder_decoders.encoder_decoder``.

    The decoder reads the start token and all tokens of the answer but the last; the labels are the answer. Both are
    padded on the right to the longest of the batch.

    Args:
        answers: the token ids of each answer.
        start: the token that the decoder begins with.
        pad: the padding token.
        most: the number of the model's positions; batches are no wider.
    """

    provides = "tokens and their mask"  # what the encoder reads, in messages

    def __init__(self, answers: Sequence[Sequence[int]], start: int, pad: int, most: int) -> None:
        self.answers, self.start, self.pad, self.most = answers, start, pad, most

    def __len__(self) -> int:
        return len(self.answers)

    @abstractmethod
    def selected(self, numbers: Sequence[int]) -> Pairs:
        """Return the rows with these indices."""

    @property
    def lengths(self) -> Array:
        """The number of tokens of each row."""
        return np.array([len(answer) for answer in self.answers], np.int64)

    @property
    def tokens(self) -> int:
        """The number of tokens of all rows."""
        return int(self.lengths.sum())

    @property
    @abstractmethod
    def content(self) -> Any:
        """Settings that determine the batches, in JSON types."""

    def names_for(self, specs: Specs, known: DataNames) -> DataNames:
        """Return empty names, since answers have no classes; raise DataError if the step requires other inputs."""
        self._roles(specs)
        return NO_NAMES

    def load(
        self, batches: Iterator[Sequence[int]], specs: Specs, seed: Sequence[int], known: DataNames = NO_NAMES
    ) -> Iterator[dict[str, Array]]:
        """Yield batches whose tokens are padded to the longest of the batch, rounded up to a multiple of 16."""
        roles = self._roles(specs)
        for numbers, arrays in self._read(batches):
            answers = [self.answers[i] for i in numbers]
            labels, there = self._padded(answers, IGNORED)
            before, _ = self._padded([[self.start, *answer[:-1]] for answer in answers], self.pad)
            arrays |= {"before": before, "labels": np.where(there, labels, IGNORED)}
            yield {name: arrays[roles[name]].astype(numpy_dtype(spec.dtype)) for name, spec in specs.items()}

    def _padded(self, rows: Sequence[Sequence[int]], pad: int) -> tuple[Array, Array]:
        """Return rows of token ids padded on the right [rows, width], and 1 for tokens, 0 for padding."""
        longest = max(map(len, rows))
        shape = len(rows), max(longest, min(filled_up(longest), self.most))
        found, there = np.full(shape, pad, np.int64), np.zeros(shape, np.int64)
        for i, row in enumerate(rows):
            found[i, : len(row)], there[i, : len(row)] = row, 1
        return found, there

    @abstractmethod
    def _read(self, batches: Iterator[Sequence[int]]) -> Iterator[tuple[Sequence[int], dict[str, Array]]]:
        """Yield the indices of each batch, and the encoder's arrays: ``"read"``, and ``"mask"`` if there is one."""

    @abstractmethod
    def first(self, i: int, decode: Callable[[Sequence[int]], str]) -> str:
        """Return what the models read before the answer of row ``i``, for people."""

    @abstractmethod
    def _fits(self, spec: TensorSpec) -> bool:
        """Whether the data provide this input of the encoder."""

    def _roles(self, specs: Specs) -> dict[str, str]:
        """Return the content of each input and target of a step; raise DataError if it requires others."""
        usual = {MASK: "mask", TOKENS: "before"}
        found = {
            name: "labels" if isinstance(spec, TargetSpec) else usual.get(name, "read") for name, spec in specs.items()
        }
        fits = all((self._fits if role == "read" else _is_tokens)(specs[name]) for name, role in found.items())
        if not fits or len(set(found.values())) < len(found) or not {"before", "read"} <= set(found.values()):
            raise DataError(
                f"the data provide {self.provides} and the decoder's tokens, but the step expects "
                f"{', '.join(map(str, specs.values()))}; build it on an encoder and a decoder of optimum"
            )
        return found


class TextPairs(Pairs):
    """Texts and answers as tokens; see :class:`Pairs`.

    Args:
        texts, answers: the token ids of each row.
        start, pad, most: as for :class:`Pairs`.
    """

    def __init__(
        self, texts: Sequence[Sequence[int]], answers: Sequence[Sequence[int]], start: int, pad: int, most: int
    ) -> None:
        super().__init__(answers, start, pad, most)
        self.texts = texts

    def __getitem__(self, i: int) -> tuple[Sequence[int], Sequence[int]]:
        return self.texts[i], self.answers[i]

    def selected(self, numbers: Sequence[int]) -> TextPairs:
        """Return the rows with these indices."""
        texts, answers = ([part[i] for i in numbers] for part in (self.texts, self.answers))
        return TextPairs(texts, answers, self.start, self.pad, self.most)

    @property
    def lengths(self) -> Array:
        """The number of tokens of each row, of text and answer."""
        return np.array([len(text) for text in self.texts], np.int64) + super().lengths

    @property
    def content(self) -> Any:
        """The tokens of each row."""
        return [list(map(list, self[i])) for i in range(len(self))]

    def _read(self, batches: Iterator[Sequence[int]]) -> Iterator[tuple[Sequence[int], dict[str, Array]]]:
        for numbers in batches:
            ids, mask = self._padded([self.texts[i] for i in numbers], self.pad)
            yield numbers, {"read": ids, "mask": mask}

    def first(self, i: int, decode: Callable[[Sequence[int]], str]) -> str:
        """Return the text of row ``i``."""
        return f"{decode(self.texts[i])}\n"

    def _fits(self, spec: TensorSpec) -> bool:
        return _is_tokens(spec)


def _is_tokens(spec: TensorSpec) -> bool:
    return numpy_dtype(spec.dtype).kind in "iu" and len(spec.shape) == 2


def read_texts(request: Request, data: Any) -> TextPairs:
    """Read rows of ``prompt`` and ``completion`` as tokens.

    Raises:
        DataError: the data have other columns, a text has no or unknown tokens, or the folder has no start token.
    """
    tokenizer, recipe = request.tokenizer, request.recipe
    rows = read(data, request.columns, ("prompt",))
    if rows.kind != "prompt" or not all(isinstance(row[n], str) for row in rows for n in ("prompt", "completion")):
        raise DataError(f"{rows.where} has no texts in prompt and completion, which {recipe.task} requires; name them")
    longest = request.longest(LONGEST)
    found = [[*tokenizer.spans([row[name] for row in rows], True, False)] for name in ("prompt", "completion")]
    for i, ((text, _), (answer, _)) in enumerate(zip(*found, strict=True)):
        check_tokens((text, answer), rows.place(i), request.base.vocabulary)
    over = [i for i, both in enumerate(zip(*found, strict=True)) if any(len(ids) > longest for ids, _ in both)]
    if over and recipe.long == "error":
        raise DataError(
            f"{rows.place(over[0])} has more than {longest} tokens in a text or its answer",
            remedy="raise length=, or pass long='drop' or 'cut'",
            shell="raise --length, or pass --long drop or cut",
        )
    if over:
        log.warning("%d rows of %s have more than %d tokens; they are %s", len(over), rows.where, longest,
                    "dropped" if recipe.long == "drop" else "truncated")  # fmt: skip
    kept = [i for i in range(len(rows)) if recipe.long != "drop" or i not in set(over)]
    if not kept:
        raise DataError(
            f"no row of {rows.where} remains", remedy="add rows, or raise length=", shell="add rows, or raise --length"
        )
    texts, answers = ([truncated(*part[i], longest) for i in kept] for part in found)
    return TextPairs(texts, answers, start_of(request), tokenizer.pad, longest)


def start_of(request: Request) -> int:
    """Return the token that the decoder begins with; raise DataError if ``config.json`` does not name it."""
    start = request.base.described.get("decoder_start_token_id")
    if not isinstance(start, int):
        raise DataError(
            f"config.json in '{shown(request.base.path)}' has no decoder_start_token_id; add it from the model"
        )
    return start


def check_tokens(texts: Sequence[Sequence[int]], place: str, known: int | None) -> None:
    """Raise DataError if a text has no tokens, or a token outside the model's vocabulary of ``known`` tokens."""
    if not all(texts):
        raise DataError(f"{place} has a text without tokens; drop the row")
    check_number(max(map(max, texts)), place, known)


def digest_of(*parts: Pairs | None) -> str:
    """Return the SHA-256 of training and validation rows."""
    return hashlib.sha256(json.dumps([None if part is None else part.content for part in parts]).encode()).hexdigest()


def truncated(ids: Sequence[int], spans: Sequence[tuple[int, int]], longest: int) -> Sequence[int]:
    """Return at most ``longest`` tokens of a text with its last special tokens, as transformers truncates texts.

    ``spans`` are the characters of each token, as from ``Tokenizer.spans``.
    """
    if len(ids) <= longest:
        return ids
    added = next((i for i, span in enumerate(reversed(spans)) if span != NOWHERE), 0)
    return [*ids[: longest - added], *ids[len(ids) - added :]]

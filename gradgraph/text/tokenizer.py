"""Tokenizers: a ``tokenizer.json``, as Hugging Face's package ``tokenizers`` writes it, read safely, run on texts."""

from __future__ import annotations

import functools
import hashlib
import json
import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from gradgraph.errors import DataError, shown
from gradgraph.files.atomic import write_atomically
from gradgraph.files.untrusted.contained_paths import path_inside
from gradgraph.files.untrusted.documents import json_of
from gradgraph.files.untrusted.regular import UnreadableError, reason_of, regular_bytes
from gradgraph.runtime.data.batch import Array
from gradgraph.step.data_names import DataNames

NAME = "tokenizer.json"
LARGEST = 256 << 20  # bytes of a file
LONGER = 1000  # times that it may make a text as long
LONGEST = 512  # tokens, where neither the model nor the tokenizer says how many
CHUNK = 4096  # texts that are encoded at once: what the package returns takes far more memory than the numbers
PADS = ("[PAD]", "<pad>", "<|pad|>", "<|endoftext|>", "</s>")


@dataclass(frozen=True)
class Encoded:
    """Texts as tokens, one after the other.

    Attributes:
        ids: of all tokens: int32 [tokens].
        types: 1 for those of the second text of a pair: uint8 [tokens].
        words: of the first token of each word, the number of the word in its text, else −1: int32 [tokens].
        starts: the first token of each text, and how many tokens there are: int64 [texts + 1].
        cut: how many texts were longer than they may be.
    """

    ids: Array
    types: Array
    words: Array
    starts: Array
    cut: int

    @property
    def lengths(self) -> Array:
        """The tokens of each text."""
        return np.diff(self.starts)


class Tokenizer:
    """A tokenizer from a file that anybody may have written.

    Args:
        path: of a ``tokenizer.json``.
        inside: whether it was found in a folder, which it must not lead out of.

    Attributes:
        content: the bytes of the file.
        digest: their SHA-256.
        pad: the number that fills a text up, and whether it stands in front of it.
        cuts_left: whether texts that are too long lose their beginnings.
        longest: how many tokens a text may have, if the file says it.

    Raises:
        DataError: it cannot be read, or is no tokenizer; the package ``tokenizers`` is not installed.
    """

    def __init__(self, path: str | os.PathLike[str], inside: bool = False) -> None:
        try:
            file = Path(path)
            self.content = regular_bytes(path_inside(file.parent, file.name) if inside else file, LARGEST)
        except UnreadableError as error:
            raise DataError(f"the tokenizer '{shown(path)}' cannot be read ({error}); check the path") from None
        try:
            from tokenizers import Tokenizer as Runner
        except ImportError:
            install = "pip install tokenizers"
            raise DataError(
                "texts are read by the package tokenizers, which is not installed", remedy=install, shell=install
            ) from None
        try:
            self._runner = Runner.from_buffer(self.content)
        except BaseException as error:  # where its Rust panics, what it raises is no Exception
            if isinstance(error, KeyboardInterrupt | SystemExit):
                raise
            raise DataError(
                f"'{shown(path)}' is no tokenizer ({reason_of(error)}); give the tokenizer.json that lies beside the "
                "model where it comes from"
            ) from None
        parts = (self._runner.normalizer, self._runner.post_processor, self._runner.decoder)
        if math.prod(_growth(json_of(part.__getstate__())) for part in parts if part is not None) > LONGER:
            raise DataError(
                f"'{shown(path)}' makes texts more than {LONGER:,} times as long; give the tokenizer.json that lies "
                "beside the model where it comes from"
            )
        self.digest = hashlib.sha256(self.content).hexdigest()
        padding, truncation = self._runner.padding or {}, self._runner.truncation or {}
        found = (self._runner.token_to_id(name) for name in PADS)
        known = next((number for number in found if number is not None), 0)
        self.pad, self.pads_left = int(padding.get("pad_id", known)), padding.get("direction") == "left"
        self.longest: int | None = truncation.get("max_length")
        self.cuts_left = truncation.get("direction") == "left"
        self._strategy = truncation.get("strategy", "longest_first")  # of pairs
        self._runner.no_padding()

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write a copy of the file, atomically; raises OutputError."""
        write_atomically(Path(path), self.content)
        return Path(path)

    def encode(self, texts: Sequence[Any], length: int, words: bool = False) -> Encoded:
        """Encode texts, pairs of texts, or lists of ``words``, each cut to ``length`` tokens.

        Raises:
            DataError: the tokenizer fails, or so few tokens hold no text.
        """
        parts = list(self._encoded(texts, length, words))
        lengths = np.array([n for part in parts for n in part[3]], np.int64)
        ids, types, numbers = (np.concatenate([part[i] for part in parts]) for i in range(3))
        return Encoded(ids, types, numbers, np.concatenate([[0], np.cumsum(lengths)]), sum(part[4] for part in parts))

    @property
    def words(self) -> dict[str, int]:
        """The number of each token."""
        return dict(self._runner.get_vocab(with_added_tokens=True))

    @property
    def size(self) -> int:
        """How many tokens there are: one more than the largest number."""
        return max(self.words.values(), default=-1) + 1

    def number_of(self, token: str) -> int | None:
        """The number of a token; None if there is none of this name."""
        number: int | None = self._runner.token_to_id(token)
        return number

    def decode(self, ids: Sequence[int], special: bool = True) -> str:
        """The text of tokens, with special ones or without."""
        return str(self._runner.decode(list(map(int, ids)), skip_special_tokens=not special))

    def spans(self, texts: Sequence[str], special: bool) -> Iterator[tuple[list[int], list[tuple[int, int]]]]:
        """The tokens of each whole text, and the characters [first, behind the last) that each is made of.

        Every character of a token counts, spaces too, even where the tokenizer trims them; of a special token that
        swallows what is beside it, its own alone.

        Args:
            special: whether to add the tokens that the model expects around a text, which are made of no characters
                (−1, −1); not where the text has them already.

        Raises:
            DataError: the tokenizer fails.
        """
        try:
            self._untrimmed.no_truncation()
            added = {number: token.content for number, token in self._runner.get_added_tokens_decoder().items()}
            for first in range(0, len(texts), CHUNK):
                part = list(texts[first : first + CHUNK])
                for text, one in zip(part, self._untrimmed.encode_batch(part, add_special_tokens=special), strict=True):
                    spans = [_own(text, added.get(n), *span) for n, span in zip(one.ids, one.offsets, strict=True)]
                    spans = [_NOWHERE if put else s for s, put in zip(spans, one.special_tokens_mask, strict=True)]
                    yield _once(one.ids, spans) if special else (one.ids, spans)
        except BaseException as error:
            if isinstance(error, KeyboardInterrupt | SystemExit | GeneratorExit):
                raise
            raise DataError(f"the tokenizer failed ({reason_of(error)}); give texts that it takes") from None

    @functools.cached_property
    def _untrimmed(self) -> Any:
        """The same tokenizer; of one that leaves spaces out of the characters of tokens, one that does not."""
        processor = self._runner.post_processor
        if processor is None or not _let_spaces_be(json_of(processor.__getstate__())):
            return self._runner
        whole = json_of(self.content, largest=LARGEST)
        _let_spaces_be(whole["post_processor"])
        return type(self._runner).from_buffer(json.dumps(whole).encode())

    def _encoded(self, texts: Sequence[Any], length: int, words: bool) -> Iterator[tuple[Any, ...]]:
        try:
            strategy = self._strategy if texts and isinstance(texts[0], tuple) else "longest_first"
            side = "left" if self.cuts_left else "right"
            self._runner.enable_truncation(max_length=length, strategy=strategy, direction=side)
            for first in range(0, max(len(texts), 1), CHUNK):
                made = self._runner.encode_batch(list(texts[first : first + CHUNK]), is_pretokenized=words)
                yield (
                    np.array([n for one in made for n in one.ids], np.int32),
                    np.array([n for one in made for n in one.type_ids], np.uint8),
                    np.array([n for one in made for n in _first_tokens(one.word_ids)], np.int32) if words else _NONE,
                    [len(one) for one in made],
                    sum(bool(one.overflowing) for one in made),
                )
        except BaseException as error:
            if isinstance(error, KeyboardInterrupt | SystemExit):
                raise
            raise DataError(
                f"the tokenizer failed ({reason_of(error)}); give texts that it takes, and a length of more tokens "
                "than it adds to each"
            ) from None


_NONE = np.zeros(0, np.int32)


_NOWHERE = (-1, -1)


def _own(text: str, special: str | None, first: int, last: int) -> tuple[int, int]:
    """The characters of a token; of a special one, without those beside it that it swallows (lstrip, rstrip)."""
    at = -1 if special is None else text.find(special, first, last)
    return (first, last) if at < 0 or not special else (at, at + len(special))


def _growth(part: Any) -> int:
    """How many times as long a part of a tokenizer may make a text."""
    if isinstance(part, list):
        return math.prod(map(_growth, part))
    if not isinstance(part, dict):
        return 1
    pattern, specials = part.get("pattern"), part.get("special_tokens")
    replaced = pattern.get("String", "") if isinstance(pattern, dict) else ""
    own = len(part.get("content") or "") // max(1, len(replaced))
    own += 2 * len(part.get("prepend") or "")
    if isinstance(specials, dict):
        put = max((len(one["ids"]) for one in specials.values()), default=0)
        own += put * max(len(part["single"]), len(part["pair"]))
    inner = [value for key, value in part.items() if key in ("normalizers", "processors", "decoders")]
    return max(1, own) * _growth(inner)


def _let_spaces_be(processor: Any) -> bool:
    """Let a post-processor, or those in it, trim no spaces; whether one of them did."""
    if isinstance(processor, list):
        trimmed = [_let_spaces_be(each) for each in processor]  # all of them, and not up to the first
        return any(trimmed)
    if not isinstance(processor, dict):
        return False
    trims = processor.get("trim_offsets") is True
    if trims:
        processor["trim_offsets"] = False
    return _let_spaces_be(processor.get("processors")) or trims


def _once(ids: list[int], spans: list[tuple[int, int]]) -> tuple[list[int], list[tuple[int, int]]]:
    """The same tokens without the first and the last that a tokenizer adds, where the text has those itself."""
    first = len(ids) > 1 and ids[0] == ids[1] and spans[0] == _NOWHERE != spans[1]
    last = len(ids) > 1 and ids[-1] == ids[-2] and spans[-1] == _NOWHERE != spans[-2]
    kept = slice(int(first), len(ids) - int(last))
    return ids[kept], spans[kept]


def _first_tokens(numbers: Sequence[int | None]) -> Iterator[int]:
    """The number of its word for the first token of each word, −1 for the others and those that the model adds."""
    before = None
    for number in numbers:
        yield -1 if number is None or number == before else number
        before = number


# --- beside a model -----------------------------------------------------------------------------------------------


def digest_for(names: DataNames) -> str | None:
    """The digest of the tokenizer that a model reads texts with, by the names of its data; None if it reads none."""
    return next((read["tokenizer"] for read in names.texts.values() if "tokenizer" in read), None)


def place_beside(model: Path) -> Path:
    """The place for a copy of the tokenizer of a model's file or a step folder, where no other model's lies."""
    return model.with_name(f"{model.stem}.{NAME}")


def tokenizer_beside(model: str | os.PathLike[str], names: DataNames) -> Tokenizer | None:
    """The tokenizer that a model was trained with, which lies in its folder; None if the model reads no texts.

    Args:
        model: its file, its step folder, or the folder of its run.
        names: of the data that it was trained on.

    Raises:
        DataError: there is none, or only others.
    """
    digest, path = digest_for(names), Path(model)
    if digest is None:
        return None
    found = [p for p in (path / NAME, place_beside(path), path.absolute().parent / NAME) if p.is_file()]
    for file in found:
        with_digest = Tokenizer(file, inside=True)
        if with_digest.digest == digest:
            return with_digest
    raise DataError(
        f"'{shown(path)}' reads texts, and "
        + (
            f"'{shown(found[0])}' is another tokenizer than it was trained with"
            if found
            else "no tokenizer is beside it"
        ),
        remedy="give gg.text.table(…, tokenizer=…) the tokenizer.json that it was trained with",
        shell="add --tokenizer, the tokenizer.json that it was trained with",
    )

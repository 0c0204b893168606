"""Tokenizers: a ``tokenizer.json`` of Hugging Face's package ``tokenizers``, loaded safely."""

from __future__ import annotations

import contextlib
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

from gradgraph.data.arrays.batch import Array
from gradgraph.data.record.data_names import DataNames
from gradgraph.data.texts.tokenizer_files import TokenizerSettings, settings_in
from gradgraph.errors import DataError, shown
from gradgraph.files.atomic import write_atomically
from gradgraph.files.untrusted.contained_paths import path_inside
from gradgraph.files.untrusted.documents import json_of
from gradgraph.files.untrusted.regular import UnreadableError, reason_of, regular_bytes

NAME = "tokenizer.json"
LARGEST = 256 << 20  # bytes of a file
LONGER = 1000  # maximum factor by which a tokenizer may lengthen a text
LONGEST = 512  # default maximum length
CHUNK = 1 << 18  # characters encoded at once: the package's results take far more memory than the token ids
PADS = ("[PAD]", "<pad>", "<|pad|>", "<|endoftext|>", "</s>")


@dataclass(frozen=True)
class Encoded:
    """Encoded texts, concatenated.

    Attributes:
        ids: token ids of all texts: int32 [tokens].
        types: 1 for tokens of the second text of a pair: uint8 [tokens].
        words: for the first token of each word, the index of the word in its text, else −1: int32 [tokens].
        starts: index of the first token of each text, then the number of tokens: int64 [texts + 1].
        cut: number of truncated texts.
    """

    ids: Array
    types: Array
    words: Array
    starts: Array
    cut: int

    @property
    def lengths(self) -> Array:
        """The number of tokens of each text."""
        return np.diff(self.starts)


@dataclass(frozen=True)
class Window:
    """A pair of texts as tokens: the whole first text, and as much of the second as fits.

    Attributes:
        ids: token ids: int32 [tokens].
        types: 1 for tokens of the second text of a pair: uint8 [tokens].
        spans: the first character of each token in the second text, and the one after its last: int32 [tokens, 2];
            −1 for other tokens.
    """

    ids: Array
    types: Array
    spans: Array

    def __len__(self) -> int:
        return len(self.ids)


class Tokenizer:
    """A tokenizer loaded from an untrusted file, with the settings of the files next to it.

    As in transformers, the padding token and the sides of padding and truncation in ``tokenizer_config.json`` take
    precedence over those in ``tokenizer.json``.

    Args:
        path: path of a ``tokenizer.json``.
        inside: whether to reject a file that is a link to a file outside its folder.
        alone: whether to ignore the files next to it.

    Attributes:
        content: the content of a ``tokenizer.json``: the bytes of the file, changed only if settings differ.
        digest: SHA-256 of ``content``.
        special_tokens: special tokens that the files next to it name, such as ``{"cls_token": "[CLS]"}``.
        pad: id of the padding token.
        pads_left: whether texts are padded on the left.
        cuts_left: whether long texts are truncated on the left.
        longest: maximum number of tokens of a text; None if the file does not set it.

    Raises:
        DataError: the file cannot be read or is not a tokenizer; or the package ``tokenizers`` is not installed.
    """

    def __init__(self, path: str | os.PathLike[str], inside: bool = False, alone: bool = False) -> None:
        file = Path(path)
        try:
            self.content = regular_bytes(path_inside(file.parent, file.name) if inside else file, LARGEST)
        except UnreadableError as error:
            raise DataError(f"the tokenizer '{shown(path)}' cannot be read ({error}); check the path") from None
        try:
            from tokenizers import Tokenizer as Runner
        except ImportError:
            install = "pip install tokenizers"
            raise DataError(
                "texts require the package tokenizers, which is not installed", remedy=install, shell=install
            ) from None
        try:
            self._runner = Runner.from_buffer(self.content)
        except BaseException as error:  # a panic in its Rust code raises a BaseException
            if isinstance(error, KeyboardInterrupt | SystemExit):
                raise
            raise DataError(
                f"'{shown(path)}' is not a valid tokenizer ({reason_of(error)}); use the model's tokenizer.json"
            ) from None
        parts = (self._runner.normalizer, self._runner.post_processor, self._runner.decoder)
        if math.prod(_growth(json_of(part.__getstate__())) for part in parts if part is not None) > LONGER:
            raise DataError(
                f"'{shown(path)}' may make texts more than {LONGER:,} times longer; use the model's tokenizer.json"
            )
        truncation = self._runner.truncation or {}
        self.longest: int | None = truncation.get("max_length")
        self._strategy = truncation.get("strategy", "longest_first")  # how pairs are truncated
        has_settings = file.name == NAME and not alone
        beside = settings_in(file.parent, None if inside else file) if has_settings else TokenizerSettings()
        own, self.special_tokens = self._decided(TokenizerSettings()), beside.tokens
        self.pad, self.pads_left, self.cuts_left = decided = self._decided(beside)
        if decided != own:
            self.content = _with_settings(self.content, *decided)
        self.digest = hashlib.sha256(self.content).hexdigest()
        self._runner.no_padding()

    def _decided(self, beside: TokenizerSettings) -> tuple[int, bool, bool]:
        """Return the id of the padding token, and whether texts are padded and truncated on the left."""
        padding, truncation = self._runner.padding or {}, self._runner.truncation or {}
        named = beside.tokens.get("pad_token")
        found = (None if named is None else self.number_of(named), padding.get("pad_id"), *map(self.number_of, PADS))
        pad = next((int(number) for number in found if number is not None), 0)
        pads_left, cuts_left = beside.pads_left, beside.cuts_left
        if pads_left is None:
            by_class = beside.pads_left_by_class and not self._is_byte_level
            pads_left = padding.get("direction") == "left" if padding else by_class
        if cuts_left is None:
            cuts_left = truncation.get("direction") == "left"
        return pad, pads_left, cuts_left

    @property
    def _is_byte_level(self) -> bool:
        """Whether tokens are bytes; transformers then replaces Llama's class, which would pad on the left."""
        parts = (self._runner.pre_tokenizer, self._runner.decoder)
        return any(b"ByteLevel" in part.__getstate__() for part in parts if part is not None)

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write a copy of the file, atomically; raises OutputError."""
        write_atomically(Path(path), self.content)
        return Path(path)

    def encode(self, texts: Sequence[Any], length: int, words: bool = False) -> Encoded:
        """Encode texts, pairs of texts, or lists of ``words``, truncated to ``length`` tokens.

        Raises:
            DataError: the tokenizer fails, or ``length`` is too small for its special tokens.
        """
        parts = list(self._encoded(texts, length, words))
        lengths = np.array([n for part in parts for n in part[3]], np.int64)
        ids, types, numbers = (np.concatenate([part[i] for part in parts]) for i in range(3))
        return Encoded(ids, types, numbers, np.concatenate([[0], np.cumsum(lengths)]), sum(part[4] for part in parts))

    @property
    def words(self) -> dict[str, int]:
        """The id of each token."""
        return dict(self._runner.get_vocab(with_added_tokens=True))

    @property
    def size(self) -> int:
        """The vocabulary size: one more than the largest id."""
        return max(self.words.values(), default=-1) + 1

    def number_of(self, token: str) -> int | None:
        """Return the id of a token; None if it is unknown."""
        number: int | None = self._runner.token_to_id(token)
        return number

    def decode(self, ids: Sequence[int], special: bool = True) -> str:
        """Return the text of tokens, with or without special tokens."""
        return str(self._runner.decode(list(map(int, ids)), skip_special_tokens=not special))

    def spans(
        self, texts: Sequence[str], special: bool, checks: bool = True
    ) -> Iterator[tuple[list[int], list[tuple[int, int]]]]:
        """Yield the token ids of each text, without truncation, and the character span [start, end) of each token.

        Spans include spaces that the tokenizer trims, but not spaces that a special token absorbs.

        Args:
            special: whether to add special tokens around a text; their span is (−1, −1). Pass False if the texts
                contain them already.
            checks: whether to reject texts whose spans are wrong, since the tokenizer drops one of their characters.

        Raises:
            DataError: the tokenizer fails, or a text is rejected.
        """
        with _explained("check the texts"):
            self._untrimmed.no_truncation()
            added = {number: token.content for number, token in self._runner.get_added_tokens_decoder().items()}
            for part in _chunks(texts):
                if checks:
                    self._check_places(part)
                for text, one in zip(part, self._untrimmed.encode_batch(part, add_special_tokens=special), strict=True):
                    spans = [_own(text, added.get(n), *span) for n, span in zip(one.ids, one.offsets, strict=True)]
                    spans = [NOWHERE if put else s for s, put in zip(spans, one.special_tokens_mask, strict=True)]
                    yield _once(one.ids, spans) if special else (one.ids, spans)

    def ids(self, texts: Sequence[str], special: bool) -> Iterator[list[int]]:
        """Yield the token ids of each text, without truncation; ``special`` is as for :meth:`spans`.

        Raises:
            DataError: the tokenizer fails.
        """
        return (ids for ids, _ in self.spans(texts, special, checks=False))

    def _check_places(self, texts: Sequence[str]) -> None:
        """Raise DataError if the spans of tokens of a text would be wrong, since the tokenizer drops a character.

        The package's BPE model without an unknown token drops characters that it has no token for, and shifts the spans
        of all tokens after them in the same word.
        """
        if self._by_character is None:
            return
        unknown = self._by_character.token_to_id(_UNKNOWN)
        for text, one in zip(
            texts, self._by_character.encode_batch(list(texts), add_special_tokens=False), strict=True
        ):
            tokens = list(zip(one.ids, one.word_ids, one.offsets, strict=True))
            last = {word: i for i, (number, word, _) in enumerate(tokens) if number != unknown}
            for i, (number, word, span) in enumerate(tokens):
                if number == unknown and i < last.get(word, 0):
                    raise _dropped(text[slice(*span)])

    @functools.cached_property
    def _by_character(self) -> Any:
        """The tokenizer without merges and with an unknown token, so that each character has its own token.

        None if the tokenizer drops no characters.
        """
        model = self._runner.model
        if type(model).__name__ != "BPE" or model.unk_token is not None or self._has_all_bytes:
            return None
        whole = json_of(self._runner.to_str().encode(), largest=LARGEST)
        whole["model"]["vocab"][_UNKNOWN] = max(whole["model"]["vocab"].values(), default=-1) + 1
        whole["model"] |= {"unk_token": _UNKNOWN, "fuse_unk": False, "merges": [], "dropout": None}
        made = type(self._runner).from_buffer(json.dumps(whole).encode())
        made.no_truncation()
        return made

    @property
    def _has_all_bytes(self) -> bool:
        """Whether texts are encoded as bytes, and all 256 have a token."""
        from tokenizers.pre_tokenizers import ByteLevel

        parts, model = (self._runner.pre_tokenizer, self._runner.normalizer), self._runner.model
        if not any(b"ByteLevel" in part.__getstate__() for part in parts if part is not None):
            return False
        is_plain = model.continuing_subword_prefix is None and model.end_of_word_suffix is None
        return is_plain and self._runner.get_vocab(with_added_tokens=False).keys() >= set(ByteLevel.alphabet())

    def rooms(self, texts: Sequence[str], length: int) -> list[int]:
        """Return how many of ``length`` tokens are left to the second text of a pair with each of these texts."""
        special = self._runner.num_special_tokens_to_add(True)
        return [length - special - len(ids) for ids in self.ids(texts, False)]

    def windows(self, pairs: Sequence[tuple[str, str]], length: int, stride: int) -> Iterator[list[Window]]:
        """Yield the windows of each pair: of at most ``length`` tokens, with the whole first text and a part of the
        second. Consecutive windows share ``stride`` tokens of the second text.

        If the tokenizer pads on the left, the second text precedes the first, as in transformers.

        Raises:
            DataError: the tokenizer fails, or misplaces tokens of a second text because it drops a character; also if a
                first text leaves no more than ``stride`` tokens to the second.
        """
        strategy, second = ("only_first", 0) if self.pads_left else ("only_second", 1)
        with _explained("check the texts"):
            self._check_places([long for _, long in pairs])
            self._runner.enable_truncation(max_length=length, stride=stride, strategy=strategy)
            for part in _chunks(pairs):
                turned = [(long, short) for short, long in part] if self.pads_left else list(part)
                for one in self._runner.encode_batch(turned):
                    yield [_window(each, second) for each in (one, *one.overflowing)]

    @functools.cached_property
    def _untrimmed(self) -> Any:
        """The tokenizer without space trimming, so that the spans of tokens include spaces."""
        processor = self._runner.post_processor
        if processor is None or not _disable_trimming(json_of(processor.__getstate__())):
            return self._runner
        whole = json_of(self.content, largest=LARGEST)
        _disable_trimming(whole["post_processor"])
        return type(self._runner).from_buffer(json.dumps(whole).encode())

    def _encoded(self, texts: Sequence[Any], length: int, words: bool) -> Iterator[tuple[Any, ...]]:
        with _explained("check the texts, and that the length exceeds the number of special tokens added to each"):
            strategy = self._strategy if texts and isinstance(texts[0], tuple) else "longest_first"
            side = "left" if self.cuts_left else "right"
            self._runner.enable_truncation(max_length=length, strategy=strategy, direction=side)
            for part in _chunks(texts) if len(texts) else [[]]:
                made = self._runner.encode_batch(part, is_pretokenized=words)
                yield (
                    np.array([n for one in made for n in one.ids], np.int32),
                    np.array([n for one in made for n in one.type_ids], np.uint8),
                    np.array([n for one in made for n in _first_tokens(one.word_ids)], np.int32) if words else _NONE,
                    [len(one) for one in made],
                    sum(bool(one.overflowing) for one in made),
                )


def _chunks(texts: Sequence[Any]) -> Iterator[list[Any]]:
    """Yield consecutive texts (or pairs of texts, or lists of words) of about ``CHUNK`` characters together."""
    part, size = list[Any](), 0
    for text in texts:
        part.append(text)
        size += len(text) if isinstance(text, str) else sum(map(len, text))
        if size >= CHUNK:
            yield part
            part, size = [], 0
    if part:
        yield part


_NONE = np.zeros(0, np.int32)
NOWHERE = (-1, -1)  # the span of a special token that is not in the text
_UNKNOWN = "<|gradgraph unknown|>"


@contextlib.contextmanager
def _explained(remedy: str) -> Iterator[None]:
    """Raise a DataError with ``remedy`` for any failure of the package; a panic in its Rust code is a BaseException."""
    try:
        yield
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt | SystemExit | GeneratorExit | DataError):
            raise
        raise DataError(f"the tokenizer failed ({reason_of(error)}); {remedy}") from None


def _dropped(characters: str) -> DataError:
    points = " ".join(f"U+{ord(c):04X}" for c in characters)
    return DataError(
        f"the tokenizer has no token for '{shown(characters)}' ({points}) and drops it, which misplaces the tokens "
        "after it; remove the character from the texts, or use a tokenizer with an unknown token"
    )


def _window(encoding: Any, second: int) -> Window:
    """Return an encoding of ``tokenizers`` as a Window; ``second`` is the index of the second text in it."""
    inside = np.array([number == second for number in encoding.sequence_ids], bool)
    spans = np.where(inside[:, None], np.array(encoding.offsets, np.int32).reshape(-1, 2), np.int32(-1))
    return Window(np.array(encoding.ids, np.int32), np.array(encoding.type_ids, np.uint8), spans)


def _own(text: str, special: str | None, first: int, last: int) -> tuple[int, int]:
    """Return the span of a token in ``text``: ``first`` to ``last``, without spaces that a special token absorbs.

    ``special`` is the content of a special token, otherwise None.
    """
    at = -1 if special is None else text.find(special, first, last)
    return (first, last) if at < 0 or not special else (at, at + len(special))


def _growth(part: Any) -> int:
    """Return the largest factor by which a part of a tokenizer.json may lengthen a text."""
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


def _disable_trimming(processor: Any) -> bool:
    """Disable space trimming in a post-processor and all nested ones; return whether any of them trimmed."""
    if isinstance(processor, list):
        trimmed = [_disable_trimming(each) for each in processor]  # a list, as any() would stop at the first
        return any(trimmed)
    if not isinstance(processor, dict):
        return False
    trims = processor.get("trim_offsets") is True
    if trims:
        processor["trim_offsets"] = False
    return _disable_trimming(processor.get("processors")) or trims


def _once(ids: list[int], spans: list[tuple[int, int]]) -> tuple[list[int], list[tuple[int, int]]]:
    """Return tokens and spans without a special token at either end that the tokenizer added a second time."""
    first = len(ids) > 1 and ids[0] == ids[1] and spans[0] == NOWHERE != spans[1]
    last = len(ids) > 1 and ids[-1] == ids[-2] and spans[-1] == NOWHERE != spans[-2]
    kept = slice(int(first), len(ids) - int(last))
    return ids[kept], spans[kept]


def _with_settings(content: bytes, pad: int, pads_left: bool, cuts_left: bool) -> bytes:
    """Return the content of a ``tokenizer.json`` with other settings of padding and truncation."""
    whole = json_of(content, largest=LARGEST)
    usual = {"strategy": "BatchLongest", "pad_to_multiple_of": None, "pad_type_id": 0, "pad_token": ""}
    sides = ["Left" if left else "Right" for left in (pads_left, cuts_left)]
    whole["padding"] = {**usual, **(whole.get("padding") or {}), "pad_id": pad, "direction": sides[0]}
    if whole.get("truncation") or cuts_left:
        usual = {"max_length": LONGEST, "strategy": "LongestFirst", "stride": 0}
        whole["truncation"] = {**usual, **(whole.get("truncation") or {}), "direction": sides[1]}
    return json.dumps(whole, ensure_ascii=False).encode()


def _first_tokens(numbers: Sequence[int | None]) -> Iterator[int]:
    """Yield, for each token, the index of the word that it starts, or −1 (continuations and special tokens)."""
    before = None
    for number in numbers:
        yield -1 if number is None or number == before else number
        before = number


# --- next to a model ----------------------------------------------------------------------------------------------


def digest_for(names: DataNames) -> str | None:
    """Return the SHA-256 of the tokenizer that a model was trained with; None if the model does not read texts."""
    return next((read["tokenizer"] for read in names.texts.values() if "tokenizer" in read), None)


def place_beside(model: Path) -> Path:
    """Return the path for a copy of the tokenizer next to a model file or in a step folder."""
    return model.with_name(f"{model.stem}.{NAME}")


def tokenizer_beside(model: str | os.PathLike[str], names: DataNames) -> Tokenizer | None:
    """Return the tokenizer stored next to the trained model; None if the model does not read texts.

    ``model`` is the model's file, its step folder, or the folder of its run.

    Raises:
        DataError: the tokenizer that the model was trained with is not stored there.
    """
    digest, path = digest_for(names), Path(model)
    if digest is None:
        return None
    found = [p for p in (path / NAME, place_beside(path), path.absolute().parent / NAME) if p.is_file()]
    for file in found:
        for alone in (False, True):  # an earlier version may have trained without the files next to it
            with_digest = Tokenizer(file, inside=True, alone=alone)
            if with_digest.digest == digest:
                return with_digest
    raise DataError(
        f"the model '{shown(path)}' was trained on texts, but "
        + (
            f"'{shown(found[0])}' is not the tokenizer of its training"
            if found
            else "no tokenizer is stored next to it"
        ),
        remedy="pass the tokenizer.json of its training: gg.text.table(…, tokenizer='tokenizer.json')",
        shell="pass the tokenizer.json of its training: --tokenizer tokenizer.json",
    )

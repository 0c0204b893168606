"""Batches of texts and their answers, for an encoder with a decoder."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from gradgraph.chat.chat_batches import filled_up
from gradgraph.data.arrays.batch import Array
from gradgraph.data.dataset import Loadable
from gradgraph.data.record.data_names import NO_NAMES, DataNames
from gradgraph.data.record.specs import Specs, TargetSpec, numpy_dtype
from gradgraph.data.texts.tokenizer import NOWHERE
from gradgraph.errors import DataError
from gradgraph.surgery.encoder_decoders import TOKENS
from gradgraph.surgery.language_models import IGNORED, MASK


class TextPairs(Loadable):
    """Texts and answers as tokens, for a step on the result of ``surgery.encoder_decoders.encoder_decoder``.

    The decoder reads the start token and all tokens of the answer but the last; the labels are the answer. Both are
    padded on the right to the longest of the batch.

    Args:
        texts, answers: the token ids of each row.
        start: the token that the decoder begins with.
        pad: the padding token.
    """

    def __init__(self, texts: Sequence[Sequence[int]], answers: Sequence[Sequence[int]], start: int, pad: int) -> None:
        self.texts, self.answers, self.start, self.pad = texts, answers, start, pad

    def __len__(self) -> int:
        return len(self.texts)

    def __getitem__(self, i: int) -> tuple[Sequence[int], Sequence[int]]:
        return self.texts[i], self.answers[i]

    @property
    def lengths(self) -> Array:
        """The number of tokens of each row, of text and answer."""
        return np.array([len(text) + len(answer) for text, answer in zip(self.texts, self.answers, strict=True)])

    @property
    def tokens(self) -> int:
        """The number of tokens of all texts and answers."""
        return int(self.lengths.sum())

    def names_for(self, specs: Specs, known: DataNames) -> DataNames:
        """Return empty names, since texts have no classes; raise DataError if the step requires other inputs."""
        _roles(specs)
        return NO_NAMES

    def load(
        self, batches: Iterator[Sequence[int]], specs: Specs, seed: Sequence[int], known: DataNames = NO_NAMES
    ) -> Iterator[dict[str, Array]]:
        """Yield batches padded to the longest text and the longest answer, each a multiple of 16 tokens."""
        roles = _roles(specs)
        for numbers in batches:
            answers = [self.answers[i] for i in numbers]
            ids, mask = _padded([self.texts[i] for i in numbers], self.pad)
            labels, there = _padded(answers, IGNORED)
            before, _ = _padded([[self.start, *answer[:-1]] for answer in answers], self.pad)
            arrays = {"ids": ids, "mask": mask, "before": before, "labels": np.where(there, labels, IGNORED)}
            yield {name: arrays[roles[name]].astype(numpy_dtype(spec.dtype)) for name, spec in specs.items()}


def truncated(ids: Sequence[int], spans: Sequence[tuple[int, int]], longest: int) -> Sequence[int]:
    """Return at most ``longest`` tokens of a text with its last special tokens, as transformers truncates texts.

    ``spans`` are the characters of each token, as from ``Tokenizer.spans``.
    """
    if len(ids) <= longest:
        return ids
    added = next((i for i, span in enumerate(reversed(spans)) if span != NOWHERE), 0)
    return [*ids[: longest - added], *ids[len(ids) - added :]]


def _padded(rows: Sequence[Sequence[int]], pad: int) -> tuple[Array, Array]:
    """Return rows of token ids padded on the right [rows, width], and 1 for tokens, 0 for padding."""
    shape = len(rows), filled_up(max(map(len, rows)))
    found, there = np.full(shape, pad, np.int64), np.zeros(shape, np.int64)
    for i, row in enumerate(rows):
        found[i, : len(row)], there[i, : len(row)] = row, 1
    return found, there


def _roles(specs: Specs) -> dict[str, str]:
    """Return the content of each input and target of a step; raise DataError if it requires others."""
    usual = {MASK: "mask", TOKENS: "before"}
    found = {name: "labels" if isinstance(spec, TargetSpec) else usual.get(name, "ids") for name, spec in specs.items()}
    of_texts = all(numpy_dtype(spec.dtype).kind in "iu" and len(spec.shape) == 2 for spec in specs.values())
    if not of_texts or len(set(found.values())) < len(found) or not {"before", "ids"} <= set(found.values()):
        raise DataError(
            f"texts and answers provide tokens, their mask and the decoder's tokens, but the step expects "
            f"{', '.join(map(str, specs.values()))}; build it on an encoder and a decoder of optimum"
        )
    return found

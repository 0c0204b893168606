"""Batches of tokens: rows of similar lengths, padded on the right; or packed rows of several texts."""

from __future__ import annotations

import bisect
from abc import abstractmethod
from collections.abc import Iterator, Sequence

import numpy as np

from gradgraph.chat.tokens import Tokens
from gradgraph.data.arrays.batch import Array
from gradgraph.data.dataset import Loadable
from gradgraph.data.record.data_names import NO_NAMES, DataNames
from gradgraph.data.record.specs import Specs, TargetSpec, TensorSpec, numpy_dtype
from gradgraph.errors import DataError
from gradgraph.surgery.language_models import IGNORED, POSITIONS, SEGMENTS

MULTIPLE = 16  # row lengths are multiples of this, for fewer distinct lengths: each requires a session of its own


class TokenBatches(Loadable):
    """Rows of tokens, of which batches are padded on the right to their longest row."""

    _lengths: Array  # the number of tokens of each row

    @abstractmethod
    def _width(self, tokens: int) -> int:
        """Return the row length of a batch whose longest row has this many tokens."""

    @property
    def longest(self) -> int:
        """The number of tokens per row in the widest batch, with padding."""
        return self._width(self._lengths.max(initial=0))

    def width_of(self, rows: Sequence[int]) -> int:
        """Return the number of tokens per row of a batch of ``rows``, with padding."""
        return int(self._width(self._lengths[list(rows)].max(initial=0)))


class ChatBatches(TokenBatches):
    """Texts as tokens, for a step on the result of ``surgery.language_model``.

    The label of each token is the next token, or ignored if the next token is not trained on. Rows of one text are
    padded on the right, where causal attention does not read padding and the loss ignores it; rows of similar lengths
    share a batch. Packed rows contain several texts, for a step with the input ``segments``. If the step's number of
    tokens is fixed, all rows have this length.

    Args:
        samples: the texts.
        length: the maximum number of tokens per row; packed rows have exactly as many.
        packed: pack several texts into a row.
        pad: the padding token.

    Raises:
        DataError: a text is longer than ``length``.
    """

    def __init__(self, samples: Sequence[Tokens], length: int, packed: bool = False, pad: int = 0) -> None:
        self.samples, self.length, self.packed, self.pad = samples, length, packed, pad
        sizes = [len(tokens) for tokens in samples]
        if sizes and max(sizes) > length:
            raise DataError(
                f"the text at index {sizes.index(max(sizes))} has {max(sizes):,} tokens, more than the row length "
                f"{length:,}; raise the length, or drop the text"
            )
        self.rows = packed_rows(sizes, length) if packed else [[i] for i in range(len(sizes))]
        self._lengths = np.array([sum(sizes[i] for i in row) for row in self.rows], np.int64)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, i: int) -> list[Tokens]:
        """Return the texts of row ``i``: one, or several if rows are packed."""
        return [self.samples[k] for k in self.rows[i]]

    @property
    def tokens(self) -> int:
        """The number of tokens of all texts."""
        return int(self._lengths.sum())

    def _width(self, tokens: int) -> int:
        return self.length if self.packed else min(filled_up(tokens), self.length)

    def names_for(self, specs: Specs, known: DataNames) -> DataNames:
        """Return empty names, since texts have no classes; raise DataError if the step requires other inputs."""
        self._inputs(specs)
        return NO_NAMES

    @property
    def lengths(self) -> Array | None:
        """The number of tokens of each row; None if rows are packed."""
        return None if self.packed else self._lengths

    def load(
        self, batches: Iterator[Sequence[int]], specs: Specs, seed: Sequence[int], known: DataNames = NO_NAMES
    ) -> Iterator[dict[str, Array]]:
        """Yield batches padded to their longest row, rounded up to a multiple of 16 tokens."""
        ids, target = self._inputs(specs)
        for numbers in batches:
            arrays = self._arrays([self.rows[i] for i in numbers], fixed_width(ids, self._lengths))
            named = {ids.name: arrays["ids"], SEGMENTS: arrays["segments"], POSITIONS: arrays["positions"]}
            if target is not None:
                named[target.name] = arrays["labels"]
            yield {name: named[name].astype(numpy_dtype(spec.dtype)) for name, spec in specs.items()}

    def _arrays(self, rows: Sequence[Sequence[int]], fixed: int | None) -> dict[str, Array]:
        longest = max(sum(len(self.samples[i]) for i in row) for row in rows)
        shape = len(rows), fixed or self._width(longest)
        ids, labels = np.full(shape, self.pad, np.int64), np.full(shape, IGNORED, np.int64)
        segments, positions = np.zeros(shape, np.int64), np.zeros(shape, np.int64)
        for r, row in enumerate(rows):
            first = 0
            for number, i in enumerate(row, 1):
                tokens = self.samples[i]
                last = first + len(tokens)
                ids[r, first:last], segments[r, first:last] = tokens.ids, number
                positions[r, first:last] = np.arange(len(tokens))
                labels[r, first : last - 1] = tokens.labels
                first = last
        return {"ids": ids, "labels": labels, "segments": segments, "positions": positions}

    def _inputs(self, specs: Specs) -> tuple[TensorSpec, TargetSpec | None]:
        """Return a step's token input and its target, if any; raise DataError if it requires other inputs."""
        targets = [spec for spec in specs.values() if isinstance(spec, TargetSpec)]
        others = [s for s in specs.values() if s not in targets and s.name not in (SEGMENTS, POSITIONS)]
        fits = len(others) == 1 and len(others[0].shape) == 2 and numpy_dtype(others[0].dtype).kind in "iu"
        if not fits or len(targets) > 1 or self.packed != (SEGMENTS in specs):
            takes = ", ".join(map(str, specs.values()))
            raise DataError(
                f"chat data provide tokens{' and their segments' if self.packed else ''}, but the step expects "
                f"{takes}; build it on gg.surgery.language_model(model{', packed=True' if self.packed else ''})"
            )
        fixed_width(others[0], self._lengths)
        return others[0], targets[0] if targets else None


def fixed_width(ids: TensorSpec, lengths: Array) -> int | None:
    """Return the number of tokens per row if the step fixes it, otherwise None; raise DataError if a row is longer."""
    fixed, longest = ids.shape[-1], int(lengths.max(initial=0))
    if not isinstance(fixed, int):
        return None
    if longest > fixed:
        raise DataError(
            f"a row has {longest:,} tokens, but the model was exported for texts of {fixed:,}; lower the length, or "
            "export the model for longer texts"
        )
    return fixed


def filled_up(tokens: int) -> int:
    """Return a number of tokens rounded up to a multiple of 16."""
    return -(-int(tokens) // MULTIPLE) * MULTIPLE


def packed_rows(sizes: Sequence[int], length: int) -> list[list[int]]:
    """Pack texts into few rows by best fit, the longest first; return the indices of the texts in each row.

    Args:
        sizes: the number of tokens of each text, at most ``length``.
        length: the number of tokens of a row.
    """
    rows: list[list[int]] = []
    space: list[tuple[int, int]] = []  # the remaining tokens and the index of each row, sorted
    for i in sorted(range(len(sizes)), key=lambda i: (-sizes[i], i)):
        at = bisect.bisect_left(space, (sizes[i], -1))
        if at == len(space):
            left, row = length, len(rows)
            rows.append([])
        else:
            left, row = space.pop(at)
        rows[row].append(i)
        bisect.insort(space, (left - sizes[i], row))
    return rows

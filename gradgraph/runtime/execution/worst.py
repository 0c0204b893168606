"""The samples that a model is worst at: where to look for wrong labels, and for what it has not learnt."""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from gradgraph.errors import shown
from gradgraph.runtime.data.batch import Array
from gradgraph.runtime.saved.printed import html_table, image_markup

MOST_NUMBERS = 8  # of an array that is printed


@dataclass(frozen=True, eq=False)
class WorstSample:
    """A sample with a large loss.

    Attributes:
        index: its place in the data, counted from 0.
        value: of the column that was looked at: its loss.
        sample: its inputs and targets by name, without the axis of samples.
        outputs: of the model, likewise.
        file: where it comes from, if it has a file of its own.
        label, called: the name of its class, and of the class that the model takes it for, where classes have names.
        text: that its tokens are made of, if it is one.
        picture: a small PNG, of the file or of the array of an image; empty where it is neither.
    """

    index: int
    value: float
    sample: Mapping[str, Array]
    outputs: Mapping[str, Array]
    file: str = ""
    label: str = ""
    called: str = ""
    picture: bytes = b""
    text: str = ""

    @property
    def words(self) -> dict[str, str]:
        """Words that are known of it: its file, its classes, and its text."""
        known = {"file": self.file, "is": self.label, "called": self.called, "text": self.text}
        return {what: name for what, name in known.items() if name}

    def __str__(self) -> str:
        arrays = {**self.sample, **self.outputs}
        said = ", ".join(f"{shown(name)} {_shown(array)}" for name, array in arrays.items())
        words = "".join(f"{what} '{shown(name)}', " for what, name in self.words.items())
        return f"sample {self.index:,}: {self.value:.6g}; {words}{said}"


class WorstSamples(list[WorstSample]):
    """Samples with the largest losses, the largest first. Printed, they are a line each."""

    def __str__(self) -> str:
        return "\n".join(map(str, self))

    def as_data(self) -> list[dict[str, Any]]:
        """For JSON."""
        return [
            {"sample": one.index, "loss": one.value, **one.words,
             "outputs": {name: a.tolist() for name, a in one.outputs.items()}} for one in self
        ]  # fmt: skip

    def _repr_html_(self) -> str:
        names = list(self[0].sample) + list(self[0].outputs) if self else []
        words = list(dict.fromkeys(word for one in self for word in one.words))
        arrays = [{**one.sample, **one.outputs} for one in self]
        pictured = any(one.picture for one in self)
        rows = [
            [
                f"{one.index:,}",
                f"{one.value:.6g}",
                *(one.words.get(word, "") for word in words),
                *([image_markup(one.picture)] if pictured else []),
                *(_shown(held[name]) for name in names),
            ]
            for one, held in zip(self, arrays, strict=True)
        ]
        return html_table(["sample", "loss", *words, *(["picture"] if pictured else []), *names], rows)


def _shown(array: Array) -> str:
    """An array as text: a few numbers as they are, of many their type and shape."""
    if array.size > MOST_NUMBERS:
        return f"{array.dtype}{list(array.shape)}"
    return np.array2string(array, precision=4, separator=", ", suppress_small=True).replace("\n", "")


Valued = tuple[int, float, Mapping[str, Array]]  # the place of a sample, its value and its arrays


def largest(samples: Iterable[Valued], count: int) -> list[Valued]:
    """The ``count`` with the largest values, the largest first; no more are kept. NaN counts as largest."""
    kept: list[tuple[tuple[float, int], Valued]] = []
    for index, value, arrays in samples:
        rank = (math.inf if math.isnan(value) else value, -index)  # of equal ones the first stays
        (heapq.heappush if len(kept) < count else heapq.heappushpop)(kept, (rank, (index, value, arrays)))
    return [valued for _, valued in sorted(kept, key=lambda pair: pair[0], reverse=True)]

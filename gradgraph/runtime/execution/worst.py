"""The samples with the largest losses, which often have wrong labels or show what a model has not learned."""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from gradgraph.data.arrays.batch import Array
from gradgraph.errors import shown
from gradgraph.runtime.saved.printed import html_table, image_markup

MOST_NUMBERS = 8  # of an array that is printed


@dataclass(frozen=True, eq=False)
class WorstSample:
    """A sample with a large loss.

    Attributes:
        index: position of the sample in the data, from 0.
        value: its loss.
        sample: its inputs and targets by name, without the sample axis.
        outputs: the model's outputs for it by name, without the sample axis.
        file: path of the sample's file, if each sample is a file.
        label, called: names of its true class, and of the predicted class; empty without class names.
        text: the text that its tokens were made from; empty if it is not a text.
        picture: a small PNG, of its file or image array; empty if it is not an image.
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
        """The sample's file, class names and text by their captions in printed output, without empty ones."""
        known = {"file": self.file, "is": self.label, "called": self.called, "text": self.text}
        return {what: name for what, name in known.items() if name}

    def __str__(self) -> str:
        arrays = {**self.sample, **self.outputs}
        said = ", ".join(f"{shown(name)} {_shown(array)}" for name, array in arrays.items())
        words = "".join(f"{what} '{shown(name)}', " for what, name in self.words.items())
        return f"sample {self.index:,}: {self.value:.6g}; {words}{said}"


class WorstSamples(list[WorstSample]):
    """The samples with the largest losses, largest first; printed with one line per sample."""

    def __str__(self) -> str:
        return "\n".join(map(str, self))

    def as_data(self) -> list[dict[str, Any]]:
        """Return plain data for JSON."""
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
    """Return the elements of a small array as text; for a larger array its type and shape."""
    if array.size > MOST_NUMBERS:
        return f"{array.dtype}{list(array.shape)}"
    return np.array2string(array, precision=4, separator=", ", suppress_small=True).replace("\n", "")


Valued = tuple[int, float, Mapping[str, Array]]  # the index of a sample, its loss and its arrays


def largest(samples: Iterable[Valued], count: int) -> list[Valued]:
    """Return the ``count`` samples with the largest losses (NaN is the largest), largest first, storing no more."""
    kept: list[tuple[tuple[float, int], Valued]] = []
    for index, value, arrays in samples:
        rank = (math.inf if math.isnan(value) else value, -index)  # of equal losses, the first sample is kept
        (heapq.heappush if len(kept) < count else heapq.heappushpop)(kept, (rank, (index, value, arrays)))
    return [valued for _, valued in sorted(kept, key=lambda pair: pair[0], reverse=True)]

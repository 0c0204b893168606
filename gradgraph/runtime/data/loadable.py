"""The interface of datasets that match their names with a model's and load whole batches: images, shards, texts,
sounds.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from gradgraph.runtime.data.batch import Array
from gradgraph.runtime.data.shuffling import permutation
from gradgraph.step.data_names import NO_NAMES, DataNames
from gradgraph.step.manifest import TensorSpec


class Loadable(ABC):
    """Samples that load themselves batch by batch for ``fit``, ``evaluate`` and ``predict``.

    Attributes:
        files: files of the samples, if each has its own.
    """

    files: Sequence[Path] = ()

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def names_for(self, specs: Mapping[str, TensorSpec], known: DataNames) -> DataNames:
        """Return the names for a step, taken from ``known`` if present.

        Raises:
            UnmatchedError: the names differ from the known ones.
            DataError: the step requires other inputs.
        """

    @abstractmethod
    def load(
        self,
        batches: Iterator[Sequence[int]],
        specs: Mapping[str, TensorSpec],
        seed: Sequence[int],
        known: DataNames = NO_NAMES,
    ) -> Iterator[dict[str, Array]]:
        """Yield batches of the samples with these indices.

        Randomness depends only on ``seed``; an empty seed means no training, and no randomness.
        """

    def text_of(self, i: int, known: DataNames) -> str:
        """Return the text of a sample, for messages; empty if it is not text."""
        return ""

    def order(self, seed: int, epoch: int, batch_size: int) -> Array:
        """Return the sample order of a shuffled epoch, a function of these numbers only."""
        return permutation(seed, epoch, len(self))

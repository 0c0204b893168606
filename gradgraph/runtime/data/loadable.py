"""The datasets that match their names with a model's and load whole batches: pictures, shards, texts, sounds."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from gradgraph.runtime.data.batch import Array
from gradgraph.runtime.data.shuffling import permutation
from gradgraph.step.data_names import NO_NAMES, DataNames
from gradgraph.step.manifest import TensorSpec


class Loadable(ABC):
    """Samples that ``fit``, ``evaluate`` and ``predict`` have loaded batch by batch.

    Attributes:
        files: of the samples, where each has one of its own.
    """

    files: Sequence[Path] = ()

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def names_for(self, specs: Mapping[str, TensorSpec], known: DataNames) -> DataNames:
        """The names of what a step takes, as they are ``known``, where they are.

        Raises:
            UnmatchedError: they are others than those that are known.
            DataError: the step takes something else.
        """

    @abstractmethod
    def load(
        self,
        batches: Iterator[Sequence[int]],
        specs: Mapping[str, TensorSpec],
        seed: Sequence[int],
        known: DataNames = NO_NAMES,
    ) -> Iterator[dict[str, Array]]:
        """Batches of the samples of these numbers, for what a step takes.

        All that is random follows from ``seed``; where that is empty, samples are not to train on, and nothing is.
        """

    def text_of(self, i: int, known: DataNames) -> str:
        """The text that a sample is made of, for messages; empty where it is none."""
        return ""

    def order(self, seed: int, epoch: int, batch_size: int) -> Array:
        """The samples of a shuffled epoch, in order: a function of these numbers alone."""
        return permutation(seed, epoch, len(self))

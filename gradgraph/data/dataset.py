"""The base class of gradgraph's own datasets (images, shards, texts, sounds), which load whole batches.

Unlike other datasets, they match their columns and classes with those of the model by name.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from pathlib import Path

from gradgraph.data.arrays.batch import Array
from gradgraph.data.augment.augmentation import Augmentations
from gradgraph.data.record.data_names import NO_NAMES, DataNames
from gradgraph.data.record.specs import Specs
from gradgraph.data.shuffling import by_length, permutation


class Loadable(ABC):
    """The base class of datasets that load whole batches for ``fit``, ``evaluate`` and ``predict``.

    Attributes:
        files: paths of the samples' files, if each sample is a file.
        augmented: the augmentations of images in training, if any.
    """

    files: Sequence[Path] = ()
    augmented: Augmentations | None = None

    @property
    def augments(self) -> bool:
        """Whether samples differ between epochs."""
        return self.augmented is not None

    def __len__(self) -> int:
        return len(self.files)

    @abstractmethod
    def names_for(self, specs: Specs, known: DataNames) -> DataNames:
        """Return the names of columns and classes of the data for a step.

        Args:
            specs: the inputs and targets of the step.
            known: column and class names of the training data, which take precedence.

        Raises:
            UnmatchedError: if the names do not match the known ones.
            DataError: if the step requires other inputs.
        """

    @abstractmethod
    def load(
        self, batches: Iterator[Sequence[int]], specs: Specs, seed: Sequence[int], known: DataNames = NO_NAMES
    ) -> Iterator[dict[str, Array]]:
        """Yield batches of samples.

        Args:
            batches: the indices of each batch's samples.
            specs: the inputs and targets of the step.
            seed: determines all randomness, such as augmentations; empty outside training, for no randomness.
            known: column and class names of the training data.
        """

    def text_of(self, i: int, known: DataNames) -> str:
        """Return the text of sample ``i``, for messages; empty if it is not a text."""
        return ""

    @property
    def lengths(self) -> Array | None:
        """The number of tokens of each sample, if samples of similar lengths should share a batch; None otherwise."""
        return None

    def order(self, seed: int, epoch: int, batch_size: int) -> Array:
        """Return the sample order of a shuffled epoch, which depends only on the arguments and on ``lengths``.

        With lengths, samples are sorted within random windows of up to 50 batches (at most a quarter of the samples),
        which are redrawn each epoch.
        """
        shuffled = permutation(seed, epoch, len(self))
        return shuffled if self.lengths is None else by_length(shuffled, self.lengths, seed, epoch, batch_size)

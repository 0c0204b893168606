"""Augmentations that mix the images and the labels of a batch."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from gradgraph.data.arrays.batch import Array
from gradgraph.data.augment.augmentation import Augmentations
from gradgraph.data.images.image_form import ImageForm
from gradgraph.data.record.classes import takes_labels
from gradgraph.data.record.specs import TensorSpec
from gradgraph.data.shuffling import generator
from gradgraph.errors import DataError

OF_BATCH = 1  # last number of the seed of a batch; not zero, since NumPy ignores trailing zeros of a seed


def check_mixing(augmented: Augmentations | None, spec: TensorSpec | None) -> None:
    """Raise DataError if augmentations mix classes, but the target expects class indices."""
    if augmented is not None and augmented.mixing and spec is not None and takes_labels(spec):
        raise DataError(
            f"{augmented.mixing[0].call} mixes classes, but the step expects class numbers",
            remedy="build it with loss='soft_cross_entropy', whose targets are class probabilities",
            shell="add --loss soft_cross_entropy, whose targets are class probabilities",
        )


def mixed(
    batch: dict[str, Array],
    image: str,
    label: str | None,
    form: ImageForm,
    augmented: Augmentations | None,
    seed: Sequence[int],
    first: int,
) -> dict[str, Array]:
    """Apply augmentations that mix the images and targets of a batch, if there are any.

    ``label`` is None without targets. ``seed`` is the seed of the epoch, empty outside training; ``first`` is the index
    of the first image.
    """
    rng = generator(seed, first, OF_BATCH)
    if augmented is None or rng is None or not augmented.mixing:
        return batch
    shares = np.zeros((len(batch[image]), 0), np.float32) if label is None else batch[label]
    images, targets = augmented.of_batch(batch[image], shares, form.axes, rng)
    return {**batch, image: images} | ({} if label is None else {label: targets})

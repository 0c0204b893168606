"""Augmentations that mix the images of a batch and their class probabilities."""

from __future__ import annotations

import math

import numpy as np

from gradgraph.data.augment.augmentation import (
    ABOVE_ZERO,
    PROBABILITY,
    Array,
    Augmentation,
    Generator,
    Size,
    augmentation,
)


@augmentation(alpha=ABOVE_ZERO, p=PROBABILITY)
def mixup(alpha: float = 1.0, p: float = 1.0) -> Augmentation:
    """Mix each image of a batch with the previous one: ``λ·x + (1 − λ)·x'``, and their classes likewise.

    λ is drawn from Beta(α, α) for each batch (Zhang et al. 2018; ``torchvision.transforms.v2.MixUp``). Classes become
    probabilities, so the step needs the loss ``soft_cross_entropy``.

    Args:
        alpha: parameter of the distribution; 0.2 for ImageNet in the paper.
        p: probability that a batch is mixed.
    """

    def mixed(images: Array, shares: Array, axes: Size, rng: Generator) -> tuple[Array, Array]:
        if rng.random() >= p:
            return images, shares
        part = float(rng.beta(alpha, alpha))
        return _blend(images, part), _blend(shares, part)

    return Augmentation("batch", mixed)


def _blend(array: Array, part: float) -> Array:
    """Return ``part`` times each row plus ``1 − part`` times the previous row, in the dtype of ``array``."""
    kind = np.result_type(array.dtype, np.float32)
    made = array.astype(kind) * kind.type(part) + np.roll(array, 1, 0) * kind.type(1 - part)
    blended: Array = np.rint(made) if array.dtype.kind in "iu" else made
    return blended.astype(array.dtype)


@augmentation(alpha=ABOVE_ZERO, p=PROBABILITY)
def cutmix(alpha: float = 1.0, p: float = 1.0) -> Augmentation:
    """Paste a rectangle of the previous image into each image of a batch; classes are weighted by area.

    The rectangle covers 1 − λ of the area, clipped to the image; λ is drawn from Beta(α, α) for each batch (Yun et
    al. 2019; ``torchvision.transforms.v2.CutMix``). The step needs the loss ``soft_cross_entropy``.

    Args:
        alpha: parameter of the distribution.
        p: probability that a batch is mixed.
    """

    def mixed(images: Array, shares: Array, axes: Size, rng: Generator) -> tuple[Array, Array]:
        if rng.random() >= p:
            return images, shares
        part = float(rng.beta(alpha, alpha))
        place: list[slice] = [slice(None)] * images.ndim
        for axis in axes:
            side = images.shape[axis]
            at, half = int(rng.integers(side)), int(0.5 * math.sqrt(1.0 - part) * side)
            place[axis] = slice(max(0, at - half), min(side, at + half))
        sides = [(place[axis].stop - place[axis].start) / images.shape[axis] for axis in axes]
        made = images.copy()
        made[tuple(place)] = np.roll(images, 1, 0)[tuple(place)]
        return made, _blend(shares, 1.0 - math.prod(sides))

    return Augmentation("batch", mixed)

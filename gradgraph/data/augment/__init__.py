"""Augmentations of images and sounds by name: ``gradgraph.augment.flip()``, or ``"mixup(alpha=0.2)"`` in the shell.

This package works on Pillow images, samples and arrays, and must not depend on datasets, models or files.
Each augmentation is a function here that cites its formula and defaults. Randomness depends only on the seed of the
run, the epoch and the index of the image or sound.
"""

from gradgraph.data.augment.augmentation import AUGMENTATIONS as AUGMENTATIONS
from gradgraph.data.augment.augmentation import Augmentation as Augmentation
from gradgraph.data.augment.augmentation import Augmentations as Augmentations
from gradgraph.data.augment.colours import color_jitter as color_jitter
from gradgraph.data.augment.colours import random_erasing as random_erasing
from gradgraph.data.augment.geometry import affine as affine
from gradgraph.data.augment.geometry import flip as flip
from gradgraph.data.augment.geometry import random_crop as random_crop
from gradgraph.data.augment.geometry import random_resized_crop as random_resized_crop
from gradgraph.data.augment.geometry import rotation as rotation
from gradgraph.data.augment.geometry import vertical_flip as vertical_flip
from gradgraph.data.augment.mixing import cutmix as cutmix
from gradgraph.data.augment.mixing import mixup as mixup
from gradgraph.data.augment.placing import zoom as zoom
from gradgraph.data.augment.policies import rand_augment as rand_augment
from gradgraph.data.augment.silences import spec_augment as spec_augment

__all__ = ["AUGMENTATIONS", "Augmentation", *AUGMENTATIONS]  # pyright: ignore[reportUnsupportedDunderAll]


def __dir__() -> list[str]:
    return sorted(__all__)

"""Labels of images and sounds: class numbers, shares of classes or other numbers, in the form that a step takes."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from gradgraph.augment.augmentation import Augmentations
from gradgraph.errors import DataError, listed, shown
from gradgraph.runtime.data.batch import Array
from gradgraph.runtime.data.image_form import ImageForm
from gradgraph.runtime.data.matching import class_numbers, classes_for, warn_of_missing
from gradgraph.runtime.data.remedies import takes_labels
from gradgraph.step.data_names import is_text
from gradgraph.step.manifest import TensorSpec, numpy_dtype

OF_BATCH = 1  # the last word of a seed of batches: none that trails off in zeros, which add nothing


class Labels:
    """The labels of some images or sounds.

    Attributes:
        where: that they come from, in messages.
        numbers: one for each image; where classes have names, the place of its class among these.
        classes: the names; empty where there are none.
        written: the text of each, where they are numbers that a file without types may have meant as names.
    """

    def __init__(self, where: str, numbers: Array, classes: Sequence[str] = (), written: Array | None = None) -> None:
        self.where, self.numbers, self.classes, self.written = where, numbers, list(classes), written
        self._told = False  # which classes it lacks

    @classmethod
    def of(cls, values: Array, where: str, written: Array | None = None) -> Labels:
        """Labels of a column: numbers as they are, texts as names of classes, which are sorted."""
        if values.dtype.kind in "biuf":
            return cls(where, values.astype(np.int64) if values.dtype.kind == "b" else values, written=written)
        classes, numbers = np.unique(np.array([str(value) for value in values]), return_inverse=True)
        return cls(where, numbers.astype(np.int64), classes.tolist())

    def like(self, known: Sequence[str] | None) -> Labels:
        """These labels, as names where the model knows all of them as such: a file may lack all other names."""
        if self.classes or known is None or self.written is None or not set(self.written.tolist()) <= set(known):
            return self
        return Labels.of(self.written, self.where)

    def names_for(self, spec: TensorSpec, known: Sequence[str] | None) -> Sequence[str]:
        """The names of all classes of a target: those that are known, or else those that are here.

        Raises:
            UnmatchedError: one is new.
            DataError: the step has fewer classes, or a name is no text.
        """
        if odd := [name for name in self.classes if not is_text(name)]:
            raise DataError(f"{self.where} has the folders {listed(odd)}, whose names are no UTF-8; rename them")
        names = classes_for(spec, self.classes, known, self.where)
        if not self._told:
            warn_of_missing(self.classes, names, self.where)
        self._told = True
        return names

    def targets(self, spec: TensorSpec, known: Sequence[str] | None) -> Array:
        """A row for each image, as the step takes it: the number of its class, or 1 for its class among zeros.

        Raises:
            UnmatchedError: a class is new.
            DataError: the step takes targets of another form.
        """
        numbers, count = self.numbers, None
        if self.classes:
            names = known or self.classes
            numbers, count = np.array(class_numbers(self.classes, names, self.where))[numbers], len(names)
        return as_targets(numbers, spec, count, self.where)


def as_targets(numbers: Array, spec: TensorSpec, classes: int | None, where: str) -> Array:
    """``numbers`` as a step takes them: class numbers [samples], numbers [samples, 1], or shares [samples, classes].

    Args:
        numbers: one for each sample.
        spec: of the target.
        classes: how many there are, where that is known.
        where: they come from, in messages.

    Raises:
        DataError: the target has another form.
    """
    if takes_labels(spec) or len(spec.shape) not in (1, 2) or spec.dtype.startswith(("int", "uint", "bool")):
        return numbers
    width, dtype = spec.shape[-1], numpy_dtype(spec.dtype)
    if len(spec.shape) == 1 or width == 1:
        if classes is not None and classes > 2:
            raise DataError(f"{where} has {classes} classes, and '{shown(spec.name)}' takes one number for each image; "
                            "give two classes, or a model with an output for each class")  # fmt: skip
        return numbers.astype(dtype).reshape((-1, 1)[: len(spec.shape)])
    if numbers.dtype.kind not in "iu" or (numbers.size and numbers.min() < 0):
        raise DataError(f"'{shown(spec.name)}' takes the share of each class, and {where} has {numbers.dtype} that are "
                        "no numbers of classes; give whole numbers from 0 on")  # fmt: skip
    count = width if isinstance(width, int) else max(classes or 0, int(numbers.max(initial=0)) + 1)
    if numbers.size and numbers.max() >= count:
        raise DataError(f"{where} has the class {numbers.max()}, and '{shown(spec.name)}' {count} classes from 0 on; "
                        "give the model a head with as many")  # fmt: skip
    return np.eye(count, dtype=dtype)[numbers]


def number_of(seed: Sequence[int], *further: int) -> list[int]:
    """The seed of one image (its number ``further``) or batch, as generators take it."""
    return [*(s % (1 << 64) for s in seed), *further]


def check_mixing(augmented: Augmentations | None, spec: TensorSpec | None) -> None:
    """Raise DataError where augmentations mix classes, and the target takes class numbers."""
    if augmented is not None and augmented.mixing and spec is not None and takes_labels(spec):
        raise DataError(
            f"{augmented.mixing[0].call} mixes classes, and the step takes class numbers",
            remedy="build it with loss='soft_cross_entropy', whose targets are the shares of classes",
            shell="add --loss soft_cross_entropy, whose targets are the shares of classes",
        )


def mixed(
    batch: dict[str, Array],
    image: str,
    label: str | None,
    form: ImageForm,
    augmented: Augmentations,
    seed: Sequence[int],
) -> dict[str, Array]:
    """A batch whose images and targets are mixed, where augmentations do so.

    Args:
        batch: images and targets by name.
        image, label: their names; None where there are no targets.
        form: of the images.
        augmented: the augmentations.
        seed: of the batch: those of the epoch, and the number of its first image.
    """
    if not augmented.mixing:
        return batch
    rng = np.random.default_rng(number_of(seed, OF_BATCH))
    shares = np.zeros((len(batch[image]), 0), np.float32) if label is None else batch[label]
    images, targets = augmented.of_batch(batch[image], shares, form.axes, rng)
    return {**batch, image: images} | ({} if label is None else {label: targets})

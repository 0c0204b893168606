"""Labels of images and sounds: class numbers, shares of classes or other numbers, in the form that a step takes."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from gradgraph.augment.augmentation import Augmentations
from gradgraph.errors import DataError, listed, shown
from gradgraph.preprocess.frames import text_of
from gradgraph.runtime.data.batch import Array
from gradgraph.runtime.data.image_form import ImageForm
from gradgraph.step.classes import Classes, check_whole, classes_for, kind_of, labelled, takes_labels, warn_of_missing
from gradgraph.step.data_names import is_text
from gradgraph.step.manifest import TensorSpec, numpy_dtype

OF_BATCH = 1  # the last word of a seed of batches: none that trails off in zeros, which add nothing


class Labels:
    """The labels of some images or sounds, as they were found.

    Attributes:
        where: that they come from, in messages.
        values: of each: text, a boolean or a number; with ``names``, the number of one of these.
        names: of the classes that numbers stand for, where the source has such names.
        written: the text of each, in a file whose cells have no types.
    """

    def __init__(self, where: str, values: Array, names: Sequence[str] = (), written: Array | None = None) -> None:
        self.where, self.values, self.names, self.written = where, values, list(names), written
        self._told = False  # which classes it lacks

    @property
    def alone(self) -> tuple[Array, list[str]]:
        """The labels as they are without a model: numbers, and the names of classes that these stand for."""
        if self.names or kind_of(self.values) != "text":
            return self.values, self.names
        names, numbers = np.unique(text_of(self.values).astype(str), return_inverse=True)
        return numbers.astype(np.int64), names.tolist()

    def matched(self, spec: TensorSpec, known: Classes | None) -> tuple[Array, Classes]:
        """The number of the class of each, or other numbers as they are; and the classes.

        Raises:
            UnmatchedError: a class is new.
            DataError: the step has fewer classes, or a name is no text.
        """
        if odd := [name for name in self.names if not is_text(name)]:
            raise DataError(f"{self.where} has the folders {listed(odd)}, whose names are no UTF-8; rename them")
        if self.names:
            classes = classes_for(spec, self.names, known, self.where)
            numbers, found = classes.of_names(self.names, self.where)[self.values], self.names
        else:
            check_whole(self.values, self.where)
            are_classes = takes_labels(spec) or (known is not None and bool(known.names))
            values = self.written if self.written is not None and are_classes else self.values
            numbers, classes = labelled(values, spec, known, self.where)
            found = (
                [classes.names[i] for i in np.unique(numbers)] if classes.names and numbers.dtype.kind == "i" else []
            )
        if not self._told and found:
            warn_of_missing(found, classes, self.where)
        self._told = True
        return numbers, classes

    def targets(self, spec: TensorSpec, known: Classes | None) -> Array:
        """A row for each image, as the step takes it: the number of its class, or 1 for its class among zeros.

        Raises:
            UnmatchedError: a class is new.
            DataError: the step takes targets of another form.
        """
        numbers, classes = self.matched(spec, known)
        return as_targets(numbers, spec, len(classes.names) or None, self.where)


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

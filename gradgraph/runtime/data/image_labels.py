"""Labels of images and sounds, in the form of the target: class numbers, class probabilities or other numbers."""

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

OF_BATCH = 1  # the last word of a batch seed: nonzero, since trailing zeros would add nothing


class Labels:
    """The labels of some images or sounds.

    Attributes:
        where: their source, in messages.
        values: text, a boolean or a number for each; with ``names``, an index into these.
        names: class names for numbers, if the source has them.
        written: the text of each, in a file of untyped cells.
    """

    def __init__(self, where: str, values: Array, names: Sequence[str] = (), written: Array | None = None) -> None:
        self.where, self.values, self.names, self.written = where, values, list(names), written
        self._told = False  # warned about missing classes

    @property
    def alone(self) -> tuple[Array, list[str]]:
        """The labels without a model: numbers, and the class names that they stand for."""
        if self.names or kind_of(self.values) != "text":
            return self.values, self.names
        names, numbers = np.unique(text_of(self.values).astype(str), return_inverse=True)
        return numbers.astype(np.int64), names.tolist()

    def matched(self, spec: TensorSpec, known: Classes | None) -> tuple[Array, Classes]:
        """Return the class number of each label, or other numbers unchanged; and the classes.

        Raises:
            UnmatchedError: a class is new.
            DataError: the step has fewer classes, or a name is not text.
        """
        if odd := [name for name in self.names if not is_text(name)]:
            raise DataError(f"{self.where} has the folders {listed(odd)}, whose names are not valid UTF-8; rename them")
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
        """Return a target row per image: its class number, or one-hot.

        Raises:
            UnmatchedError: a class is new.
            DataError: the step expects targets of another form.
        """
        numbers, classes = self.matched(spec, known)
        return as_targets(numbers, spec, len(classes.names) or None, self.where)


def as_targets(numbers: Array, spec: TensorSpec, classes: int | None, where: str) -> Array:
    """Convert ``numbers`` to the target's form: class numbers [samples], numbers [samples, 1], or one-hot [samples,
    classes].

    Args:
        numbers: one per sample.
        spec: of the target.
        classes: number of classes, if known.
        where: their source, in messages.

    Raises:
        DataError: the target has another form.
    """
    if takes_labels(spec) or len(spec.shape) not in (1, 2) or spec.dtype.startswith(("int", "uint", "bool")):
        return numbers
    width, dtype = spec.shape[-1], numpy_dtype(spec.dtype)
    if len(spec.shape) == 1 or width == 1:
        if classes is not None and classes > 2:
            raise DataError(f"{where} has {classes} classes, but '{shown(spec.name)}' is one number per image; "
                            "provide two classes, or a model with an output per class")  # fmt: skip
        return numbers.astype(dtype).reshape((-1, 1)[: len(spec.shape)])
    if numbers.dtype.kind not in "iu" or (numbers.size and numbers.min() < 0):
        raise DataError(f"'{shown(spec.name)}' is one probability per class, but {where} has {numbers.dtype} that are "
                        "not class numbers; provide integers from 0 on")  # fmt: skip
    count = width if isinstance(width, int) else max(classes or 0, int(numbers.max(initial=0)) + 1)
    if numbers.size and numbers.max() >= count:
        raise DataError(f"{where} has the class {numbers.max()}, but '{shown(spec.name)}' {count} classes from 0 on; "
                        "give the model a larger head")  # fmt: skip
    return np.eye(count, dtype=dtype)[numbers]


def number_of(seed: Sequence[int], *further: int) -> list[int]:
    """Return the generator seed of one image (its number ``further``) or batch."""
    return [*(s % (1 << 64) for s in seed), *further]


def check_mixing(augmented: Augmentations | None, spec: TensorSpec | None) -> None:
    """Raise DataError if augmentations mix classes, but the target is class numbers."""
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
    augmented: Augmentations,
    seed: Sequence[int],
) -> dict[str, Array]:
    """Apply augmentations that mix the images and targets of a batch.

    Args:
        batch: images and targets by name.
        image, label: their names; None without targets.
        form: image conversion options.
        augmented: the augmentations.
        seed: of the epoch, followed by the number of the first image.
    """
    if not augmented.mixing:
        return batch
    rng = np.random.default_rng(number_of(seed, OF_BATCH))
    shares = np.zeros((len(batch[image]), 0), np.float32) if label is None else batch[label]
    images, targets = augmented.of_batch(batch[image], shares, form.axes, rng)
    return {**batch, image: images} | ({} if label is None else {label: targets})

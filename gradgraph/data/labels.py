"""Labels of files, converted to the form of the target: class indices, class probabilities or numbers."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from gradgraph.data.arrays.batch import Array
from gradgraph.data.preprocess.frames import is_text, text_of
from gradgraph.data.record.classes import (
    Classes,
    check_whole,
    classes_for,
    kind_of,
    labelled,
    takes_labels,
    warn_of_missing,
)
from gradgraph.data.record.specs import TensorSpec, numpy_dtype
from gradgraph.errors import DataError, listed, shown


class Labels:
    """The labels of files or shards.

    Attributes:
        where: description of their source, for messages.
        values: one text, boolean or number per sample; with ``names``, an index into ``names``.
        names: class names, if the source has them.
        written: the original text of each label, if it was read from a file with untyped cells.
    """

    def __init__(self, where: str, values: Array, names: Sequence[str] = (), written: Array | None = None) -> None:
        self.where, self.values, self.names, self.written = where, values, list(names), written
        self._told = False  # whether the warning about missing classes was logged

    @property
    def alone(self) -> tuple[Array, list[str]]:
        """Return the labels as numbers, and the class name of each number, independently of a model.

        Text labels are numbered in sorted order. If the labels are numbers without class names, the list is empty.
        """
        if self.names or kind_of(self.values) != "text":
            return self.values, self.names
        names, numbers = np.unique(text_of(self.values).astype(str), return_inverse=True)
        return numbers.astype(np.int64), names.tolist()

    def matched(self, spec: TensorSpec, known: Classes | None) -> tuple[Array, Classes]:
        """Return, for each label, its class index in the model [samples], and the classes of the model.

        Regression targets are returned unchanged.

        Raises:
            UnmatchedError: if a class is not known from training.
            DataError: if the step has fewer classes, or a name is not valid text.
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
        """Return one target row per sample: a class index, a one-hot row, or a number.

        Raises:
            UnmatchedError: if a class is not known from training.
            DataError: if the step expects targets of a different form.
        """
        numbers, classes = self.matched(spec, known)
        return as_targets(numbers, spec, len(classes.names) or None, self.where)


def as_targets(numbers: Array, spec: TensorSpec, classes: int | None, where: str) -> Array:
    """Convert ``numbers``, class indices or other values [samples], to the form of a target.

    The form is class indices [samples], values [samples, 1], or one-hot rows [samples, classes]. ``classes`` is the
    number of classes, if known; ``where`` describes the source for messages.

    Raises:
        DataError: if the target has a different form.
    """
    if takes_labels(spec) or len(spec.shape) not in (1, 2) or spec.dtype.startswith(("int", "uint", "bool")):
        return numbers
    width, dtype = spec.shape[-1], numpy_dtype(spec.dtype)
    if len(spec.shape) == 1 or width == 1:
        if classes is not None and classes > 2:
            raise DataError(f"{where} has {classes} classes, but '{shown(spec.name)}' is one number per sample; "
                            "provide two classes, or a model with an output per class")  # fmt: skip
        return numbers.astype(dtype).reshape((-1, 1)[: len(spec.shape)])
    if numbers.dtype.kind not in "iu" or (numbers.size and numbers.min() < 0):
        raise DataError(f"'{shown(spec.name)}' is one probability per class, so {where} should contain class numbers "
                        f"(integers from 0 on), but contains other {numbers.dtype} values")  # fmt: skip
    count = width if isinstance(width, int) else max(classes or 0, int(numbers.max(initial=0)) + 1)
    if numbers.size and numbers.max() >= count:
        raise DataError(f"{where} has the class number {numbers.max()}, but '{shown(spec.name)}' has {count} classes, "
                        "numbered from 0; give the model a larger head")  # fmt: skip
    return np.eye(count, dtype=dtype)[numbers]

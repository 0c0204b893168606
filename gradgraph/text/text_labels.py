"""Labels of texts and of words: numbers, or names of classes that become numbers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from gradgraph.errors import DataError, shown
from gradgraph.runtime.data.batch import Array
from gradgraph.step.classes import Classes, labelled, takes_labels
from gradgraph.step.manifest import TargetSpec, numpy_dtype
from gradgraph.text.frame_columns import number_of


def labels_of(
    values: Sequence[Any], spec: TargetSpec, known: Classes | None, column: str, own: Sequence[str] = ()
) -> tuple[Array, Classes]:
    """The numbers of a target, and its classes, where it has some.

    Args:
        values: of each text, or of each word.
        known: the classes that the model was trained on.
        column: that they stand in.
        own: the names that the table itself has for whole numbers.

    Raises:
        UnmatchedError: a class is new.
        DataError: there are more classes than the model has, or values of a regression are no numbers.
    """
    if not takes_labels(spec):
        return _quantities(values, spec, column), Classes()
    array = np.empty(len(values), object)
    array[:] = values
    return labelled(array, spec, known, f"the column '{shown(column)}'", own=own)


def _quantities(values: Sequence[Any], spec: TargetSpec, column: str) -> Array:
    numbers = [number_of(value) for value in values]
    odd = [value for value, number in zip(values, numbers, strict=True) if number is None]
    if odd:
        raise DataError(
            f"the column '{shown(column)}' has {len(odd)} value{'s' if len(odd) > 1 else ''} of {len(values)} that are "
            f"no numbers, such as '{shown(odd[0])}', and the model takes {spec}; give numbers there"
        )
    found = np.array(numbers, numpy_dtype(spec.dtype))
    return found[:, None] if len(spec.shape) == 2 else found

"""Labels of texts and of words, as numbers: class names become class numbers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from gradgraph.data.arrays.batch import Array
from gradgraph.data.record.classes import Classes, labelled, takes_labels
from gradgraph.data.record.specs import TargetSpec, numpy_dtype
from gradgraph.data.texts.frame_columns import number_of
from gradgraph.errors import DataError, shown


def labels_of(
    values: Sequence[Any], spec: TargetSpec, known: Classes | None, column: str, own: Sequence[str] = ()
) -> tuple[Array, Classes]:
    """Return labels as class numbers with the classes, or as regression values with empty classes.

    Args:
        values: the labels of all texts, or of all words.
        own: class names that the table itself declares for integer labels.

    Raises:
        UnmatchedError: the labels have a class that the model does not have.
        DataError: there are more classes than the model has, or regression values are not numbers.
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
            f"not numbers, such as '{shown(odd[0])}', but the model expects {spec}; use numbers only"
        )
    found = np.array(numbers, numpy_dtype(spec.dtype))
    return found[:, None] if len(spec.shape) == 2 else found

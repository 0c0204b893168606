"""Labels of texts and of words: numbers, or names of classes that become numbers."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import numpy as np

from gradgraph.errors import DataError, listed, shown
from gradgraph.runtime.data.batch import Array
from gradgraph.runtime.data.matching import class_numbers, classes_for
from gradgraph.runtime.data.remedies import takes_labels
from gradgraph.step.manifest import TargetSpec, numpy_dtype
from gradgraph.text.frame_columns import number_of

log = logging.getLogger("gradgraph")


def labels_of(
    values: Sequence[Any], spec: TargetSpec, known: Sequence[str] | None, column: str
) -> tuple[Array, Sequence[str] | None]:
    """The numbers of a target, and the names of its classes, where it has some.

    Whole numbers that the model has classes for stand for these; other labels are names, sorted (numbers by size).

    Args:
        values: of each text, or of each word.
        known: the names of all classes, as they are known.
        column: that they stand in.

    Raises:
        UnmatchedError: a class is new.
        DataError: there are more classes than the model has, or values of a regression are no numbers.
    """
    numbers = [number_of(value) for value in values]
    if not takes_labels(spec):
        return _quantities(values, numbers, spec, column), None
    names = [str(value) for value in values]
    if all(type(number) is int for number in numbers):
        if _stand_for_classes(numbers, names, spec, known):
            return np.array(numbers, np.int64), known
        names = [str(number) for number in numbers]
        found = [str(number) for number in sorted({int(number or 0) for number in numbers})]
    else:
        found = sorted(set(names))
    where = f"the column '{shown(column)}'"
    classes = classes_for(spec, found, known, where)
    if known is None:
        log.info("the classes of %s are %s, from 0 on", where, listed(classes))
    numbered = dict(zip(found, class_numbers(found, classes, where), strict=True))
    return np.array([numbered[name] for name in names], np.int64), classes


def _stand_for_classes(
    numbers: Sequence[Any], names: Sequence[str], spec: TargetSpec, known: Sequence[str] | None
) -> bool:
    """Whether whole numbers are those of classes, rather than their names."""
    if known is not None and set(names) <= set(known):
        return False
    most = len(known) if known is not None else spec.classes
    return most is None or all(0 <= number < most or number == spec.ignore_index for number in numbers)


def _quantities(values: Sequence[Any], numbers: Sequence[Any], spec: TargetSpec, column: str) -> Array:
    odd = [value for value, number in zip(values, numbers, strict=True) if number is None]
    if odd:
        raise DataError(
            f"the column '{shown(column)}' has {len(odd)} value{'s' if len(odd) > 1 else ''} of {len(values)} that are "
            f"no numbers, such as '{shown(odd[0])}', and the model takes {spec}; give numbers there"
        )
    found = np.array(numbers, numpy_dtype(spec.dtype))
    return found[:, None] if len(spec.shape) == 2 else found

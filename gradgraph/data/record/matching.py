"""Matching of the column and class names of data with the names in the model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from gradgraph.data.record.classes import Classes, classes_for, takes_labels, warn_of_missing
from gradgraph.data.record.data_names import NO_NAMES, DataNames
from gradgraph.data.record.specs import TargetSpec, TensorSpec
from gradgraph.errors import UnmatchedError, listed, shown

DEEPEST = 4  # levels of datasets to search: a subset refers to the dataset that it is part of


def check_same(names: DataNames, known: DataNames) -> None:
    """Raise UnmatchedError if the names of new data do not match the ``known`` names of the training data.

    For each input or target in both, columns must be equal, and classes must have equal indices, although either side
    may have additional classes at the end. Preprocessing must be equal if both have one.
    """
    if names.preprocess != known.preprocess and names.preprocess and known.preprocess:
        raise UnmatchedError("the data were not prepared with the model's preprocessing; prepare them again")
    for name in names.columns.keys() & known.columns.keys():
        if names.columns[name] != known.columns[name]:
            raise _prepared_otherwise(name, "columns", names.columns[name], known.columns[name])
    for name in names.classes.keys() & known.classes.keys():
        if any(a != b for a, b in zip(names.classes[name], known.classes[name], strict=False)):
            raise _prepared_otherwise(name, "classes", names.classes[name], known.classes[name])


def _prepared_otherwise(name: str, what: str, mine: Sequence[str], known: Sequence[str]) -> UnmatchedError:
    return UnmatchedError(
        f"the data were prepared with the {what} {listed(mine)} of '{shown(name)}', but the model was trained on "
        f"{listed(known)}; prepare them again"
    )


@dataclass(frozen=True)
class Declared:
    """The classes declared by a dataset: ``classes`` as in torchvision, or ``features`` as in Hugging Face.

    Attributes:
        names: all class names, by target.
        numbers: target → array from the dataset's class indices to the model's, if they differ.
    """

    names: DataNames = NO_NAMES
    numbers: Mapping[str, np.ndarray[Any, Any]] = field(default_factory=dict)

    @classmethod
    def of(cls, dataset: Any, specs: Mapping[str, TensorSpec], known: DataNames) -> Declared:
        """Return the classes that a dataset declares for the targets in ``specs``.

        Raises:
            UnmatchedError: if the dataset has a class that the model does not know.
        """
        targets = [spec for spec in specs.values() if takes_labels(spec)]
        names, numbers = NO_NAMES, dict[str, np.ndarray[Any, Any]]()
        for spec in targets:
            found = declared_classes(dataset, spec.name, deep=len(targets) == 1)
            mine = Classes.known(known, spec.name)
            most = spec.classes if isinstance(spec, TargetSpec) else None
            if found is None or (mine is None and most not in (None, len(found))) or (mine and not mine.names):
                continue
            where = f"the dataset ({type(dataset).__name__})"
            classes = classes_for(spec, found, mine, where)
            warn_of_missing(found, classes, where)
            numbered = classes.of_names(found, where)
            if (numbered != np.arange(len(found))).any():
                numbers[spec.name] = numbered
            names = names.updated((classes if mine else Classes(classes.names, numbered=True)).of(spec.name))
        return cls(names, numbers)

    @property
    def keeps(self) -> bool:
        """Whether the dataset's class indices can be used unchanged."""
        return not self.numbers

    def numbered(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        """Return a copy of ``batch`` with the dataset's class indices replaced by the model's."""
        made = dict(batch)
        for name, numbers in self.numbers.items():
            labels = np.asarray(made[name])
            inside = (labels >= 0) & (labels < len(numbers))
            made[name] = np.where(inside, numbers[np.where(inside, labels, 0)], labels)
        return made


def declared_classes(dataset: Any, target: str, deep: bool = False) -> Sequence[str] | None:
    """Return the class names that a dataset declares for a target; None if it declares none.

    They are read from its ``features`` and, if ``deep``, from ``classes`` of the dataset or, for a subset, its parent.
    """
    features = getattr(dataset, "features", None)
    found: Any = None
    if isinstance(features, Mapping) and target in features:
        feature = features[target]
        found = getattr(feature, "names", None) or getattr(getattr(feature, "feature", None), "names", None)
    at = dataset
    for _ in range(DEEPEST if deep else 0):
        found = getattr(at, "classes", None) if found is None else found
        at = getattr(at, "dataset", None)
    is_list = isinstance(found, list | tuple) and bool(found) and all(isinstance(name, str) for name in found)
    return list(found) if is_list and len(set(found)) == len(found) else None

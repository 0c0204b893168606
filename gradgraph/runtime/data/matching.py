"""Are these the classes that the model knows? Matched by name, and said in one sentence if not."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from gradgraph.errors import DataError, UnmatchedError, listed, shown
from gradgraph.runtime.data.remedies import takes_labels
from gradgraph.step.data_names import NO_NAMES, DataNames
from gradgraph.step.manifest import Manifest, TargetSpec, TensorSpec
from gradgraph.step.placed_columns import is_one_number

if TYPE_CHECKING:
    from gradgraph.frontend.loss import Loss

log = logging.getLogger("gradgraph")

DEEPEST = 4  # a subset has the dataset that it is a part of, and so on


def class_numbers(found: Sequence[str], known: Sequence[str], where: str) -> list[int]:
    """The numbers of these classes among those that are known; raises UnmatchedError if one is new."""
    numbers = {name: i for i, name in enumerate(known)}
    if new := [name for name in found if name not in numbers]:
        lacks = f", and lacks the {_classes(missing)}" if (missing := _missing(found, known)) else ""
        raise UnmatchedError(
            f"{where} has the new {_classes(new)}{lacks}, where the model knows {listed(known)}; "
            "leave such samples out, or give classes the names that they had in training"
        )
    return [numbers[name] for name in found]


def classes_for(spec: TensorSpec, found: Sequence[str], known: Sequence[str] | None, where: str) -> Sequence[str]:
    """The names of all classes of the target ``spec``: those that are known, or else those that were found.

    Raises:
        UnmatchedError: one is new.
        DataError: the model has fewer classes than were found.
    """
    if known is not None:
        class_numbers(found, known, where)
        return known
    most = spec.classes if isinstance(spec, TargetSpec) else None
    if most is None and len(spec.shape) == 2 and isinstance(spec.shape[1], int) and spec.shape[1] > 1:
        most = spec.shape[1]  # of targets that are the share of each class
    if most is not None and len(found) > most:
        raise DataError(
            f"{where} has {len(found)} classes ({listed(found)}), and the model's labels go from 0 to {most - 1}",
            remedy="give it a head with as many (gradgraph.new_head), or leave samples out",
            shell="give it a head with as many (gradgraph surgery --new-head), or leave samples out",
        )
    return found


def warn_of_missing(found: Sequence[str], known: Sequence[str], where: str) -> None:
    """Say which classes that are known were not found."""
    if missing := _missing(found, known):
        log.warning("%s lacks the %s, which the model knows", where, _classes(missing))


def _missing(found: Sequence[str], known: Sequence[str]) -> list[str]:
    there = set(found)
    return [name for name in known if name not in there]


def _classes(names: Sequence[str]) -> str:
    return f"{'class' if len(names) == 1 else 'classes'} {listed(names)}"


def check_same(names: DataNames, known: DataNames) -> None:
    """Raise UnmatchedError unless numbers stand for the same columns and classes; what either does not know may be any.

    More classes than one of them has may follow in the other.
    """
    if names.preprocess != known.preprocess and names.preprocess and known.preprocess:
        raise UnmatchedError(
            "these data were prepared with another preprocessing than that of the model; prepare them again"
        )
    for name in names.columns.keys() & known.columns.keys():
        if names.columns[name] != known.columns[name]:
            raise _prepared_otherwise(name, "columns", names.columns[name], known.columns[name])
    for name in names.classes.keys() & known.classes.keys():
        if any(a != b for a, b in zip(names.classes[name], known.classes[name], strict=False)):
            raise _prepared_otherwise(name, "classes", names.classes[name], known.classes[name])


def _prepared_otherwise(name: str, what: str, mine: Sequence[str], known: Sequence[str]) -> UnmatchedError:
    return UnmatchedError(
        f"these data were prepared with the {what} {listed(mine)} of '{shown(name)}', and the model was trained on "
        f"{listed(known)}; prepare them again"
    )


def with_activations(names: DataNames, manifest: Manifest) -> DataNames:
    """``names``, with those targets of the step whose loss takes the model's scores for logits of a Softmax, and those
    of one number a sample whose loss takes it for that of a Sigmoid.
    """
    of = {name: _computed_by(loss_of(name, manifest)) for name in names.classes}
    return replace(
        names,
        softmax=[name for name, computed in of.items() if computed == "Softmax"],
        sigmoid=[t.name for t in manifest.targets if t.name in of and is_yes_or_no(t, manifest)],
    )


def is_yes_or_no(target: TargetSpec, manifest: Manifest) -> bool:
    """Whether a target is one number a sample, and its loss takes the model's for the logit of a Sigmoid."""
    return is_one_number(target) and _computed_by(loss_of(target.name, manifest)) == "Sigmoid"


def _computed_by(loss: Loss | None) -> str:
    return "" if loss is None else "Softmax" if loss.of_logs else loss.activation


def loss_of(target: str, manifest: Manifest) -> Loss | None:
    """The loss that compares a target; None where it is a function of the user's own."""
    from gradgraph.losses import LOSSES

    for part in manifest.parts.values():
        call = part.loss
        if call.get("name") not in LOSSES:  # several, by output
            of_output = {f"{output}_target": call for output, call in call.get("arguments", {}).items()}
            call = of_output.get(target, {})
        if target in part.inputs and isinstance(call, Mapping) and call.get("name") in LOSSES:
            return LOSSES.by_name(call["name"], **call["arguments"])
    return None


def check_numbers_mean(names: DataNames, manifest: Manifest) -> None:
    """Raise DataError where classes have names, which are numbers from 0 on, and the loss takes −1 and 1."""
    for target in names.classes:
        loss = loss_of(target, manifest)
        if loss is not None and any(one.is_sign for one in loss.targets):
            raise DataError(
                f"the classes of '{shown(target)}' are the numbers 0 and 1, and the loss {loss.name} takes −1 and 1",
                remedy="build the step with loss='bce_with_logits', or give the numbers −1 and 1",
                shell="add --loss bce_with_logits, or give the numbers −1 and 1",
            )


@dataclass(frozen=True)
class Declared:
    """The classes that a dataset says it has: ``classes`` as those of torchvision, or ``features`` of Hugging Face.

    Attributes:
        names: of all classes, by target.
        numbers: of targets whose labels stand for other classes here, the number of each class of the dataset.
    """

    names: DataNames = NO_NAMES
    numbers: Mapping[str, np.ndarray[Any, Any]] = field(default_factory=dict)

    @classmethod
    def of(cls, dataset: Any, specs: Mapping[str, TensorSpec], known: DataNames) -> Declared:
        """Look at a dataset; raises UnmatchedError if it has a class that is not ``known``."""
        targets = [spec for spec in specs.values() if takes_labels(spec)]
        names, numbers = dict[str, Sequence[str]](), dict[str, np.ndarray[Any, Any]]()
        for spec in targets:
            found = _declared(dataset, spec.name, alone=len(targets) == 1)
            mine = known.classes.get(spec.name)
            most = spec.classes if isinstance(spec, TargetSpec) else None
            if found is None or (mine is None and most not in (None, len(found))):
                continue
            where = f"the dataset ({type(dataset).__name__})"
            names[spec.name] = classes_for(spec, found, mine, where)
            warn_of_missing(found, names[spec.name], where)
            numbered = np.array(class_numbers(found, names[spec.name], where), np.int64)
            if (numbered != np.arange(len(found))).any():
                numbers[spec.name] = numbered
        return cls(DataNames(classes=names), numbers)

    @property
    def keeps(self) -> bool:
        """Whether all labels stay as they are."""
        return not self.numbers

    def numbered(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        """``batch`` with the numbers that its classes have here; other labels, such as ignored ones, stay."""
        made = dict(batch)
        for name, numbers in self.numbers.items():
            labels = np.asarray(made[name])
            inside = (labels >= 0) & (labels < len(numbers))
            made[name] = np.where(inside, numbers[np.where(inside, labels, 0)], labels)
        return made


def _declared(dataset: Any, target: str, alone: bool) -> Sequence[str] | None:
    features = getattr(dataset, "features", None)
    found: Any = None
    if isinstance(features, Mapping) and target in features:
        found = getattr(features[target], "names", None)
    at = dataset
    for _ in range(DEEPEST if alone else 0):
        found = getattr(at, "classes", None) if found is None else found
        at = getattr(at, "dataset", None)
    is_list = isinstance(found, list | tuple) and len(found) > 1 and all(isinstance(name, str) for name in found)
    return list(found) if is_list and len(set(found)) == len(found) else None

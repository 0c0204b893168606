"""Mapping of labels to class indices, for every kind of training data.

Labels may be text, booleans or numbers. Some sources also list class names: folders, categories of COCO, the features
of a Hugging Face dataset. Labels are matched with the classes that the model was trained on:

- A name is matched exactly, so "01" and "1" are different classes. "TRUE" is "True", and "1.0" is "1".
- A boolean is the class of that name ("True", "yes"), or the index 0 or 1 if classes have no names.
- A whole number is the class of that name if class names look like numbers. Otherwise, or if the training data listed
  class indices with their names, it is a class index.
- Any other label is rejected by an error that names it. So is a number that could mean two classes.
"""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from gradgraph.data.preprocess.frames import Array, check_cells, is_gap, text_of
from gradgraph.data.record.data_names import DataNames
from gradgraph.data.record.specs import TargetSpec, TensorSpec
from gradgraph.errors import DataError, UnmatchedError, listed

log = logging.getLogger("gradgraph")

TRUTH = {"false": 0, "no": 0, "n": 0, "f": 0, "off": 0, "0": 0, "true": 1, "yes": 1, "y": 1, "t": 1, "on": 1, "1": 1}
WORDS_OF_TRUTH = ("false", "true")
_WHOLE = re.compile(r"(-?(?:0|[1-9][0-9]*))(?:\.0+)?")  # as a program writes it: "01" does not match


def takes_labels(spec: TensorSpec) -> bool:
    """Whether ``spec`` is a target of class indices."""
    return isinstance(spec, TargetSpec) and spec.ignore_index is not None


class ClassNumbers(np.ndarray[Any, Any]):
    """An array of class indices, never matched as names: ``array.view(ClassNumbers)``."""


def as_class_numbers(batch: Mapping[str, Any], targets: Collection[str]) -> dict[str, Any]:
    """Return a batch with the arrays of ``targets`` marked as class indices, which are not matched with class names."""
    return {
        name: value.view(ClassNumbers) if name in targets and isinstance(value, np.ndarray) else value
        for name, value in batch.items()
    }


@dataclass(frozen=True)
class Classes:
    """The classes of a target.

    Attributes:
        names: the class names in the order of their indices; empty if classes have no names.
        numbered: whether whole numbers in the data are class indices even if class names look like numbers.
    """

    names: tuple[str, ...] = ()
    numbered: bool = False

    @classmethod
    def known(cls, names: DataNames, target: str) -> Classes | None:
        """Return the classes of a target that a model was trained on; None if none are recorded."""
        found, numbered = names.classes.get(target), target in names.numbered
        return cls(tuple(found or ()), numbered) if found is not None or numbered else None

    def of(self, target: str) -> DataNames:
        """Return these classes as the ``DataNames`` of a target; empty if they have no names."""
        return DataNames(classes={target: self.names}, numbered=(target,) if self.numbered else ()) if self.names else (
            DataNames()
        )  # fmt: skip

    @cached_property
    def look_like_numbers(self) -> bool:
        """Whether a class name is spelled as a number, so that a number in the data could be a name."""
        return any(_number(name) is not None for name in self.names)

    @cached_property
    def may_be_named_by_numbers(self) -> bool:
        """Whether a whole number in the data may be the name of a class with a different index."""
        are_their_numbers = all(name == str(i) for i, name in enumerate(self.names))
        return not self.numbered and self.look_like_numbers and not are_their_numbers

    def look_at_numbers(self, spec: TensorSpec) -> bool:
        """Whether whole numbers in the data must be matched with classes: names, or indices without a name."""
        most = spec.classes if isinstance(spec, TargetSpec) else None
        return bool(self.names) and (self.may_be_named_by_numbers or most is None or len(self.names) < most)

    def called(self, numbers: Sequence[int]) -> list[str]:
        """Return the names of class indices; an index without a name is returned as digits."""
        return [self.names[n] if 0 <= n < len(self.names) else str(n) for n in numbers]

    # --- class indices of labels ------------------------------------------------------------------------------

    def of_names(self, found: Sequence[str], where: str) -> Array:
        """Return the class index of each name in ``found``, as int64.

        Raises:
            UnmatchedError: if a name matches no class.
        """
        if not self.names:
            numbered = self._of_texts(found, where, None)
            return np.array([numbered[name] for name in found], np.int64)
        numbers = [self._called(name) for name in found]
        if new := [name for name, number in zip(found, numbers, strict=True) if number is None]:
            raise self._new(new, found, where)
        return np.array(numbers, np.int64)

    def of_values(self, values: Array, where: str, ignored: int | None = None) -> Array:
        """Return the class index of each label, as int64; numbers with fractions are returned unchanged.

        Args:
            values: text, booleans or numbers [n], without missing values.
            where: the origin of the labels, for messages.
            ignored: the label that the loss ignores (``ignore_index``).

        Raises:
            UnmatchedError: if a label matches no class, or could match two.
        """
        kind = kind_of(values)
        if kind == "number":
            if not self.may_be_named_by_numbers:
                return self._of_class_numbers(values, where, ignored)
            found, inverse = np.unique(np.asarray(values, None if values.dtype.kind in "iuf" else np.float64),
                                       return_inverse=True)  # fmt: skip
            each = found.tolist()
            numbers: list[int | None] = [self._numbered_as(v, where) if v != ignored else ignored for v in each]
            if new := [_spelled(v) for v, number in zip(each, numbers, strict=True) if number is None]:
                raise self._new(new, [_spelled(v) for v in each], where)
            return np.array(numbers, np.int64)[inverse.reshape(-1)]
        if kind == "truth":
            return self._of_truth(values.astype(bool), where)
        texts = text_of(values)
        numbered = self._of_texts(sorted(set(texts.tolist())), where, ignored)
        return np.array([numbered[text] for text in texts.tolist()], np.int64)

    def _of_class_numbers(self, values: Array, where: str, ignored: int | None) -> Array:
        """Return class indices as int64 after a check; numbers with fractions are returned unchanged."""
        array = values if values.dtype.kind in "iuf" else np.asarray(values, np.float64)
        if array.dtype.kind == "f" and not (array == np.round(array)).all():
            return array
        numbers = array.astype(np.int64)
        self._check_order_of_truth(where)
        beyond = numbers >= len(self.names) if self.names else np.zeros(0, bool)
        if ignored is not None and beyond.any():
            beyond &= numbers != ignored
        if beyond.any():
            raise UnmatchedError(
                f"{where} has the class index {numbers[beyond][0]}, but the model has {len(self.names)} classes "
                f"({listed(self.names)}), numbered from 0; drop such samples, or use class names"
            )
        return numbers

    def _of_truth(self, values: Array, where: str) -> Array:
        if not self.names:
            return values.astype(np.int64)
        meant = [[i for i, name in enumerate(self.names) if TRUTH.get(name.casefold()) == truth] for truth in (0, 1)]
        for truth, places in enumerate(meant):
            if len(places) != 1 and (values == bool(truth)).any():
                raise UnmatchedError(
                    f"{where} has booleans, and {bool(truth)} matches no class; the model has {listed(self.names)}; "
                    "use class names as labels"
                )
        return np.where(values, meant[1][0] if meant[1] else 0, meant[0][0] if meant[0] else 0).astype(np.int64)

    def _of_texts(self, found: Sequence[str], where: str, ignored: int | None) -> dict[str, int]:
        """Return the class index of each distinct label in ``found``."""
        whole = {text: _whole(text) for text in found}
        are_whole = None not in whole.values()
        if not self.names:
            if are_whole:
                return {text: int(number or 0) for text, number in whole.items()}
            if all(text.casefold() in WORDS_OF_TRUTH for text in found):
                return {text: TRUTH[text.casefold()] for text in found}
            raise UnmatchedError(
                f"{where} has the {_classes(found)}, but the model was trained on class indices, without names",
                remedy="use indices from 0 on, or set the names first: trainer.names = "
                "gradgraph.DataNames(classes={target: names})",
                shell="use indices from 0 on",
            )
        as_numbers = are_whole and (self.numbered or not self.look_like_numbers)
        if as_numbers:
            twofold = [text for text in found if self._places.get(text, whole[text]) != whole[text]]
            if twofold:
                raise UnmatchedError(
                    f"{where} has the {_classes(twofold)}, which may be a name or an index, as the model "
                    f"has {listed(self.names)} and was trained on their indices; use whole numbers as labels"
                )
            numbers = self._of_class_numbers(np.array(list(whole.values()), np.int64), where, ignored)
            return dict(zip(found, numbers.tolist(), strict=True))
        known = {text: self._called(text) for text in found}
        if ignored is not None and str(ignored) in known:
            known[str(ignored)] = ignored
        if new := [text for text, number in known.items() if number is None]:
            raise self._new(new, found, where)
        return {text: number for text, number in known.items() if number is not None}

    # --- single labels ----------------------------------------------------------------------------------------

    @cached_property
    def _places(self) -> dict[str, int]:
        return {name: i for i, name in enumerate(self.names)}

    def _called(self, text: str) -> int | None:
        """Return the index of the class named ``text``, or None if there is no such class."""
        if text in self._places:
            return self._places[text]
        if text.casefold() in WORDS_OF_TRUTH:
            alike = [i for i, name in enumerate(self.names) if name.casefold() == text.casefold()]
            return alike[0] if len(alike) == 1 else None
        whole = _whole(text)
        return None if whole is None else self._places.get(str(whole))

    def _numbered_as(self, value: float, where: str) -> int | None:
        """Return the index of the class whose name is the number ``value``, or None if there is no such class."""
        equal = [i for i, name in enumerate(self.names) if _number(name) == value]
        if len(equal) > 1:
            raise UnmatchedError(
                f"{where} has the number {_spelled(value)}, which may be "
                f"the {_classes([self.names[i] for i in equal])}; use text labels"
            )
        spelled = {_spelled(value), repr(float(value))}
        return equal[0] if equal and self.names[equal[0]] in spelled else None

    def _check_order_of_truth(self, where: str) -> None:
        """Raise UnmatchedError if "true" has class index 0 and "false" 1, so that 0 and 1 in the data are ambiguous."""
        if self.numbered or [TRUTH.get(name.casefold()) for name in self.names] != [1, 0]:
            return
        raise UnmatchedError(
            f"{where} has whole numbers, which are ambiguous, as the classes {listed(self.names)} have the indices "
            "0 and 1; use class names as labels"
        )

    def _new(self, new: Sequence[str], found: Sequence[str], where: str) -> UnmatchedError:
        missing = [name for name in self.names if name not in set(found)]
        lacks = f", and lacks the {_classes(missing)}" if missing else ""
        return UnmatchedError(
            f"{where} has the new {_classes(new)}{lacks}; the model has {listed(self.names)}; drop such samples, or "
            "use the class names of the training data"
        )


# --- determining classes -----------------------------------------------------------------------------------


def labelled(
    values: Array,
    spec: TensorSpec,
    known: Classes | None,
    where: str,
    *,
    own: Sequence[str] = (),
    whole: bool = True,
) -> tuple[Array, Classes]:
    """Return the class index of each label of a target, and its classes: ``known``, or those found in the labels.

    Args:
        values: text, booleans or numbers [n].
        known: the classes that the model was trained on; None before the first training.
        where: the origin of the labels, for messages.
        own: the class names that the source lists, in the order of indices from 0.
        whole: whether ``values`` are all labels of the data. If so, positive whole numbers are class names if some
            are too large for class indices, and there are no more distinct numbers than classes.

    Raises:
        UnmatchedError: if a label matches no known class.
        DataError: if labels are missing, or the model has fewer classes.
    """
    ignored = spec.ignore_index if isinstance(spec, TargetSpec) else None
    check_whole(values, where)
    if own and kind_of(values) == "number":
        return _by_own_names(values, spec, known, where, own, ignored)
    if known is None:
        known = _found(values, spec, where, ignored, whole)
    return known.of_values(values, where, ignored), known


def classes_for(spec: TensorSpec, found: Sequence[str], known: Classes | None, where: str) -> Classes:
    """Return ``known``, or new classes with the names ``found`` if there are no known ones.

    Raises:
        UnmatchedError: if a name matches no known class.
        DataError: if the model has fewer classes.
    """
    if known is not None:
        known.of_names(found, where)
        return known
    most = spec.classes if isinstance(spec, TargetSpec) else None
    if most is None and len(spec.shape) == 2 and isinstance(spec.shape[1], int) and spec.shape[1] > 1:
        most = spec.shape[1]  # for targets that are class probabilities
    if most is not None and len(found) > most:
        raise DataError(
            f"{where} has {len(found)} classes ({listed(found)}), but the model's labels range from 0 to {most - 1}",
            remedy="give it a head with as many outputs (gradgraph.new_head), or drop samples",
            shell="give it a head with as many outputs (gradgraph surgery --new-head), or drop samples",
        )
    return Classes(tuple(found))


def warn_of_missing(found: Sequence[str], known: Classes, where: str) -> None:
    """Log a warning for known classes that do not occur in ``found``."""
    there = set(known.of_names(found, where).tolist()) if known.names else set()
    if missing := [name for i, name in enumerate(known.names) if i not in there]:
        log.warning("%s lacks the %s, known from training", where, _classes(missing))


def kind_of(values: Array) -> str:
    """Return the kind of labels: "number", "truth" (booleans) or "text"."""
    if values.dtype.kind != "O":
        return {"b": "truth", "i": "number", "u": "number", "f": "number"}.get(values.dtype.kind, "text")
    kinds = {type(value) for value in values.tolist()}
    if kinds and all(issubclass(kind, bool | np.bool_) for kind in kinds):
        return "truth"
    are_numbers = all(issubclass(kind, int | float | np.number) and not issubclass(kind, bool) for kind in kinds)
    return "number" if kinds and are_numbers else "text"


def _by_own_names(
    values: Array, spec: TensorSpec, known: Classes | None, where: str, own: Sequence[str], ignored: int | None
) -> tuple[Array, Classes]:
    """Return class indices and classes for numeric labels whose source lists class names (``own``)."""
    if known is not None and not known.names:
        return known.of_values(values, where, ignored), known
    classes = classes_for(spec, own, known, where)
    classes = Classes(classes.names, numbered=True) if known is None else classes
    numbers = classes.of_names(own, where)
    given = Classes(tuple(own), numbered=True).of_values(values, where, ignored)
    inside = (given >= 0) & (given < len(own))
    return np.where(inside, numbers[np.where(inside, given, 0)], given), classes


def _found(values: Array, spec: TensorSpec, where: str, ignored: int | None, whole: bool) -> Classes:
    """Return the classes that occur in the labels, if no classes are known."""
    kind = kind_of(values)
    if kind == "truth":
        return Classes(("False", "True")) if takes_labels(spec) else Classes()
    names = sorted(set(text_of(values).tolist())) if kind == "text" else []
    if names and all(name.casefold() in WORDS_OF_TRUTH for name in names):
        return classes_for(spec, _both_of_truth(names), None, where)
    numbers: set[Any] = {_whole(name) for name in names}
    if kind == "number" or None not in numbers:
        if not whole or not takes_labels(spec):
            return Classes()
        numbers = numbers or set(np.unique(np.asarray(values, np.float64)).tolist())
        if not _are_names(numbers, spec, ignored):
            return Classes()
        names = [_spelled(number) for number in sorted(numbers)]
    found = classes_for(spec, names, None, where)
    level = logging.INFO if kind == "text" and None in numbers else logging.WARNING  # numbers might be mistakes
    log.log(level, "the classes of %s are %s, from 0 on", where, listed(found.names))
    return found


def _are_names(numbers: Collection[Any], spec: TensorSpec, ignored: int | None) -> bool:
    """Whether numeric labels are class names: positive whole numbers, of which some are too large for a class index."""
    most = spec.classes if isinstance(spec, TargetSpec) else None
    if most is None or len(numbers) > most or not all(float(n).is_integer() and n > 0 for n in numbers):
        return False
    return any(n >= most and n != ignored for n in numbers)


def _both_of_truth(names: Sequence[str]) -> list[str]:
    """Return the class names "false" and "true", in upper or lower case like the ones in ``names``."""
    by_word = {name.casefold(): name for name in names}
    if len(by_word) < len(names):
        return list(names)
    alike = next(iter(names))
    other = {word: word.upper() if alike.isupper() else word.title() if alike.istitle() else word
             for word in WORDS_OF_TRUTH}  # fmt: skip
    return [by_word.get(word, other[word]) for word in WORDS_OF_TRUTH]


def check_whole(values: Array, where: str) -> None:
    """Raise DataError if labels are missing, or are lists or dicts."""
    check_cells(where, values)
    kind, gaps = values.dtype.kind, 0
    if kind == "O":
        gaps = sum(map(is_gap, values.tolist()))
    elif kind in "fMm":
        gaps = int((np.isnan if kind == "f" else np.isnat)(values).sum())
    if gaps:
        raise DataError(f"{where} lacks {gaps} of {len(values)} labels; fill in or drop those rows")


def _whole(text: str) -> int | None:
    """Parse a whole number, such as "7" or "7.0"; None for other text, including numbers with leading zeros."""
    found = _WHOLE.fullmatch(text)
    return int(found[1]) if found and len(text) < 20 else None


def _number(name: str) -> float | None:
    """Parse a finite number; return None for other text."""
    try:
        number = float(name)
    except ValueError:
        return None
    return number if math.isfinite(number) else None


def _spelled(value: Any) -> str:
    return str(int(value)) if float(value).is_integer() else repr(value)


def _classes(names: Sequence[str]) -> str:
    return f"{'class' if len(names) == 1 else 'classes'} {listed(names)}"

"""Predicted classes and their probabilities, from scores and class names."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from gradgraph.runtime.data.batch import Array
from gradgraph.step.data_names import DataNames


@dataclass(frozen=True)
class Scores:
    """An output with a score for each class of a target, [samples, classes]; or one for the second of two, [samples] or
    [samples, 1].

    Attributes:
        target, output: their names.
        classes: the names of the classes.
        computed: probabilities are this function of the scores: Softmax, Sigmoid, or "Identity" where they are
            probabilities already; empty where scores stand for none.
        single: it is a score for the second of two classes.
    """

    target: str
    output: str
    classes: tuple[str, ...]
    computed: str = ""
    single: bool = False

    @property
    def has_probabilities(self) -> bool:
        """Whether the scores stand for probabilities."""
        return bool(self.computed)

    @property
    def middle(self) -> float:
        """The second of two classes is called where its only score is above this."""
        return 0.5 if self.computed == "Identity" else 0.0

    def numbers(self, scores: Array) -> Array:
        """The numbers of the classes with the highest score: int64 [samples]."""
        found: Array = (scores.reshape(len(scores)) > self.middle).astype(np.int64) if self.single else scores.argmax(1)
        return found

    def called(self, scores: Array) -> Array:
        """The names of the classes with the highest score: [samples]."""
        names: Array = np.array(self.classes)[self.numbers(scores)]
        return names

    def labels(self, target: Array) -> Array:
        """The numbers of the classes that samples are of: [samples]; of shares of the classes, the largest."""
        if self.single:
            found: Array = (target.reshape(len(target)) > 0.5).astype(np.int64)
            return found
        return target.argmax(1) if target.ndim == 2 else target

    def probabilities(self, scores: Array) -> Array:
        """The probability of each class: float32 [samples, classes]."""
        high = np.asarray(scores, np.float64)
        if self.single:
            yes = high.reshape(len(high), 1)
            if self.computed == "Sigmoid":
                yes = np.exp(-np.logaddexp(0.0, -yes))
            high = np.concatenate([1 - yes, yes], 1)
        elif self.computed == "Softmax":
            high = np.exp(high - high.max(axis=1, keepdims=True))
            high /= high.sum(axis=1, keepdims=True)
        return high.astype(np.float32)


def scores_in(names: DataNames, outputs: Mapping[str, Array], probable: Collection[str]) -> list[Scores]:
    """The scores for each target whose classes have names, among the outputs of some samples.

    Args:
        names: of the classes.
        outputs: of a batch, by name.
        probable: those outputs that are probabilities.
    """
    return scores_of(names, {n: a.shape for n, a in outputs.items() if a.dtype.kind == "f"}, probable)


def scores_of(names: DataNames, shapes: Mapping[str, Sequence[object]], probable: Collection[str]) -> list[Scores]:
    """Return the scores for each target, from the shapes of the floating outputs."""
    found = []
    for target, classes in names.classes.items():
        whole = [name for name, shape in shapes.items() if tuple(shape[1:]) == (len(classes),)]
        output = output_of(target, whole)
        single = output is None and len(classes) == 2
        if single:
            output = _single_of(target, names, shapes, probable)
        if output is not None:
            computed = "Softmax" if target in names.softmax else "Sigmoid" if single and target in names.sigmoid else ""
            computed = "Identity" if output in probable else computed
            found.append(Scores(target, output, tuple(classes), computed, single))
    return found


def _single_of(
    target: str, names: DataNames, shapes: Mapping[str, Sequence[object]], probable: Collection[str]
) -> str | None:
    """The output with a score for the second of two classes: that which the target is called after, or the only one."""
    fitting = [
        name
        for name, shape in shapes.items()
        if len(shape) and tuple(shape[1:]) in ((), (1,)) and (target in names.sigmoid or name in probable)
    ]
    own = [name for name in fitting if target == f"{name}_target"]
    return next(iter(own or (fitting if len(fitting) == 1 else [])), None)


def output_of(target: str, fitting: Sequence[str]) -> str | None:
    """The output with a score for each class, of those ``fitting``: of several losses, that which the target is called
    after.
    """
    own = [name for name in fitting if target == f"{name}_target"]
    return next(iter([*own, *fitting]), None)


def names_of_classes(
    names: DataNames, batch: Mapping[str, Array], outputs: Mapping[str, Array], probable: Collection[str]
) -> tuple[str, str]:
    """The names of the class of the only sample of a batch, and of the class that the model takes it for: of the first
    target whose classes have names; no text where there is none.
    """
    for one in scores_in(names, outputs, probable):
        label = batch.get(one.target)
        if label is not None and (label.shape == (1, len(one.classes)) or (one.single and label.size == 1)):
            label = one.labels(label)
        if label is not None and label.shape == (1,) and 0 <= label[0] < len(one.classes):
            return one.classes[int(label[0])], str(one.called(outputs[one.output])[0])
    return "", ""

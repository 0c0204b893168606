"""Predicted classes and their probabilities, from a model's class scores."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from gradgraph.data.arrays.batch import Array
from gradgraph.data.record.data_names import DataNames


@dataclass(frozen=True)
class Scores:
    """A model output with class scores for a target.

    The scores have the shape [samples, classes]; for two classes, also [samples] or [samples, 1], with a single score
    for the second class.

    Attributes:
        target, output: names of the target and of the output.
        classes: class names.
        computed: the function from scores to probabilities: "Softmax", "Sigmoid", or "Identity" if the output already
            contains probabilities; empty if scores do not determine probabilities.
        single: whether the output has a single score, that of the second of two classes.
    """

    target: str
    output: str
    classes: tuple[str, ...]
    computed: str = ""
    single: bool = False

    @property
    def has_probabilities(self) -> bool:
        """Whether probabilities can be computed from the scores."""
        return bool(self.computed)

    @property
    def middle(self) -> float:
        """The threshold of a single score, above which the second class is predicted."""
        return 0.5 if self.computed == "Identity" else 0.0

    def numbers(self, scores: Array) -> Array:
        """Return the indices of the predicted classes: int64 [samples]."""
        found: Array = (scores.reshape(len(scores)) > self.middle).astype(np.int64) if self.single else scores.argmax(1)
        return found

    def called(self, scores: Array) -> Array:
        """Return the names of the predicted classes: [samples]."""
        names: Array = np.array(self.classes)[self.numbers(scores)]
        return names

    def labels(self, target: Array) -> Array:
        """Return the class index of each sample, [samples]; for class probabilities, the index of the largest."""
        if self.single:
            found: Array = (target.reshape(len(target)) > 0.5).astype(np.int64)
            return found
        return target.argmax(1) if target.ndim == 2 else target

    def probabilities(self, scores: Array) -> Array:
        """Return the probability of each class: float32 [samples, classes]."""
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
    """Return the scores for each target with class names, from the outputs of a batch.

    ``probable`` are the names of outputs that are probabilities.
    """
    return scores_of(names, {n: a.shape for n, a in outputs.items() if a.dtype.kind == "f"}, probable)


def scores_of(names: DataNames, shapes: Mapping[str, Sequence[object]], probable: Collection[str]) -> list[Scores]:
    """Return the scores for each target with class names, from the ``shapes`` of the floating-point outputs by name."""
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
    """Return the output with a single score per sample, for the second of two classes; None if unclear.

    This is the output ``<output>`` for the target ``<output>_target``, or else the only output of a suitable shape.
    """
    fitting = [
        name
        for name, shape in shapes.items()
        if len(shape) and tuple(shape[1:]) in ((), (1,)) and (target in names.sigmoid or name in probable)
    ]
    own = [name for name in fitting if target == f"{name}_target"]
    return next(iter(own or (fitting if len(fitting) == 1 else [])), None)


def output_of(target: str, fitting: Sequence[str]) -> str | None:
    """Return the output ``<output>`` for a target named ``<output>_target``, or else the first output.

    Only outputs in ``fitting`` count. None if it is empty.
    """
    own = [name for name in fitting if target == f"{name}_target"]
    return next(iter([*own, *fitting]), None)


def names_of_classes(
    names: DataNames, batch: Mapping[str, Array], outputs: Mapping[str, Array], probable: Collection[str]
) -> tuple[str, str]:
    """Return the names of the true and the predicted class of the only sample in a batch.

    They are for the first target with class names and a valid label; without such a target, both are empty.
    """
    for one in scores_in(names, outputs, probable):
        label = batch.get(one.target)
        if label is not None and (label.shape == (1, len(one.classes)) or (one.single and label.size == 1)):
            label = one.labels(label)
        if label is not None and label.shape == (1,) and 0 <= label[0] < len(one.classes):
            return one.classes[int(label[0])], str(one.called(outputs[one.output])[0])
    return "", ""

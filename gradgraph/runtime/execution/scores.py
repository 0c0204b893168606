"""Which class a model calls a sample, and how probable it is: scores by the names of classes."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from gradgraph.runtime.data.batch import Array
from gradgraph.step.data_names import DataNames


@dataclass(frozen=True)
class Scores:
    """An output [samples, classes] with a score for each class of a target.

    Attributes:
        target, output: their names.
        classes: the names of the classes.
        softmax: probabilities are the Softmax of the scores.
        probable: the scores are probabilities already.
    """

    target: str
    output: str
    classes: tuple[str, ...]
    softmax: bool = False
    probable: bool = False

    @property
    def has_probabilities(self) -> bool:
        """Whether the scores stand for probabilities."""
        return self.softmax or self.probable

    def called(self, scores: Array) -> Array:
        """The names of the classes with the highest score: [samples]."""
        names: Array = np.array(self.classes)[scores.argmax(axis=1)]
        return names

    def probabilities(self, scores: Array) -> Array:
        """The probability of each class: float32 [samples, classes]."""
        high = np.asarray(scores, np.float64)
        if not self.probable:
            high = np.exp(high - high.max(axis=1, keepdims=True))
            high /= high.sum(axis=1, keepdims=True)
        return high.astype(np.float32)


def scores_in(names: DataNames, outputs: Mapping[str, Array], probable: Collection[str] = ()) -> list[Scores]:
    """The scores for each target whose classes have names, among the outputs of some samples.

    Args:
        names: of the classes.
        outputs: of a batch, by name.
        probable: those outputs that are probabilities.
    """
    found = []
    for target, classes in names.classes.items():
        fitting = [n for n, array in outputs.items() if array.dtype.kind == "f" and array.shape[1:] == (len(classes),)]
        output = output_of(target, fitting)
        if output is not None:
            found.append(Scores(target, output, tuple(classes), target in names.softmax, output in probable))
    return found


def output_of(target: str, fitting: Sequence[str]) -> str | None:
    """The output with a score for each class, of those ``fitting``: of several losses, that which the target is called
    after.
    """
    own = [name for name in fitting if target == f"{name}_target"]
    return next(iter([*own, *fitting]), None)


def names_of_classes(names: DataNames, batch: Mapping[str, Array], outputs: Mapping[str, Array]) -> tuple[str, str]:
    """The names of the class of the only sample of a batch, and of the class that the model takes it for: of the first
    target whose classes have names; no text where there is none.
    """
    for one in scores_in(names, outputs):
        label = batch.get(one.target)
        if label is not None and label.shape == (1, len(one.classes)):  # the share of each class
            label = label.argmax(axis=1)
        if label is not None and label.shape == (1,) and 0 <= label[0] < len(one.classes):
            return one.classes[int(label[0])], str(one.called(outputs[one.output])[0])
    return "", ""

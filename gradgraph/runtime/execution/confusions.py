"""Confused classes of a classifier, with example samples and pictures."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from gradgraph.data.arrays.batch import Array, on_host
from gradgraph.data.images.image_form import pictured
from gradgraph.data.record.data_names import DataNames
from gradgraph.data.sources.sources import Indexed, Source
from gradgraph.errors import DataError, shown
from gradgraph.runtime.execution.binding import released
from gradgraph.runtime.execution.class_table import ClassTable
from gradgraph.runtime.execution.scores import Scores, scores_in
from gradgraph.runtime.execution.target_losses import is_yes_or_no, with_activations
from gradgraph.runtime.saved.printed import Markup, html_table, image_markup

if TYPE_CHECKING:
    from gradgraph.runtime.execution.step_session import StepSession

TINY = 1e-12  # lower values are not probabilities


@dataclass(frozen=True, eq=False)
class Called:
    """A sample with its predicted class.

    Attributes:
        index: position of the sample in the data, from 0.
        label, called: names of the true class and of the predicted class.
        probability: probability of the predicted class; NaN if the scores do not determine it.
        loss: −log of the probability of the true class; without probabilities, the score of the predicted class minus
            the score of the true class.
        file: path of the sample's file, if each sample is a file.
        picture: a small PNG; empty if the sample is not an image.
    """

    index: int
    label: str
    called: str
    probability: float
    loss: float
    file: str = ""
    picture: bytes = b""

    @property
    def markup(self) -> Markup:
        """The picture of the sample as an HTML image; empty without a picture."""
        return image_markup(self.picture)

    def __str__(self) -> str:
        file = f" ({shown(self.file)})" if self.file else ""
        sure = "" if np.isnan(self.probability) else f", probability {self.probability:.3f}"
        return f"sample {self.index:,}{file}: is '{shown(self.label)}', called '{shown(self.called)}'{sure}"


@dataclass(frozen=True, eq=False)
class Confusion:
    """A pair of confused classes.

    Attributes:
        label, called: names of the true class and of the predicted class.
        count: the number of samples of ``label`` that were predicted as ``called``.
        samples: among these, the samples with the largest losses.
    """

    label: str
    called: str
    count: int
    samples: tuple[Called, ...]


@dataclass(frozen=True, eq=False)
class Confusions:
    """The mistakes of a classifier, printed as the most frequent pairs; in a notebook, with pictures.

    Attributes:
        table: the confusion matrix, with precision, recall and F1 of each class.
        pairs: the most frequently confused classes.
        worst: the samples with the largest losses.
    """

    table: ClassTable
    pairs: tuple[Confusion, ...]
    worst: tuple[Called, ...]

    def __str__(self) -> str:
        lines = [f"accuracy {self.table.accuracy:.4f}"]
        for pair in self.pairs:
            lines.append(f"called '{shown(pair.called)}', and is '{shown(pair.label)}': {pair.count:,}")
            lines += [f"  {one}" for one in pair.samples]
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        rows = [
            [p.label, p.called, f"{p.count:,}", Markup("".join(one.markup for one in p.samples))] for p in self.pairs
        ]
        return html_table(["is", "called", "how often", "samples"], rows)


@dataclass
class Judged:
    """The true and predicted class indices, probabilities and losses of all samples of the data, each [samples].

    Attributes:
        labels, called: indices of the true and predicted classes.
        probability, loss: as for ``Called``.
    """

    classes: tuple[str, ...]
    labels: Array
    called: Array
    probability: Array
    loss: Array

    @property
    def counted(self) -> Array:
        """A mask [samples]: True for each sample with a valid class label."""
        return (self.labels >= 0) & (self.labels < len(self.classes))

    def table(self) -> ClassTable:
        size, there = len(self.classes), self.counted
        matrix = np.zeros((size, size), np.int64)
        np.add.at(matrix, (self.labels[there], self.called[there]), 1)
        return ClassTable.of(matrix, self.classes)

    def worst(self, count: int, label: int | None = None, called: int | None = None) -> list[int]:
        """Return the indices of the ``count`` samples with the largest losses, largest first.

        With ``label``, only samples of this class that are predicted as ``called`` are considered.
        """
        of_pair = self.counted if label is None else (self.labels == label) & (self.called == called)
        there = np.flatnonzero(of_pair)
        return [int(i) for i in there[np.argsort(-self.loss[there], kind="stable")][:count]]

    def sample(self, i: int, file: str, picture: bytes) -> Called:
        names = self.classes
        label, called = names[int(self.labels[i])], names[int(self.called[i])]
        return Called(i, label, called, float(self.probability[i]), float(self.loss[i]), file, picture)


def _judged(labels: Array, array: Array, scores: Scores) -> tuple[Array, Array, Array, Array]:
    """Return the labels, predicted classes, probabilities and losses of a batch, as in ``Judged``, from its scores."""
    labels = scores.labels(labels)
    rows, called = np.arange(len(array)), scores.numbers(array)
    own = np.clip(labels, 0, len(scores.classes) - 1)
    if not scores.has_probabilities:
        return labels, called, np.full(len(array), np.nan), array[rows, called] - array[rows, own]
    shares = scores.probabilities(array)
    return labels, called, shares[rows, called], -np.log(np.maximum(shares[rows, own], TINY))


def confusions_of(session: StepSession, source: Source, most: int, examples: int, k: int, averaged: bool) -> Confusions:
    """Return the confused samples, as documented in ``Trainer.confusions``; raises DataError."""
    target, names = _target_of(session, source)
    judged = _judge(session, source, target, names, averaged)
    table = judged.table()
    numbers = {name: i for i, name in enumerate(table.names)}
    confused = table.confused(most)
    of_pairs = [judged.worst(examples, numbers[label], numbers[called]) for label, called, _ in confused]
    worst = judged.worst(k)
    wanted = sorted({n for of_pair in (*of_pairs, worst) for n in of_pair})
    rows = source.at([[n] for n in wanted]) if isinstance(source, Indexed) and not source.files else iter(())
    samples = {}
    for n in wanted:
        file = str(source.files[n]) if source.files else ""
        row = {name: np.asarray(array)[0] for name, array in next(rows, {}).items()}
        samples[n] = judged.sample(n, file, pictured(file, row, names.images))
    pairs = [
        Confusion(*pair, tuple(samples[n] for n in of_pair)) for pair, of_pair in zip(confused, of_pairs, strict=True)
    ]
    return Confusions(table, tuple(pairs), tuple(samples[n] for n in worst))


def _judge(session: StepSession, source: Source, target: str, names: DataNames, averaged: bool) -> Judged:
    """Run the model on all samples; return their true and predicted classes, probabilities and losses.

    Raises:
        DataError: if the data are empty, or the target does not have one class per sample.
    """
    bound, checker = session.prediction(averaged), session.data.checker
    found: list[Scores] = []

    def batches() -> Iterator[tuple[Array, Array]]:
        with released(bound, checker):
            for i, batch in enumerate(source.batches(0)):
                try:
                    feeds = {name: on_host(feed) for name, feed in checker(batch).items()}
                except DataError as error:
                    raise error.at(f"batch {i}") from None
                outputs = bound.compute({name: feed for name, feed in feeds.items() if name in bound.inputs})
                found[:] = found or [
                    one for one in scores_in(names, outputs, session.data.probable) if one.target == target
                ]
                if not found or feeds[target].ndim > 2 or _has_several(feeds[target], found[0]):
                    raise _no_classifier(target)
                yield feeds[target], np.array(outputs[found[0].output])

    parts = [_judged(labels, scores, found[0]) for labels, scores in batches()]
    return Judged(found[0].classes, *(np.concatenate(column) for column in zip(*parts, strict=True)))


def _has_several(labels: Array, scores: Scores) -> bool:
    """Whether a row of class probabilities in ``labels`` has several classes above 0.5, or none above 0."""
    if labels.ndim < 2 or scores.single:
        return False
    return bool(((labels > 0.5).sum(1) > 1).any() or (labels.max(1, initial=0) <= 0).any())


def _no_classifier(target: str) -> DataError:
    return DataError(
        f"confusions need one class per sample, and '{shown(target)}' is not a target of this kind",
        remedy="print the samples with the largest losses: trainer.worst(data)",
        shell="print the samples with the largest losses: gradgraph evaluate --worst 10",
    )


def _target_of(session: StepSession, source: Source) -> tuple[str, DataNames]:
    """Return the first target with classes, and data names with its class names, or indices if it has none.

    Raises:
        DataError: if no target has classes.
    """
    names, targets = session.data.names.updated(source.names), session.manifest.targets
    spec = next((spec for spec in targets if spec.name in names.classes), None)
    spec = spec or next((spec for spec in targets if spec.classes is not None), None)
    spec = spec or next((spec for spec in targets if is_yes_or_no(spec, session.manifest)), None)
    if spec is None:
        raise _no_classifier(targets[0].name if targets else "target")
    classes = names.classes.get(spec.name) or [str(i) for i in range(spec.classes or 2)]
    return spec.name, with_activations(replace(names, classes={spec.name: classes}), session.manifest)

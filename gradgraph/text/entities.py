"""Entities in tagged words, and their precision, recall and F1 score, as computed by the package seqeval."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from gradgraph.data.texts.text_table import TextTable
from gradgraph.errors import DataError, shown
from gradgraph.runtime.trainer import Trainer

OUTSIDE = "O"
BATCH_SIZE = 32

_SAME = {"L": "E", "U": "S"}  # BILOU's prefixes for last and unit, as those of BIOES for end and single

Entity = tuple[int, str, int, int]  # index of the sentence, kind, index of the first and of the last word


@dataclass(frozen=True)
class Score:
    """Counts of entities.

    Attributes:
        there: entities in the data.
        found: entities predicted.
        right: predicted entities that are correct.
    """

    there: int
    found: int
    right: int

    @property
    def precision(self) -> float:
        """The fraction of predicted entities that are correct; 0 if none are predicted."""
        return self.right / self.found if self.found else 0.0

    @property
    def recall(self) -> float:
        """The fraction of entities in the data that were found; 0 if the data have none."""
        return self.right / self.there if self.there else 0.0

    @property
    def f1(self) -> float:
        """The harmonic mean of precision and recall."""
        return 2 * self.right / (self.there + self.found) if self.there + self.found else 0.0

    def as_data(self) -> dict[str, float]:
        """Return plain data for JSON."""
        return {"precision": self.precision, "recall": self.recall, "f1": self.f1, "support": self.there}


@dataclass(frozen=True)
class EntityScores:
    """Scores of all entities and of each kind, printed as a table.

    Attributes:
        all: all kinds together (seqeval's "micro" averages).
        kinds: scores by kind.
    """

    all: Score
    kinds: Mapping[str, Score]

    @property
    def precision(self) -> float:
        """The precision of all kinds together."""
        return self.all.precision

    @property
    def recall(self) -> float:
        """The recall of all kinds together."""
        return self.all.recall

    @property
    def f1(self) -> float:
        """F1 of all kinds together."""
        return self.all.f1

    def as_data(self) -> dict[str, Any]:
        """Return plain data for JSON."""
        return {"all": self.all.as_data(), **{kind: score.as_data() for kind, score in self.kinds.items()}}

    def __str__(self) -> str:
        width = max(8, *(len(shown(kind)) for kind in self.kinds)) if self.kinds else 8
        rows = [f"{'entities':{width}} precision  recall      f1  support"]
        for kind, score in {**self.kinds, "all": self.all}.items():
            numbers = f"{score.precision:9.3f} {score.recall:7.3f} {score.f1:7.3f} {score.there:8,}"
            rows.append(f"{shown(kind):{width}} {numbers}")
        return "\n".join(rows)


def entities_in(tags: Sequence[str]) -> Iterator[tuple[str, int, int]]:
    """Yield the kind, first and last word index of each entity in the tags of a sentence.

    Tags are ``O``, or a prefix and a kind: ``B-PER`` begins an entity, and ``I-PER`` continues it or begins one after
    another kind; ``E-`` and ``L-`` end an entity, ``S-`` and ``U-`` are a whole one. These are the rules of conlleval
    and of seqeval's default mode (Ramshaw and Marcus, 1995; Nakayama, 2018).
    """
    before, kind_before, first = OUTSIDE, "", 0
    for i, tag in enumerate([*tags, OUTSIDE]):
        prefix, _, kind = tag.partition("-")
        prefix, kind = _SAME.get(prefix, prefix), kind or "_"
        if _ends(before, prefix, kind_before, kind):
            yield kind_before, first, i - 1
        if _begins(before, prefix, kind_before, kind):
            first = i
        before, kind_before = prefix, kind


def _ends(before: str, now: str, kind_before: str, kind: str) -> bool:
    """Whether an entity ends between two words, by the prefixes (``before``, ``now``) and kinds of their tags."""
    if before in (OUTSIDE, ""):
        return False
    return before in ("E", "S") or now in ("B", "S", OUTSIDE, "") or kind_before != kind


def _begins(before: str, now: str, kind_before: str, kind: str) -> bool:
    """Whether an entity begins at the second of two words, by the prefixes and kinds of their tags."""
    if now in (OUTSIDE, ""):
        return False
    return now in ("B", "S") or before in ("E", "S", OUTSIDE, "") or kind_before != kind


def entity_scores(there: Sequence[Sequence[str]], found: Sequence[Sequence[str]]) -> EntityScores:
    """Compute entity scores of predicted tags; an entity is correct if its words and its kind are correct.

    Args:
        there: the true tags of the words of each sentence.
        found: the predicted tags.

    Raises:
        DataError: the numbers of tags of a sentence differ.
    """
    if [len(tags) for tags in there] != [len(tags) for tags in found]:
        raise DataError("true and predicted tags of a sentence differ in number; give one tag per word in both")
    sets = [{(i, *entity) for i, tags in enumerate(every) for entity in entities_in(tags)} for every in (there, found)]
    counts = [Counter(kind for _, kind, _, _ in entities) for entities in (*sets, sets[0] & sets[1])]
    kinds = sorted({*counts[0], *counts[1]})
    of_kinds = {kind: Score(counts[0][kind], counts[1][kind], counts[2][kind]) for kind in kinds}
    return EntityScores(Score(*(sum(count.values()) for count in counts)), of_kinds)


def evaluate_entities(trainer: Trainer, data: TextTable, *, averaged: bool = True) -> EntityScores:
    """Compute a trainer's entity scores on tagged words; truncated words count as tagged ``O``.

    Args:
        trainer: a trainer of a step that classifies tokens.
        data: words with their tags.
        averaged: as for ``Trainer.evaluate``.

    Raises:
        DataError: the model was not trained on words with named tags, or has no output of scores per token.
    """
    names = trainer.names
    if not names.classes or not any("words" in read for read in names.texts.values()):
        raise DataError(
            "entities require tagged words, but this model was trained on other data; train it on a table of words "
            "with their tags"
        )
    specs = {spec.name: spec for spec in trainer.manifest.inputs}
    there, found = list[list[str]](), list[list[str]]()
    tags = data.tags(trainer.manifest.targets[0], names)
    classes = next(iter(names.classes.values()))
    for first in range(0, len(data), BATCH_SIZE):
        rows = range(first, min(first + BATCH_SIZE, len(data)))
        batch = next(data.load(iter([rows]), specs, (), names))
        outputs = trainer.predict(batch, averaged=averaged)
        arrays = outputs.values() if isinstance(outputs, Mapping) else [outputs]
        scores = next((a for a in arrays if a.ndim == 3 and a.shape[2] == len(classes)), None)
        if scores is None:
            raise DataError(
                "the model has no output [texts, tokens, classes], so it cannot tag words; use one that labels tokens"
            )
        given = data.tagged(rows, np.asarray(scores).argmax(axis=2), specs, names)
        found += [[OUTSIDE if tag is None else tag for tag in one] for one in given]
        there += [tags[row] for row in rows]
    return entity_scores(there, found)

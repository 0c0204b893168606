"""Output of ``predict`` and ``evaluate`` for models that tag words: words with predicted tags, and entity scores."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from gradgraph.cli.predictions import Array, Batches

if TYPE_CHECKING:
    from gradgraph.data.record.data_names import DataNames
    from gradgraph.runtime.execution.predictor import Predictor
    from gradgraph.runtime.trainer import Trainer

LOST = "?"  # the tag of a word that was truncated


def tags_words(samples: Any, names: DataNames) -> bool:
    """Whether the model classifies each word of the samples, and its classes have names."""
    is_read = any("words" in read for read in names.texts.values())
    return is_read and bool(names.classes) and hasattr(samples, "tagged")


def with_tags(batches: Batches, samples: Any, predictor: Predictor) -> Batches:
    """Replace the class scores per token in ``batches`` with two text arrays, "words" and "tags", joined by spaces."""
    classes = next(iter(predictor.names.classes.values()))
    form = next(read for read in predictor.names.texts.values() if "words" in read)
    words = samples.columns.lists(samples.form.words or form["words"])

    def every() -> Iterator[tuple[int, Mapping[str, Array]]]:
        done = 0
        for count, found in batches:
            scores = next((n for n, a in found.items() if a.ndim == 3 and a.shape[2] == len(classes)), None)
            if scores is None:
                yield count, found
                continue
            rows = range(done, done + count)
            tags = samples.tagged(rows, found[scores].argmax(axis=2), predictor.specs, predictor.names)
            lines = [" ".join(LOST if tag is None else tag for tag in of_row) for of_row in tags]
            beside = {"words": np.array([" ".join(map(str, words[row])) for row in rows]), "tags": np.array(lines)}
            yield count, {**{name: array for name, array in found.items() if name != scores}, **beside}
            done += count

    return every()


def entities(trainer: Trainer, samples: Any, averaged: bool) -> dict[str, Any]:
    """Return the table of entity scores as ``{"entities": table}``; empty unless classes are tags such as "B-PER"."""
    names = next(iter(trainer.names.classes.values()), ())
    if not tags_words(samples, trainer.names) or not any("-" in name for name in names):
        return {}
    from gradgraph.text import evaluate_entities

    return {"entities": evaluate_entities(trainer, samples, averaged=averaged)}

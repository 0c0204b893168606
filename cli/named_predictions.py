"""Additional arrays of ``gradgraph predict``: the class of each sample, the probabilities of classes, and the file."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain

import numpy as np

from gradgraph.cli.predictions import Array, Batches, Layouts
from gradgraph.graph.builder import Builder
from gradgraph.runtime.execution.joining import Layout
from gradgraph.runtime.execution.predictor import Predictor
from gradgraph.runtime.execution.scores import scores_in

OF_SAMPLES = Layout(axes=(0,))


@dataclass(frozen=True)
class Beside:
    """An array that is written in addition to the outputs of a model.

    Attributes:
        name: the name of the array.
        made: a function that computes the array from the outputs of a batch and the slice of its samples.
        columns: the names of the columns, if there are several.
    """

    name: str
    made: Callable[[Mapping[str, Array], slice], Array]
    columns: tuple[str, ...] = ()


def named(batches: Batches, files: Sequence[str], predictor: Predictor) -> tuple[Batches, Layouts, list[Beside]]:
    """Add arrays to batches of outputs: the class, the probabilities and the file of each sample, if known.

    Args:
        batches: the outputs of at least one batch.
        files: the file of each sample, in order; empty if samples are not files.
        predictor: the predictor that computes the batches.

    Returns:
        The batches with the added arrays, the layouts of all arrays, and the added arrays.
    """
    coming = iter(batches)
    rows, outputs = first = next(coming)
    added = list(_beside(rows, outputs, np.array(files), predictor))

    def every() -> Iterator[tuple[int, Mapping[str, Array]]]:
        done = 0
        for count, found in chain([first], coming):
            yield count, {**found, **{one.name: one.made(found, slice(done, done + count)) for one in added}}
            done += count

    beside = [name for name in outputs if name not in predictor.layouts]  # arrays of with_tags
    return every(), {**predictor.layouts, **dict.fromkeys([*beside, *(one.name for one in added)], OF_SAMPLES)}, added


def _beside(rows: int, outputs: Mapping[str, Array], files: Array, predictor: Predictor) -> Iterator[Beside]:
    free, layouts = Builder(list(outputs)), predictor.layouts
    scores = [s for s in scores_in(predictor.names, outputs, predictor.probable) if len(outputs[s.output]) == rows]
    for one in scores:
        of = f"{one.target}." if len(scores) > 1 else ""
        yield Beside(free.fresh(f"{of}class"), partial(_of_scores, one.output, one.called))
        if one.has_probabilities:
            made = partial(_of_scores, one.output, one.probabilities)
            yield Beside(free.fresh(f"{of}probability"), made, one.classes)
    if len(files) and all(layouts[name].axis([(array, rows)]) is not None for name, array in outputs.items()):
        yield Beside(free.fresh("file"), lambda found, place: files[place])


def _of_scores(output: str, made: Callable[[Array], Array], found: Mapping[str, Array], _: slice) -> Array:
    return made(found[output])

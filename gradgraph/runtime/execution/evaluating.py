"""Evaluation and prediction with a trainer's sessions, and the samples with the largest losses."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from gradgraph.data.arrays.batch import Array, Batch, BatchChecker, Feed, on_host, rows_of
from gradgraph.data.images.image_form import pictured
from gradgraph.data.preprocess.frames import is_table
from gradgraph.data.record.matching import check_same
from gradgraph.data.sources.shares import Spare, shares
from gradgraph.data.sources.sources import Columns, Indexed, Order, Source, as_source, read_data
from gradgraph.data.tables import columns_of
from gradgraph.errors import DataError, listed, shown, suggestion
from gradgraph.runtime.execution.binding import released
from gradgraph.runtime.execution.joining import filled, joined, of_first
from gradgraph.runtime.execution.means import WeightedMeans, pooled
from gradgraph.runtime.execution.scores import names_of_classes
from gradgraph.runtime.execution.step_data import without
from gradgraph.runtime.execution.step_session import StepSession
from gradgraph.runtime.execution.team import ALONE, Team
from gradgraph.runtime.execution.worst import Valued, WorstSample, WorstSamples, largest
from gradgraph.step.finishes import OF_CLASSES, add_sums, finished
from gradgraph.step.manifest import column


class Evaluator:
    """Evaluation and prediction with the sessions of a step. The caller must hold ``turns.lock``."""

    def __init__(self, session: StepSession) -> None:
        self._session, self._data = session, session.data
        self._definition, self._manifest = session.definition, session.manifest
        self._checker, self._parts = session.data.checker, session.parts

    def evaluate(
        self,
        source: Source,
        limit: int | None = None,
        stop: Callable[[], bool] | None = None,
        averaged: bool = True,
        team: Team = ALONE,
    ) -> dict[str, Any]:
        """Return loss and metrics over all ranks of ``team``; see ``Trainer.evaluate``.

        Args:
            limit: the maximum number of batches; None for all.
            stop: called before each batch; True ends the evaluation.
            averaged: whether to use averaged weights if the step has them.
        """
        means, totals = self._totals(source, limit, stop, averaged, team)
        found = {name: value for mean in means.values() for name, value in mean.result().items()}
        return found | finished(self._manifest.columns_of_sums, totals)

    def class_counts(self, source: Source, metric: str | None, averaged: bool) -> Array:
        """Return the confusion matrix from which ``metric`` is computed; see ``Trainer.per_class``."""
        counted = [m.name for m in self._manifest.columns_of_sums if m.finish in OF_CLASSES]
        if not counted:
            raise DataError(
                "the step was built without a metric that counts classes",
                remedy="build it with metrics=['confusion_matrix']",
                shell="build it with --metric confusion_matrix",
            )
        if metric is not None and metric not in counted:
            raise DataError(f"'{shown(metric)}' is not a metric that counts classes; choose {listed(counted)}")
        return self._totals(source, None, None, averaged)[1][metric or counted[0]]

    def worst(self, source: Source, count: int, by: str | None, averaged: bool) -> WorstSamples:
        """Return the samples with the largest losses; see ``Trainer.worst``."""
        fixed = next((s for s in self._manifest.inputs if s.shape and isinstance(s.shape[0], int)), None)
        if fixed is not None and fixed.shape[0] != 1:
            raise DataError(
                f"samples are evaluated one by one, but the input '{shown(fixed.name)}' has a fixed batch size of "
                f"{fixed.shape[0]}; export the model with a dynamic batch axis"
            )
        if by is None and len(self._parts) > 1:
            raise DataError(
                "this step folder has several steps, each with its own loss",
                remedy=f"choose the step whose loss ranks the samples: by='{next(iter(self._parts))}', …",
                shell="remove --worst, or use trainer.worst in Python",
            )
        if by is not None and by not in self._parts:
            raise DataError(f"there is no step '{shown(by)}'{suggestion(by, self._parts)}")
        step = next(iter(self._parts)) if by is None else by
        rows = largest(self._one_by_one(source, step, averaged), count)
        bound, read = self._session.prediction(averaged), self._prediction_checker.specs
        found = WorstSamples()
        for index, value, row in rows:
            outputs = bound.compute({name: row[name] for name in read})
            layouts = ((n, a, self._session.layouts[n].axis([(a, 1)])) for n, a in outputs.items())
            alone = {n: a if axis is None else a.take(0, axis) for n, a, axis in layouts}
            file = str(source.files[index]) if source.files else ""
            known, one = self._data.names.updated(source.names), {n: a[0] for n, a in row.items()}
            picture = pictured(file, one, known.images)
            names = names_of_classes(known, row, outputs, self._data.probable)
            found.append(WorstSample(index, value, one, alone, file, *names, picture, source.text_of(index, known)))
        return found

    def _one_by_one(self, source: Source, step: str, averaged: bool) -> Iterator[Valued]:
        """Yield the index, loss and arrays of each sample, evaluated as a batch of its own.

        Samples whose labels are all ignored are skipped. ``step`` is the step whose loss is returned.
        """
        self._definition.check_unchanged()
        bound, loss, index = self._session.evaluation(averaged), column(step, "loss"), -1
        unread = self._checker.specs.keys() - bound.inputs
        with self._checker.any_may_be_ignored(), released(bound, self._checker):
            for i, batch in enumerate(source.batches(0)):
                feeds = {name: on_host(feed) for name, feed in _checked(self._checker, batch, i).items()}
                for row in range(rows_of(feeds)):
                    index += 1
                    one = {name: np.array(array[row : row + 1]) for name, array in feeds.items()}
                    if self._data.counted(step, one):
                        bound.run(without(unread, one))
                        columns = {**bound.numbers, **finished(self._manifest.columns_of_sums, bound.sums)}
                        yield index, columns[loss], one
        self._definition.check_unchanged()

    def _totals(
        self, source: Source, limit: int | None, stop: Callable[[], bool] | None, averaged: bool, team: Team = ALONE
    ) -> tuple[dict[str, WeightedMeans], dict[str, Array]]:
        """Return the mean results of each step, and the totals that other columns are computed from, over all ranks."""
        self._definition.check_unchanged()
        # one mean per step, since the numbers of counted labels may differ between steps
        means = {step: WeightedMeans() for step in self._parts}
        bound, totals = self._session.evaluation(averaged), dict[str, Array]()
        rows: dict[str, list[Array]] = {}
        unread = self._checker.specs.keys() - bound.inputs  # evaluation may need less than training
        with (
            self._checker.any_may_be_ignored(),
            released(bound, self._checker),
            contextlib.nullcontext() if stop else self._session.computing(source),
        ):
            for i, batch in enumerate(shares(source, self._checker, 0, 0, team.rank, team.ranks)):
                if (stop and stop()) or i == limit:
                    break
                feeds = _checked(self._checker, batch, i)
                if type(batch) is Spare:
                    continue
                bound.run(without(unread, feeds) if unread else feeds)
                for step, mean in means.items():
                    own = {n: v for n, v in bound.numbers.items() if n.startswith(column(step, ""))}
                    mean.add(own, self._data.counted(step, feeds))
                add_sums(totals, bound.sums)
                for name, array in bound.rows.items():
                    rows.setdefault(name, []).append(array)
        self._definition.check_unchanged()  # the last batch may have read a changed file
        if team.ranks > 1:
            means, totals, rows = pooled(team.gathered((means, totals, rows)))
        totals |= {name: np.concatenate(arrays) for name, arrays in rows.items()}
        has_no_loss = "loss" not in totals and self._manifest.parts.keys() == {""}
        if has_no_loss and not any(mean.weight for mean in means.values()) and not (stop and stop()):
            raise DataError("every label in the data is ignored; give at least one label to evaluate")
        return means, totals

    def predict(self, x: Any, order: Order, averaged: bool = True) -> list[tuple[dict[str, Array], int]]:
        """Return, for each batch, the model's outputs by name and the number of samples.

        For a fixed batch size, the last batch is padded with copies of its last sample, whose outputs are dropped.
        """
        bound, checker = self._session.prediction(averaged), self._prediction_checker
        parts = []
        filling = replace(order, fills=True, augments=False)
        source = as_source(self._without_targets(x), checker, filling, self._data.known)
        size = order.batch_size if checker.fixed_rows and isinstance(source, Indexed) else 0
        with released(bound, checker), self._session.computing(source):
            for i, batch in enumerate(source.batches(0)):
                whole, own = filled(batch, size) if size and isinstance(batch, Mapping) else (batch, 0)
                feeds = _checked(checker, whole, i)
                found, rows = bound.compute(feeds), checker.counts(feeds)[0]
                if whole is not batch:
                    found = {n: of_first(n, a, own, rows, self._session.layouts[n]) for n, a in found.items()}
                    rows = own
                parts.append((found, rows))
        return parts

    def joined(self, parts: Sequence[tuple[Mapping[str, Array], int]]) -> dict[str, Array]:
        """Concatenate the results of :meth:`predict`, each output along its sample axis; see ``Trainer.predict``."""
        found = self._session.layouts
        return {name: joined(name, [(p[name], rows) for p, rows in parts], found[name]) for name in parts[0][0]}

    @functools.cached_property
    def _prediction_checker(self) -> BatchChecker:
        specs = [s for s in self._manifest.inputs if s.name in self._session.prediction().inputs]
        return BatchChecker(specs, known=lambda: self._data.known)

    def _without_targets(self, x: Any) -> Any:
        """Return the data ``x`` without targets; a bare array becomes a dict with the model's only input."""
        read = self._prediction_checker.specs
        if isinstance(x, Columns):
            check_same(x.names, self._data.names)
            x = x.arrays
        x = read_data(x, self._data.names)
        if is_table(x):
            return columns_of(x, read, self._data.names, self._checker.specs.keys() - read.keys())[0]
        if isinstance(x, Mapping):
            return {name: value for name, value in x.items() if name in read or name not in self._checker.specs}
        return dict.fromkeys(read, x) if hasattr(x, "shape") and len(read) == 1 else x


def _checked(checker: BatchChecker, batch: Batch, i: int) -> Mapping[str, Feed]:
    try:
        return checker(batch)
    except DataError as error:
        raise error.at(f"batch {i}") from None

"""The data of a step: names that they must match, checks of batches, and sources of batches."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Mapping, Set
from dataclasses import replace
from typing import Any

import numpy as np
import onnx_ir as ir

from gradgraph.data.arrays.batch import Batch, BatchChecker, Feed, FromTables, fixed_rows, on_host
from gradgraph.data.arrays.remedies import check_counts
from gradgraph.data.arrays.rows import Rows
from gradgraph.data.record.classes import takes_labels
from gradgraph.data.record.data_names import NO_NAMES, DataNames
from gradgraph.data.sources.sources import Columns, Indexed, Order, Source, as_source
from gradgraph.errors import DataError, UnmatchedError, counted, shown
from gradgraph.runtime.execution.part import Part
from gradgraph.runtime.execution.predictor import is_probable
from gradgraph.runtime.execution.target_losses import check_numbers_mean, with_activations
from gradgraph.runtime.execution.team import ALONE, Team
from gradgraph.runtime.saved.record import Progress
from gradgraph.step.step import Step

log = logging.getLogger("gradgraph")

DEFAULT_BATCH_SIZE = 32


class StepData:
    """An object that turns a user's data into checked batches for a step, and records their names.

    Args:
        progress: returns the progress of the run, which contains the names of the training data.
        check_inputs: as for ``Trainer``.
        ranks: the number of processes that share each batch.

    Attributes:
        checker: checks batches with the inputs and targets of all steps.
        labels: the names of the targets that are class labels.
    """

    def __init__(self, definition: Step, progress: Callable[[], Progress], check_inputs: bool, ranks: int) -> None:
        self._definition, self._manifest, self._progress = definition, definition.manifest, progress
        self._check_inputs, self._ranks = check_inputs, ranks
        self.labels = tuple(target.name for target in self._manifest.targets if takes_labels(target))
        self._known: tuple[DataNames, DataNames] | None = None  # ``names``, and ``known`` computed from them
        self._checkers: dict[tuple[str, ...], BatchChecker] = {}
        self.checker = BatchChecker(self._manifest.batch, check_inputs, lambda: self.known)
        self.checker.some_count = self._some_count(*self._manifest.parts)

    # --- names ----------------------------------------------------------------------------------------------

    @property
    def names(self) -> DataNames:
        """The column and class names that data must match: those of the training data, else the model's own."""
        return self._progress().names or self._names_of_model

    @property
    def known(self) -> DataNames:
        """The column and class names that data must match, as :attr:`names`.

        After the first step, they also contain the targets with class indices but no class names.
        """
        return self._known_once_trained() if self._progress().steps else self.names

    def _known_once_trained(self) -> DataNames:
        names = self.names
        if self._known is None or self._known[0] is not names:
            numbered = [target for target in self.labels if target not in names.classes]
            self._known = names, names.updated(DataNames(numbered=numbered)) if numbered else names
        return self._known[1]

    @functools.cached_property
    def _names_of_model(self) -> DataNames:
        known = self._manifest.data
        return with_activations(known, self._manifest) if known else known

    @functools.cached_property
    def probable(self) -> set[str]:
        """The names of the model's outputs that are class probabilities."""
        return {v.name or "" for v in ir.from_proto(self._definition.eval).graph.outputs if is_probable(v)}

    def learn(self, names: DataNames) -> None:
        """Add ``names`` to the recorded names of the training data, which later data must match."""
        learnt = self.names.updated(names)
        if names and self._progress().names.without_activations() != learnt.without_activations():
            self._progress().names = with_activations(learnt, self._manifest)

    # --- data -----------------------------------------------------------------------------------------------

    def order(self, batch_size: int | None, shuffle: bool, drop_last: bool, team: Team = ALONE) -> Order:
        """Return the order of samples in batches of ``batch_size`` samples over all ranks.

        The default is the model's fixed batch size, or else 32.

        Raises:
            DataError: if a batch has fewer samples than the team has processes.
        """
        check_counts(batch_size=batch_size)
        fixed = fixed_rows(self._manifest.inputs)
        size = batch_size if batch_size is not None else DEFAULT_BATCH_SIZE if fixed is None else fixed * team.ranks
        if size < team.ranks:
            raise DataError(
                f"a batch of {size} samples is too small for {team.ranks} ranks, which share each batch",
                remedy="give a larger batch_size (the total of all ranks), or start fewer ranks",
                shell="give a larger --batch-size (the total of all ranks), or fewer --ranks",
            )
        return Order(int(size), shuffle, drop_last, self._progress().seed, rank=team.rank, ranks=team.ranks)

    def source(
        self, data: Any, order: Order, steps: tuple[str, ...] | None = None, known: DataNames | None = None
    ) -> Source:
        """Return user data as a source of batches for ``steps``, by default all.

        The data must match the names in ``known``, by default :attr:`known`.

        Raises:
            DataError: if the data do not match the step.
        """
        known = self.known if known is None else known
        if steps is None:
            source = as_source(data, self.checker, order, known)
        else:
            source = as_source(self.read_by(steps, data), self.checker_of(steps), order, known)
        check_numbers_mean(source.names, self._manifest)
        return source

    def to_train_on(self, data: Any, order: Order, steps: tuple[str, ...] | None = None) -> Source:
        """Return training data as a source of batches.

        If column or class names differ from the model's, log a warning before the first step of a run, and raise
        UnmatchedError later.
        """
        try:
            source = self.source(data, order, steps)
        except UnmatchedError as error:
            if self._progress().steps or self.names.preprocess is not None:
                raise
            log.warning("%s; training starts with the new names", error.problem)
            source = self._with_new_names(data, order, steps)
        if source.rows is not None and source.rows < order.ranks:
            raise DataError(
                f"the data have {counted(source.rows, 'sample')}, fewer than the {order.ranks} ranks; start fewer ranks"
            )
        if order.ranks > 1 and isinstance(source, Columns):
            self.check_all_count({n: a for n, a in source.arrays.items() if isinstance(a, np.ndarray)})
        return source

    def _with_new_names(self, data: Any, order: Order, steps: tuple[str, ...] | None) -> Source:
        """Return training data with new class names and, if necessary, new columns.

        Known columns are kept if the data have them, those of targets first: the user may have chosen them.
        """
        known, targets = self.known, {target.name for target in self._manifest.targets}
        chosen = {name: columns for name, columns in known.columns.items() if name in targets}
        for names in (replace(known, classes={}, numbered=()), DataNames(columns=chosen)):
            try:
                return self.source(data, order, steps, names)
            except UnmatchedError:
                continue
        return self.source(data, order, steps, NO_NAMES)

    def held_out(self, data: Any, batch_size: int | None, team: Team = ALONE, *, is_validation: bool = False) -> Source:
        """Return data for evaluation as a source of batches, without augmentation and unshuffled.

        A source passed as ``data`` keeps its order. With ``is_validation``, class labels must match the training data
        even before the first step.
        """
        given = data.order if isinstance(data, Indexed) else None
        order = given or self.order(batch_size, shuffle=False, drop_last=False, team=team)
        order = replace(order, rank=team.rank, ranks=team.ranks)
        known = self._known_once_trained() if is_validation else None
        order = order if isinstance(data, Columns) else replace(order, augments=False)
        return self.source(data, order, known=known)

    def one_after_another(self, data: Any, batch_size: int | None = None) -> Source:
        """Return data for evaluation as an unshuffled source of batches, even if ``data`` is a shuffled source."""
        source = self.held_out(data, batch_size)
        if isinstance(source, Indexed) and source.order.shuffle:
            return self.source(source, replace(source.order, shuffle=False))
        return source

    # --- batches --------------------------------------------------------------------------------------------

    def counts(self, checked: Mapping[str, Feed]) -> tuple[int, int]:
        """Return the numbers of samples and of loss terms in a checked batch; see :meth:`BatchChecker.counts`."""
        return (type(checked) is Rows and checked.table.counts) or self.checker.counts(checked)

    def counted(self, step: str, feeds: Mapping[str, Feed]) -> int:
        """Return the number of loss terms in a batch, by which the named step ``step`` divides its loss."""
        if not step:
            return self.counts(feeds)[1]
        return self.checker_of((step,)).counts({s.name: feeds[s.name] for s in self._manifest.specs_of(step)})[1]

    def batch_of(self, part: Part, batch: Batch, raw: bool = True) -> Mapping[str, Feed]:
        """Return a checked batch for one step: arrays with the dtypes and shapes of its inputs.

        Inputs of other steps are dropped. ``Rows`` that the session gathers itself are returned unchanged, since their
        table was checked before. ``raw`` is whether the batch comes directly from the user, not from a source.

        Raises:
            DataError: if the batch does not match the step.
        """
        if part.name:
            checked = self.checker_of((part.name,))(self.read_by((part.name,), batch), raw=raw)
        elif type(batch) is not Rows:
            checked = self.checker(batch, raw=raw)
        else:
            part.gathered = shapes = batch.table.shapes
            session = part.for_usual()
            if session.gathers != shapes:
                return self.checker(dict(batch))
            batch.session = session
            return batch
        if type(checked) is FromTables:  # tables bring names of columns and classes
            self.learn(checked.names)
        return checked

    def read_by(self, steps: tuple[str, ...], data: Any) -> Any:
        """Return ``data`` without the inputs and targets that none of ``steps`` reads."""
        if not isinstance(data, Mapping):
            return data
        read = self.checker_of(steps).specs
        others = [name for name in data if name not in read and name in self.checker.specs]
        return without({*others}, data) if others else data

    def checker_of(self, steps: tuple[str, ...]) -> BatchChecker:
        """Return the checker of batches with only the inputs and targets of these steps."""
        if steps not in self._checkers:
            names = {s.name for step in steps for s in self._manifest.specs_of(step)}
            specs = [s for s in self.checker.specs.values() if s.name in names]
            whole = names == self.checker.specs.keys()
            own = BatchChecker(specs, self._check_inputs, lambda: self.known)
            own.some_count = self._some_count(*steps)
            self._checkers[steps] = self.checker if whole else own
        return self._checkers[steps]

    def check_all_count(self, arrays: Mapping[str, Feed]) -> None:
        """Raise DataError if labels are ignored with several losses on several ranks, which are weighted by samples.

        Whole columns are checked before the first step, other data with each batch.
        """
        if self._manifest.separate is None or not self._manifest.separate.every_label:
            return
        for spec in self._manifest.targets:
            if spec.ignore_index is None or spec.name not in arrays:
                continue
            if (on_host(arrays[spec.name]) == spec.ignore_index).any():
                raise DataError(
                    f"'{shown(spec.name)}' has the ignored label {spec.ignore_index}, which is unsupported for several "
                    "losses on several ranks; give each sample a label, or train in one process"
                )

    def _some_count(self, *steps: str) -> bool:
        """Whether each batch of these steps needs at least one label that is not ignored.

        It does not if several ranks share each batch, or the loss is not divided by the number of labels
        (``reduction="sum"``, or several losses).
        """
        losses = [self._manifest.parts[step].loss for step in steps]
        sums = any(loss.get("arguments", {}).get("reduction") == "sum" for loss in losses)
        return self._ranks == 1 and not sums and all(loss.get("name") != "several" for loss in losses)

    def release(self) -> None:
        """Drop all references of checkers to batches."""
        for checker in (self.checker, *self._checkers.values()):
            checker.forget()


def without(unread: Set[str], feeds: Mapping[str, Feed]) -> dict[str, Feed]:
    """Return ``feeds`` without the names in ``unread``."""
    return {name: feed for name, feed in feeds.items() if name not in unread}

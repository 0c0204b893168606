"""The executor, used by the Trainer and the training loop to check batches, run steps and save the state."""

from __future__ import annotations

import contextlib
import copy
import functools
import logging
import math
import os
import tempfile
import time
from collections.abc import Iterator, Mapping, Set
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime as ort

from gradgraph.arguments import described
from gradgraph.data.arrays.batch import (
    Array,
    Batch,
    BatchChecker,
    Feed,
    FromTables,
    fixed_rows,
    on_host,
)
from gradgraph.data.arrays.remedies import check_counts
from gradgraph.data.arrays.rows import Rows
from gradgraph.data.record.classes import as_class_numbers, takes_labels
from gradgraph.data.record.data_names import NO_NAMES, DataNames
from gradgraph.data.sources.sources import Columns, Order, Samples, Source, as_source
from gradgraph.errors import (
    ArgumentError,
    BuildError,
    DataError,
    DivergedError,
    UnmatchedError,
    counted,
    listed,
    shown,
)
from gradgraph.files.atomic import write_atomically
from gradgraph.files.suffixes import check_suffix
from gradgraph.runtime.execution.binding import BoundSession
from gradgraph.runtime.execution.frozen_weights import initial_value
from gradgraph.runtime.execution.locking import Turns
from gradgraph.runtime.execution.nonfinite import NonFinite
from gradgraph.runtime.execution.opened import OpenedStep
from gradgraph.runtime.execution.ort_values import to_ortvalue
from gradgraph.runtime.execution.part import Part
from gradgraph.runtime.execution.predictor import is_probable
from gradgraph.runtime.execution.profiler import WARM_UP, Profile, profile_of
from gradgraph.runtime.execution.session import STOCK
from gradgraph.runtime.execution.state import State
from gradgraph.runtime.execution.target_losses import check_numbers_mean, with_activations
from gradgraph.runtime.execution.team import ALONE, Team
from gradgraph.runtime.saved.checkpoint import checkpoint_pieces
from gradgraph.runtime.saved.partial import Loaded, fitting
from gradgraph.runtime.saved.record import Progress
from gradgraph.step.fed_rate import with_fed_rate
from gradgraph.step.manifest import LEARNING_RATE, column

log = logging.getLogger("gradgraph")

DEFAULT_BATCH_SIZE = 32


class Executor:
    """An executor that trains a step and records its progress.

    The caller of a method must hold ``turns.lock``, unless documented otherwise.

    Args:
        check_loss, check_inputs: as for ``Trainer``.
    """

    def __init__(self, opened: OpenedStep, progress: Progress, check_loss: bool, check_inputs: bool) -> None:
        self.opened, self.progress = opened, progress
        self.definition, self.manifest, self.team = opened.definition, opened.manifest, opened.team
        self.checker = BatchChecker(self.manifest.batch, check_inputs, lambda: self.known)
        self.checker.some_count = self._some_count(*self.manifest.parts)
        self.turns = Turns()
        self._check_loss, self._check_inputs = check_loss, check_inputs
        opened.checks_loss = check_loss
        self.parts = opened.parts
        self._checkers: dict[tuple[str, ...], BatchChecker] = {}
        self._known: tuple[DataNames, DataNames] | None = None  # ``names``, and ``known`` computed from them
        self._labels = tuple(target.name for target in self.manifest.targets if takes_labels(target))

    # created on first use; cached, since it is read in every step
    @functools.cached_property
    def state(self) -> State:
        return self.opened.state

    @functools.cached_property
    def part(self) -> Part:
        """The only step of the step folder; raise BuildError if there are several named steps."""
        if self.manifest.steps:
            names = listed(self.manifest.steps)
            raise BuildError(
                f"this step folder has several steps ({names}); name one of them",
                remedy=f"call trainer.step({next(iter(self.manifest.steps))!r}, batch)",
                shell="train all of them with `gradgraph train`",
            )
        return self.parts[""]

    # --- names ----------------------------------------------------------------------------------------------

    @property
    def names(self) -> DataNames:
        """The column and class names that data must match: names of the training data, or else of the model's data."""
        return self.progress.names or self._names_of_model

    @property
    def known(self) -> DataNames:
        """The column and class names that data must match, as :attr:`names`.

        After the first step, they also contain the targets with class indices but no class names.
        """
        return self._known_once_trained() if self.progress.steps else self.names

    def _known_once_trained(self) -> DataNames:
        names = self.names
        if self._known is None or self._known[0] is not names:
            numbered = [target for target in self._labels if target not in names.classes]
            self._known = names, names.updated(DataNames(numbered=numbered)) if numbered else names
        return self._known[1]

    @functools.cached_property
    def _names_of_model(self) -> DataNames:
        known = self.definition.manifest.data
        return with_activations(known, self.manifest) if known else known

    @functools.cached_property
    def probable(self) -> set[str]:
        """The names of the model's outputs that are class probabilities."""
        return {v.name or "" for v in ir.from_proto(self.definition.eval).graph.outputs if is_probable(v)}

    def learn(self, names: DataNames) -> None:
        """Add ``names`` to the recorded names of the training data, which later data must match."""
        learnt = self.names.updated(names)
        if names and self.progress.names.without_activations() != learnt.without_activations():
            self.progress.names = with_activations(learnt, self.manifest)

    # --- data -----------------------------------------------------------------------------------------------

    def order(self, batch_size: int | None, shuffle: bool, drop_last: bool, team: Team = ALONE) -> Order:
        """Return the order of samples in batches of ``batch_size`` samples over all ranks.

        The default is the model's fixed batch size, or else 32.

        Raises:
            DataError: if a batch has fewer samples than the team has processes.
        """
        check_counts(batch_size=batch_size)
        fixed = fixed_rows(self.manifest.inputs)
        size = batch_size if batch_size is not None else DEFAULT_BATCH_SIZE if fixed is None else fixed * team.ranks
        if size < team.ranks:
            raise DataError(
                f"a batch of {size} samples is too small for {team.ranks} ranks, which share each batch",
                remedy="give a larger batch_size (the total of all ranks), or start fewer ranks",
                shell="give a larger --batch-size (the total of all ranks), or fewer --ranks",
            )
        return Order(int(size), shuffle, drop_last, self.progress.seed, rank=team.rank, ranks=team.ranks)

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
        check_numbers_mean(source.names, self.manifest)
        return source

    def to_train_on(self, data: Any, order: Order, steps: tuple[str, ...] | None = None) -> Source:
        """Return training data as a source of batches.

        If column or class names differ from the model's, log a warning before the first step of a run, and raise
        UnmatchedError later.
        """
        try:
            source = self.source(data, order, steps)
        except UnmatchedError as error:
            if self.progress.steps or self.names.preprocess is not None:
                raise
            log.warning("%s; training starts with the new names", error.problem)
            source = self.source(data, order, steps, NO_NAMES)
        if source.rows is not None and source.rows < order.ranks:
            raise DataError(
                f"the data have {counted(source.rows, 'sample')}, fewer than the {order.ranks} ranks; start fewer ranks"
            )
        if order.ranks > 1 and isinstance(source, Columns):
            self._check_all_count({n: a for n, a in source.arrays.items() if isinstance(a, np.ndarray)})
        return source

    def held_out(self, data: Any, batch_size: int | None, team: Team = ALONE, *, is_validation: bool = False) -> Source:
        """Return data for evaluation as a source of batches, without augmentation and unshuffled.

        A source passed as ``data`` keeps its order. With ``is_validation``, class labels must match the training data
        even before the first step.
        """
        is_prepared = isinstance(data, Columns | Samples)
        order = data.order if is_prepared else self.order(batch_size, shuffle=False, drop_last=False, team=team)
        order = replace(order, rank=team.rank, ranks=team.ranks)
        known = self._known_once_trained() if is_validation else None
        order = order if isinstance(data, Columns) else replace(order, augments=False)
        return self.source(data, order, known=known)

    def one_after_another(self, data: Any, batch_size: int | None = None) -> Source:
        """Return data for evaluation as an unshuffled source of batches, even if ``data`` is a shuffled source."""
        source = self.held_out(data, batch_size)
        if isinstance(source, Columns | Samples) and source.order.shuffle:
            return self.source(source, replace(source.order, shuffle=False))
        return source

    # --- one step -------------------------------------------------------------------------------------------

    def counts(self, checked: Mapping[str, Feed]) -> tuple[int, int]:
        """Return the numbers of samples and of loss terms in a checked batch; see :meth:`BatchChecker.counts`."""
        return (type(checked) is Rows and checked.table.counts) or self.checker.counts(checked)

    def counted(self, step: str, feeds: Mapping[str, Feed]) -> int:
        """Return the number of loss terms in a batch, by which the named step ``step`` divides its loss."""
        if not step:
            return self.counts(feeds)[1]
        return self.checker_of((step,)).counts({s.name: feeds[s.name] for s in self.parts[step].specs})[1]

    def train(
        self,
        feeds: Mapping[str, Feed],
        hyperparameters: Mapping[str, float],
        part: Part,
        options: ort.RunOptions | None = None,
    ) -> BoundSession:
        """Train on a checked batch; return the session, which contains the results.

        Raises:
            UnknownNameError, DataError, DivergedError, ModelError: as for ``Trainer.step``.
            TerminatedError: if ``options.terminate`` was set. The state is unchanged; a step that overwrites it
                finishes first.
        """
        rates = part.rates
        try:
            changed = hyperparameters != rates.given
        except ValueError:  # a hyperparameter is an array; rates.write raises the error
            changed = True
        if changed:
            written = rates.write(hyperparameters)
            self.progress.hyperparameters.update({column(part.name, name): value for name, value in written.items()})
        if part.ends is not None:
            self._warn_if_ended(part, part.ends)
        if self.team.ranks > 1:
            self._check_all_count(feeds)
            self.team.counts(*self.counts(feeds))
        session: BoundSession = (type(feeds) is Rows and feeds.session) or part.of(feeds)
        # binding for a device copies, so the hyperparameters must be bound again in each step
        fed = feeds if self.state.on_cpu else {**feeds, **rates.constants}
        session.run(fed, options)
        if self._check_loss and not math.isfinite(loss := session.numbers["loss"]):
            session.undo()
            raise self._diverged(loss, feeds, hyperparameters, part)
        p = self.progress
        if p.kernels != self.opened.kernels:
            self._goes_on_with(self.opened.kernels)
        p.steps += 1
        if part.reports_rate:
            p.hyperparameters[column(part.name, LEARNING_RATE)] = session.numbers[LEARNING_RATE]
        if part.name:
            p.counts[part.name] = p.counts.get(part.name, 0) + 1
            usual = {column(part.name, dim): size for dim, size in (part.usual or {}).items()}
            p.sizes = {**(p.sizes or {}), **usual}
        else:
            p.sizes = part.usual
        return session

    def _goes_on_with(self, kernels: str) -> None:
        """Record the kernels used from now on; warn if earlier steps were trained with others."""
        p = self.progress
        if p.kernels and kernels and p.steps:
            log.warning(
                "the run was trained with %s and now continues with %s, which may round differently",
                *(f"native kernels ({shown(k)})" if k != STOCK else "onnxruntime's kernels alone"
                  for k in (p.kernels, kernels)),
            )  # fmt: skip
        p.kernels = kernels

    def _warn_if_ended(self, part: Part, ends: float) -> None:
        """Warn once if a step's learning rate stays 0 because its schedule has ended after ``ends`` updates."""
        p = self.progress
        if (p.counts.get(part.name, 0) if part.name else p.steps) < ends:  # there cannot be more updates than steps
            return
        if int(self.state.read([part.counter])[part.counter]) >= ends:
            part.ends = None
            whose = f" of '{shown(part.name)}'" if part.name else ""
            log.warning(
                "the learning rate schedule%s ended after %d updates: the rate is now 0, so the weights no longer "
                "change; build the step with a longer schedule, or stop training", whose, ends,
            )  # fmt: skip

    def _diverged(
        self, loss: float, feeds: Mapping[str, Feed], hyperparameters: Mapping[str, float], part: Part
    ) -> DivergedError:
        from gradgraph.losses import REMEDIES  # imported only here, since its imports are slow

        fate = "was overwritten, since in_place=True: load a checkpoint" if self.state.lost else "is kept"
        whose = f"loss of '{part.name}'" if part.name else "loss"
        arguments = f"{part.name!r}, error.batch" if part.name else "error.batch"
        # copies, since the user may fill the memory of an array with the next batch
        copies = {name: feed if isinstance(feed, ort.OrtValue) else feed.copy() for name, feed in feeds.items()}
        batch = as_class_numbers(copies, self._labels)
        hint = REMEDIES.get(self.manifest.parts[part.name].loss.get("name", ""), {}).get(str(loss))
        return DivergedError(
            f"the {whose} became {loss} in step {self.progress.steps + 1} (the state before it {fate})",
            batch,
            dict(hyperparameters),
            part.name or None,
            remedy=hint or f"lower the learning rate, or find the node with trainer.find_nonfinite({arguments})",
            shell=hint or "lower the learning rate (--lr), or look for NaN in the data",
        )

    def named(self, step: str | None) -> Part:
        """Return a named step, or for None the only step.

        Raises:
            UnknownNameError: if there is no step of this name.
            BuildError: if ``step`` is None and there are several steps.
        """
        if step is None:
            return self.part
        self.manifest.named(step)
        return self.parts[step]

    def named_batch(self, name: Any, batch: Any) -> tuple[Part, Any]:
        """Return the step and the batch from the arguments of ``Trainer.step``: (name, batch), or only a batch."""
        if isinstance(name, str) and batch is not None:
            return self.named(name), batch
        if name is not None and batch is not None:
            raise ArgumentError(f"the name of a step is {described(name)}; it should be text, such as 'generator'")
        return self.named(None), batch if name is None else name

    def batch_of(self, part: Part, batch: Batch, raw: bool = True) -> Mapping[str, Feed]:
        """Return a checked batch for one step: arrays with the dtypes and shapes of its inputs.

        Inputs of other steps are dropped. ``Rows`` that the session gathers itself are returned unchanged, since their
        table was checked before. ``raw`` is whether the batch comes directly from the user, not from a source.

        Raises:
            DataError: if the batch does not match the step.
        """
        if part.name:
            return self._learnt(self.checker_of((part.name,))(self.read_by((part.name,), batch), raw=raw))
        if type(batch) is not Rows:
            return self._learnt(self.checker(batch, raw=raw))
        self.opened.gathered = shapes = batch.table.shapes
        session = part.for_usual()
        if session.gathers != shapes:
            return self.checker(dict(batch))
        batch.session = session
        return batch

    def _learnt(self, checked: Mapping[str, Feed]) -> Mapping[str, Feed]:
        """Return a checked batch unchanged; if it was passed as a table, record its column and class names."""
        if type(checked) is FromTables:
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
            names = {s.name for step in steps for s in self.parts[step].specs}
            specs = [s for s in self.checker.specs.values() if s.name in names]
            whole = names == self.checker.specs.keys()
            own = BatchChecker(specs, self._check_inputs, lambda: self.known)
            own.some_count = self._some_count(*steps)
            self._checkers[steps] = self.checker if whole else own
        return self._checkers[steps]

    def _check_all_count(self, arrays: Mapping[str, Feed]) -> None:
        """Raise DataError if labels are ignored with several losses on several ranks, which are weighted by samples.

        Whole columns are checked before the first step, other data with each batch.
        """
        if self.manifest.separate is None or not self.manifest.separate.every_label:
            return
        for spec in self.manifest.targets:
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
        losses = [self.manifest.parts[step].loss for step in steps]
        sums = any(loss.get("arguments", {}).get("reduction") == "sum" for loss in losses)
        return self.team.ranks == 1 and not sums and all(loss.get("name") != "several" for loss in losses)

    def scaling(self) -> dict[str, float]:
        """Return the loss scale and the number of skipped steps of mixed precision; empty without loss scaling."""
        names = self.manifest.precision.get("state", {})
        known = self.state.read(list(names.values())) if names else {}
        return {name: float(known[tensor]) for name, tensor in names.items()}

    def find_nonfinite(
        self, feeds: Mapping[str, Feed], hyperparameters: Mapping[str, float], part: Part
    ) -> NonFinite | None:
        """Return the origin of NaN or infinity in a step on a checked batch, or None if all numbers are finite.

        See ``Trainer.find_nonfinite``.
        """
        state, rates = self.state, part.rates
        state.check()
        before = dict(rates.given or {})
        rates.write(hyperparameters)
        try:
            arrays = {
                n: f if isinstance(f, ort.OrtValue) else to_ortvalue(np.ascontiguousarray(f)) for n, f in feeds.items()
            }
            read = set(self.manifest.parts[part.name].reads)
            held = {name: value for name, value in state.values(state.side).items() if name in read}
            return self.opened.find_nonfinite(part, {**arrays, **rates.constants, **held}, arrays)
        finally:
            rates.write(before)
            rates.given = None

    def profile(
        self, feeds: Mapping[str, Feed], hyperparameters: Mapping[str, float], steps: int, part: Part
    ) -> Profile:
        """Profile steps on a checked batch; see ``Trainer.profile``. The state is updated."""
        seconds = []
        for _ in range(WARM_UP + steps):  # timed without onnxruntime's profiler, which slows a step
            begin = time.perf_counter()
            self.train(feeds, hyperparameters, part)
            seconds.append(time.perf_counter() - begin)
        with tempfile.TemporaryDirectory() as folder:
            session = self.opened.alone(part, part.sizes(feeds), Path(folder) / "profile")
            fed = feeds if self.state.on_cpu else {**feeds, **part.rates.constants}
            for _ in range(WARM_UP + steps):
                session.run(fed)
            written = Path(session.session.end_profiling())
            return profile_of(self.definition, part.model, written, seconds[WARM_UP:])

    # --- trials ---------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def undone(self) -> Iterator[None]:
        """Run a block that may train; afterwards, restore the state and progress from before the block."""
        state, progress = self.state.read(), self.progress
        self.progress = copy.deepcopy(progress)
        try:
            yield
        finally:
            self.release()
            for part in self.parts.values():
                part.rates.given = None
            if progress.sizes is None:  # nothing was trained before the block, which determined the sizes of sessions
                self.opened.gathered = {}
                for part in self.parts.values():
                    part.close_sessions()
            self.state.write(state)
            self.progress = progress

    def with_fed_rate(self, step: str) -> Executor:
        """Return a copy with its own state, and the learning rate as an input instead of a schedule in the graph.

        Raises:
            BuildError: as for :func:`gradgraph.step.fed_rate.with_fed_rate`.
        """
        opened, progress = self.opened, copy.deepcopy(self.progress)
        fed = OpenedStep(with_fed_rate(self.definition, step), opened.placement, opened.options, tune=False)
        made = Executor(fed, progress, self._check_loss, self._check_inputs)
        made.stand_at(self.state.read(), progress)
        return made

    # --- many steps -----------------------------------------------------------------------------------------------

    def expect(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """Set the batch shapes for which the training session is created; by default the shapes of the first batch.

        Batches of other shapes run in a second session.
        """
        for part in self.parts.values():
            if all(s.name in shapes for s in part.specs):
                part.expect_shapes(shapes)

    def computing(self, source: Source) -> contextlib.AbstractContextManager[None]:
        """Return a context for many runs on the batches of ``source``, in which this thread flushes denormals.

        This is faster than setting the floating-point environment in each run. The context does nothing for sources
        that call the user's code, which it would affect, too.
        """
        return self.opened.options.computing() if isinstance(source, Columns) else contextlib.nullcontext()

    def release(self) -> None:
        """Drop all references of training sessions and checkers to batches."""
        for part in self.parts.values():
            part.release()
        for checker in (self.checker, *self._checkers.values()):
            checker.forget()

    # --- progress and state ------------------------------------------------------------------------------------

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write a checkpoint atomically; acquires the lock itself while reading the state."""
        check_suffix(path, ".ckpt", ".safetensors")  # a checkpoint has the safetensors format
        if not self.team.is_first:
            self.team.lend()
            return
        with self.turns.taken():
            values, beside = self.team.kept(self.state.seen())
            write_atomically(path, checkpoint_pieces(values, self.progress, beside))
        self.team.lend()

    def read(self) -> dict[str, Array]:
        """Return copies of the whole state."""
        found = self.team.completed(self.state.read())
        self.team.lend()
        return found

    def take(self, values: Mapping[str, Any], strict: bool) -> Loaded:
        """Load values into the state; see ``Trainer.load_state_dict``."""
        if strict:
            self.state.write(values)
            return Loaded(tuple(self.state.specs))
        frozen = {t.name: t for t in self.definition.eval.graph.initializer}
        held = lambda name: initial_value(self.definition, frozen[name]) if name in frozen else None  # noqa: E731
        report, weights = fitting(self.manifest, values, held)
        self.state.write({**self.read(), **weights, **self.opened.follow(weights)})
        return report

    def stand_at(self, values: Mapping[str, Array], progress: Progress) -> None:
        """Resume from a checkpoint's state and progress; raise CheckpointError if ``values`` do not match the step."""
        self.state.write(values)
        self.go_on(progress)

    def go_on(self, progress: Progress) -> None:
        """Continue with the current state and ``progress``, for whose batch sizes training sessions are created."""
        self.progress = progress
        for name, part in self.parts.items():
            part.rates.given = None
            if progress.sizes is not None:
                prefix = column(name, "")  # with several steps, names of sizes begin with the step's name
                sizes = {n.removeprefix(prefix): d for n, d in progress.sizes.items() if n.startswith(prefix)}
                if sizes or not name:
                    part.expect(sizes)


def without(unread: Set[str], feeds: Mapping[str, Feed]) -> dict[str, Feed]:
    """Return ``feeds`` without the names in ``unread``."""
    return {name: feed for name, feed in feeds.items() if name not in unread}

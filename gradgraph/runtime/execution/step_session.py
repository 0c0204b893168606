"""A step on one machine: its state, its progress, and its sessions, with which Trainer and training loop run it."""

from __future__ import annotations

import contextlib
import copy
import functools
import logging
import math
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import onnx
import onnxruntime as ort

from gradgraph.arguments import described
from gradgraph.data.arrays.batch import Array, Feed
from gradgraph.data.arrays.rows import Rows
from gradgraph.data.record.classes import as_class_numbers
from gradgraph.data.sources.sources import Columns, Source
from gradgraph.errors import ArgumentError, BuildError, DivergedError, listed, shown
from gradgraph.files.atomic import write_atomically
from gradgraph.files.suffixes import check_suffix
from gradgraph.machine.free_memory import return_freed
from gradgraph.passes.draws import fixed
from gradgraph.runtime.execution.binding import BoundSession, Ports
from gradgraph.runtime.execution.capture import CapturedSession, can_capture, capturing
from gradgraph.runtime.execution.computing import ComputingSession
from gradgraph.runtime.execution.frozen_weights import initial_value
from gradgraph.runtime.execution.gathering import ROWS, GatheringSession, Shapes, gather
from gradgraph.runtime.execution.inplace import with_updates_last
from gradgraph.runtime.execution.joining import Layout, layouts
from gradgraph.runtime.execution.locking import Turns
from gradgraph.runtime.execution.opener import Opener
from gradgraph.runtime.execution.overwrites import may_overwrite, prepared, proven
from gradgraph.runtime.execution.part import Part
from gradgraph.runtime.execution.session import LEAST_PASSED, STOCK, Placement, RuntimeOptions, create_session
from gradgraph.runtime.execution.shaped import Sizes
from gradgraph.runtime.execution.state import State, followed, initial_state
from gradgraph.runtime.execution.step_data import StepData
from gradgraph.runtime.execution.team import ALONE, Team
from gradgraph.runtime.execution.tuner import Tuner
from gradgraph.runtime.saved.checkpoint import checkpoint_pieces
from gradgraph.runtime.saved.partial import Loaded, fitting
from gradgraph.runtime.saved.record import Progress
from gradgraph.step.fed_rate import with_fed_rate
from gradgraph.step.inference import without_loss
from gradgraph.step.manifest import LEARNING_RATE, column
from gradgraph.step.step import Step

log = logging.getLogger("gradgraph")


class StepSession:
    """The state of a step, its progress, and its sessions, which share the state; each is created on first use.

    The caller of a method must hold ``turns.lock``, unless documented otherwise.

    Args:
        progress: the progress of the run; by default a new one.
        check_loss, check_inputs, tune: as for ``Trainer``.

    Attributes:
        parts: the train graphs by name, each with its sessions by batch shape; a single step has the name "".
        data: checks batches, and reads sources of batches.
        opener: lowers models for this machine, and opens onnxruntime sessions of them.
        kernels: the kernels that train: the native library's name, or ``STOCK``; "" on providers other than the CPU.

    Raises:
        RuntimeUnavailableError: if the step was lowered for another runtime or machine, or native kernels are requested
            and not available.
    """

    def __init__(
        self,
        definition: Step,
        placement: Placement,
        options: RuntimeOptions,
        progress: Progress | None = None,
        check_loss: bool = True,
        check_inputs: bool = False,
        tune: bool | Tuner = False,
        team: Team = ALONE,
    ) -> None:
        definition, options = team.opened(definition, placement, placement.settled(options))
        self.definition, self.manifest, self.team = definition, definition.manifest, team
        self.placement, self.options = placement, options
        self.opener = Opener(definition, placement, options, tune)
        self.kernels = placement.kernels(options)
        self.progress = progress or Progress()
        self.check_loss, self._check_inputs = check_loss, check_inputs
        self.data = StepData(definition, lambda: self.progress, check_inputs, team.ranks)
        self.turns = Turns()
        self.parts = {
            name: Part(name, self.manifest, model, self._training_session) for name, model in definition.trains.items()
        }
        self._evaluations: dict[bool, BoundSession] = {}  # by whether weights are averaged
        self._predictions: dict[bool, ComputingSession] = {}

    @functools.cached_property
    def state(self) -> State:
        """The state tensors, initialized by running init.onnx."""
        return initial_state(self.definition, self.placement, self.options)

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
        return self.part, batch if name is None else name

    # --- one step -------------------------------------------------------------------------------------------

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
        self.definition.check_unchanged()
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
            self.data.check_all_count(feeds)
            self.team.counts(*self.data.counts(feeds))
        session: BoundSession = (type(feeds) is Rows and feeds.session) or part.of(feeds)
        # binding for a device copies, so the hyperparameters must be bound again in each step
        fed = feeds if self.state.on_cpu else {**feeds, **rates.constants}
        session.run(fed, options)
        if self.check_loss and not math.isfinite(loss := session.numbers["loss"]):
            session.undo()
            raise self._diverged(loss, feeds, hyperparameters, part)
        p = self.progress
        if p.kernels != self.kernels:
            self._record_kernels()
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

    def _record_kernels(self) -> None:
        """Record the kernels used from now on; warn if earlier steps were trained with others."""
        p, kernels = self.progress, self.kernels
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
        batch = as_class_numbers(copies, self.data.labels)
        hint = REMEDIES.get(self.manifest.parts[part.name].loss.get("name", ""), {}).get(str(loss))
        return DivergedError(
            f"the {whose} became {loss} in step {self.progress.steps + 1} (the state before it {fate})",
            batch,
            dict(hyperparameters),
            part.name or None,
            remedy=hint or f"lower the learning rate, or find the node with trainer.find_nonfinite({arguments})",
            shell=hint or "lower the learning rate (--lr), or look for NaN in the data",
        )

    def scaling(self) -> dict[str, float]:
        """Return the loss scale and the number of skipped steps of mixed precision; empty without loss scaling."""
        names = self.manifest.precision.get("state", {})
        known = self.state.read(list(names.values())) if names else {}
        return {name: float(known[tensor]) for name, tensor in names.items()}

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
                for part in self.parts.values():
                    part.close_sessions()
            self.state.write(state)
            self.progress = progress

    def with_fed_rate(self, step: str) -> StepSession:
        """Return a copy with its own state, and the learning rate as an input instead of a schedule in the graph.

        Raises:
            BuildError: as for :func:`gradgraph.step.fed_rate.with_fed_rate`.
        """
        progress, fed = copy.deepcopy(self.progress), with_fed_rate(self.definition, step)
        made = StepSession(fed, self.placement, self.options, progress, self.check_loss, self._check_inputs)
        made.stand_at(self.state.read(), progress)
        return made

    # --- many steps ------------------------------------------------------------------------------------------

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
        return self.options.computing() if isinstance(source, Columns) else contextlib.nullcontext()

    def release(self) -> None:
        """Drop all references of training sessions and checkers to batches."""
        for part in self.parts.values():
            part.release()
        self.data.release()

    # --- progress and state ---------------------------------------------------------------------------------

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write a checkpoint atomically; acquires the lock itself while reading the state."""
        check_suffix(path, ".ckpt", ".safetensors")  # a checkpoint has the safetensors format
        if not self.team.is_first:
            self.team.lend()
            return
        self.definition.check_unchanged()
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
        self.state.write({**self.read(), **weights, **followed(self.definition, self.placement, self.options, weights)})
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

    # --- sessions -------------------------------------------------------------------------------------------

    def _training_session(self, part: Part, sizes: Sizes) -> BoundSession:
        """Create the session of ``part`` for batches of these sizes."""
        if (shared := self.team.session(self, part, sizes)) is not None:
            return shared
        ports, state, opener = part.ports, self.state, self.opener
        if state.on_cpu:
            opener.warn_of_precision(part.model)
        if self.options.cuda_graph and not ports.measures:
            model = opener.lowered(part.model, sizes)
            if can_capture(model, self.placement, self.options.cuda_graph):
                opener.warn_of_precision(model)
                session = create_session(model, capturing(self.placement), self.options, opener.weights)
                return CapturedSession(session, state, ports, self.placement)
        in_place = state.on_cpu and may_overwrite(part.model, ports.next_of, self.options)

        def changed(model: onnx.ModelProto) -> onnx.ModelProto:
            opener.warn_of_precision(model)
            if state.on_cpu:
                gather(model, part.gathered)
            return prepared(model, ports, self.options, self.check_loss) if in_place else model

        key = sorted(part.gathered.items()), sorted(ports.next_of.items()), self.check_loss
        packs = self.packs_for(part, sizes)
        session, executed = opener.to_train(part.model, sizes, key, changed, tells=in_place, packs=packs)
        safe = self._shared(executed, ports.next_of)
        keeps = self.check_loss if self.options.in_place == "auto" and state.shared else None
        if any(i.name == ROWS for i in session.get_inputs()):
            return GatheringSession(session, part.gathered, state, ports, safe, keeps)
        return BoundSession(session, state, ports, safe, keeps=keeps)

    def half(
        self,
        model: onnx.ModelProto,
        sizes: Sizes,
        next_of: Mapping[str, str],
        packs: bool = True,
        gathered: Shapes = MappingProxyType({}),
    ) -> tuple[ort.InferenceSession, frozenset[str]]:
        """Create a session for a half of the step (gradients or update); return it with the tensors it overwrites.

        Args:
            next_of: the outputs with the next values of the state tensors that the half updates, by tensor.
            packs: whether the session may keep a copy of frozen weights.
            gathered: shapes of the inputs whose rows the session gathers.
        """
        # the update half contains no loss to wait for, so in_place="auto" does not apply
        in_place = bool(next_of) and self.options.in_place is True and self.state.on_cpu

        def changed(made: onnx.ModelProto) -> onnx.ModelProto:
            if self.state.on_cpu:
                gather(made, gathered)
            return with_updates_last(made, next_of) if in_place else made

        key = sorted(gathered.items()), sorted(next_of.items())
        session, executed = self.opener.to_train(model, sizes, key, changed, tells=in_place, packs=packs)
        return session, self._shared(executed, next_of) if in_place else frozenset()

    def alone(self, part: Part, sizes: Sizes, profile: Path | None = None) -> BoundSession:
        """Create a training session for batches of these sizes, neither cached nor shared.

        ``profile`` is the prefix of the file to which onnxruntime writes a profile; None for no profile.
        """
        model = self.opener.lowered(part.model, sizes)
        session = create_session(model, self.placement, self.options, self.opener.weights, profile=profile)
        return BoundSession(session, self.state, part.ports)

    def packs_for(self, part: Part, sizes: Sizes) -> bool:
        """Whether a session of ``part`` may keep a copy of frozen weights, if the options allow it.

        The session for the usual sizes may; the general session for other batches (empty ``sizes``) needs
        ``_packs_twice``.
        """
        return bool(sizes) or not part.has_sizes or self._packs_twice

    @property
    def _packs_twice(self) -> bool:
        """Whether sessions other than the training session may have their own copy of frozen weights.

        For BERT-base, a copy takes 0.4 GB, and makes products of 4 to 64 rows 1.3 to 2.7 times as fast, of 128 to 512
        rows 1.04 to 1.3 times (2048 x 2048, one thread of an AMD EPYC). The decision depends only on the size, so
        evaluations of a step always return the same bits.
        """
        return self.options.pack_weights is True or self.opener.frozen_bytes < LEAST_PASSED

    def _shared(self, executed: onnx.ModelProto | None, next_of: Mapping[str, str]) -> frozenset[str]:
        """Return the state tensors that a session may overwrite; both sets of the state then share their memory.

        If ``executed``, the model as onnxruntime executes it, is None, no session may overwrite tensors in ``next_of``.
        """
        safe = frozenset[str]() if executed is None else proven(executed, next_of, self.options)
        if self.options.in_place:
            self.state.share(safe, next_of)
        return safe

    def evaluation(self, averaged: bool = True) -> BoundSession:
        """Return the session that computes loss and metrics, with averaged weights if ``averaged`` and available."""
        averages = self.manifest.averages if averaged else {}
        if (key := bool(averages)) not in self._evaluations:
            ports = Ports(self.manifest.results, measures=self.manifest.columns_of_sums)
            self._evaluations[key] = BoundSession(self._evaluating, self.state, ports, stand_ins=averages)
        return self._evaluations[key]

    def prediction(self, averaged: bool = True) -> ComputingSession:
        """Return the session of the model's outputs; ``averaged`` as for :meth:`evaluation`."""
        averages = self.manifest.averages if averaged else {}
        if (key := bool(averages)) not in self._predictions:
            session = self._predicting[0]
            names = [o.name for o in session.get_outputs()]
            self._predictions[key] = ComputingSession(session, self.state, names, averages)
        return self._predictions[key]

    @property
    def layouts(self) -> dict[str, Layout]:
        """The sample axes of the model's outputs."""
        return self._predicting[1]

    def close_sessions(self) -> None:
        """Close all sessions to free their memory; they are created again on use."""
        for part in self.parts.values():
            part.close_sessions()
        self._evaluations.clear()
        self._predictions.clear()
        for name in ("_evaluating", "_predicting"):
            self.__dict__.pop(name, None)
        return_freed()

    @property
    def to_evaluate(self) -> tuple[onnx.ModelProto, bool]:
        """The model of the evaluation session, and whether the session may keep a copy of frozen weights."""
        return fixed(self.definition.eval), self._packs_twice

    @property
    def to_predict(self) -> tuple[onnx.ModelProto, bool]:
        """The model of the prediction session, and whether the session may keep a copy of frozen weights."""
        return without_loss(self.definition.eval, self.manifest), True

    @functools.cached_property
    def _evaluating(self) -> ort.InferenceSession:
        return self.opener.to_compute(*self.to_evaluate)

    @functools.cached_property
    def _predicting(self) -> tuple[ort.InferenceSession, dict[str, Layout]]:
        model, packs = self.to_predict
        return self.opener.to_compute(model, packs), layouts(model, [s.name for s in self.manifest.inputs])

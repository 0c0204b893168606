"""The trainer: a step, its state on a device, and everything one does with them from Python."""

from __future__ import annotations

import contextlib
import functools
import logging
import math
import os
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, NoReturn

import onnx
import onnxruntime as ort

from gradgraph.arguments import FLAG, FUNCTION, NUMBER, PATH, WHOLE, Kind, checked, described, instance
from gradgraph.atomic import write_atomically
from gradgraph.backends import BACKENDS
from gradgraph.backends.demands import check_runs_here
from gradgraph.backends.engine import for_machine
from gradgraph.backends.ort_native import HIGHEST
from gradgraph.errors import DataError, DivergedError
from gradgraph.files import save_model
from gradgraph.manifest import Manifest
from gradgraph.passes.inference import inference_model, without_loss
from gradgraph.runtime.data.batch import Array, Batch, BatchChecker, Feed, batch_specs
from gradgraph.runtime.data.remedies import check_counts
from gradgraph.runtime.data.rows import Rows
from gradgraph.runtime.data.sources import Columns, Order, Source, as_source
from gradgraph.runtime.execution.binding import BoundSession, released
from gradgraph.runtime.execution.capture import CapturedSession, can_capture, capturing
from gradgraph.runtime.execution.gathering import GatheringSession, Shapes, gather
from gradgraph.runtime.execution.inplace import overwritable
from gradgraph.runtime.execution.means import WeightedMeans
from gradgraph.runtime.execution.outputs import ComputingSession, joined
from gradgraph.runtime.execution.rates import Rates
from gradgraph.runtime.execution.session import (
    Device,
    Placement,
    Provider,
    RuntimeOptions,
    create_session,
    explained,
    external_weights,
)
from gradgraph.runtime.execution.shaped import ShapedSessions, Sizes
from gradgraph.runtime.execution.state import State
from gradgraph.runtime.execution.tuner import Tuner, default_cache
from gradgraph.runtime.execution.turns import Turns, in_turn
from gradgraph.runtime.loop.fit import Fit, FitOptions
from gradgraph.runtime.saved.checkpoint import encode_checkpoint, load_newest
from gradgraph.runtime.saved.history import History
from gradgraph.runtime.saved.record import Progress
from gradgraph.step import Step

log = logging.getLogger("gradgraph")

Rate = float | Callable[[int], float]
RATE = Kind("a number, or a function of the number of steps done", lambda value: callable(value) or NUMBER.fits(value))
DEFAULT_BATCH_SIZE = 32


class Trainer:
    """Runs a step on stock onnxruntime.

    Several threads may use one trainer: their calls wait for each other. While ``fit`` runs in one of them, the others
    may read the state, save, evaluate, predict and export between two of its steps; what would change the state there
    raises BusyError.

    Args:
        step: a :class:`gradgraph.step.Step`, or the folder of one.
        providers: onnxruntime's execution providers, in order of preference; overrides ``device``.
        device: ``"cpu"``, ``"cuda"``, or ``"auto"`` (CUDA if this onnxruntime has it).
        seed: of the order of the data.
        options: threads, memory and other settings of onnxruntime.
        check_loss: stop at a NaN or infinite loss, with the state of the step before.
        check_inputs: look for NaN and Inf in every batch.
        tune: time the candidate forms of every operator once, at the first step, and use the fastest ones; what was
            timed on this machine before is looked up in the user's cache. (A ``Tuner`` of your own: with another
            cache, or to see what it finds.)

    Raises:
        ModelError: the step folder is damaged, or onnxruntime refuses its models.
        RuntimeUnavailableError: the device, a provider or the native kernels are not available.
    """

    @checked(seed=WHOLE, check_loss=FLAG, check_inputs=FLAG, tune=instance(bool | Tuner, "True, False or a Tuner"),
             options=instance(RuntimeOptions, "gg.RuntimeOptions").or_none())  # fmt: skip
    def __init__(
        self,
        step: Step | str | os.PathLike[str],
        providers: Sequence[Provider] | None = None,
        device: Device = "auto",
        seed: int = 0,
        *,
        options: RuntimeOptions | None = None,
        check_loss: bool = True,
        check_inputs: bool = False,
        tune: bool | Tuner = False,
    ) -> None:
        self.definition = step if isinstance(step, Step) else Step.load(step)
        self.placement = Placement.choose(device, providers)
        if self.manifest.backend in BACKENDS:
            check_runs_here(BACKENDS[self.manifest.backend], self.manifest.machine, self.placement.backend)
        self.progress = Progress(seed=int(seed))
        self.check_loss = check_loss
        self._options = options or RuntimeOptions()
        self._backend = self.placement.trains_for(self._options)
        self._tuner = self._tuner_for(tune)
        self._train_checker = BatchChecker(batch_specs(self.manifest), check_inputs)
        self._rates = Rates(self.manifest.hyperparameters)
        self.turns = Turns()
        self._gathered: Shapes = {}  # what a training session that is made now is to gather
        self._continues = False  # the next fit goes on where a checkpoint ended
        log.info("training on %s", self.described)

    @property
    def manifest(self) -> Manifest:
        return self.definition.manifest

    @property
    def device(self) -> str:
        """Where the state lives: ``"cpu"`` or ``"cuda"``."""
        return self.placement.memory

    @property
    def described(self) -> str:
        """Where it trains, and what makes that less exact than usual, in words."""
        precision = self._options.matmul_precision
        return self.device if precision == HIGHEST else f"{self.device} with matmul_precision {precision}"

    @property
    def history(self) -> History:
        """The rows that the last ``fit`` has recorded."""
        return self.progress.history

    # --- one step -------------------------------------------------------------------------------------------

    def step(self, batch: Batch, **hyperparameters: float) -> dict[str, Array]:
        """Train on one batch.

        Args:
            batch: inputs and targets by name (or a tuple in the order of the manifest): NumPy arrays, OrtValues,
                or anything that speaks DLPack.
            hyperparameters: values for scalar inputs such as ``learning_rate``; the manifest's values by default.

        Returns:
            ``{"loss": …}`` and the metrics, as 0-d arrays.

        Raises:
            DataError: the batch does not fit. Nothing has changed.
            UnknownNameError: the step has no such hyperparameter.
            DataError: a hyperparameter is not finite. Nothing has changed.
            DivergedError: the loss is NaN or infinite. The state is that before this step; the error keeps the batch.
            ModelError: onnxruntime failed. The state is that before this step.
            BusyError: ``fit`` runs in another thread.
        """
        with self.turns.lock:
            self.turns.refuse_beside_fit("step")
            return self.train_on(self._train_checker(batch), hyperparameters, None).results()

    def check_batch(self, batch: Batch) -> Mapping[str, Feed]:
        """The batch as the step takes it, or DataError. Rows that the session gathers have been checked before."""
        if type(batch) is not Rows:
            return self._train_checker(batch)
        self._gathered = shapes = batch.table.shapes
        session = self._train.for_usual()
        if session.gathers != shapes:
            return self._train_checker(dict(batch))
        batch.session = session
        return batch

    def counts(self, checked: Mapping[str, Feed]) -> tuple[int, int]:
        """Of a checked batch: the samples, and what a mean over it is a mean over."""
        return (type(checked) is Rows and checked.table.counts) or self._train_checker.counts(checked)

    def expect(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """Say which shapes most batches will have: the training session is made for these.

        Without this they are those of the first batch. Batches of other shapes run in a second session.
        """
        self._train.expect_shapes(shapes)

    def computing(self, source: Source) -> contextlib.AbstractContextManager[None]:
        """Within it this thread stays set as sessions set it for each run, which then take less time.

        So nobody else's code may run in it: not that of a source that is not ours, either.
        """
        return self._options.computing() if isinstance(source, Columns) else contextlib.nullcontext()

    def release(self) -> None:
        """Keep no data of a finished :meth:`fit` alive."""
        self._train.release()
        self._train_checker.forget()

    def train_on(
        self, feeds: Mapping[str, Feed], hyperparameters: Mapping[str, float], options: ort.RunOptions | None
    ) -> BoundSession:
        """:meth:`step` on a batch that has been checked; the session has the results. The caller holds the lock."""
        try:
            changed = hyperparameters != self._rates.given
        except ValueError:  # an array: said where the rates are written
            changed = True
        if changed:
            self.progress.hyperparameters.update(self._rates.write(hyperparameters))
        session = (type(feeds) is Rows and feeds.session) or self._train.of(feeds)
        # a device copies what is bound at binding, so there the rates are bound anew each time
        fed = feeds if self.state.on_cpu else {**feeds, **self._rates.constants}
        session.run(fed, options)
        if self.check_loss and not math.isfinite(loss := session.numbers["loss"]):
            self.state.undo()
            fate = "was written over (in_place=True): load a checkpoint" if self.state.lost else "is kept"
            raise DivergedError(
                f"the loss became {loss} in step {self.progress.steps + 1} (the state before it {fate})",
                _kept(feeds),
                dict(hyperparameters),
                remedy="lower the learning rate, or look for NaN in the data with check_inputs=True",
                shell="lower the learning rate (--lr), or look for NaN in the data",
            )
        self.progress.steps += 1
        self.progress.sizes = self._train.usual
        self._continues = False
        return session

    # --- many steps -----------------------------------------------------------------------------------------

    @checked(learning_rate=RATE.or_none(), max_time=NUMBER.or_none(), checkpoint=PATH.or_none(), shuffle=FLAG,
             drop_last=FLAG, progress=FLAG.or_none(), resume=FLAG.or_none(),
             callbacks=instance(Iterable, "a list of callbacks"))  # fmt: skip
    def fit(
        self,
        data: Any,
        epochs: int = 1,
        batch_size: int | None = None,
        *,
        validation: Any = None,
        shuffle: bool = True,
        drop_last: bool = False,
        learning_rate: Rate | None = None,
        callbacks: Iterable[Any] = (),
        progress: bool | None = None,
        checkpoint: str | os.PathLike[str] | None = None,
        checkpoint_every: int | None = None,
        max_steps: int | None = None,
        max_time: float | None = None,
        patience: int | None = None,
        limit: int | None = None,
        resume: bool | None = None,
        **hyperparameters: Rate,
    ) -> History:
        """Train for some epochs.

        Args:
            data: a dict of arrays, the path of an ``.npz`` or of a folder of ``.npy``, a dataset, or an iterable of
                batches (see :func:`gradgraph.runtime.data.sources.as_source`).
            epochs: passes over the data; after a resume, those done before count too.
            batch_size: samples per step; 32 by default, or what the model is fixed to.
            validation: data to evaluate after each epoch (columns ``val_loss`` and so on).
            shuffle: a new order in each epoch, a function of the trainer's seed and the epoch (not for iterables).
            drop_last: leave out a last, smaller batch.
            learning_rate: a number, or a function of the number of steps done.
            callbacks: objects with any of ``on_step(trainer, results)``, ``on_epoch(trainer, row)`` and
                ``on_end(trainer, history)``, called in this order; the first two stop training by returning True.
            progress: None draws a bar on a terminal and prints plain lines elsewhere; False is silent.
            checkpoint: file that is saved at the end, after each epoch, and when training is interrupted.
            checkpoint_every: save every so many steps instead of after each epoch.
            max_steps, max_time: stop after so many steps of this fit, or seconds of this call.
            patience: stop after so many epochs without improvement of ``val_loss`` (``loss`` without validation) and
                go back to the best state, which is also saved beside ``checkpoint`` as ``<name>.best<suffix>``.
            limit: use only the first so many batches of each epoch and of the validation data.
            resume: go on with an unfinished fit; by default if the trainer comes from a checkpoint.
            hyperparameters: other scalar inputs of the step, like ``learning_rate``.

        Returns:
            One row per epoch; a last epoch that was cut short has one, too, over the batches it saw.

        Raises:
            DataError: the data do not fit, said before the first step where possible.
            DivergedError: the loss is NaN or infinite.
            OutputError: the last checkpoint could not be written, or another run saves to the same path.
            BusyError: another thread fits, or it is called in a callback of ``fit``.
            KeyboardInterrupt: Ctrl-C; the step was finished and the checkpoint saved before. (SIGTERM: SystemExit.)
        """
        if max_time is not None and not max_time > 0:
            raise DataError(f"max_time must be a number of seconds above zero, but is {described(max_time)}")
        counts = {"epochs": epochs, "batch_size": batch_size, "max_steps": max_steps, "patience": patience}
        check_counts(**counts, limit=limit, checkpoint_every=checkpoint_every)
        rates = dict(hyperparameters)
        if learning_rate is not None:
            rates["learning_rate"] = learning_rate
        self._rates.check_names(rates)
        order = self._order(batch_size, shuffle, drop_last)
        options = FitOptions(
            epochs=epochs,
            rates=rates,
            callbacks=tuple(callbacks),
            progress=progress,
            checkpoint=checkpoint,
            checkpoint_every=checkpoint_every,
            max_steps=max_steps,
            max_time=max_time,
            patience=patience,
            limit=limit,
        )
        with self.turns.of_fit():
            with self.turns.taken():
                source = as_source(data, self._train_checker, order)
                held_out = None if validation is None else self._source(validation, order.batch_size)
                continues, self._continues = self._continues, False
            run = Fit(self, source, order, replace(options, validation=held_out))
            return run(resume=continues if resume is None else resume)

    def prepare(
        self, data: Any, batch_size: int | None = None, *, shuffle: bool = True, drop_last: bool = False
    ) -> Any:
        """Data for :meth:`fit` with the same arguments and for :meth:`evaluate`: read, checked and converted once.

        Args:
            data, batch_size, shuffle, drop_last: as for :meth:`fit`.

        Raises:
            DataError: the data do not fit.
        """
        with self.turns.taken():
            return as_source(data, self._train_checker, self._order(batch_size, shuffle, drop_last))

    @checked(limit=WHOLE.or_none(), stop=FUNCTION.or_none())
    @in_turn
    def evaluate(
        self,
        data: Any,
        batch_size: int | None = None,
        *,
        limit: int | None = None,
        stop: Callable[[], bool] | None = None,
    ) -> dict[str, float]:
        """Loss and metrics on held-out data: means over the samples, or over the labels that are not ignored.

        So unequal batches count as they should. (Class weights are not counted, and a loss that sums is averaged.)

        Args:
            data: as for :meth:`fit`, or what :meth:`prepare` gives, in the batches that it was prepared for.
            batch_size: samples per run; the result does not depend on it beyond rounding.
            limit: use only so many batches.
            stop: asked before each batch; True ends the evaluation early.

        Raises:
            DataError: the data do not fit.
        """
        self.definition.check_uncut()
        means, source, bound = WeightedMeans(), self._source(data, batch_size), self._eval
        unread = self._train_checker.specs.keys() - bound.inputs  # evaluation may need less than training
        with released(bound, self._train_checker), contextlib.nullcontext() if stop else self.computing(source):
            for i, batch in enumerate(source.batches(0)):
                if (stop and stop()) or i == limit:
                    break
                feeds = _checked(self._train_checker, batch, i)
                bound.run(_without(unread, feeds) if unread else feeds)
                means.add(bound.numbers, self.counts(feeds)[1])
        if not means.weight and not (stop and stop()):
            raise DataError("there is nothing to evaluate; the data hold no batch")
        return means.result()

    @in_turn
    def predict(self, x: Any, batch_size: int | None = None) -> Any:
        """The model's outputs, in evaluation mode.

        Args:
            x: an array (of the only input), a tuple, a dict by name, or whatever :meth:`fit` takes; targets among a
                dict, or what :meth:`prepare` gives, are left out. Results are in the order of the samples.
            batch_size: samples per run.

        Returns:
            An array if the model has one output, else a dict by name.

        Raises:
            DataError: the data do not fit, or outputs of different shapes cannot be put together.
        """
        self.definition.check_uncut()
        bound, checker = self._predict, self._predict_checker
        if isinstance(x, Columns):
            x, batch_size = x.arrays, batch_size or x.order.batch_size
        if isinstance(x, Mapping):
            unread = {s.name for s in batch_specs(self.manifest)} - checker.specs.keys()
            x = {name: value for name, value in x.items() if name not in unread}
        elif hasattr(x, "shape") and len(checker.specs) == 1:
            x = dict.fromkeys(checker.specs, x)
        parts = []
        source = as_source(x, checker, self._order(batch_size, shuffle=False, drop_last=False))
        with released(bound, checker), self.computing(source):
            for i, batch in enumerate(source.batches(0)):
                feeds = _checked(checker, batch, i)
                parts.append((bound.compute(feeds), checker.counts(feeds)[0]))
        outputs = {name: joined(name, [(p[name], rows) for p, rows in parts]) for name in self.manifest.outputs}
        return next(iter(outputs.values())) if len(outputs) == 1 else outputs

    def _source(self, data: Any, batch_size: int | None) -> Source:
        """Data for evaluation, in their own order (or in that which they were prepared for)."""
        if isinstance(data, Columns):
            return as_source(data, self._train_checker, data.order)
        return self.prepare(data, batch_size, shuffle=False)

    def _order(self, batch_size: int | None, shuffle: bool, drop_last: bool) -> Order:
        return Order(self._batch_size(batch_size), shuffle, drop_last, self.progress.seed)

    def _batch_size(self, given: int | None) -> int:
        if given is not None:
            check_counts(batch_size=given)
            return int(given)
        fixed = (s.shape[0] for s in self.manifest.inputs if s.shape and isinstance(s.shape[0], int))
        return next(fixed, DEFAULT_BATCH_SIZE)

    # --- state ------------------------------------------------------------------------------------------------

    @functools.cached_property
    def state(self) -> State:
        """The state tensors, first filled by running init.onnx."""
        with self.turns.taken():  # a second thread finds what the first has made
            made: State | None = vars(self).get("state")
            return made or self._first_state()

    def _first_state(self) -> State:
        state = State(self.manifest.state, self.placement)
        session = self._session("init")
        binding = session.io_binding()
        for name, value in state.values(state.side).items():
            binding.bind_ortvalue_output(name, value)
        with explained("running init.onnx failed"):
            session.run_with_iobinding(binding)
        self.definition.release_init()  # or the weights would lie in memory once more
        return state

    @property
    @in_turn
    def parameters(self) -> dict[str, Array]:
        """Copies of the trained weights, by name."""
        return self.state.read(self.manifest.trainable)

    @in_turn
    def state_dict(self) -> dict[str, Array]:
        """Copies of every state tensor: parameters, running statistics, optimizer slots, counters."""
        return self.state.read()

    @checked(values=instance(Mapping, "a dict of arrays by name"))
    def load_state_dict(self, values: Mapping[str, Array]) -> None:
        """Replace the whole state.

        Raises:
            CheckpointError: a tensor is missing, unknown, or of another shape or dtype; nothing was changed then.
            BusyError: ``fit`` runs in another thread.
        """
        with self.turns.trained("load_state_dict"):
            self.state.write(values)

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "a Trainer can be neither pickled nor copied, as it holds sessions of onnxruntime; save() a checkpoint and "
            "call Trainer.resume(step, checkpoint) where another one is needed (a Step can be pickled)"
        )

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write a checkpoint, atomically.

        Raises:
            OutputError: ``path`` cannot be written; an older checkpoint there is intact.
        """
        with self.turns.taken():
            content = encode_checkpoint(self.state.read(), self.progress)
        write_atomically(path, content)

    @classmethod
    def resume(cls, step: Step | str | os.PathLike[str], path: str | os.PathLike[str], **options: Any) -> Trainer:
        """A trainer that stands where :meth:`save` left one; the next :meth:`fit` goes on from there.

        Args:
            step: the same step.
            path: the checkpoint.
            options: as for :class:`Trainer`; the seed is that of the checkpoint.

        Raises:
            CheckpointError: the checkpoint is not there, damaged, or of another step.
        """
        trainer = cls(step, **options)
        trainer.load(path)
        return trainer

    def load(self, path: str | os.PathLike[str]) -> None:
        """Take over state and progress from a checkpoint.

        Raises:
            CheckpointError: the checkpoint is not there, damaged, or of another step; nothing was changed then.
            BusyError: ``fit`` runs in another thread, or this is called in a callback of it.
        """
        values, progress = load_newest(path, self.manifest.state)
        with self.turns.trained("load"):
            self.turns.refuse_within_fit("load")
            self.state.write(values)
            self.progress, self._rates.given = progress, None
            if progress.sizes is not None:
                self._train.expect(progress.sizes)
            self._continues = True

    def export(self, path: str | os.PathLike[str] | None = None) -> onnx.ModelProto:
        """The trained model as plain ONNX: no loss, no optimizer, layers in evaluation form.

        Raises:
            ModelError: the step keeps no output of the model.
            OutputError: ``path`` cannot be written.
        """
        needed = {s.name for s in self.manifest.state} & {i.name for i in self.definition.eval.graph.input}
        with self.turns.taken():
            values = self.state.read(needed)
        model = inference_model(self.definition.resolved("eval"), self.manifest, values)
        if path is not None:
            save_model(model, path)
        return model

    # --- sessions, made when first needed ------------------------------------------------------------------------

    @functools.cached_property
    def _train(self) -> ShapedSessions:
        return ShapedSessions(batch_specs(self.manifest), self._train_session)

    def _train_session(self, sizes: Sizes) -> BoundSession:
        next_of = {s.name: s.next for s in self.manifest.state}
        model = self._lowered(self.definition.train, sizes)
        if can_capture(model, self.placement, self._options.cuda_graph):
            session = create_session(model, capturing(self.placement), self._options, self._weights)
            return CapturedSession(session, self.state, self._results, next_of, self.placement)
        gathers = self._gathered if self.state.on_cpu and gather(model, self._gathered) else {}
        session, safe = self._training(model, next_of)
        bound = (self.state, self._results, next_of, self._rates.constants, safe)
        return GatheringSession(session, gathers, *bound) if gathers else BoundSession(session, *bound)

    def _training(
        self, model: onnx.ModelProto, next_of: Mapping[str, str]
    ) -> tuple[ort.InferenceSession, frozenset[str]]:
        """A session, and the state tensors that it may write over."""
        if not (self._options.in_place and self.state.on_cpu):
            return create_session(model, self.placement, self._options, self._weights), frozenset()
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "executed.onnx"
            session = create_session(model, self.placement, self._options, self._weights, path)
            safe = overwritable(onnx.load(path, load_external_data=False), next_of)
        self.state.share(safe)
        return session, safe

    @functools.cached_property
    def _eval(self) -> BoundSession:
        return BoundSession(self._session("eval"), self.state, self._results)

    @functools.cached_property
    def _predict(self) -> ComputingSession:
        model = for_machine(without_loss(self.definition.eval, self.manifest), self.placement.backend)
        session = create_session(model, self.placement, self._options, self._weights)
        return ComputingSession(session, self.state, self.manifest.outputs)

    @functools.cached_property
    def _predict_checker(self) -> BatchChecker:
        return BatchChecker([s for s in self.manifest.inputs if s.name in self._predict.inputs])

    @property
    def _results(self) -> dict[str, str]:
        return {"loss": self.manifest.loss_output, **{name: name for name in self.manifest.metrics}}

    @functools.cached_property
    def _weights(self) -> dict[str, ort.OrtValue]:
        """Frozen weights that lie beside the models: mapped once, shared by all sessions."""
        step = self.definition
        return {**external_weights(step, step.eval), **external_weights(step, step.train)}

    def _session(self, name: Literal["init", "eval"]) -> ort.InferenceSession:
        step = self.definition
        model: onnx.ModelProto = getattr(step, name)
        if name == "init":  # runs once: the zeros of optimizer slots would be computed a second time to be folded
            weights = external_weights(step, model)
            return create_session(model, self.placement, replace(self._options, optimization="none"), weights)
        return create_session(for_machine(model, self.placement.backend), self.placement, self._options, self._weights)

    def _lowered(self, model: onnx.ModelProto, sizes: Sizes | None) -> onnx.ModelProto:
        """A model that trains, in the forms to train with."""
        choose = self._tuner(model, sizes) if self._tuner is not None and sizes is not None else None
        return for_machine(model, self._backend, sizes, choose)

    def _tuner_for(self, tune: bool | Tuner) -> Tuner | None:
        if isinstance(tune, Tuner):
            return tune
        return Tuner(self._backend, self.placement, self._options, default_cache()) if tune else None


def _kept(feeds: Mapping[str, Feed]) -> dict[str, Feed]:
    """Copies of arrays, whose memory may be a buffer that is filled again."""
    return {name: feed if isinstance(feed, ort.OrtValue) else feed.copy() for name, feed in feeds.items()}


def _without(unread: Set[str], feeds: Mapping[str, Feed]) -> dict[str, Feed]:
    return {name: feed for name, feed in feeds.items() if name not in unread}


def _checked(checker: BatchChecker, batch: Batch, i: int) -> Mapping[str, Feed]:
    try:
        return checker(batch)
    except DataError as error:
        raise error.at(f"batch {i}") from None

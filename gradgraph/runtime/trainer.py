"""The Trainer, the public interface for training a step; implemented by ``execution`` and ``loop``."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, NoReturn, overload

from gradgraph.arguments import FINITE, FLAG, FUNCTION, NAMES, NUMBER, PATH, TEXT, WHOLE, Kind, checked, instance
from gradgraph.backends.ort_native.native_precision import HIGHEST
from gradgraph.data.arrays.batch import Array, Batch
from gradgraph.data.arrays.remedies import check_counts
from gradgraph.data.record.column_assignment import placed
from gradgraph.data.record.data_names import DataNames
from gradgraph.data.sources.labels_apart import labels_apart, paired
from gradgraph.data.sources.sources import Indexed
from gradgraph.errors import ArgumentError, CheckpointError, DataError
from gradgraph.files.path_kinds import Kind as Place
from gradgraph.files.path_kinds import checkpoint_of, kind_of, last_checkpoint_of, weights_of
from gradgraph.optim.plateau import Plateau
from gradgraph.rivals.entries import METHODS
from gradgraph.runtime.checkpoints import Checkpoints
from gradgraph.runtime.execution.evaluating import Evaluator
from gradgraph.runtime.execution.locking import synchronized
from gradgraph.runtime.execution.part import check_accumulates
from gradgraph.runtime.execution.session import Device, Placement, Provider, RuntimeOptions
from gradgraph.runtime.execution.step_session import StepSession
from gradgraph.runtime.execution.team import ALONE, Parallel
from gradgraph.runtime.execution.tuner import Tuner
from gradgraph.runtime.features.keeping import keep_features as keep
from gradgraph.runtime.features.variants import Variants
from gradgraph.runtime.loop.fit import Fit, FitOptions
from gradgraph.runtime.loop.logs import LOGS
from gradgraph.runtime.loop.moving import Rate
from gradgraph.runtime.loop.pattern import Pattern, pattern_of
from gradgraph.runtime.loop.several import SeveralFit, rates_of
from gradgraph.runtime.loop.sizing import limit_of
from gradgraph.runtime.saved.history import History
from gradgraph.runtime.saved.monitor import MODE, Monitor
from gradgraph.runtime.saved.record import Progress
from gradgraph.step.manifest import Manifest
from gradgraph.step.step import Step

log = logging.getLogger("gradgraph")

RATE = Kind(
    "a number, a function of the number of steps done, or gradgraph.optim.reduce_on_plateau(...)",
    lambda value: callable(value) or isinstance(value, Plateau | Mapping) or NUMBER.fits(value),
)
KEEP = Kind("True, False or 'auto'", lambda value: FLAG.fits(value) or value == "auto")
EVERY = "a dict of steps and numbers, such as {'generator': 5}"


class Trainer(Checkpoints):
    """A trainer that runs a step with stock onnxruntime.

    Several threads may share a trainer: their calls wait for each other. While ``fit`` runs in one thread, others
    may read the state, save, evaluate, predict and export between two of its steps; calls that would change the state
    raise BusyError.

    Args:
        step: a :class:`gradgraph.Step`, or a step folder; or the folder of a run (``gradgraph train --run``), which
            provides the weights of its best epoch, or else of its last one.
        providers: onnxruntime's execution providers, in order of preference; overrides ``device``.
        device: ``"cpu"``, ``"cuda"``, or ``"auto"`` (CUDA if this onnxruntime has it).
        seed: random seed of the data order.
        options: threads, memory and other settings of onnxruntime.
        check_loss: raise an error for a NaN or infinite loss, keeping the state before that step.
        check_inputs: check every batch for NaN and Inf.
        tune: time the implementations of every operator once, at the first step, and use the fastest ones; earlier
            results on this machine are read from the user's cache. Pass a ``Tuner`` for another cache or its results.
        parallel: ``gg.DataParallel()`` for several processes that train together, each on a part of every batch.

    Raises:
        ModelError: if the step folder is damaged, or onnxruntime rejects its models.
        RuntimeUnavailableError: if the device, a provider or the native kernels are not available.
    """

    @checked(seed=WHOLE, check_loss=FLAG, check_inputs=FLAG, tune=instance(bool | Tuner, "True, False or a Tuner"),
             options=instance(RuntimeOptions, "gg.RuntimeOptions").or_none(),
             parallel=instance(Parallel, "gg.DataParallel()").or_none())  # fmt: skip
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
        parallel: Parallel | None = None,
    ) -> None:
        definition = step if isinstance(step, Step) else Step.load(step)
        team = ALONE if parallel is None else parallel.team()
        placement = Placement.choose(device, providers, lambda: team.gpu)
        progress = Progress(seed=int(seed))
        self._session = StepSession(
            definition, placement, options or RuntimeOptions(), progress, check_loss, check_inputs, tune, team
        )
        self._evaluator = Evaluator(self._session)
        self.turns = self._session.turns
        self._resumed_at: int | None = None  # a fit that begins at this step continues the one of a checkpoint
        self._unread = None if isinstance(step, Step) else checkpoint_of(step)  # see Exports._unread
        log.info("training on %s", self.described)
        if not isinstance(step, Step) and kind_of(step) is Place.RUN:
            self.load(weights_of(step))

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            there = METHODS.get(name)
            remedy = "" if there is None else f"; that is {there}"
            raise AttributeError(f"'Trainer' object has no attribute '{name}'{remedy}", name=name, obj=self)

    @property
    def definition(self) -> Step:
        """The step that is trained."""
        return self._session.definition

    @property
    def manifest(self) -> Manifest:
        """The manifest of the step: names, shapes and roles of its tensors."""
        return self._session.manifest

    @property
    def device(self) -> str:
        """The device of the state: ``"cpu"`` or ``"cuda"``."""
        return self._session.placement.memory

    @property
    def described(self) -> str:
        """The device, with native kernels and reduced precision if they are used, such as "cpu with native kernels"."""
        options = self._session.options
        kernels = " with native kernels" if options.native_kernels else ""
        precision = "" if options.matmul_precision == HIGHEST else f" at matmul_precision {options.matmul_precision}"
        return f"{self.device}{kernels}{precision}"

    @property
    def progress(self) -> Progress:
        """The progress of the run: steps, epochs, and all other contents of a checkpoint except the state."""
        return self._session.progress

    @property
    def names(self) -> DataNames:
        """The column and class names of the training data, which later data must match.

        ``fit`` reads them from tables, image folders and datasets. For arrays, set them yourself:
        ``trainer.names = gradgraph.DataNames(classes={"target": ["cat", "dog"]})``.
        """
        return self._session.data.names

    @names.setter
    def names(self, names: DataNames) -> None:
        with self.turns.trained("names"):
            self._session.data.learn(placed(names, self.manifest.inputs, self.manifest.targets))

    @property
    def history(self) -> History:
        """The history recorded by the last ``fit``."""
        return self.progress.history

    # --- training -------------------------------------------------------------------------------------------

    @overload
    def step(self, name: Batch, **hyperparameters: float) -> dict[str, Array]: ...
    @overload
    def step(self, name: str, batch: Batch, **hyperparameters: float) -> dict[str, Array]: ...
    @overload
    def step(self, *, batch: Batch, **hyperparameters: float) -> dict[str, Array]: ...

    def step(self, name: Any = None, batch: Any = None, **hyperparameters: float) -> dict[str, Array]:
        """Train on one batch: ``step(batch)``, or with several steps by name: ``step("generator", batch)``.

        Args:
            name: the step to run, if there are several.
            batch: inputs and targets by name (or a tuple in the order of the manifest): NumPy arrays, OrtValues,
                or anything with DLPack. It may contain inputs that only other steps read.
            hyperparameters: values for scalar inputs such as ``learning_rate``; the manifest's values by default.

        Returns:
            ``{"loss": …}`` and the metrics, as 0-d arrays.

        Raises:
            DataError: if the batch does not match the step, or a hyperparameter is not finite. The state is unchanged.
            UnknownNameError: if a hyperparameter or the step does not exist.
            BuildError: if there are several steps, and ``name`` is missing.
            DivergedError: if the loss is NaN or infinite. The state is unchanged (unless ``in_place=True``); the error
                contains the batch.
            ModelError: if onnxruntime fails. The state is unchanged, or lost if it was being overwritten
                (``in_place``). Also if a file with weights was overwritten since the step was opened.
            BusyError: if ``fit`` is running in another thread.
        """
        session = self._session
        part, batch = session.named_batch(name, batch)
        with self.turns.lock:
            self.turns.refuse_beside_fit("step")
            return session.train(session.data.batch_of(part, batch), hyperparameters, part).results()

    @synchronized
    def expect(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """Set the usual shapes of a batch by input name, for which the training session is created.

        By default they are the shapes of the first batch. Batches of other shapes run in a second session.
        """
        self._session.expect(shapes)

    @labels_apart
    @checked(learning_rate=RATE.or_none(), steps=NAMES.or_none(), every=instance(Mapping, EVERY).or_none(),
             max_time=NUMBER.or_none(), checkpoint=PATH.or_none(), shuffle=FLAG,
             drop_last=FLAG, progress=FLAG.or_none(), resume=FLAG.or_none(), monitor=TEXT.or_none(), mode=MODE,
             keep_features=KEEP,
             min_delta=Kind("a finite number that is not negative", lambda value: FINITE.fits(value) and value >= 0),
             log=LOGS.or_none(), callbacks=instance(Iterable, "a list of callbacks"))  # fmt: skip
    def fit(
        self,
        data: Any,
        epochs: int = 1,
        batch_size: int | str | None = None,
        *,
        validation: Any = None,
        shuffle: bool = True,
        drop_last: bool = False,
        learning_rate: Rate | Mapping[str, Rate] | None = None,
        callbacks: Iterable[Any] = (),
        progress: bool | None = None,
        checkpoint: str | os.PathLike[str] | None = None,
        checkpoint_every: int | None = None,
        max_steps: int | None = None,
        max_time: float | None = None,
        patience: int | None = None,
        monitor: str | None = None,
        mode: Literal["min", "max"] | None = None,
        min_delta: float = 0.0,
        limit: int | None = None,
        resume: bool | None = None,
        accumulate: int | None = None,
        log: Any = None,
        log_every: int = 50,
        eval_every: int | None = None,
        steps: str | Sequence[str] | None = None,
        every: Mapping[str, int] | None = None,
        keep_features: bool | Literal["auto"] = False,
        feature_variants: int | None = None,
        y: Any = None,
        **hyperparameters: Rate | Mapping[str, Rate],
    ) -> History:
        """Train for some epochs: ``fit(data, 3)``, or ``fit(x, y, epochs=3)``.

        Args:
            data: a dict of arrays, the path of an ``.npz`` or of a folder of ``.npy``, a dataset, or an iterable of
                batches (docs/how-to/data.md lists all).
            epochs: number of epochs, including those before a resume.
            batch_size: samples per step; by default 32, or the batch size of a fixed model. ``"auto"``: the largest
                power of two that fits in free memory; ``"auto:4GB"``: with this memory limit for the process
                (:meth:`find_batch_size`).
            validation: data to evaluate after each epoch (columns ``val_loss`` and so on).
            shuffle: shuffle the samples in each epoch, in an order that depends only on the trainer's seed and the
                epoch (not for iterables).
            drop_last: drop an incomplete last batch.
            learning_rate: a number, a function of the number of steps done, or
                ``gradgraph.optim.reduce_on_plateau(…)``, which follows the history of this fit.
            callbacks: objects with any of ``on_step(trainer, results)``, ``on_epoch(trainer, row)`` and
                ``on_end(trainer, history)``, called in this order; the first two stop training by returning True.
            progress: None shows a progress bar on a terminal and prints plain lines elsewhere; False is silent.
            checkpoint: file to save at the end, after each epoch, and when training is interrupted.
            checkpoint_every: save every N steps instead of after each epoch.
            max_steps, max_time: stop after this many steps of this fit, or seconds of this call.
            patience: stop after this many epochs without improvement of ``monitor`` and restore the best state,
                which is also saved next to ``checkpoint`` as ``<name>.best<suffix>``.
            monitor: column of the history; ``val_loss`` by default (``loss`` without validation).
            mode: ``"min"`` or ``"max"``; by default derived from the column's name (``val_accuracy``).
            min_delta: minimum change that counts as an improvement.
            limit: use only this many batches of each epoch and of the validation data.
            resume: continue an unfinished fit; by default if the trainer was loaded from a checkpoint.
            accumulate: update the weights after this many batches, and after the last batch of an epoch, with the
                gradient of all their samples; requires a step built with ``accumulate=True``. For an iterable of
                unknown length, remaining gradients are kept for the next epoch.
            log: where to write a record every ``log_every`` steps and after each epoch: a path (``.jsonl``, ``.csv``,
                or a folder for TensorBoard), an object with ``write(record)``, or a list of them.
            log_every: number of steps between records.
            eval_every: evaluate ``validation`` every N steps, and at the end, instead of after each epoch. The history
                then has a row for each evaluation, and ``patience``, the best state, ``on_epoch`` and checkpoints refer
                to evaluations instead of epochs.
            steps: with several named steps, the steps that train on each batch, in this order; by default all of them.
                A step may occur twice.
            every: steps that train only on every N-th batch: ``{"generator": 5}``.
            keep_features: compute frozen layers once for each sample, and train only the rest of the step in each
                epoch, with the same results. Features are kept in up to a quarter of the free memory, otherwise in
                files next to ``checkpoint``. Layers are computed in every epoch if Dropout, batch statistics or other
                samples of the batch affect them. True raises an error if no feature can be kept; "auto" trains
                without.
            feature_variants: with ``keep_features`` and augmented data, the number of augmented variants of each
                sample whose features are computed. Epoch ``e`` trains on variant ``e % feature_variants``, so the
                first epochs are the same as without kept features, and later ones repeat their augmentations.
            y: labels, if ``data`` only contains the inputs: an array for the only target, a table, or a dict by name.
                It may be the second positional argument; pass all others by keyword then.
            hyperparameters: other scalar inputs, each in a form accepted for ``learning_rate``; with several steps, a
                dict by step.

        Returns:
            The history, with one row per epoch (or per ``eval_every`` steps). An incomplete last epoch has a row, too,
            over the batches done.

        Raises:
            DataError: if the data do not match the step; raised before the first step if possible.
            DivergedError: if the loss is NaN or infinite.
            OutputError: if the last checkpoint cannot be written, or another run saves to the same path.
            BusyError: if another thread runs ``fit``, or this is called in a callback of ``fit``.
            KeyboardInterrupt: after Ctrl-C, when the current step is finished and the checkpoint is saved; after
                SIGTERM, SystemExit.
        """
        check_counts(feature_variants=feature_variants)
        if feature_variants is not None and not keep_features:
            raise ArgumentError(
                "feature_variants has no effect without keep_features",
                remedy="pass keep_features=True, too",
                shell="add --keep-features, too",
            )
        given = hyperparameters if learning_rate is None else {**hyperparameters, "learning_rate": learning_rate}
        rates, pattern = self._rates_and_pattern(given, steps, every)
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
            monitor=Monitor(monitor, mode, float(min_delta)),
            limit=limit,
            accumulate=accumulate,
            log=log,
            log_every=log_every,
            eval_every=eval_every,
        )
        session = self._session
        check_accumulates(accumulate, session.parts.values())
        data = paired(data, y, self.manifest.inputs, self.manifest.targets, self.names)
        batch_size, team = self._samples(data, batch_size, drop_last), session.team
        order = session.data.order(batch_size, shuffle, drop_last, team)
        with self.turns.of_fit():
            with self.turns.taken():
                source = session.data.to_train_on(data, order, pattern.names if pattern else None)
                session.data.learn(source.names)
                held_out = (
                    None
                    if validation is None
                    else session.data.held_out(validation, order.batch_size, team, is_validation=True)
                )
                continues, self._resumed_at = self._resumed_at == self.progress.steps, None
                resume = team.agreed(continues if resume is None else resume)
                if team.ranks > 1:
                    told = {
                        "options of fit": options.told(resume),
                        "data": source.fingerprint,
                        "validation": "none" if held_out is None else held_out.fingerprint,
                    }
                    told["options of kept features"] = (
                        f"keep_features={keep_features}, feature_variants={feature_variants}"
                    )
                    told["kernels"] = session.kernels  # other kernels round differently
                    team.begin(session, told, source.usual_terms(session.data.checker) or order.size)
                kept = None
                if keep_features is True or (keep_features == "auto" and epochs > 1):
                    began = time.monotonic()
                    variants = (
                        None
                        if feature_variants is None
                        else Variants(feature_variants, self.progress.epochs_of_fit(epochs, resume))
                    )
                    kept = keep(session, source, held_out, keep_features, checkpoint, variants)
                    options = options.after(time.monotonic() - began)
            if kept is not None:
                session, source, held_out = kept.session, kept.source, kept.validation
            arguments = (session, source, order, held_out, options, self)
            fit = Fit(*arguments) if pattern is None else SeveralFit(*arguments, pattern=pattern)
            history = fit(resume)
            if kept is not None:
                kept.remove_files()
            return history

    def _rates_and_pattern(
        self, given: Mapping[str, Any], steps: str | Sequence[str] | None, every: Mapping[str, int] | None
    ) -> tuple[Mapping[str, Any], Pattern | None]:
        """Validate and return the hyperparameters and the pattern of steps of a fit."""
        pattern = pattern_of(list(self.manifest.steps), steps, every)
        if pattern is not None:
            return rates_of(given, pattern, self._session.parts, self.fit), pattern
        self._session.part.rates.check_names(given, self.fit)
        for name, rate in given.items():
            if isinstance(rate, Mapping):
                raise ArgumentError(f"{name} is a dict by step, but there is only one step; pass a number")
        return given, None

    def prepare(
        self, data: Any, batch_size: int | str | None = None, *, shuffle: bool = True, drop_last: bool = False
    ) -> Any:
        """Read, check and convert data once, for :meth:`fit` with the same arguments and for :meth:`evaluate`.

        Args:
            data, batch_size, shuffle, drop_last: as for :meth:`fit`.

        Raises:
            DataError: if the data do not match the step.
        """
        session = self._session
        order = session.data.order(self._samples(data, batch_size, drop_last), shuffle, drop_last, session.team)
        with self.turns.taken():
            return session.data.to_train_on(data, order)

    def _samples(self, data: Any, given: int | str | None, drop_last: bool) -> int | None:
        """Return the batch size for the argument ``given``: itself (a number or None), or one found for "auto".

        A resumed run keeps its batch size.
        """
        if not isinstance(given, str):
            return given
        limit_of(given)
        if self._session.team.ranks > 1:
            raise DataError("an automatic batch size is not supported with several ranks; give a number")
        known = self.progress.order.get("batch_size")
        if known is not None and self._resumed_at == self.progress.steps:
            return int(known)
        found = self.find_batch_size(data, given.partition(":")[2] or None, drop_last=drop_last)
        log.info("%s", found)
        return found.samples

    # --- evaluation -----------------------------------------------------------------------------------------

    @labels_apart
    @checked(limit=WHOLE.or_none(), stop=FUNCTION.or_none(), averaged=FLAG)
    @synchronized
    def evaluate(
        self,
        data: Any,
        batch_size: int | None = None,
        *,
        limit: int | None = None,
        stop: Callable[[], bool] | None = None,
        averaged: bool = True,
        y: Any = None,
    ) -> dict[str, Any]:
        """Compute loss and metrics on held-out data: means over the samples, or over the labels that are not ignored.

        Batches of different sizes are weighted by their samples or labels, regardless of class weights, also for a loss
        with ``reduction="sum"``.
        Metrics computed from sums (``gradgraph.metrics``) are exact over all data; per-class metrics are arrays.

        Args:
            data: as for :meth:`fit`, or a result of :meth:`prepare`, which keeps its batch size.
            batch_size: samples per run, which affects the result only by rounding.
            limit: use only this many batches.
            stop: called before each batch; True ends the evaluation early.
            averaged: evaluate with averaged weights, if the optimizer keeps averages (``gradgraph.optim.ema``).
            y: as for :meth:`fit`.

        Raises:
            DataError: if the data do not match the step.
        """
        data = paired(data, y, self.manifest.inputs, self.manifest.targets, self.names)
        self._warn_if_untrained()
        return self._evaluator.evaluate(self._session.data.held_out(data, batch_size), limit, stop, averaged)

    @checked(averaged=FLAG, per_batch=FLAG)
    @synchronized
    def predict(self, x: Any, batch_size: int | None = None, *, averaged: bool = True, per_batch: bool = False) -> Any:
        """Compute the model's outputs in evaluation mode for any number of samples, even for a fixed batch size.

        The outputs of several batches are concatenated along the sample axis, wherever it is (as in [time, batch, …]).
        An output without a sample axis, such as a sum over the batch, is stacked, with one entry per batch on a new
        first axis; if it depends on no input, it is returned once. For a single batch, all outputs are unchanged.

        Args:
            x: an array (for the only input), a tuple, a dict by name, or anything that :meth:`fit` accepts. Targets in
                it are ignored. Results are in the order of the samples.
            batch_size: samples per run.
            averaged: as for :meth:`evaluate`.
            per_batch: return a list with the outputs of each batch, which may have different shapes.

        Returns:
            An array if the model has one output, else a dict by name.

        Raises:
            DataError: if the data do not match the step, or outputs have different shapes in different batches.
        """
        self._warn_if_untrained()
        if isinstance(x, Indexed):
            batch_size = batch_size or x.order.batch_size
        order = self._session.data.order(batch_size, shuffle=False, drop_last=False)
        parts = self._evaluator.predict(x, order, averaged)
        found = [outputs for outputs, _ in parts] if per_batch else [self._evaluator.joined(parts)]
        results = [next(iter(outputs.values())) if len(outputs) == 1 else outputs for outputs in found]
        return results if per_batch else results[0]

    # --- checkpoints ------------------------------------------------------------------------------------------

    @classmethod
    def resume(
        cls, step: Step | str | os.PathLike[str], path: str | os.PathLike[str] | None = None, **options: Any
    ) -> Trainer:
        """Create a trainer from a checkpoint written by :meth:`save`; the next :meth:`fit` continues from there.

        Args:
            step: the same step as before, or the folder of a run.
            path: the checkpoint, or a run's folder to load its last checkpoint; optional if ``step`` is a run's folder.
            options: as for :class:`Trainer`; the seed is read from the checkpoint.

        Raises:
            CheckpointError: if the checkpoint is missing, damaged, or of another step.
        """
        if path is None and (isinstance(step, Step) or (path := last_checkpoint_of(step)) is None):
            raise CheckpointError("there is no checkpoint to resume from; pass a checkpoint, or the folder of a run")
        PATH.check("the checkpoint", path)
        trainer = cls(step if isinstance(step, Step) else Step.load(step), **options)
        trainer.load(weights_of(path, last=True))
        return trainer

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "a Trainer cannot be pickled or copied, since it contains onnxruntime sessions; save() a checkpoint and "
            "create another one with Trainer.resume(step, checkpoint) (a Step can be pickled)"
        )

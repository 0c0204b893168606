"""``gradgraph.train``: execute a run."""

from __future__ import annotations

import contextlib
import logging
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gradgraph.errors import ArgumentError, counted, readable_bytes
from gradgraph.files.stdin import from_stdin
from gradgraph.runs.columns import check_same_data, preprocess, starting_model
from gradgraph.runs.interruption import drawn_if_stopped, how_to_resume, where_it_diverged
from gradgraph.runs.run_data import check_longest, keep_tokenizer
from gradgraph.runs.run_folder import RunFolder
from gradgraph.runs.run_options import Run
from gradgraph.runs.spelled_build import SpelledBuild
from gradgraph.runtime.execution.team import ALONE
from gradgraph.runtime.saved.history import History

if TYPE_CHECKING:
    from gradgraph.optim import Plateau, Schedule
    from gradgraph.parallel.data_parallel import DataParallel
    from gradgraph.runtime.trainer import Trainer
    from gradgraph.step.step import Step

log = logging.getLogger("gradgraph.runs")


@dataclass(frozen=True)
class Trained:
    """The result of a run.

    Attributes:
        run: the run, with the paths of all its outputs and the batch size.
        trainer: the trainer after the run.
        history: loss and metrics of each epoch; empty for a trial.
        trials: the results of ``find_lr`` (a ``RateCurve``), ``overfit`` (an ``Overfit``) and ``profile`` (a dict of
            ``Profile`` by step name), if these options are set.
    """

    run: Run
    trainer: Trainer
    history: History
    trials: dict[str, Any] = field(default_factory=dict)

    @property
    def files(self) -> dict[str, Path]:
        """The files that the run wrote, by option: ``checkpoint``, ``export``, ``history``."""
        paths = {name: getattr(self.run, name) for name in ("checkpoint", "export", "history")}
        return {name: path for name, path in paths.items() if path is not None}


def train(run: Run, *, progress: bool | None = None, words: Sequence[str] = ()) -> Trained:
    """Execute a training run: train the model, write all outputs, and return the result.

    The result is bit-identical to that of ``gradgraph train`` with the same options. Progress is logged to the logger
    ``gradgraph.runs`` at level INFO.

    Args:
        run: the model, the data, and all options.
        progress: as for ``Trainer.fit``.
        words: the command line of the run as typed, for messages and the run folder; empty in Python.

    Raises:
        ArgumentError: options contradict each other.
        OutputError: an output cannot be written, or already contains another run.
        CheckpointError: the checkpoint exists without ``resume`` or ``force``, or does not match the step.
        GradgraphError: any error of ``gradgraph.build`` and ``Trainer.fit``.
    """
    with contextlib.ExitStack() as until_end:
        training = _Training(run, words, until_end)
        trainer = training.open()
        samples, data = training.read(trainer)
        training.begin(trainer)
        if run.is_trial:
            return Trained(training.run, trainer, History(), training.try_out(trainer, data))
        history = training.fit(trainer, samples, data, progress)
        return Trained(training.run, trainer, history)


class _Training:
    """A run in progress.

    Args:
        run: its options.
        words: the command line as typed; empty in Python.
        until_end: the stack for cleanup at the end of the run, such as removing a copy of data from stdin.
    """

    def __init__(self, run: Run, words: Sequence[str], until_end: contextlib.ExitStack) -> None:
        self.words, self.until_end = words, until_end
        self._shared = _data_parallel(run)
        self.team = ALONE if self._shared is None else self._shared.team()
        self.folder = folder = RunFolder.of(run, words)
        if folder is not None:
            self.team.from_first(lambda: folder.check(run.force))
            if self.team.is_first:
                until_end.enter_context(folder.made())
            run = folder.filled(run)
        self.run = run
        self.rate: Schedule | Plateau | float | None = None
        self._build = SpelledBuild({**run.build, "seed": run.seed, "accumulate": run.accumulate is not None})

    def open(self) -> Trainer:
        """Open or build the step, and return its trainer with initial weights and data names set."""
        run = self.run
        doing = "opening" if run.trains_step else "building a step from"
        log.info("%s %s, to train on %s …", doing, run.model or run.begun or run.start, run.data)
        self.run = run = replace(run, data=self.until_end.enter_context(from_stdin(run.data)))
        self.team.from_first(run.check_outputs)
        self.rate = self._build.lr if run.trains_step else self._build.rate(run.total_steps)
        step = self._step()
        for line in step.taken:
            log.info("%s", line)
        trainer = self._trainer(step)
        if run.weights is not None:
            log.info("%s", trainer.load_state_dict(run.weights, strict=False))
        if run.start is not None:
            check_same_data(trainer, step)
        self._name_columns(trainer)
        return trainer

    def _step(self) -> Step:
        from gradgraph.step.step import Step

        run = self.run
        if run.model is None:
            model = starting_model(run.start or "", run.data, run.target, self._kinds, run.begun)
            step = self._build.build(*model, rate=self.rate)
        else:
            step = Step.load(run.model) if run.trains_step else self._build.build(run.model, rate=self.rate)
        return step if self._shared is None else step.apart()  # so that several processes can train from the folder

    @property
    def _kinds(self) -> dict[str, Any]:
        """The column kinds given by ``--column``, without sample weights, which are not a model input."""
        return {**self.run.column, **({"sample_weight": "drop"} if self._build.sample_weight else {})}

    def _trainer(self, step: Step) -> Trainer:
        from gradgraph.runtime.execution.session import RuntimeOptions
        from gradgraph.runtime.trainer import Trainer

        run = self.run
        options = RuntimeOptions(native_kernels=run.native_kernels, matmul_precision=run.matmul_precision)
        if run.resume and run.checkpoint is not None:
            return Trainer.resume(step, run.checkpoint, device=run.device, options=options, parallel=self._shared)
        return Trainer(step, device=run.device, seed=run.seed, options=options, parallel=self._shared)

    def _name_columns(self, trainer: Trainer) -> None:
        """Set the preprocessing and the target columns of a table in ``trainer.names``."""
        from gradgraph.data.record.column_assignment import compared
        from gradgraph.data.tables import target_columns

        run = self.run
        if run.preprocess is not None:  # its targets are the target columns
            preprocess(trainer, run.data, run.target, self._kinds)
        elif run.target and run.start is None:
            targets = compared(trainer.manifest.targets)
            trainer.names = trainer.names.updated(target_columns(targets, run.target))

    def read(self, trainer: Trainer) -> tuple[Any, Any]:
        """Return the training data as read, and as prepared for ``trainer``. One batch is checked first."""
        run = self.run
        samples = run.reading.data(run.data, trainer.names, run.augment)
        data = trainer.prepare(samples, run.batch_size, shuffle=run.shuffle, drop_last=run.drop_last)
        if isinstance(run.batch_size, str):
            self.run = replace(run, batch_size=data.order.batch_size)
            log.info("the largest power of two that fits: batches of %s samples", self.run.batch_size)
        trainer.names = data.names
        check_longest(trainer, samples)
        trainer.evaluate(data, limit=1)  # invalid data are rejected before anything is written
        return samples, data

    def _held_out(self, trainer: Trainer) -> Any:
        """Return the validation data, or None if the run has none."""
        path = self.run.validation
        return None if path is None else self.run.reading.data(path, trainer.names)

    def begin(self, trainer: Trainer) -> None:
        """Write the step folder, except for a trial or a resumed run, and log the trained parameters."""
        run, step, out = self.run, trainer.definition, self.run.out
        goes_on = self.folder is not None and run.resume and out is not None and out.exists()
        if out is not None and not run.is_trial and not goes_on:
            step.remember(trainer.names)
            self.team.from_first(lambda: step.save(out, force=run.force, share_weights=run.share_weights))
            log.info("wrote %s", out)
        sizes = [s.nbytes for s in step.manifest.state if s.kind == "parameter"]
        weights = f"{counted(len(sizes), 'tensor')} of weights, {readable_bytes(sum(sizes))}"
        log.info("training on %s: %s", trainer.described, weights)
        if self.words and run.export is None and run.checkpoint is None and not run.is_trial:
            log.info("the trained weights will not be saved; add --export trained.onnx or --checkpoint run.ckpt")

    def _fit_arguments(self, progress: bool | None) -> dict[str, Any]:
        """Return the arguments of ``Trainer.fit``; ``rate`` is omitted for a schedule, which is part of the graph."""
        from gradgraph.optim import Schedule

        run = self.run
        rates = {} if self.rate is None or isinstance(self.rate, Schedule) else {"learning_rate": self.rate}
        same = ("epochs", "batch_size", "accumulate", "shuffle", "drop_last")
        return {
            **{name: getattr(run, name) for name in same},
            "every": run.every or None,
            "progress": progress,
            **rates,
        }

    def fit(self, trainer: Trainer, samples: Any, data: Any, progress: bool | None) -> History:
        """Train, write the outputs of the run, and return the history."""
        run, folder, is_first = self.run, self.folder, self.team.is_first
        if is_first:
            keep_tokenizer(samples, (run.out, run.export), run.run)
        if folder is not None:
            self.team.from_first(lambda: folder.begin(trainer))
        held_out = self._held_out(trainer)
        same = ("keep_features", "feature_variants", "checkpoint", "max_steps", "max_time", "patience", "monitor",
                "mode", "min_delta", "limit", "log_every", "eval_every")  # fmt: skip
        with (
            how_to_resume(run.checkpoint, run.run, self.words, force=run.force),
            where_it_diverged(trainer),
            drawn_if_stopped(folder if is_first else None, trainer),
        ):
            history = trainer.fit(data, validation=held_out, log=run.log or None, **self._fit_arguments(progress),
                                  **{name: getattr(run, name) for name in same})  # fmt: skip
        if not is_first:
            return history
        if run.export is not None:  # first, as it is the most important result
            trainer.export_file(run.export)
        if run.history is not None:
            history.to_csv(run.history)
        if folder is not None:
            folder.show_mistakes(trainer, held_out)
            folder.finish(trainer, history)
        return history

    def try_out(self, trainer: Trainer, data: Any) -> dict[str, Any]:
        """Run find_lr, overfit, profile and dry_run, in this order, and return their results."""
        run = self.run
        found: dict[str, Any] = {}
        if run.find_lr:
            found["find_lr"] = trainer.find_lr(data, accumulate=run.accumulate)
            log.info("%s", found["find_lr"])
        if run.overfit:
            rates: dict[str, Any] = {"learning_rate": self.rate} if isinstance(self.rate, float) else {}
            with where_it_diverged(trainer):
                found["overfit"] = trainer.overfit(data, **rates)
            log.info("%s", found["overfit"])
        if run.profile:
            batch = dict(next(iter(data.batches(0))))
            parts = trainer.manifest.parts
            found["profile"] = {name: trainer.profile(name or batch, batch if name else None) for name in parts}
        if run.dry_run:
            trainer.fit(data, **{**self._fit_arguments(False), "every": None, "epochs": 1}, limit=1)
            size = run.batch_size if isinstance(run.batch_size, int) else None
            held_out = data if run.validation is None else self._held_out(trainer)
            trainer.evaluate(held_out, size, limit=1)
            with tempfile.TemporaryDirectory() as folder:
                trainer.save(Path(folder) / "run.ckpt")
                trainer.export_file(Path(folder) / "trained.onnx")
            log.info("dry run: one batch was trained, evaluated, saved and exported; nothing was written")
        return found


def _data_parallel(run: Run) -> DataParallel | None:
    """Return the data-parallel configuration of the run, or None for a single process.

    Raises:
        ArgumentError: ``ranks`` is greater than 1, but there is only this process.
    """
    from gradgraph.parallel.mpi import started_ranks

    if started_ranks() == 1:
        if (run.ranks or 1) > 1:
            raise ArgumentError("ranks starts processes from the command line only; start Python with mpiexec -n, and "
                                "omit ranks")  # fmt: skip
        return None
    from gradgraph.parallel.data_parallel import DataParallel

    return DataParallel(timeout=run.rank_timeout, shard_state=run.shard_state, sync_batch_norm=run.sync_batch_norm,
                        compress=run.compress)  # fmt: skip

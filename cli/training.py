"""A run of ``gradgraph train``, from its options to its results."""

from __future__ import annotations

import shlex
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import click

from gradgraph.cli import output
from gradgraph.cli.interruption import drawn_if_stopped, how_to_resume, where_it_diverged
from gradgraph.cli.options import typed_by_user
from gradgraph.cli.recipe_command import resolved
from gradgraph.errors import CheckpointError, OutputError, counted, readable_bytes, shown
from gradgraph.files.files_written import data_beside
from gradgraph.files.stdin import from_stdin
from gradgraph.runs.columns import check_same_data, preprocess, starting_model
from gradgraph.runs.reading import Reading, check_longest, keep_tokenizer
from gradgraph.runs.run_folder import RunFolder
from gradgraph.runs.spelled_build import BUILDING, SpelledBuild
from gradgraph.runtime.execution.team import ALONE
from gradgraph.step.output_paths import check_output

if TYPE_CHECKING:
    from gradgraph.optim import Plateau, Schedule
    from gradgraph.parallel.data_parallel import DataParallel
    from gradgraph.runtime.saved.history import History
    from gradgraph.runtime.trainer import Trainer
    from gradgraph.step.step import Step


@dataclass(frozen=True)
class Run:
    """The options of ``gradgraph train`` that do not describe a build, by parameter name."""

    model: Path | None
    out: Path | None
    data: Path
    validation: Path | None
    start: str | None
    target: tuple[str, ...]
    preprocess: str | None
    column: dict[str, Any]
    image: dict[str, Any]
    augment: tuple[str, ...]
    tokenizer: Path | None
    text: dict[str, Any]
    sound: dict[str, Any]
    epochs: int
    batch_size: int | str | None
    accumulate: int | None
    every: dict[str, int]
    lr: float | None
    checkpoint: Path | None
    weights: Path | None
    resume: bool
    export_to: Path | None
    history: Path | None
    logs: tuple[Path, ...]
    log_every: int
    max_steps: int | None
    max_time: float | None
    limit: int | None
    patience: int | None
    eval_every: int | None
    monitor: str | None
    mode: Literal["min", "max"] | None
    min_delta: float
    no_shuffle: bool
    drop_last: bool
    device: Literal["auto", "cpu", "cuda"]
    native_kernels: bool | None
    matmul_precision: Literal["highest", "high"]
    dry_run: bool
    find_lr: bool
    overfit: bool
    profile: bool
    seed: int
    share_weights: bool
    force: bool

    @property
    def reading(self) -> Reading:
        """The options that describe how data files are read."""
        return Reading(self.image, self.tokenizer, self.text, self.sound, self.model)

    @property
    def trains_step(self) -> bool:
        """Whether MODEL is a step folder."""
        return self.model is not None and self.model.is_dir()

    @property
    def is_trial(self) -> bool:
        """Whether the run is a trial that saves nothing, such as --dry-run."""
        return self.dry_run or self.find_lr or self.overfit or self.profile

    def check_options(self) -> None:
        """Raise UsageError for options that contradict each other."""
        contradictions = {
            "--resume needs --checkpoint, the file to resume from; add it": self.resume and self.checkpoint is None,
            "--resume continues from the checkpoint and --force overwrites it; give one of them": (
                self.resume and self.force
            ),
            "--resume uses the weights of the checkpoint; omit --weights": self.resume and self.weights is not None,
            "--matmul-precision applies to native kernels; omit --no-native-kernels": (
                self.matmul_precision != "highest" and self.native_kernels is False
            ),
        }
        for message, contradicts in contradictions.items():
            if contradicts:
                raise click.UsageError(message, click.get_current_context())

    def check_outputs(self) -> None:
        """Raise an error, before training begins, if an output cannot be written.

        Raises:
            OutputError: if an output path is invalid, an input file, or used twice.
            CheckpointError: if the checkpoint exists without --resume or --force, or --resume finds none.
        """
        inputs = [p for p in (self.model, self.data, self.validation, self.weights) if p is not None]
        outputs = [("--checkpoint", self.checkpoint), ("--export", self.export_to), ("--history", self.history)]
        outputs += [("--log", path) for path in self.logs if path.suffix]  # a TensorBoard folder may exist
        taken: dict[Path, str] = {}
        for option, path in outputs:
            check_output(path, *inputs)
            if path is None:
                continue
            other = taken.get(path.resolve())
            taken[path.resolve()] = option
            if other is not None:
                raise OutputError(f"{other} and {option} are both '{shown(path)}'; give each its own path")
        if self.checkpoint is None or self.is_trial:
            return
        there = self.checkpoint.exists()
        if there and not (self.resume or self.force):
            raise CheckpointError(
                f"'{shown(self.checkpoint)}' already exists; add --resume to resume from it, or --force to start over"
            )
        if self.resume and not there:
            raise CheckpointError(f"there is no checkpoint '{shown(self.checkpoint)}' to resume from; omit --resume")

    def total_steps(self) -> int | None:
        """Return the number of updates in all epochs, for schedules; None if the batch size is not a number or the data
        do not exist.

        --max-steps does not change the number, so that a resumed run continues the same schedule.
        """
        if not isinstance(self.batch_size, int) or not self.data.exists():
            return None
        from gradgraph.runtime.data.sources import Order

        steps = Order(self.batch_size, drop_last=self.drop_last).batch_count(self.reading.rows(self.data))
        steps = steps if self.limit is None else min(steps, self.limit)
        every = self.accumulate or 1
        return self.epochs * -(-steps // every)  # schedules count updates

    def fit_arguments(self, rate: Any) -> dict[str, Any]:
        """Return the arguments of ``Trainer.fit``, without ``rate`` if it is a schedule, which is part of the graph."""
        from gradgraph.optim import Schedule

        rates = {} if rate is None or isinstance(rate, Schedule) else {"learning_rate": rate}
        return {
            "epochs": self.epochs,
            "batch_size": self.batch_size,
            "accumulate": self.accumulate,
            "every": self.every or None,
            "shuffle": not self.no_shuffle,
            "drop_last": self.drop_last,
            "progress": False if output.talk.quiet else None,
            **rates,
        }


class Training:
    """A run in progress.

    Args:
        run: its options.
        recipe: its build options.
        folder: the folder of --run, if any.
        shared: how several processes share the run; None for a single process.
    """

    def __init__(self, run: Run, recipe: SpelledBuild, folder: RunFolder | None, shared: DataParallel | None) -> None:
        self.run, self.folder = run, folder
        self.team = ALONE if shared is None else shared.team()
        self.rate: Schedule | Plateau | float | None = None
        self._recipe, self._shared = recipe, shared

    @classmethod
    def of_command(cls, ctx: click.Context, given: Mapping[str, Any], shared: DataParallel | None) -> Training:
        """Return the run that the options ``given`` on the command line describe; the folder of --run is created.

        Raises:
            click.UsageError: if options contradict each other.
            OutputError: if the folder cannot be created, or contains other files.
        """
        options = {name: value for name, value in given.items() if name not in BUILDING}
        recipe = SpelledBuild({**given, "accumulate": given["accumulate"] is not None})
        team = ALONE if shared is None else shared.team()
        folder = _run_folder(ctx, options)
        if folder is not None:
            team.from_first(lambda: folder.check(given["force"]))
            if team.is_first:
                ctx.with_resource(folder.made())
            folder.fill(options, builds=given["model"] is None or not given["model"].is_dir())
        run = Run(**options)
        if recipe.sample_weight and (run.start is not None or run.preprocess is not None):
            run = replace(run, column={**run.column, "sample_weight": "drop"})  # not a feature of the model
        run.check_options()
        return cls(run, recipe, folder, shared)

    def open(self, ctx: click.Context) -> Trainer:
        """Open or build the step, and return its trainer, with the weights to start from and names for the data."""
        run = self.run
        begun = run.out if run.model is None and run.resume and run.out is not None and run.out.is_dir() else None
        doing = "opening" if run.trains_step else "building a step from"
        output.say(f"{doing} {run.model or begun or run.start}, to train on {run.data} …")
        self.run = run = replace(run, data=ctx.with_resource(from_stdin(run.data)))
        self.team.from_first(run.check_outputs)
        self.rate = run.lr if run.trains_step else self._recipe.rate(run.total_steps)
        step = self._step(ctx, begun)
        for line in step.taken:
            output.say(line)
        trainer = self._trainer(step)
        if run.weights is not None:
            output.say(str(trainer.load_state_dict(run.weights, strict=False)))
        if run.start is not None:
            check_same_data(trainer, step)
        self._name_columns(trainer)
        return trainer

    def _step(self, ctx: click.Context, begun: Path | None) -> Step:
        run = self.run
        if run.model is None:
            if not run.target:
                raise click.UsageError(
                    f"--model {run.start} predicts a column of the table; name it with --target COLUMN"
                )
            model = starting_model(run.start or "", run.data, run.target, run.column, begun)
            step = self._recipe.build(*model, rate=self.rate)
        else:
            step = _load_step(ctx, run.model) if run.trains_step else self._recipe.build(run.model, rate=self.rate)
        return step if self._shared is None else step.apart()  # so that the folder supports several processes, too

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
        from gradgraph.runtime.data.tables import target_columns

        run = self.run
        if run.preprocess is not None:  # its targets are the target columns
            preprocess(trainer, run.data, run.target, run.column)
        elif run.column and run.start is None:
            raise click.UsageError(
                "--column requires --preprocess auto or --model; add --preprocess auto", click.get_current_context()
            )
        elif run.target and run.start is None:
            targets = compared(trainer.manifest.targets)
            trainer.names = trainer.names.updated(target_columns(targets, run.target))

    def read(self, trainer: Trainer) -> tuple[Any, Any]:
        """Return the training data as read, and as prepared for ``trainer``; a batch of them is tried."""
        run = self.run
        samples = run.reading.data(run.data, trainer.names, run.augment)
        data = trainer.prepare(samples, run.batch_size, shuffle=not run.no_shuffle, drop_last=run.drop_last)
        if isinstance(run.batch_size, str):
            self.run = replace(run, batch_size=data.order.batch_size)
            output.say(f"the largest power of two that fits: batches of {self.run.batch_size} samples")
        trainer.names = data.names
        check_longest(trainer, samples)
        trainer.evaluate(data, limit=1)  # invalid data are rejected before anything is written
        return samples, data

    def held_out(self, trainer: Trainer) -> Any:
        """Return the validation data, or None if the run has none."""
        path = self.run.validation
        return None if path is None else self.run.reading.data(path, trainer.names)

    def begin(self, trainer: Trainer) -> None:
        """Write the step folder, unless this is a trial or the run goes on in its folder; say what is trained."""
        run, step = self.run, trainer.definition
        goes_on = self.folder is not None and run.resume and run.out is not None and run.out.exists()
        if run.out is not None and not run.is_trial and not goes_on:
            step.remember(trainer.names)
            to, force, share = run.out, run.force, run.share_weights
            self.team.from_first(lambda: step.save(to, force=force, share_weights=share))
            output.say(f"wrote {to}")
        sizes = [s.nbytes for s in step.manifest.state if s.kind == "parameter"]
        output.say(
            f"training on {trainer.described}: {counted(len(sizes), 'tensor')} of weights, {readable_bytes(sum(sizes))}"
        )
        if run.export_to is None and run.checkpoint is None and not run.is_trial:
            output.say("the trained weights will not be saved; add --export trained.onnx or --checkpoint run.ckpt")

    def fit(self, trainer: Trainer, samples: Any, data: Any) -> History:
        """Train, write the results to the outputs of the run, and return the history."""
        run, folder, is_first = self.run, self.folder, self.team.is_first
        if is_first:
            keep_tokenizer(samples, (run.out, run.export_to), None if folder is None else folder.path)
        if folder is not None:
            self.team.from_first(lambda: folder.begin(trainer))
        held_out = self.held_out(trainer)
        with (
            how_to_resume(run.checkpoint, folder, force=run.force),
            where_it_diverged(trainer),
            drawn_if_stopped(folder if is_first else None, trainer),
        ):
            history = trainer.fit(data, validation=held_out, checkpoint=run.checkpoint, max_steps=run.max_steps,
                                  max_time=run.max_time, patience=run.patience, monitor=run.monitor, mode=run.mode,
                                  min_delta=run.min_delta, limit=run.limit, log=run.logs or None,
                                  log_every=run.log_every, eval_every=run.eval_every,
                                  **run.fit_arguments(self.rate))  # fmt: skip
        if not is_first:
            return history
        if run.export_to is not None:  # first, as it is the most important result
            trainer.export_file(run.export_to)
        if run.history is not None:
            history.to_csv(run.history)
        if folder is not None:
            folder.show_mistakes(trainer, held_out)
            folder.finish(trainer, history)
        return history

    def try_out(self, trainer: Trainer, data: Any, as_json: bool) -> None:
        """Run --find-lr, --overfit, --profile and --dry-run, in this order; --json prints the results."""
        run = self.run
        facts: dict[str, Any] = {}
        if run.find_lr:
            curve = trainer.find_lr(data, accumulate=run.accumulate)
            output.say(str(curve))
            facts |= {"suggestion": curve.suggestion, "rates": curve.rates, "losses": curve.losses}
        if run.overfit:
            rates: dict[str, Any] = {"learning_rate": self.rate} if isinstance(self.rate, float) else {}
            with where_it_diverged(trainer):
                found = trainer.overfit(data, **rates)
            output.say(str(found))
            facts |= {"learned": found.learned, "overfit": found.losses}
        if run.profile:
            batch = dict(next(iter(data.batches(0))))
            timed = {name: trainer.profile(name or batch, batch if name else None) for name in trainer.manifest.parts}
            facts |= {"profile": timed[""].as_data() if "" in timed else {n: t.as_data() for n, t in timed.items()}}
            for name, found_here in timed.items() if not as_json else ():
                output.emit(f"{name}: {found_here}\n" if name else str(found_here))
        if run.dry_run:
            trainer.fit(
                data, **{**run.fit_arguments(self.rate), "every": None, "epochs": 1, "progress": False}, limit=1
            )
            size = run.batch_size if isinstance(run.batch_size, int) else None
            held_out = data if run.validation is None else self.held_out(trainer)
            trainer.evaluate(held_out, size, limit=1)
            with tempfile.TemporaryDirectory() as folder:
                trainer.save(Path(folder) / "run.ckpt")
                trainer.export_file(Path(folder) / "trained.onnx")
            output.say("dry run: one batch was trained, evaluated, saved and exported; nothing was written")
        if as_json:
            output.emit_json(facts)
        elif run.find_lr and facts["suggestion"] is not None:
            output.emit(f"{facts['suggestion']:.2g}")

    def report(self, trainer: Trainer, history: History, as_json: bool) -> None:
        """Print the results: the metrics of the epoch whose weights were kept, and the files written."""
        run = self.run
        step = run.model if run.trains_step else run.out
        p = trainer.progress
        written = {"checkpoint": run.checkpoint, "export": run.export_to, "history": run.history}
        files = {name: str(path) for name, path in written.items() if path is not None}
        follows = None  # the command to export the trained model, if this run did not and a later one can
        if run.export_to is None and run.checkpoint is not None and step is not None:
            best = run.checkpoint.with_name(f"{run.checkpoint.stem}.best{run.checkpoint.suffix}")
            checkpoint = best if history.restored is not None and best.exists() else run.checkpoint
            words = ["gradgraph", "export", str(step), "--checkpoint", str(checkpoint), "-o", "trained.onnx"]
            follows = shlex.join(words)
        if as_json:
            epoch = None if history.restored is None else history["epoch"][history.restored]
            output.emit_json({"steps": p.steps, "epochs": p.epoch, "restored_epoch": epoch,
                              "history": dict(trainer.history), "files": files, "next": follows})  # fmt: skip
            return
        row = history.row(-1 if history.restored is None else history.restored) if history else {"step": p.steps}
        width = max(16, *(len(name) + 1 for name in row))
        for name, value in row.items():
            output.emit(f"{name:{width}}{value:.6g}")
        if files:
            beside = [] if run.export_to is None else data_beside(run.export_to)
            output.say(f"wrote {', '.join([*files.values(), *map(str, beside)])}")
        if follows is not None:
            output.say(f"next: {follows}")


def _run_folder(ctx: click.Context, given: dict[str, Any]) -> RunFolder | None:
    """Return the ``RunFolder`` of --run, or None without it; the option is removed from ``given``."""
    path = given.pop("run_folder")
    if path is None:
        return None
    if any(given[trial] for trial in ("dry_run", "find_lr", "overfit", "profile")):
        raise click.UsageError("--run saves the results of a run, but a trial has none; give one of them", ctx)
    read = {role: given[role] for role in ("model", "data", "validation", "weights")}
    return RunFolder(path, resolved(ctx), {what: file for what, file in read.items() if file is not None},
                     shlex.join(["gradgraph", *output.talk.arguments]), given["resume"])  # fmt: skip


def _load_step(ctx: click.Context, folder: Path) -> Step:
    from gradgraph.step.step import Step

    foreign = typed_by_user(ctx, (*BUILDING, "out"))
    if foreign:
        raise click.UsageError(
            f"{foreign[0]} is a build option, but '{shown(folder)}' is a step folder, which is already built; omit it",
            ctx,
        )
    return Step.load(folder)

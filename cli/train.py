"""``gradgraph train``: train a model or a step folder on data."""

from __future__ import annotations

import shlex
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import click

from gradgraph.cli import output
from gradgraph.cli.choices import BATCH_SIZE, PATH, Suggested
from gradgraph.cli.data import AUGMENT, TARGET, Reading, check_longest, keep_tokenizer, reading_options
from gradgraph.cli.files_written import data_beside
from gradgraph.cli.interruption import drawn_if_stopped, how_to_resume, where_it_diverged
from gradgraph.cli.key_values import arguments
from gradgraph.cli.options import (
    BUILDING,
    CUSTOM_OPS,
    FORCE,
    SHARE_WEIGHTS,
    build_option,
    build_options,
    device_option,
    typed_by_user,
)
from gradgraph.cli.output_paths import check_output
from gradgraph.cli.rank_output import parallel, starts
from gradgraph.cli.recipe import Recipe
from gradgraph.cli.recipe_command import RecipeCommand, resolved
from gradgraph.cli.run_folder import RunFolder
from gradgraph.cli.sections import placed
from gradgraph.cli.stdin import from_stdin
from gradgraph.cli.table_options import COLUMN, PREPROCESS, START, check_same_data, preprocess, starting_model
from gradgraph.errors import CheckpointError, OutputError, readable_bytes, shown

if TYPE_CHECKING:
    from gradgraph.runtime.saved.history import History
    from gradgraph.runtime.trainer import Trainer
    from gradgraph.step.step import Step


@click.command("train", cls=RecipeCommand)
@click.argument("model", type=PATH, required=False)
@START
@placed(
    "data",
    "--data",
    key="train",
    type=PATH,
    required=True,
    help="An .npz (- from stdin) or a folder of .npy, with one array per input; a table (.csv, .parquet, …); a "
    "folder of images, with one subfolder per class; shards (.tar); or images with boxes or masks, as COCO "
    "(.json), YOLO (data.yaml) or Pascal VOC.",
)
@placed("data", "--validation", type=PATH, help="Validation data, evaluated after each epoch.")
@TARGET
@PREPROCESS
@COLUMN
@reading_options
@AUGMENT
@placed("training", "--epochs", type=click.IntRange(min=1), default=10, show_default=True, help="Number of epochs.")
@placed(
    "data",
    "--batch-size",
    type=BATCH_SIZE,
    help="Samples per step. Default: 32, or the batch size of a fixed model. auto: the largest power of two that "
    "fits in free memory; auto:4GB: with this memory limit for the process.",
)
@placed(
    "training",
    "--accumulate",
    type=click.IntRange(min=1),
    help="Accumulate gradients over this many batches before each update.",
)
@placed(
    "training",
    "--every",
    multiple=True,
    metavar="STEP=N",
    callback=arguments,
    help="For a folder with several steps: train this one only on every N-th batch; repeatable.",
)
@placed(
    "output",
    "--run",
    "run_folder",
    key="run",
    type=PATH,
    metavar="FOLDER",
    help="Write everything to this folder, with a README.md that explains it: step, checkpoint, trained model, "
    "history, log, and a recipe of all options.",
)
@placed("output", "-o", "--out", key="step", type=PATH, help="Also write the step folder built from MODEL here.")
@placed("output", "--checkpoint", type=PATH, help="Save state and progress here after each epoch and when interrupted.")
@placed(
    "model",
    "--weights",
    type=PATH,
    help="Initialise from the tensors in this .safetensors, .ckpt, .npz or .onnx whose names and shapes match.",
)
@placed("training", "--resume", is_flag=True, help="Resume from --checkpoint.")
@placed("output", "--export", "export_to", key="export", type=PATH, help="Write the trained inference model here.")
@placed("output", "--history", type=PATH, help="Write loss and metrics of each epoch here (.csv).")
@placed(
    "output",
    "--log",
    "logs",
    type=PATH,
    multiple=True,
    help="Log metrics here during training: .jsonl, .csv, or a folder for TensorBoard; repeatable.",
)
@placed(
    "output",
    "--log-every",
    type=click.IntRange(min=1),
    default=50,
    show_default=True,
    help="Number of steps between records of --log.",
)
@placed(
    "training",
    "--max-steps",
    type=click.IntRange(min=1),
    help="Stop after this many steps. Schedules still span all --epochs, so that a resumed run completes them.",
)
@placed(
    "training",
    "--max-time",
    type=click.FloatRange(min=0, min_open=True),
    metavar="SECONDS",
    help="Stop after this time.",
)
@placed("training", "--limit", type=click.IntRange(min=1), help="Use only this many batches of each epoch.")
@placed(
    "training",
    "--patience",
    type=click.IntRange(min=1),
    help="Early stopping: stop after this many epochs (or --eval-every intervals) without improvement, and keep the "
    "best weights.",
)
@placed(
    "training",
    "--eval-every",
    type=click.IntRange(min=1),
    metavar="STEPS",
    help="Evaluate --validation every N steps instead of after each epoch; --patience and checkpoints follow.",
)
@placed(
    "training",
    "--monitor",
    metavar="COLUMN",
    help="Column that --patience monitors, such as val_accuracy. Default: val_loss.",
)
@placed(
    "training",
    "--mode",
    type=click.Choice(["min", "max"]),
    help="Whether lower or higher is better. Default: derived from the column's name.",
)
@placed(
    "training",
    "--min-delta",
    type=click.FloatRange(min=0),
    default=0.0,
    help="Minimum change that counts as an improvement.",
)
@placed("data", "--no-shuffle", key="shuffle", is_flag=True, help="Do not shuffle the samples.")
@placed("data", "--drop-last", is_flag=True, help="Drop the last batch of an epoch if it is smaller.")
@device_option("train")
@CUSTOM_OPS
@placed(
    "training",
    "--native-kernels",
    is_flag=True,
    default=None,
    help="Require native C++ kernels, or with --no-native-kernels disable them. Default: use them on the CPU if they "
    "are built (see `gradgraph env`).",
)
@placed(
    "training",
    "--matmul-precision",
    type=click.Choice(["highest", "high"]),
    default="highest",
    show_default=True,
    help="Native kernels: full float32 precision, or faster with errors of at most 2^-15 (on processors with AMX).",
)
@placed(
    "training",
    "--ranks",
    type=click.IntRange(min=1),
    help="Train in this many processes on this machine, each on a part of every batch (on several machines: mpiexec "
    "-n 64 gradgraph train …).",
)
@placed(
    "training",
    "--rank-timeout",
    type=click.FloatRange(min=0, min_open=True),
    default=600.0,
    show_default=True,
    metavar="SECONDS",
    help="Stop the run if a process does not respond for this long.",
)
@placed(
    "training",
    "--shard-state",
    is_flag=True,
    help="With several processes: partition the optimizer state among them.",
)
@placed(
    "training",
    "--sync-batch-norm",
    is_flag=True,
    help="With several processes: compute batch statistics over the whole batch, as one process would.",
)
@placed(
    "training",
    "--compress",
    type=Suggested("parallel.data_parallel:COMPRESSIONS"),
    help="With several processes: compress gradients, such as top_k(ratio=0.01).",
)
@placed(
    "training",
    "--dry-run",
    is_flag=True,
    help="Train, evaluate, save and export one batch as a test; write nothing.",
)
@placed(
    "training",
    "--find-lr",
    is_flag=True,
    help="Compare learning rates on the data, suggest one, and exit; write nothing.",
)
@placed(
    "training",
    "--overfit",
    is_flag=True,
    help="Try to overfit one batch in 200 steps, report the result, and exit; write nothing.",
)
@placed(
    "training",
    "--profile",
    is_flag=True,
    help="Profile the operators of a step by layer, and exit; write nothing.",
)
@build_option(
    "seed", "Random seed. With a step folder, it only affects the order of data: masks keep the seed of the build."
)
@SHARE_WEIGHTS
@FORCE
@build_options("accumulate", "seed", "separate", "size")
@output.json_option
@click.pass_context
def command(ctx: click.Context, /, model: Path | None, out: Path | None, as_json: bool, **given: Any) -> None:
    """Train MODEL: an .onnx file, which is built first (with the options of `gradgraph build`), a step folder, or a
    recipe (.toml, or - for stdin) of these options, which the command line overrides.

    Examples:
      gradgraph train model.onnx --data train.npz --validation held_out.npz --epochs 10 --export trained.onnx
      gradgraph train step/ --data train.npz --checkpoint run.ckpt --resume
      gradgraph train --model mlp --data train.csv --target price --run runs/one
      gradgraph train recipe.toml --lr 1e-4

    Provide one array per model input, with one row per sample, under the input's name. Labels go under `target`.
    Ctrl-C finishes the current step, saves the checkpoint and prints the command to resume.
    """
    if (model is None) == (given["start"] is None):
        raise click.UsageError("give MODEL, such as model.onnx, or --model NAME to train a new network on a table", ctx)
    if given["start"] is not None and not typed_by_user(ctx, ("loss",)):
        given["loss"] = ()  # the model's default loss
    if starts(given["ranks"], given, model, ctx):
        from gradgraph.parallel.launching import launch

        ctx.exit(launch(given["ranks"], output.talk.arguments))
    from gradgraph.runtime.execution.team import ALONE

    del given["ranks"]
    timeout = given.pop("rank_timeout")
    shared = parallel(timeout, **{way: given.pop(way) for way in ("shard_state", "sync_batch_norm", "compress")})
    team = ALONE if shared is None else shared.team()
    accumulates = given["accumulate"] is not None
    recipe = Recipe({**given, "accumulate": accumulates})
    given = {name: value for name, value in given.items() if name not in BUILDING}
    folder = _run_folder(ctx, model, given)
    if folder is not None:
        team.from_first(lambda: folder.check(given["force"]))
        if team.is_first:
            ctx.with_resource(folder.made())
        named = {**given, "out": out}
        folder.fill(named, builds=model is None or not model.is_dir())
        out, given = named.pop("out"), named
    run = Run(**given)
    if recipe.sample_weight and (run.start is not None or run.preprocess is not None):
        run = replace(run, column={**run.column, "sample_weight": "drop"})  # not a feature of the model
    if run.resume and run.checkpoint is None:
        raise click.UsageError("--resume needs --checkpoint, the file to resume from; add it", ctx)
    if run.resume and run.force:
        raise click.UsageError(
            "--resume continues from the checkpoint and --force overwrites it; give one of them", ctx
        )
    if run.resume and run.weights is not None:
        raise click.UsageError("--resume uses the weights of the checkpoint; omit --weights", ctx)
    if run.matmul_precision != "highest" and run.native_kernels is False:
        raise click.UsageError("--matmul-precision applies to native kernels; omit --no-native-kernels", ctx)
    begun = out if model is None and run.resume and out is not None and out.is_dir() else None
    is_step = model is not None and model.is_dir()
    named_model = model or begun or run.start
    output.say(f"{'opening' if is_step else 'building a step from'} {named_model}, to train on {run.data} …")
    run = replace(run, data=ctx.with_resource(from_stdin(run.data)))
    team.from_first(lambda: run.check_outputs(model))
    rate = run.lr if is_step else recipe.rate(run.total_steps)
    if model is None:
        step = recipe.build(*starting_model(run.start or "", run.data, run.target, run.column, begun), rate=rate)
    else:
        step = _load_step(ctx, model) if is_step else recipe.build(model, rate=rate)
    if shared is not None:
        step = step.apart()  # so that the step folder supports several processes, too
    for line in step.taken:
        output.say(line)

    from gradgraph.runtime.data.tables import target_columns
    from gradgraph.runtime.execution.session import RuntimeOptions
    from gradgraph.runtime.trainer import Trainer
    from gradgraph.step.column_assignment import compared

    options = RuntimeOptions(native_kernels=run.native_kernels, matmul_precision=run.matmul_precision)
    if run.resume and run.checkpoint is not None:
        trainer = Trainer.resume(step, run.checkpoint, device=run.device, options=options, parallel=shared)
    else:
        trainer = Trainer(step, device=run.device, seed=run.seed, options=options, parallel=shared)
    if run.weights is not None:
        output.say(str(trainer.load_state_dict(run.weights, strict=False)))
    if run.start is not None:
        check_same_data(trainer, step)
    if run.preprocess is not None:
        preprocess(trainer, run.data, run.target, run.column)
    elif run.column and run.start is None:
        raise click.UsageError("--column requires --preprocess auto or --model; add --preprocess auto", ctx)
    if run.target and run.start is None and run.preprocess is None:  # preprocessing already has the target columns
        trainer.names = trainer.names.updated(target_columns(compared(step.manifest.targets), run.target))
    samples = run.reading(model).data(run.data, trainer.names, run.augment)
    data = trainer.prepare(samples, run.batch_size, shuffle=not run.no_shuffle, drop_last=run.drop_last)
    if isinstance(run.batch_size, str):
        run = replace(run, batch_size=data.order.batch_size)
        output.say(f"the largest power of two that fits: batches of {run.batch_size} samples")
    trainer.names = data.names
    check_longest(trainer, samples)
    trainer.evaluate(data, limit=1)  # invalid data are rejected before anything is written
    goes_on = (
        folder is not None and run.resume and out is not None and out.exists()
    )  # a resumed run keeps its step folder
    if out is not None and not run.is_trial and not goes_on:
        step.remember(trainer.names)
        to, force, share = out, run.force, run.share_weights
        team.from_first(lambda: step.save(to, force=force, share_weights=share))
        output.say(f"wrote {out}")
    sizes = [s.nbytes for s in step.manifest.state if s.kind == "parameter"]
    output.say(f"training on {trainer.described}: {len(sizes)} tensors of weights, {readable_bytes(sum(sizes))}")
    if run.export_to is None and run.checkpoint is None and not run.is_trial:
        output.say("the trained weights will not be saved; add --export trained.onnx or --checkpoint run.ckpt")
    if run.is_trial:
        _do_trials(trainer, run, model, data, rate, as_json)
        return
    if team.is_first:
        keep_tokenizer(samples, (out, run.export_to), None if folder is None else folder.path)
    if folder is not None:
        team.from_first(lambda: folder.begin(trainer))
    held_out = None if run.validation is None else run.reading(model).data(run.validation, trainer.names)
    with (
        how_to_resume(run.checkpoint, folder, force=run.force),
        where_it_diverged(trainer),
        drawn_if_stopped(folder if team.is_first else None, trainer),
    ):
        history = trainer.fit(data, validation=held_out, checkpoint=run.checkpoint, max_steps=run.max_steps,
                              max_time=run.max_time, patience=run.patience, monitor=run.monitor, mode=run.mode,
                              min_delta=run.min_delta, limit=run.limit, log=run.logs or None, log_every=run.log_every,
                              eval_every=run.eval_every,
                              **run.fit_arguments(rate))  # fmt: skip
    if not team.is_first:
        return
    if run.export_to is not None:  # first, as it is the most important result
        trainer.export_file(run.export_to)
    if run.history is not None:
        history.to_csv(run.history)
    if folder is not None:
        folder.show_mistakes(trainer, held_out)
        folder.finish(trainer, history)
    _report(trainer, history, run, model if is_step else out, as_json)


def _run_folder(ctx: click.Context, model: Path | None, given: dict[str, Any]) -> RunFolder | None:
    """Return the ``RunFolder`` of --run, or None without it; the option is removed from ``given``."""
    path = given.pop("run_folder")
    if path is None:
        return None
    if any(given[trial] for trial in ("dry_run", "find_lr", "overfit", "profile")):
        raise click.UsageError("--run saves the results of a run, but a trial has none; give one of them", ctx)
    read = {"model": model, "data": given["data"], "validation": given["validation"], "weights": given["weights"]}
    return RunFolder(path, resolved(ctx), {what: file for what, file in read.items() if file is not None},
                     given["resume"])  # fmt: skip


@dataclass(frozen=True)
class Run:
    """The options of ``gradgraph train``, by parameter name."""

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

    def reading(self, model: Path | None = None) -> Reading:
        """Return the options that describe how data files are read."""
        return Reading(self.image, self.tokenizer, self.text, self.sound, model)

    @property
    def is_trial(self) -> bool:
        """Whether the run is a trial that saves nothing, such as --dry-run."""
        return self.dry_run or self.find_lr or self.overfit or self.profile

    def check_outputs(self, model: Path | None) -> None:
        """Raise an error, before training begins, if an output cannot be written.

        Raises:
            OutputError: if an output path is invalid, an input file, or used twice.
            CheckpointError: if the checkpoint exists without --resume or --force, or --resume finds none.
        """
        inputs = [p for p in (model, self.data, self.validation, self.weights) if p is not None]
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

        steps = Order(self.batch_size, drop_last=self.drop_last).batch_count(self.reading().rows(self.data))
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


def _load_step(ctx: click.Context, folder: Path) -> Step:
    from gradgraph.step.step import Step

    foreign = typed_by_user(ctx, (*BUILDING, "out"))
    if foreign:
        raise click.UsageError(
            f"{foreign[0]} is a build option, but '{shown(folder)}' is a step folder, which is already built; omit it",
            ctx,
        )
    return Step.load(folder)


def _do_trials(trainer: Trainer, run: Run, model: Path | None, data: Any, rate: Any, as_json: bool) -> None:
    """Run --find-lr, --overfit, --profile and --dry-run, in this order; --json prints the results."""
    facts: dict[str, Any] = {}
    if run.find_lr:
        curve = trainer.find_lr(data, accumulate=run.accumulate)
        output.say(str(curve))
        facts |= {"suggestion": curve.suggestion, "rates": curve.rates, "losses": curve.losses}
    if run.overfit:
        rates: dict[str, Any] = {"learning_rate": rate} if isinstance(rate, float) else {}
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
        trainer.fit(data, **{**run.fit_arguments(rate), "every": None, "epochs": 1, "progress": False}, limit=1)
        size = run.batch_size if isinstance(run.batch_size, int) else None
        held_out = data if run.validation is None else run.reading(model).data(run.validation, trainer.names)
        trainer.evaluate(held_out, size, limit=1)
        with tempfile.TemporaryDirectory() as folder:
            trainer.save(Path(folder) / "run.ckpt")
            trainer.export_file(Path(folder) / "trained.onnx")
        output.say("dry run: one batch was trained, evaluated, saved and exported; nothing was written")
    if as_json:
        output.emit_json(facts)
    elif run.find_lr and facts["suggestion"] is not None:
        output.emit(f"{facts['suggestion']:.2g}")


def _report(trainer: Trainer, history: History, run: Run, step: Path | None, as_json: bool) -> None:
    """Print the results of a run: the metrics of the epoch whose weights were kept, and the files written."""
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

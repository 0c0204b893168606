"""``gradgraph train``: train a model or a step folder on data."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from gradgraph.cli import output
from gradgraph.cli.choices import BATCH_SIZE, PATH, Suggested
from gradgraph.cli.data import AUGMENT, TARGET, reading_options
from gradgraph.cli.key_values import arguments
from gradgraph.cli.options import (
    CUSTOM_OPS,
    FORCE,
    SHARE_WEIGHTS,
    build_option,
    build_options,
    device_option,
    typed_by_user,
)
from gradgraph.cli.rank_output import parallel, starts
from gradgraph.cli.recipe_command import RecipeCommand
from gradgraph.cli.sections import placed
from gradgraph.cli.table_options import COLUMN, PREPROCESS, START

if TYPE_CHECKING:
    pass


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
def command(ctx: click.Context, /, as_json: bool, **given: Any) -> None:
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
    if (given["model"] is None) == (given["start"] is None):
        raise click.UsageError("give MODEL, such as model.onnx, or --model NAME to train a new network on a table", ctx)
    if given["start"] is not None and not typed_by_user(ctx, ("loss",)):
        given["loss"] = ()  # the model's default loss
    ranks = given.pop("ranks")
    if starts(ranks, given, given["model"], ctx):
        from gradgraph.parallel.launching import launch

        ctx.exit(launch(ranks, output.talk.arguments))
    from gradgraph.cli.training import Training

    ctx.with_resource(output.printed_log("gradgraph.runs"))
    timeout = given.pop("rank_timeout")
    shared = parallel(timeout, **{way: given.pop(way) for way in ("shard_state", "sync_batch_norm", "compress")})
    training = Training.of_command(ctx, given, shared)
    trainer = training.open(ctx)
    samples, data = training.read(trainer)
    training.begin(trainer)
    if training.run.is_trial:
        training.try_out(trainer, data, as_json)
        return
    history = training.fit(trainer, samples, data)
    if training.team.is_first:
        training.report(trainer, history, as_json)

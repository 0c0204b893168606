"""``gradgraph train``: train a model or a step folder on data."""

from __future__ import annotations

import shlex
from typing import Any

import click

from gradgraph.cli import output
from gradgraph.cli.choices import PATH
from gradgraph.cli.options import CUSTOM_OPS, recipe_options, typed_by_user
from gradgraph.cli.rank_output import starts
from gradgraph.cli.recipe_command import RecipeCommand
from gradgraph.errors import ArgumentError
from gradgraph.files.files_written import data_beside
from gradgraph.runs.run_options import OPTIONS, Run, run_of
from gradgraph.runs.spelled_build import SPELLINGS
from gradgraph.runs.training import Trained, train


@click.command("train", cls=RecipeCommand)
@click.argument("model", type=PATH, required=False)
@CUSTOM_OPS
@recipe_options("train")
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
    run = _run_of(ctx, given)
    if starts(run, ctx):
        from gradgraph.parallel.launching import launch

        ctx.exit(launch(run.ranks or 1, output.talk.arguments))
    with output.printed_log("gradgraph.runs"):
        done = train(run, progress=False if output.talk.quiet else None, words=output.talk.arguments)
    (_print_trials if run.is_trial else _print_results)(done, as_json)


def _run_of(ctx: click.Context, given: dict[str, Any]) -> Run:
    """Return the run that the options ``given`` describe; raise UsageError if they contradict each other."""
    try:
        return run_of(given["model"], {name: given[name] for name in (*OPTIONS, *typed_by_user(ctx, SPELLINGS))})
    except ArgumentError as error:
        raise click.UsageError(error.in_shell(), ctx) from None


def _print_trials(done: Trained, as_json: bool) -> None:
    """Print the results of --find-lr, --overfit and --profile."""
    found, facts = done.trials, dict[str, Any]()
    if curve := found.get("find_lr"):
        facts |= {"suggestion": curve.suggestion, "rates": curve.rates, "losses": curve.losses}
    if overfit := found.get("overfit"):
        facts |= {"learned": overfit.learned, "overfit": overfit.losses}
    if timed := found.get("profile"):
        facts |= {"profile": timed[""].as_data() if "" in timed else {n: t.as_data() for n, t in timed.items()}}
    if as_json:
        output.emit_json(facts)
        return
    for name, profile in (timed or {}).items():
        output.emit(f"{name}: {profile}\n" if name else str(profile))
    if curve and curve.suggestion is not None:
        output.emit(f"{curve.suggestion:.2g}")


def _print_results(done: Trained, as_json: bool) -> None:
    """Print the metrics of the epoch whose weights were kept, and the files written."""
    run, history, p = done.run, done.history, done.trainer.progress
    files = {name: str(path) for name, path in done.files.items()}
    follows = _how_to_export(done)
    if as_json:
        epoch = None if history.restored is None else history["epoch"][history.restored]
        output.emit_json({"steps": p.steps, "epochs": p.epoch, "restored_epoch": epoch,
                          "history": dict(done.trainer.history), "files": files, "next": follows})  # fmt: skip
        return
    row = history.row(-1 if history.restored is None else history.restored) if history else {"step": p.steps}
    width = max(16, *(len(name) + 1 for name in row))
    for name, value in row.items():
        output.emit(f"{name:{width}}{value:.6g}")
    if files:
        beside = [] if run.export is None else data_beside(run.export)
        output.say(f"wrote {', '.join([*files.values(), *map(str, beside)])}")
    if follows is not None:
        output.say(f"next: {follows}")


def _how_to_export(done: Trained) -> str | None:
    """Return the command that exports the trained model; None if the run did that, or left no checkpoint and step."""
    run = done.run
    step = run.model if run.trains_step else run.out
    if run.export is not None or run.checkpoint is None or step is None:
        return None
    best = run.checkpoint.with_name(f"{run.checkpoint.stem}.best{run.checkpoint.suffix}")
    checkpoint = best if done.history.restored is not None and best.exists() else run.checkpoint
    return shlex.join(["gradgraph", "export", str(step), "--checkpoint", str(checkpoint), "-o", "trained.onnx"])

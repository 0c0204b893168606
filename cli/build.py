"""``gradgraph build``: build a step from a model, and write the step folder."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import click

from gradgraph.cli import output
from gradgraph.cli.choices import PATH
from gradgraph.cli.options import recipe_options
from gradgraph.cli.recipe_command import RecipeCommand
from gradgraph.errors import ArgumentError, BuildError
from gradgraph.runs.spelled_build import SpelledBuild


@click.command("build", cls=RecipeCommand)
@click.argument("model", type=PATH)
@recipe_options("build")
@output.json_option
def command(
    model: Path,
    out: Path,
    share_weights: bool,
    force: bool,
    store: str,
    split_frozen: bool,
    as_json: bool,
    **typed: Any,
) -> None:
    """Append loss, backward pass and optimizer to MODEL (.onnx, or a recipe in .toml) and write the step folder.

    Examples:
      gradgraph build model.onnx --loss mse --optimizer sgd --lr 0.1 --optimizer-option momentum=0.9
      gradgraph build model.onnx --freeze 'backbone.*' -o step/
      gradgraph build recipe.toml --optimizer lion

    The folder contains init.onnx, train.onnx, eval.onnx and manifest.json: all that an ONNX runtime needs to train.
    Globs select weights by name; `gradgraph inspect MODEL` lists the names.
    """
    from gradgraph import optim

    chosen = SpelledBuild(typed)
    rate = chosen.rate()
    if isinstance(rate, optim.Plateau):
        raise BuildError(
            "the schedule reduce_on_plateau cannot be part of a step, as it depends on validation results; pass it to "
            "`gradgraph train`"
        )
    with output.printed_log("gradgraph.runs"):
        step = chosen.build(model, rate=rate)
    if store == "float16":
        from gradgraph.export import float16_storage

        stored = float16_storage(step)
        step = stored.result
        output.say(str(stored))
    if split_frozen:
        from gradgraph.export import save_split

        if share_weights:
            raise ArgumentError("--split-frozen copies weights, so it excludes --share-weights; omit one of them")
        step, folder = save_split(step, out, force=force), out / "step"
    else:
        folder = step.save(out, force=force, share_weights=share_weights)
    if as_json:
        import json

        from gradgraph.autodiff.review import as_data

        manifest = json.loads(step.manifest.to_json())
        output.emit_json({"folder": str(folder), "manifest": manifest, "findings": as_data(step.findings)})
        return
    output.emit(step.summary())
    if split_frozen:
        layers = ["gradgraph", "predict", str(out / "features.onnx"), "--data", "train.npz", "-o", "features.npz"]
        output.say(f"wrote {out}; next: {shlex.join(layers)}, then add the targets to features.npz and train {folder}")
        return
    data = ["--data", "train.npz", "--epochs", "10", "--checkpoint", "run.ckpt", "--export", "trained.onnx"]
    output.say(f"wrote {out}; next: {shlex.join(['gradgraph', 'train', str(folder), *data])}")

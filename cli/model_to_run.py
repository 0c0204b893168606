"""The inference model of MODEL for ``predict`` and ``explain``: an .onnx, a step folder, or the folder of a run."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING

import click

from gradgraph.cli import output
from gradgraph.cli.run_weights import checkpoint_to_use

if TYPE_CHECKING:
    import onnx_ir as ir

TARGET = "target"  # the default name of the first target


def model_to_run(
    path: Path, checkpoint: Path | None, untrained: bool, outputs: tuple[str, ...], averaged: bool
) -> tuple[ir.Model, Collection[str]]:
    """Return the model to run, without preprocessing of tables, and the names of its targets: arrays to ignore.

    Args:
        path: a model, a step folder or a run's folder.
        checkpoint: the checkpoint of a step folder; by default that of its run.
        untrained: whether to use the initial weights of a step folder.
        outputs: the outputs to keep; all if empty.
        averaged: whether to use the moving averages of the weights, if there are any.
    """
    from gradgraph.data.preprocess.column_nodes import cut_off
    from gradgraph.data.record.data_names import DataNames
    from gradgraph.data.record.image_preprocessing import learn_preprocessing
    from gradgraph.data.record.label_names import names_beside
    from gradgraph.passes.normal import load_runnable

    if path.is_dir():
        from gradgraph.export.artifacts import opened_trainer
        from gradgraph.step.step import Step

        checkpoint = checkpoint_to_use(path, checkpoint, untrained)
        step = Step.load(path)
        model = opened_trainer(step, checkpoint).exported(outputs or None, averaged=averaged)
        return model, [t.name for t in step.manifest.targets]
    of_steps = {"--untrained": untrained, "--checkpoint": checkpoint is not None, "--not-averaged": not averaged}
    if what := next((flag for flag, is_given in of_steps.items() if is_given), None):
        raise click.UsageError(f"{what} requires a step folder, but a model contains its weights; omit it")
    model = load_runnable(path)
    if told := learn_preprocessing(model, path):
        output.say(told)
    plan = DataNames.read_from(model.metadata_props).preprocess
    if plan is not None:
        cut_off(model, plan)
    names = DataNames.read_from(model.metadata_props)
    if not names.classes:
        model.metadata_props.update(names.updated(names_beside(path)).as_metadata())
    return model, [TARGET]

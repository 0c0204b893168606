"""``gradgraph evaluate``: a step folder and data in, its loss and metrics out, and what it gets wrong."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import click

from gradgraph.cli import output
from gradgraph.cli.choices import PATH
from gradgraph.cli.command import Command
from gradgraph.cli.data import IMAGE, read_data
from gradgraph.cli.options import CHECKPOINT, CUSTOM_OPS, NOT_AVERAGED, device_option
from gradgraph.cli.stdin import from_stdin

if TYPE_CHECKING:
    from gradgraph.runtime.trainer import Trainer


@click.command("evaluate", cls=Command)
@click.argument("step", type=PATH)
@click.option(
    "--data",
    type=PATH,
    required=True,
    help="An .npz (- from stdin), or a folder of .npy, with inputs and targets; a table (.csv, .parquet, …); a folder "
    "of images; or shards (.tar).",
)
@IMAGE
@CHECKPOINT
@click.option("--per-class", is_flag=True, help="A table of classes: precision, recall, F1, and what is confused.")
@click.option(
    "--class", "classes", multiple=True, metavar="NAME", help="The name of a class, in their order; repeatable."
)
@click.option("--worst", type=click.IntRange(min=1), metavar="K", help="The K samples with the largest losses.")
@click.option("--batch-size", type=click.IntRange(min=1), help="Samples per run.")
@NOT_AVERAGED
@device_option("run")
@CUSTOM_OPS
@output.json_option
def command(
    step: Path,
    data: Path,
    image: dict[str, Any],
    checkpoint: Path | None,
    per_class: bool,
    classes: tuple[str, ...],
    worst: int | None,
    batch_size: int | None,
    not_averaged: bool,
    device: Literal["auto", "cpu", "cuda"],
    as_json: bool,
) -> None:
    """Print loss and metrics of the STEP folder on data that it was not trained on.

    Examples:
      gradgraph evaluate step/ --checkpoint run.ckpt --data test.npz
      gradgraph evaluate step/ --checkpoint run.ckpt --data test.npz --per-class --worst 10

    --per-class needs a step that counts classes: build it with --metric f1, or --metric confusion_matrix. --worst looks
    at one sample at a time: where labels are wrong, or something is not learnt yet.
    """
    from gradgraph.runtime.trainer import Trainer

    trainer = Trainer(str(step), device=device)
    if checkpoint is not None:
        trainer.load(checkpoint)
    with from_stdin(data) as path:
        read = read_data(path, image)
        facts = _found(trainer, read, batch_size, not not_averaged, per_class, classes, worst)
    if as_json:
        output.emit_json({name: _plain(found) for name, found in facts.items()})
        return
    for name, value in facts.pop("scores").items():
        output.emit(f"{name} {_line(value)}")
    for found in facts.values():
        output.emit(f"\n{found}")


def _found(
    trainer: Trainer,
    data: Any,
    batch_size: int | None,
    averaged: bool,
    per_class: bool,
    classes: tuple[str, ...],
    worst: int | None,
) -> dict[str, Any]:
    facts: dict[str, Any] = {"scores": trainer.evaluate(data, batch_size, averaged=averaged)}
    if per_class or classes:
        facts["classes"] = trainer.per_class(data, batch_size, classes=classes or None, averaged=averaged)
    if worst is not None:
        facts["worst"] = trainer.worst(data, worst, averaged=averaged)
    return facts


def _line(value: Any) -> str:
    return f"{value:.6g}" if isinstance(value, float) else " ".join(str(value.tolist()).split())


def _plain(found: Any) -> Any:
    """What JSON has for it."""
    from gradgraph.runtime.execution.class_table import ClassTable
    from gradgraph.runtime.execution.worst import WorstSamples

    if isinstance(found, ClassTable):
        return {"classes": list(found.rows()), "matrix": found.matrix.tolist(), "accuracy": found.accuracy}
    if isinstance(found, WorstSamples):
        return [
            {"sample": w.index, "loss": w.value, "outputs": {name: a.tolist() for name, a in w.outputs.items()}}
            for w in found
        ]
    return {name: value if isinstance(value, float) else value.tolist() for name, value in found.items()}

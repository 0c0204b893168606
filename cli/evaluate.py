"""``gradgraph evaluate``: loss, metrics and mistakes of a step folder on held-out data."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import click

from gradgraph.cli import output
from gradgraph.cli.choices import PATH
from gradgraph.cli.command import Command
from gradgraph.cli.drift_table import DRIFT, drift_of
from gradgraph.cli.options import CHECKPOINT, CUSTOM_OPS, NOT_AVERAGED, UNTRAINED, device_option, reading_options
from gradgraph.cli.run_weights import checkpoint_to_use
from gradgraph.errors import DataError, shown
from gradgraph.files.stdin import from_stdin
from gradgraph.runs.run_data import Reading

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
@reading_options
@CHECKPOINT
@UNTRAINED
@click.option(
    "--per-class", is_flag=True, help="Per-class precision, recall and F1, and the classes confused with each other."
)
@click.option("--class", "classes", multiple=True, metavar="NAME", help="Names of the classes, in order; repeatable.")
@click.option("--worst", type=click.IntRange(min=1), metavar="K", help="List the K samples with the largest losses.")
@DRIFT
@click.option("--page", type=PATH, help="Write a page (.html) of a classifier's mistakes, with pictures.")
@click.option("--batch-size", type=click.IntRange(min=1), help="Samples per run.")
@NOT_AVERAGED
@device_option("run")
@CUSTOM_OPS
@output.json_option
def command(
    step: Path,
    data: Path,
    checkpoint: Path | None,
    untrained: bool,
    per_class: bool,
    classes: tuple[str, ...],
    worst: int | None,
    drift: bool,
    page: Path | None,
    batch_size: int | None,
    not_averaged: bool,
    device: Literal["auto", "cpu", "cuda"],
    as_json: bool,
    **reading: Any,
) -> None:
    """Print loss and metrics of a STEP folder, or of a run's folder, on held-out data.

    Examples:
      gradgraph evaluate runs/one --data test.npz
      gradgraph evaluate step/ --checkpoint run.ckpt --data test.npz
      gradgraph evaluate step/ --checkpoint run.ckpt --data test.npz --per-class --worst 10
      gradgraph evaluate runs/one --data photos/ --page mistakes.html
      gradgraph evaluate runs/one --data later.csv --drift

    --per-class requires a step with a confusion matrix: build it with --metric f1 or --metric confusion_matrix. --worst
    helps to find wrong labels and samples that the model has not learnt.
    """
    from gradgraph.cli.tagged_words import entities
    from gradgraph.runtime.trainer import Trainer
    from gradgraph.step.step import Step

    checkpoint = checkpoint_to_use(step, checkpoint, untrained)
    trainer = Trainer(Step.load(step), device=device)
    if checkpoint is not None:
        trainer.load(checkpoint)
    with from_stdin(data) as path:
        read = Reading(**reading, model=step).data(path, trainer.names)
        moved = drift_of(trainer.names, path, drift, as_json)
        if read is path and trainer.names.preprocess is not None:
            read = trainer.prepare(path, batch_size, shuffle=False)  # so that notes about the table are printed once
        averaged = not not_averaged
        found = trainer.evaluate(read, batch_size, averaged=averaged)
        found |= _average_precision(trainer, read, batch_size, averaged)
        tables: dict[str, Any] = {**entities(trainer, read, averaged), **moved}
        if per_class or classes:
            tables["classes"] = trainer.per_class(read, batch_size, classes=classes or None, averaged=averaged)
        if worst is not None:
            tables["worst"] = trainer.worst(read, worst, averaged=averaged)
        if page is not None:
            from gradgraph.export import save_mistakes

            figures = {name: value for name, value in found.items() if isinstance(value, float)}
            save_mistakes(
                trainer, read, page, title=str(data), scores=figures, batch_size=batch_size, averaged=averaged
            )
            output.say(f"wrote {page}")
    named = next(iter(trainer.names.classes.values()), ())
    if as_json:
        scores = {name: value if isinstance(value, float) else value.tolist() for name, value in found.items()}
        known = {"class_names": list(named)} if named else {}
        output.emit_json({"scores": scores} | known | {name: table.as_data() for name, table in tables.items()})
        return
    for name, value in found.items():
        output.emit(_printed(name, value, [shown(one) for one in classes or named]))
    for table in tables.values():
        output.emit(f"\n{table}")


def _average_precision(trainer: Trainer, data: Any, batch_size: int | None, averaged: bool) -> dict[str, Any]:
    """Return COCO's average precision if the model is a detector and the data are images with boxes; else empty."""
    import numpy as np

    from gradgraph.vision import Annotated, evaluate
    from gradgraph.vision.decoding import DECODERS

    if not isinstance(data, Annotated) or trainer.manifest.loss.get("name") not in DECODERS:
        return {}
    try:
        found = evaluate(trainer, data, batch_size=batch_size, averaged=averaged)
    except DataError as error:  # outputs in a custom order cannot be decoded
        output.say(f"no average precision: {error}")
        return {}
    each = np.array(list(found["per_class"].values()))
    return {**{name: found[name] for name in ("ap", "ap50", "ap75")}, "ap_per_class": each}


def _printed(name: str, value: Any, classes: list[str]) -> str:
    """Return a metric and its value as text; values per class are printed with the class names."""
    if isinstance(value, float):
        return f"{name} {value:.6g}"
    if value.shape == (len(classes),):
        return f"{name} {', '.join(f'{one} {number:.6g}' for one, number in zip(classes, value, strict=True))}"
    if value.shape == (len(classes), len(classes)):
        from gradgraph.runtime.saved.printed import text_table

        rows = ([one, *(f"{number:.6g}" for number in row)] for one, row in zip(classes, value, strict=True))
        return "\n".join(text_table([[name, *classes], *rows]))
    return f"{name} {' '.join(str(value.tolist()).split())}"

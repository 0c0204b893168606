"""``gradgraph predict``: run a model or a step folder on data, batch by batch."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import click

from gradgraph.cli import output
from gradgraph.cli.choices import PATH
from gradgraph.cli.command import Command
from gradgraph.cli.drift_table import DRIFT, drift_of
from gradgraph.cli.model_to_run import model_to_run
from gradgraph.cli.options import CHECKPOINT, CUSTOM_OPS, NOT_AVERAGED, UNTRAINED, device_option, reading_options
from gradgraph.errors import listed
from gradgraph.files.stdin import STDIO, from_stdin
from gradgraph.runs.run_data import Reading
from gradgraph.step.output_paths import check_output

if TYPE_CHECKING:
    from gradgraph.cli.predictions import Batches

BATCH_SIZE = 32


@click.command("predict", cls=Command)
@click.argument("model", type=PATH)
@click.option(
    "--data",
    type=PATH,
    required=True,
    help="An .npz (- from stdin) or a folder of .npy, with one array per input; a table (.csv, .parquet, …); a "
    "folder of images; or shards (.tar).",
)
@reading_options
@click.option(
    "-o",
    "--out",
    type=PATH,
    default="predictions.npz",
    show_default=True,
    help="An .npz, a .csv, or - for CSV on stdout.",
)
@click.option("--output", "outputs", multiple=True, metavar="NAME", help="Output to write; repeatable. Default: all.")
@DRIFT
@CHECKPOINT
@UNTRAINED
@click.option(
    "--batch-size", type=click.IntRange(min=1), help="Samples per run. Default: 32, or the batch size of a fixed model."
)
@NOT_AVERAGED
@device_option("run")
@CUSTOM_OPS
@output.json_option
def command(
    model: Path,
    data: Path,
    out: Path,
    outputs: tuple[str, ...],
    drift: bool,
    checkpoint: Path | None,
    untrained: bool,
    batch_size: int | None,
    not_averaged: bool,
    device: Literal["auto", "cpu", "cuda"],
    as_json: bool,
    **reading: Any,
) -> None:
    """Write the outputs of MODEL (an .onnx, a step folder, or a run's folder) for every sample of the data.

    Examples:
      gradgraph predict runs/one --data test.npz
      gradgraph predict trained.onnx --data test.npz -o predictions.npz
      gradgraph predict step/ --checkpoint run.ckpt --data test.npz --output logits -o logits.csv

    Data are read and outputs written batch by batch, so that only a few batches are in memory at a time
    (tables and arrays in Fortran order are loaded whole). Arrays that are not inputs of the model are ignored, and so
    are the targets of a table. An output without a sample axis, such as a sum, has one entry per batch.

    Columns of a table are matched by name with those of the training data. If classes have names, the predicted "class"
    and the "probability" of each class are written after the outputs; for a folder of images, also the "file".
    """
    from gradgraph.cli import predictions
    from gradgraph.cli.named_predictions import named
    from gradgraph.cli.tagged_words import tags_words, with_tags
    from gradgraph.data.sources.in_order import in_order
    from gradgraph.runtime.execution.predictor import Predictor

    if as_json and out == STDIO:
        raise click.UsageError("--json and -o - both write to stdout; give one of them")
    write = predictions.writer_for(out)
    if out != STDIO:
        check_output(out, *(p for p in (model, data, checkpoint) if p is not None))
    read, targets = model_to_run(model, checkpoint, untrained, outputs, not not_averaged)
    predictor = Predictor(read, outputs, device)
    size = batch_size or predictor.fixed_rows or BATCH_SIZE
    names, reader = predictor.names, Reading(**reading, model=model)
    with (
        from_stdin(data) as path,
        in_order(samples := reader.data(path, names, one_length=True), predictor.specs, targets, names) as source,
    ):
        if source.others:
            output.say(f"ignored: {listed(source.others)}")
        moved = drift_of(names, path, drift, as_json)
        with output.progress("samples") as advance:
            found: Batches = predictor.over(source, size)
            if not outputs and tags_words(samples, names):
                found = with_tags(found, samples, predictor)
            batches, layouts, added = named(found, source.files, predictor)
            columns = {one.name: one.columns for one in added}
            shapes = write(out, _reported(batches, source.rows, advance), source.rows, layouts, columns)
        facts: dict[str, Any] = {"file": str(out), "rows": source.rows, "outputs": shapes}
        facts |= {name: table.as_data() for name, table in moved.items()}
        if names.classes:
            facts["classes"] = names.as_data()["classes"]
    if as_json:
        output.emit_json(facts)
        return
    for table in moved.values():
        (output.say if out == STDIO else output.emit)(str(table))
    if out != STDIO:
        output.say(f"wrote {out}: {listed(shapes)} of {facts['rows']:,} samples")


def _reported(batches: Batches, rows: int, advance: Callable[[int, int], None]) -> Batches:
    """Yield ``batches``, and call ``advance`` with the numbers of processed and of all samples after each."""
    done = 0
    for count, found in batches:
        yield count, found
        done += count
        advance(done, rows)

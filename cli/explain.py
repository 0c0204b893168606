"""``gradgraph explain``: why a model predicts what it predicts, for samples of data, as a page and as arrays."""

from __future__ import annotations

import io
import json
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import click

from gradgraph.cli import output
from gradgraph.cli.choices import PATH, Named, Suggested
from gradgraph.cli.command import Command
from gradgraph.cli.key_values import arguments
from gradgraph.cli.model_to_run import model_to_run
from gradgraph.cli.options import (
    CHECKPOINT,
    CUSTOM_OPS,
    FORCE,
    NOT_AVERAGED,
    UNTRAINED,
    device_option,
    reading_options,
)
from gradgraph.errors import shown
from gradgraph.files.stdin import from_stdin
from gradgraph.runs.run_data import Reading

if TYPE_CHECKING:
    from gradgraph.attributions.explained import Explained

FILES = ("index.html", "attributions.npz", "manifest.json")
TOP = 3  # units that a line in the terminal names


@click.command("explain", cls=Command)
@click.argument("model", type=PATH)
@click.option(
    "--data",
    type=PATH,
    required=True,
    help="An .npz (- from stdin) or a folder of .npy, with one array per input; a table (.csv, .parquet, …); a folder "
    "of images or sounds; or shards (.tar).",
)
@reading_options
@click.option(
    "--method",
    cls=Named,
    type=Suggested("attributions.attribution_methods:methods"),
    default="integrated-gradients",
    show_default=True,
    help="The attribution method.",
)
@click.option(
    "--option",
    "options",
    multiple=True,
    metavar="KEY=VALUE",
    callback=arguments,
    help="Option of the method, such as n=200 or baseline=0.5; repeatable.",
)
@click.option(
    "--class",
    "target",
    metavar="CLASS",
    help="Name or index of the class to explain. Default: the predicted class of each sample.",
)
@click.option(
    "--output", "explained", metavar="NAME", help="Output to explain. Default: the first that depends on an input."
)
@click.option(
    "--samples",
    type=click.IntRange(min=1),
    default=20,
    show_default=True,
    help="Number of samples, evenly spaced over the data.",
)
@click.option("--no-checks", is_flag=True, help="Skip the sanity checks.")
@click.option("-o", "--out", type=PATH, default="why", show_default=True, help="The folder to write.")
@FORCE
@CHECKPOINT
@UNTRAINED
@NOT_AVERAGED
@device_option("run")
@CUSTOM_OPS
@output.json_option
def command(
    model: Path,
    data: Path,
    method: str,
    options: dict[str, Any],
    target: str | None,
    explained: str | None,
    samples: int,
    no_checks: bool,
    out: Path,
    force: bool,
    checkpoint: Path | None,
    untrained: bool,
    not_averaged: bool,
    device: Literal["auto", "cpu", "cuda"],
    as_json: bool,
    **reading: Any,
) -> None:
    """Show which parts of each sample the prediction of MODEL (an .onnx, a step folder, or a run's folder) depends on.

    Examples:
      gradgraph explain trained.onnx --data photos/
      gradgraph explain runs/one --data test.csv --class yes -o why/
      gradgraph explain trained.onnx --data test.npz --method smoothgrad --option n=100

    The folder contains index.html, which shows attributions as heat maps on pictures, coloured words, bars of table
    columns or curves of sounds; attributions.npz; and manifest.json, with the document that --json prints.

    Sanity checks compare the attributions with those of the model with shuffled weights, delete and insert parts in
    their order, and report the completeness error. A failed check is printed as a warning.
    """
    from gradgraph.attributions.attribution_page import page
    from gradgraph.attributions.explained import Explainer, explain_samples
    from gradgraph.attributions.sample_rows import read_samples
    from gradgraph.files.atomic import check_replaceable, check_writable, write_folder_atomically

    check_replaceable(out, FILES, force)
    if not out.exists():
        check_writable(out)
    read, targets = model_to_run(model, checkpoint, untrained, (), not not_averaged)
    explainer = Explainer(read, method, options, explained, device)
    names = explainer.predictor.names
    with from_stdin(data) as path:
        source = Reading(**reading, model=model).data(path, names, one_length=True)
        inputs, described = read_samples(source, explainer.predictor.specs, targets, names, samples)
    with output.progress("checks") as advance:
        found = explain_samples(explainer, inputs, described, target=target, checks=not no_checks, advance=advance,
                                tokenizer=getattr(source, "tokenizer", None))  # fmt: skip
    facts = {"model": str(model), "data": str(data)}
    document = facts | found.as_data()
    content = (page(f"Why did {model.name} say that?", found, facts).encode(), _npz(_arrays(found)), _json(document))
    write_folder_atomically(out, dict(zip(FILES, content, strict=True)), force)
    if as_json:
        output.emit_json(document | {"folder": str(out)})
        return
    for row in range(len(found.samples)):
        _print(found, row)
    for warning in found.warnings:
        output.say(f"warning: {warning}")
    output.say(f"wrote {out}: open {out / FILES[0]} in a browser")


def _arrays(found: Explained) -> dict[str, Any]:
    """Return the arrays of attributions.npz: attributions to elements and columns, and the predictions."""
    import numpy as np

    arrays: dict[str, Any] = {f"{name}.attribution": each for name, each in found.attributions.items()}
    for name, units in found.units.items():
        if units.shown == "columns":
            arrays |= {f"{name}.columns": np.array(units.names), f"{name}.column_attribution": found.sums[name]}
    if found.completeness is not None:
        arrays["completeness.error"] = found.completeness
    for fact in ("index", "file", "called", "target", "score"):
        arrays[fact] = np.array([getattr(one, fact) for one in found.samples])
    return arrays


def _npz(arrays: Mapping[str, Any]) -> bytes:
    """Return an .npz; unlike ``np.savez``, of arrays of any name."""
    from numpy.lib.format import write_array

    content = io.BytesIO()
    with zipfile.ZipFile(content, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, array in arrays.items():
            with archive.open(f"{name}.npy", "w", force_zip64=True) as member:
                write_array(member, array, allow_pickle=False)
    return content.getvalue()


def _json(document: Mapping[str, Any]) -> bytes:
    return (json.dumps(output.plain(document), indent=2) + "\n").encode()


def _print(found: Explained, row: int) -> None:
    """Print the prediction for a sample, then its tokens in colour, or the units with the largest attributions."""
    from rich.text import Text

    one, console = found.samples[row], output.console()
    name = shown(Path(one.file).name if one.file else f"sample {one.index:,}")
    sure = "" if one.probability is None else f" {one.probability:.1%}"
    other = "" if one.target in ("", one.called) else f", explained: {shown(one.target)}"
    head = f"{name}: {shown(one.called)}{other}{sure}"
    named = next((n for n, units in found.units.items() if units.names or n in found.tokens), None)
    if named is None:
        output.emit(head)
    elif named in found.tokens and console.color_system is not None:
        output.emit(f"{head}:")
        console.print(Text.assemble(*_coloured(found.tokens[named][row], found.sums[named][row])))
    else:
        output.emit(f"{head}: {', '.join(_top(found, named, row))}")


def _top(found: Explained, name: str, row: int) -> list[str]:
    if name in found.tokens:
        pairs = zip(found.tokens[name][row], found.sums[name][row].tolist(), strict=True)
        best = sorted((pair for pair in pairs if pair[0]), key=lambda pair: -abs(pair[1]))[:TOP]
        return [f"'{shown(token)}' {value:+.3g}" for token, value in best]
    return [f"{shown(n)}{f' = {shown(v)}' if v else ''} {a:+.3g}" for n, v, a in found.bars(name, row, TOP)]


def _coloured(tokens: list[str] | Any, values: Any) -> list[tuple[str, str]]:
    """Return each token with a style: the colour of its attribution, mixed with black by its size."""
    import numpy as np

    from gradgraph.attributions.attribution_markup import colour_of, limit_of

    own = [(shown(token), float(value)) for token, value in zip(tokens, values, strict=True) if token]
    limit, parts = limit_of(np.array([value for _, value in own])), []
    for token, value in own:
        colour, opacity = colour_of(value / limit)
        red, green, blue = (round(c * opacity) for c in colour)
        parts += [(token, f"white on rgb({red},{green},{blue})"), (" ", "")]
    return parts

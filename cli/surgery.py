"""``gradgraph surgery``: a finished model in, the model with another head, other ends or other weights out."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import click

from gradgraph.cli import output, surgery_adapters
from gradgraph.cli.choices import PATH
from gradgraph.cli.command import Command
from gradgraph.cli.output_paths import check_output
from gradgraph.errors import shown

Change = tuple[str, Callable[[Any], Any]]


@click.command("surgery", cls=Command)
@click.argument("model", type=PATH)
@click.option("--input", "inputs", multiple=True, metavar="VALUE", help="Cut: feed this inner value. Repeatable.")
@click.option("--output", "outputs", multiple=True, metavar="VALUE", help="Cut: return this inner value. Repeatable.")
@click.option("--name-weights", is_flag=True, help="Name anonymous weights by where they are used.")
@click.option("--load", type=PATH, metavar="FILE", help="Take weights by name from a .safetensors or .npz file.")
@click.option("--partly", is_flag=True, help="With --load: take what fits, and leave the rest as it is.")
@click.option(
    "--open",
    "opened",
    multiple=True,
    metavar="INPUT:AXIS=NAME",
    help="Let an axis of an input take any size, such as x:0=batch. Repeatable.",
)
@click.option("--new-head", type=click.IntRange(min=1), metavar="CLASSES", help="A new last linear layer, untrained.")
@click.option(
    "--head-output", metavar="NAME", help="With --new-head: the output that it computes; the first by default."
)
@click.option("--head-name", default="head", show_default=True, help="With --new-head: what its weights are called.")
@click.option("--resize-embedding", "resized", multiple=True, metavar="WEIGHT=ROWS", help="Another number of rows.")
@click.option("--reset", multiple=True, metavar="GLOB", help="Let these weights begin anew. Repeatable.")
@click.option("--tie", "tied", multiple=True, metavar="WEIGHT=OTHER", help="Read OTHER instead of WEIGHT. Repeatable.")
@click.option("--untie", "untied", multiple=True, metavar="GLOB", help="One for each module that reads it. Repeatable.")
@click.option("--untie-merged", is_flag=True, help="Untie what an exporter stored once because it began alike.")
@surgery_adapters.options
@click.option("--qat", type=PATH, metavar="DATA", help="Round weights and data as 8-bit runtimes do; ranges from DATA.")
@click.option("--weights", type=click.Choice(["int8", "int4"]), default="int8", show_default=True, help="With --qat.")
@click.option(
    "--activations",
    type=click.Choice(["uint8", "int8", "uint16"]),
    default="uint8",
    show_default=True,
    help="With --qat.",
)
@click.option("--qat-quantised", is_flag=True, help="Let the integers of a quantised model train; its pairs stay.")
@click.option(
    "--qat-target", "rounded", multiple=True, metavar="GLOB", help="With --qat or --qat-quantised: these layers only."
)
@click.option(
    "--ranges",
    type=click.Choice(["observed", "learned"]),
    default="observed",
    show_default=True,
    help="With --qat or --qat-quantised: scales found on data and weights, or trained from there.",
)
@click.option("--teacher", type=PATH, metavar="FILE", help="A frozen model that training makes this one imitate.")
@click.option(
    "--temperature", type=click.FloatRange(0, min_open=True), default=2.0, show_default=True, help="With --teacher."
)
@click.option(
    "--teacher-share",
    type=click.FloatRange(0, 1),
    default=0.5,
    show_default=True,
    help="With --teacher: its part of what is minimised; with 1, `--loss none` leaves only that.",
)
@click.option(
    "--match", "matched", multiple=True, metavar="VALUE=OTHER",
    help="With --teacher: let this inner value be like the teacher's. Repeatable.",
)  # fmt: skip
@click.option(
    "--teacher-input", "fed", multiple=True, metavar="INPUT=OWN",
    help="With --teacher: its input, and which one of the model that is. Repeatable.",
)  # fmt: skip
@click.option("--language-model", is_flag=True, help="Of a model that generates: tokens in, scores out, no past.")
@click.option("--in-float32", is_flag=True, help="Compute in float32 what the model computes in float16.")
@click.option("--forget-sizes", is_flag=True, help="Leave out declared sizes of inner values.")
@click.option("--seed", type=int, default=0, show_default=True, help="Of new numbers.")
@click.option("-o", "--out", type=PATH, default="edited.onnx", show_default=True, help="The model to write.")
@output.json_option
@click.pass_context
def command(ctx: click.Context, /, model: Path, out: Path, as_json: bool, **asked: Any) -> None:
    """Change a finished MODEL (.onnx) as its framework would in source code; several changes are made in the order
    of the options below.

    Examples:
      gradgraph surgery resnet.onnx --new-head 7 -o mine.onnx
      gradgraph surgery vit.onnx --open pixels:0=batch --output features -o trunk.onnx
      gradgraph surgery bert.onnx --name-weights --load weights.safetensors --partly
      gradgraph surgery llm.onnx --lora '*q_proj*' --lora '*v_proj*' --rank 16 -o lora.onnx
      gradgraph surgery llm.onnx --lora '*attn*' --language-model -o train.onnx
      gradgraph surgery mobilenet-int8.onnx --new-head 7 --qat-quantised -o mine.onnx
      gradgraph surgery lora.onnx --merge --requantise --trained trained.onnx -o merged.onnx
      gradgraph surgery lora.onnx --save-adapter fr.onnx_adapter --trained trained.onnx -o same.onnx
      gradgraph surgery small.onnx --teacher large.onnx --temperature 4 -o pupil.onnx
    """
    from gradgraph.files.models import load_model, save_model

    changes = list(_changes(ctx, **asked))
    if not changes:
        raise click.UsageError("nothing is to be changed; give one of the options, such as --new-head 7", ctx)
    check_output(out, model)
    edited = load_model(model)
    for _, change in changes:
        edited = change(edited)
    save_model(edited, out)
    ends = {"inputs": edited.graph.inputs, "outputs": edited.graph.outputs}
    names = {kind: [v.name or "" for v in values] for kind, values in ends.items()}
    if as_json:
        weights = sum(1 for v in edited.graph.initializers.values() if not v.is_graph_input())
        output.emit_json({"file": str(out), "changes": [said for said, _ in changes], **names,
                          "nodes": len(edited.graph), "weights": weights})  # fmt: skip
        return
    for said, _ in changes:
        output.emit(said)
    output.say(
        f"wrote {out}: from {', '.join(map(shown, names['inputs']))} to {', '.join(map(shown, names['outputs']))}"
    )


def _changes(
    ctx: click.Context,
    inputs: tuple[str, ...],
    outputs: tuple[str, ...],
    name_weights: bool,
    load: Path | None,
    partly: bool,
    opened: tuple[str, ...],
    new_head: int | None,
    head_output: str | None,
    head_name: str,
    resized: tuple[str, ...],
    reset: tuple[str, ...],
    tied: tuple[str, ...],
    untied: tuple[str, ...],
    untie_merged: bool,
    seed: int,
    qat: Path | None,
    qat_quantised: bool,
    rounded: tuple[str, ...],
    teacher: Path | None,
    temperature: float,
    teacher_share: float,
    matched: tuple[str, ...],
    fed: tuple[str, ...],
    ranges: str,
    weights: str,
    language_model: bool,
    in_float32: bool,
    forget_sizes: bool,
    activations: str,
    **adapters: Any,
) -> Iterator[Change]:
    """What the options ask for, in words and as functions from model to model."""
    from gradgraph import surgery

    if partly and load is None:
        raise click.UsageError("--partly is said of the weights of --load; add that, or leave it out", ctx)
    if (head_output is not None or head_name != "head") and new_head is None:
        raise click.UsageError("--head-output and --head-name go with --new-head; add that, or leave them out", ctx)
    if (matched or fed) and teacher is None:
        raise click.UsageError("--match and --teacher-input go with --teacher; add that, or leave them out", ctx)
    if (ranges != "observed" or rounded) and qat is None and not qat_quantised:
        raise click.UsageError("--ranges and --qat-target go with --qat or --qat-quantised; add one of these", ctx)
    if inputs or outputs:
        yield (
            "cut the model",
            lambda m: surgery.cut(m, inputs=list(inputs) or None, outputs=list(outputs) or None),
        )
    if name_weights:
        yield "named the weights", surgery.name_weights
    if load is not None:
        yield f"took weights from {load}", lambda m: surgery.load_weights(m, load, strict=not partly)
    if opened:
        axes = _axes(ctx, opened)
        yield f"opened {', '.join(opened)}", lambda m: surgery.open_axes(m, axes)
    if new_head is not None:
        yield (
            f"a new last layer of {new_head} classes, {head_name}.weight: train it with --train '{head_name}.*'",
            lambda m: surgery.new_head(m, new_head, output=head_output, name=head_name, seed=seed),
        )
    for weight, rows in _pairs(ctx, "--resize-embedding", resized):
        if not rows.isdigit() or not int(rows):
            raise click.UsageError(f"--resize-embedding {weight}={rows}: rows are a whole number above zero", ctx)
        yield f"{weight} has {rows} rows", _call(surgery.resize_embedding, weight, int(rows))
    if reset:
        yield f"began {', '.join(reset)} anew", lambda m: surgery.reset_weights(m, list(reset), seed=seed)
    for weight, other in _pairs(ctx, "--tie", tied):
        yield f"{weight} is {other}", _call(surgery.tie_weights, weight, other)
    if untied:
        yield f"untied {', '.join(untied)}", lambda m: surgery.untie_weights(m, list(untied))
    if untie_merged:
        yield "untied what was merged", surgery.untie_weights
    yield from surgery_adapters.changes(ctx, seed=seed, **adapters)
    if qat is not None or qat_quantised:
        said = "the integers train" if qat is None else f"rounding to {weights}, ranges from {qat}"
        yield said, lambda m: surgery.qat(
            m, qat, target=list(rounded) or None, weights=weights, activations=activations, ranges=ranges
        )  # fmt: skip
    if teacher is not None:
        pairs = dict(_pairs(ctx, "--match", matched))
        shared = dict(_pairs(ctx, "--teacher-input", fed))
        yield f"{teacher} is a frozen teacher: it is no part of what a run exports", lambda m: surgery.distill(
            m, teacher, temperature, alpha=teacher_share, match=pairs, inputs=shared
        )  # fmt: skip
    if language_model:
        yield "tokens in, scores out", surgery.language_model
    if in_float32:
        yield "computes in float32", surgery.in_float32
    if forget_sizes:
        yield "forgot the sizes of inner values", surgery.forget_sizes


def _call(function: Callable[..., Any], *arguments: Any) -> Callable[[Any], Any]:
    return lambda model: function(model, *arguments)


def _pairs(ctx: click.Context, option: str, given: tuple[str, ...]) -> Iterator[tuple[str, str]]:
    for text in given:
        left, equals, right = text.rpartition("=")
        if not (left and equals and right):
            raise click.UsageError(f"{option} '{shown(text)}' should be two names with = between them", ctx)
        yield left, right


def _axes(ctx: click.Context, given: tuple[str, ...]) -> dict[str, dict[int, str]]:
    """``x:0=batch`` as ``{"x": {0: "batch"}}``."""
    axes: dict[str, dict[int, str]] = {}
    for place, name in _pairs(ctx, "--open", given):
        tensor, _, axis = place.rpartition(":")
        if not tensor or not axis.lstrip("-").isdigit():
            raise click.UsageError(f"--open '{shown(place)}={shown(name)}' should be such as x:0=batch", ctx)
        axes.setdefault(tensor, {})[int(axis)] = name
    return axes

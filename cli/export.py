"""``gradgraph export``: a step folder and a checkpoint in, a plain inference model out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from gradgraph.cli import output
from gradgraph.cli.command import Command
from gradgraph.cli.options import CHECKPOINT, NOT_AVERAGED, PATH, check_output


@click.command("export", cls=Command)
@click.argument("step", type=PATH)
@CHECKPOINT
@click.option(
    "-o",
    "--out",
    type=PATH,
    default="trained.onnx",
    show_default=True,
    help="An .onnx, or a .safetensors for weights alone.",
)
@click.option(
    "--output", "outputs", multiple=True, metavar="NAME", help="An output to keep; repeatable. All by default."
)
@NOT_AVERAGED
@click.option("--mixed", is_flag=True, help="Keep the mixed precision of the step; the model is float32 otherwise.")
@output.json_option
def command(
    step: Path,
    checkpoint: Path | None,
    out: Path,
    outputs: tuple[str, ...],
    not_averaged: bool,
    mixed: bool,
    as_json: bool,
) -> None:
    """Write the model of a STEP folder as plain ONNX: no loss, no optimizer, layers in evaluation form.

    Examples:
      gradgraph export step/ --checkpoint run.ckpt -o trained.onnx
      gradgraph export step/ --checkpoint run.ckpt -o weights.safetensors
    """
    check_output(out, step, *([checkpoint] if checkpoint else []))
    if out.suffix == ".safetensors":
        if outputs:
            raise click.UsageError("weights alone have no outputs; leave --output out, or write an .onnx")
        if mixed:
            raise click.UsageError("weights alone are float32; leave --mixed out, or write an .onnx")
        facts = _weights(step, out, checkpoint, not not_averaged)
    else:
        facts = _model(step, out, checkpoint, outputs, averaged=not not_averaged, mixed=mixed)
    if as_json:
        output.emit_json(facts)
        return
    words = f"{facts['tensors']} tensors" if "tensors" in facts else f"{facts['nodes']} nodes"
    remark = "" if checkpoint else ", with the weights as they were before training (no --checkpoint was given)"
    output.say(f"wrote {out}: {words}{remark}")


def _model(
    step: Path, out: Path, checkpoint: Path | None, outputs: tuple[str, ...], *, averaged: bool, mixed: bool
) -> dict[str, Any]:
    from gradgraph.export import save_inference

    graph = save_inference(step, out, checkpoint, outputs or None, averaged=averaged, mixed=mixed).graph
    names = {"inputs": [i.name for i in graph.input], "outputs": [o.name for o in graph.output]}
    return {"file": str(out), "nodes": len(graph.node), **names}


def _weights(step: Path, out: Path, checkpoint: Path | None, averaged: bool) -> dict[str, Any]:
    from gradgraph.export import save_weights

    arrays = save_weights(step, out, checkpoint, averaged=averaged)
    return {"file": str(out), "tensors": len(arrays), "bytes": sum(a.nbytes for a in arrays.values())}

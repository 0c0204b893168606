"""``gradgraph grad``: a model in, a model with gradients out."""

from __future__ import annotations

import shlex
from pathlib import Path

import click

from gradgraph.cli import output
from gradgraph.cli.command import Command
from gradgraph.cli.options import BACKENDS, PATH, check_output
from gradgraph.errors import shown


@click.command("grad", cls=Command)
@click.argument("model", type=PATH)
@click.option(
    "--wrt", multiple=True, metavar="GLOB", help="Inputs and weights; repeatable. Every trainable weight by default."
)
@click.option("--output", "scalar", metavar="NAME", help="The scalar output to differentiate. The first by default.")
@click.option(
    "--backend",
    type=BACKENDS,
    default="portable",
    show_default=True,
    help="The runtime that the model is written for.",
)
@click.option("-o", "--out", type=PATH, default="grad.onnx", show_default=True, help="The model to write.")
@output.json_option
def command(model: Path, wrt: tuple[str, ...], scalar: str | None, backend: str, out: Path, as_json: bool) -> None:
    """Append gradients to MODEL (.onnx): the new model returns the output, then NAME.grad for each tensor
    (or NAME.grad_1, … where MODEL has that name already).

    Examples:
      gradgraph grad model.onnx --wrt 'conv1.*' --wrt x -o grad.onnx
      gradgraph grad model.onnx --output loss --json
    """
    import onnx_ir as ir

    from gradgraph.runtime.loop.reporter import told_if_slow
    from gradgraph.transforms import value_and_grad

    check_output(out, model)
    with told_if_slow("writing the gradient …", output.say):
        result = value_and_grad(model, output=scalar, wrt=list(wrt) or None, backend=backend, out=out)
    assert isinstance(result, ir.Model)  # what was written
    names, count = [o.name or "" for o in result.graph.outputs], len(result.graph)
    if as_json:
        output.emit_json({"file": str(out), "outputs": names, "nodes": count})
        return
    for name in names:
        output.emit(shown(name))
    advice = shlex.join(["gradgraph", "check", str(model)])
    output.say(f"wrote {out}: {count} nodes; check it with: {advice}")

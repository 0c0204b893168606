"""``gradgraph grad``: a model in, a model with gradients out."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from gradgraph.cli import output
from gradgraph.cli.choices import BACKENDS, PATH, Named
from gradgraph.cli.command import Command
from gradgraph.cli.files_written import written
from gradgraph.cli.options import build_option, one_or_all
from gradgraph.cli.output_paths import check_output
from gradgraph.errors import shown


@click.command("grad", cls=Command)
@click.argument("model", type=PATH)
@click.option(
    "--wrt", multiple=True, metavar="GLOB", help="Inputs and weights; repeatable. Every trainable weight by default."
)
@click.option(
    "--output",
    "outputs",
    multiple=True,
    metavar="NAME",
    help="The output to differentiate, a scalar unless an option below says otherwise; the first by default. "
    "Repeatable with --vjp and --jvp, which take all by default.",
)
@click.option("--vjp", is_flag=True, help="Jᵀ·c: an input OUTPUT.cotangent for each output, and outputs NAME.grad.")
@click.option("--jvp", is_flag=True, help="J·t: an input NAME.tangent for each tensor, and outputs OUTPUT.tangent.")
@click.option("--hvp", is_flag=True, help="H·t: an input NAME.tangent for each tensor, and outputs NAME.hvp.")
@click.option("--jacobian", is_flag=True, help="The whole Jacobian of an output of any shape: NAME.jacobian.")
@click.option("--hessian", is_flag=True, help="The whole Hessian of a scalar: NAME.hessian, and NAME.OTHER.hessian.")
@click.option(
    "--per-sample",
    is_flag=True,
    help="Loss and gradients of each sample by itself: OUTPUT.per_sample and NAME.per_sample_grad. With --jacobian: of "
    "each sample of the output by its own row of the inputs.",
)
@click.option(
    "--independent", is_flag=True, help="With --per-sample: samples do not mix, whatever operators the model has."
)
@click.option(
    "--mode",
    type=click.Choice(["auto", "reverse", "forward"]),
    default="auto",
    show_default=True,
    help="With --jacobian: a backward pass for each element of the output, or a tangent for each of the inputs.",
)
@click.option(
    "--recompute",
    multiple=True,
    metavar="WHAT",
    help="Compute values of the forward pass again rather than keep them, as for `gradgraph build`. Not with the "
    "options above but --vjp.",
)
@click.option(
    "--backend",
    cls=Named,
    type=BACKENDS,
    default="portable",
    show_default=True,
    help="The runtime that the model is written for.",
)
@build_option("opset")
@click.option("-o", "--out", type=PATH, default="grad.onnx", show_default=True, help="The model to write.")
@output.json_option
@click.pass_context
def command(
    ctx: click.Context,
    /,
    model: Path,
    wrt: tuple[str, ...],
    backend: str,
    opset: int | None,
    out: Path,
    as_json: bool,
    **asked: Any,
) -> None:
    """Append gradients to MODEL (.onnx): the new model returns the output, then NAME.grad for each tensor
    (or NAME.grad_1, … where MODEL has that name already).

    Examples:
      gradgraph grad model.onnx --wrt 'conv1.*' --wrt x -o grad.onnx
      gradgraph grad model.onnx --jacobian --output logits --wrt x
      gradgraph grad model.onnx --output loss --json
    """
    import onnx_ir as ir

    from gradgraph.runtime.loop.reporter import told_if_slow

    transform, arguments = _transform(ctx, **asked)
    check_output(out, model)
    with told_if_slow("writing the gradient …", output.say):
        result = transform(model, wrt=list(wrt) or None, backend=backend, opset=opset, out=out, **arguments)
    assert isinstance(result, ir.Model)  # what was written
    names, count = [o.name or "" for o in result.graph.outputs], len(result.graph)
    if as_json:
        inputs = [x.name or "" for x in result.graph.inputs]
        output.emit_json({"file": str(out), "inputs": inputs, "outputs": names, "nodes": count})
        return
    for name in names:
        output.emit(shown(name))
    advice = shlex.join(["gradgraph", "check", str(model)])
    output.say(f"wrote {written(out)}: {count} nodes; check it with: {advice}")


def _transform(
    ctx: click.Context,
    outputs: tuple[str, ...],
    per_sample: bool,
    independent: bool,
    mode: str,
    recompute: tuple[str, ...],
    **flags: bool,
) -> tuple[Callable[..., Any], dict[str, Any]]:
    """The transform that the options ask for, and its arguments."""
    from gradgraph import transforms

    asked = [name for name, given in flags.items() if given]
    if len(asked) > 1:
        raise click.UsageError(f"--{asked[0]} and --{asked[1]} are different transforms; give one of them", ctx)
    name = asked[0] if asked else "per_sample_gradients" if per_sample else "value_and_grad"
    if per_sample and name not in ("per_sample_gradients", "jacobian"):
        raise click.UsageError(f"--per-sample goes with --jacobian or alone, not with --{name}", ctx)
    if independent and name != "per_sample_gradients":
        raise click.UsageError("--independent is said of the samples of --per-sample; add that, or leave it out", ctx)
    if mode != "auto" and name != "jacobian":
        raise click.UsageError("--mode is that of --jacobian; add that, or leave it out", ctx)
    if recompute and name not in ("value_and_grad", "vjp"):
        raise click.UsageError(f"--recompute goes with --vjp or alone, not with --{name.replace('_', '-')}", ctx)
    kept = {"recompute": one_or_all(recompute)} if recompute else {}
    if name in ("vjp", "jvp"):
        return getattr(transforms, name), {"outputs": list(outputs) or None} | kept
    if len(outputs) > 1:
        raise click.UsageError("several --output go with --vjp and --jvp only; give one", ctx)
    arguments: dict[str, Any] = {"output": outputs[0] if outputs else None} | kept
    if name == "jacobian":
        arguments |= {"mode": mode, "per_sample": per_sample}
    if name == "per_sample_gradients":
        arguments["independent"] = independent
    return getattr(transforms, name), arguments

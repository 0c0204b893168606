"""``gradgraph grad``: append gradients to a model."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from gradgraph.cli import output
from gradgraph.cli.choices import BACKENDS, PATH, Named
from gradgraph.cli.command import Command
from gradgraph.cli.options import build_option
from gradgraph.errors import shown
from gradgraph.files.files_written import written
from gradgraph.runs.spelled_build import one_or_all
from gradgraph.step.output_paths import check_output


@click.command("grad", cls=Command)
@click.argument("model", type=PATH)
@click.option(
    "--wrt",
    multiple=True,
    metavar="GLOB",
    help="Inputs, parameters and inner values (a layer's output) to differentiate with respect to; repeatable. "
    "Default: every trainable parameter.",
)
@click.option(
    "--output",
    "outputs",
    multiple=True,
    metavar="NAME",
    help="Output to differentiate, a scalar unless an option below says otherwise. Default: the first one. "
    "Repeatable with --vjp and --jvp, which default to all.",
)
@click.option(
    "--vjp",
    is_flag=True,
    help="Vector-Jacobian product: adds an input OUTPUT.cotangent per output, and outputs NAME.grad.",
)
@click.option(
    "--jvp",
    is_flag=True,
    help="Jacobian-vector product: adds an input NAME.tangent per tensor, and outputs OUTPUT.tangent.",
)
@click.option(
    "--hvp", is_flag=True, help="Hessian-vector product: adds an input NAME.tangent per tensor, and outputs NAME.hvp."
)
@click.option("--jacobian", is_flag=True, help="Full Jacobian of an output of any shape: NAME.jacobian.")
@click.option("--hessian", is_flag=True, help="Full Hessian of a scalar: NAME.hessian and NAME.OTHER.hessian.")
@click.option(
    "--per-sample",
    is_flag=True,
    help="Per-sample loss and gradients: OUTPUT.per_sample and NAME.per_sample_grad. With --jacobian or "
    "--hessian: derivatives of each output row with respect to the same input row.",
)
@click.option(
    "--independent",
    is_flag=True,
    help="With --per-sample: assume that samples do not interact, whatever operators the model has.",
)
@click.option(
    "--mode",
    type=click.Choice(["auto", "reverse", "forward"]),
    default="auto",
    show_default=True,
    help="With --jacobian: reverse mode runs a backward pass per output element, forward mode a tangent per input "
    "element.",
)
@click.option(
    "--recompute",
    multiple=True,
    metavar="WHAT",
    help="Recompute activations in the backward pass instead of storing them, as for `gradgraph build`. Of the "
    "options above, only --vjp allows it.",
)
@click.option(
    "--backend",
    cls=Named,
    type=BACKENDS,
    default="portable",
    show_default=True,
    help="Runtime to write the model for.",
)
@build_option("opset")
@click.option("-o", "--out", type=PATH, default="grad.onnx", show_default=True, help="Output file.")
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
    """Append gradients to MODEL (.onnx). The new model returns the output, then its gradient NAME.grad for each
    selected tensor (or NAME.grad_1, … if MODEL already uses that name).

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
    assert isinstance(result, ir.Model)  # the written model
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
    """Return the transform that the options request, and its arguments."""
    from gradgraph import transforms

    asked = [name for name, given in flags.items() if given]
    if len(asked) > 1:
        raise click.UsageError(f"--{asked[0]} and --{asked[1]} cannot be combined; give one of them", ctx)
    name = asked[0] if asked else "per_sample_gradients" if per_sample else "value_and_grad"
    if per_sample and name not in ("per_sample_gradients", "jacobian", "hessian"):
        raise click.UsageError(
            f"--per-sample can be combined only with --jacobian and --hessian, not with --{name}", ctx
        )
    if independent and name != "per_sample_gradients":
        raise click.UsageError("--independent requires --per-sample; add it, or omit --independent", ctx)
    if mode != "auto" and name != "jacobian":
        raise click.UsageError("--mode requires --jacobian; add it, or omit --mode", ctx)
    if recompute and name not in ("value_and_grad", "vjp"):
        raise click.UsageError(f"--recompute can be combined only with --vjp, not with --{name.replace('_', '-')}", ctx)
    kept = {"recompute": one_or_all(recompute)} if recompute else {}
    if name in ("vjp", "jvp"):
        return getattr(transforms, name), {"outputs": list(outputs) or None} | kept
    if len(outputs) > 1:
        raise click.UsageError("only --vjp and --jvp accept several --output; give one", ctx)
    arguments: dict[str, Any] = {"output": outputs[0] if outputs else None} | kept
    if name == "jacobian":
        arguments |= {"mode": mode, "per_sample": per_sample}
    if name == "hessian":
        arguments["per_sample"] = per_sample
    if name == "per_sample_gradients":
        arguments["independent"] = independent
    return getattr(transforms, name), arguments

"""``gradgraph reduce``: a model that shows a fault becomes a small one, without names and weights, that still does."""

from __future__ import annotations

import shlex
from pathlib import Path

import click

from gradgraph.cli import output
from gradgraph.cli.choices import PATH, Listed
from gradgraph.cli.command import Command
from gradgraph.cli.files_written import written
from gradgraph.cli.output_paths import check_output
from gradgraph.errors import listed


@click.command("reduce", cls=Command)
@click.argument("model", type=PATH)
@click.option(
    "--fault",
    type=Listed("auto", "reduction.kinds:FAULTS"),
    default="auto",
    show_default=True,
    help="How it shows: gradients cannot be written; onnxruntime refuses the model, ends, or computes something else "
    "than the reference implementation; the same of its gradients; a gradient is wrong. By default the first of them.",
)
@click.option(
    "--test",
    metavar="COMMAND",
    help="A command of your own that ends with 0 where the fault shows; {} stands for the path of a model.",
)
@click.option(
    "--seconds",
    type=click.FloatRange(min=0, min_open=True),
    default=60,
    show_default=True,
    help="Of the processor, after which a look at one model ends; that is a fault, too.",
)
@click.option("--keep-names", is_flag=True, help="Keep names, texts and weights.")
@click.option("-o", "--out", type=PATH, default="reduced.onnx", show_default=True, help="The model to write.")
@output.json_option
def command(
    model: Path, fault: str, test: str | None, seconds: float, keep_names: bool, out: Path, as_json: bool
) -> None:
    """Shrink MODEL (.onnx) as far as its fault still shows: a file to send with a bug report.

    Examples:
      gradgraph reduce model.onnx -o small.onnx
      gradgraph reduce model.onnx --fault gradient
      gradgraph reduce model.onnx --test 'python my_check.py {}'

    Nodes, outputs, branches and sizes go as far as the same fault shows, looked for in a process of its own. Names,
    texts and weights are replaced, so that the file says nothing of the model; weights that the fault needs are named.
    """
    from gradgraph.reduction.reduced import reduce

    check_output(out, model)
    if test is not None and fault != "auto":
        raise click.UsageError("--test is a judge of your own; leave out --fault")
    words = None if test is None else shlex.split(test)
    with output.progress("nodes") as advance:

        def smaller(nodes: int, size: int) -> None:
            advance(0, nodes)

        found = reduce(
            model, fault=fault, test=words, seconds=seconds, anonymous=not keep_names, out=out, progress=smaller
        )
    if as_json:
        document = {name: value for name, value in vars(found).items() if name != "model"}
        output.emit_json({"file": str(out), **document})
        return
    for operator, count in sorted(found.operators.items()):
        output.emit(f"{count} {operator}")
    output.say(f"{found.fault}: {found.seen}")
    if found.not_anonymous:
        output.say(f"note: it needs its own numbers in {listed(found.not_anonymous)}: look whether you may send them")
    output.say(f"wrote {written(out)}: {found.nodes} of {found.nodes_before} nodes, after {found.tried} models")

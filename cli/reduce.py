"""``gradgraph reduce``: shrink a model that shows a fault, and anonymise it."""

from __future__ import annotations

import shlex
from pathlib import Path

import click

from gradgraph.cli import output
from gradgraph.cli.choices import PATH, Listed
from gradgraph.cli.command import Command
from gradgraph.errors import listed
from gradgraph.files.files_written import written
from gradgraph.step.output_paths import check_output


@click.command("reduce", cls=Command)
@click.argument("model", type=PATH)
@click.option(
    "--fault",
    type=Listed("auto", "reduction.kinds:FAULTS"),
    default="auto",
    show_default=True,
    help="Kind of fault: gradients cannot be built; onnxruntime rejects the model, crashes, or disagrees with the "
    "reference implementation; the same for the gradients; a gradient is wrong. Default: the first one found.",
)
@click.option(
    "--test",
    metavar="COMMAND",
    help="Your own test command, which must exit with 0 if the fault shows; {} stands for the path of a model.",
)
@click.option(
    "--seconds",
    type=click.FloatRange(min=0, min_open=True),
    default=60,
    show_default=True,
    help="CPU time limit for testing one model; exceeding it counts as a fault, too.",
)
@click.option("--keep-names", is_flag=True, help="Keep names, strings and weights.")
@click.option("-o", "--out", type=PATH, default="reduced.onnx", show_default=True, help="Output file.")
@output.json_option
def command(
    model: Path, fault: str, test: str | None, seconds: float, keep_names: bool, out: Path, as_json: bool
) -> None:
    """Shrink MODEL (.onnx) as long as its fault still shows, for a bug report.

    Examples:
      gradgraph reduce model.onnx -o small.onnx
      gradgraph reduce model.onnx --fault gradient
      gradgraph reduce model.onnx --test 'python my_check.py {}'

    Nodes, outputs, branches and sizes are removed as long as the same fault shows, tested in a separate process. Names,
    strings and weights are replaced, so that the file reveals nothing; weights that the fault depends on are listed.
    """
    from gradgraph.reduction.reduced import reduce

    check_output(out, model)
    if test is not None and fault != "auto":
        raise click.UsageError("--test replaces the built-in tests; omit --fault")
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
        output.say(
            f"note: the fault depends on the values of {listed(found.not_anonymous)}: check whether you may share them"
        )
    output.say(f"wrote {written(out)}: {found.nodes} of {found.nodes_before} nodes, after {found.tried} models")

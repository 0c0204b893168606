"""``gradgraph ops``: the table of operators."""

from __future__ import annotations

import click

from gradgraph.cli import output
from gradgraph.cli.command import Command


@click.command("ops", cls=Command)
@click.option(
    "--status", type=click.Choice(["rule", "body", "none", "no gradient"]), help="Only operators of this status."
)
@output.json_option
def command(status: str | None, as_json: bool) -> None:
    """List every ONNX operator and the state of its gradient.

    Examples:
      gradgraph ops
      gradgraph ops --status none --json

      rule         it has a gradient rule of its own, tested by so many cases
      body         the function body that ONNX defines for it is differentiated
      no gradient  its derivative is zero or does not exist; gradients stop there
      none         an error, unless it lies on no path from a weight to the loss
    """
    from gradgraph.cli.tables import operators

    rows = [r for r in operators() if status in (None, r["status"])]
    if as_json:
        output.emit_json({"operators": rows})
        return
    columns = ["operator", "status", "cases", "family", "remark"]
    output.emit_table(columns, ([r[c] for c in columns] for r in rows), numeric=["cases"])
    counts = {s: sum(r["status"] == s for r in rows) for s in ("rule", "body", "no gradient", "none")}
    output.say(", ".join(f"{n} {s}" for s, n in counts.items() if n))

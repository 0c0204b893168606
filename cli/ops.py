"""``gradgraph ops``: the table of operators."""

from __future__ import annotations

import click

from gradgraph.cli import output
from gradgraph.cli.command import Command


@click.command("ops", cls=Command)
@click.option(
    "--status",
    type=click.Choice(["rule", "body", "lowered", "no gradient", "none"]),
    help="Only operators of this status.",
)
@output.json_option
def command(status: str | None, as_json: bool) -> None:
    """List every ONNX operator and the state of its gradient.

    Examples:
      gradgraph ops
      gradgraph ops --status none --json

      rule         it has a gradient rule of its own, tried in so many cases
      body         the function body that ONNX defines for it is differentiated
      lowered      it is written with other operators first, by its body or better
      no gradient  its derivative is zero or does not exist; gradients stop there
      none         an error, unless it lies on no path from a weight to the loss

    The inputs named have gradients, to every order unless it says 1.
    """
    from gradgraph.verify.operator_status import STATUSES, operators

    rows = [r for r in operators() if status in (None, r["status"])]
    if as_json:
        output.emit_json({"operators": rows})
        return
    columns = ["operator", "status", "order", "cases", "inputs", "remark"]
    cells = ({**r, "inputs": ", ".join(r["inputs"])} for r in rows)
    output.emit_table(columns, ([r[c] for c in columns] for r in cells), numeric=["cases"])
    counts = {s: sum(r["status"] == s for r in rows) for s in STATUSES}
    output.say(", ".join(f"{n} {s}" for s, n in counts.items() if n))

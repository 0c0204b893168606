"""``gradgraph ops``: list the operators and which have gradients."""

from __future__ import annotations

import click

from gradgraph.cli import output
from gradgraph.cli.command import Command


@click.command("ops", cls=Command)
@click.option(
    "--status",
    type=click.Choice(["rule", "body", "lowered", "no gradient", "refused", "none"]),
    help="List only operators with this status.",
)
@output.json_option
def command(status: str | None, as_json: bool) -> None:
    """List every ONNX operator and whether it has a gradient.

    Examples:
      gradgraph ops
      gradgraph ops --status none --json

      rule         has a gradient rule, tested on the number of cases in the column "cases"
      body         differentiated through the function body that ONNX defines
      lowered      first rewritten with other operators
      no gradient  the derivative is zero or undefined; gradients stop here
      refused      no gradient rule, for the reason in the remarks: an error on such a path, too
      none         no gradient rule: an error if the operator is on a path from a weight to the loss

    The column "inputs" lists the inputs that have gradients; gradients can be of any order unless "order" is 1.
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

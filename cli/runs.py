"""``gradgraph runs``: compare the runs in a folder."""

from __future__ import annotations

from pathlib import Path

import click

from gradgraph.cli import output
from gradgraph.cli.choices import PATH
from gradgraph.cli.command import Command
from gradgraph.step.output_paths import check_output


@click.command("runs", cls=Command)
@click.argument("folder", type=PATH)
@click.option(
    "--sort", metavar="COLUMN", help="Column to sort by, best first. Default: the column that most runs monitor."
)
@click.option(
    "--html", "page", type=PATH, metavar="FILE", help="Write a page (.html) with the table and the learning curves."
)
@output.json_option
def command(folder: Path, sort: str | None, page: Path | None, as_json: bool) -> None:
    """Compare the runs in FOLDER: their results, and the options that differ.

    Examples:
      gradgraph runs runs/
      gradgraph runs runs/ --sort val_accuracy --html runs.html

    Runs are folders written by `gradgraph train --run`, finished or not. Results are those of the epoch whose weights
    were kept: the best with --patience, otherwise the last.
    """
    from gradgraph.runtime.saved.compared_runs import differing, runs_in, sorted_by, table_of

    check_output(page)
    runs = sorted_by(runs_in(folder), sort)
    if page is not None:
        from gradgraph.export.runs_page import save_runs

        save_runs(runs, page)
        output.say(f"wrote {page}; open it in a browser")
    if as_json:
        options = differing(runs)
        told = [r.as_data() | {"options": {n: v[i] for n, v in options.items()}} for i, r in enumerate(runs)]
        output.emit_json({"runs": told, "differ": list(options)})
        return
    head, *rows = table_of(runs)
    output.emit_table(head, rows, numeric=head[1:])

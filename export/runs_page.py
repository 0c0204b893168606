"""A page that compares runs: a table of their metrics and the options that differ, and their learning curves."""

from __future__ import annotations

import html
import os
from collections.abc import Sequence
from pathlib import Path

from gradgraph.errors import shown
from gradgraph.export.pages import text_of, whole_page
from gradgraph.files.atomic import write_atomically
from gradgraph.files.suffixes import check_suffix
from gradgraph.runtime.saved.compared_runs import Run, panels, table_of
from gradgraph.runtime.saved.curves import svg


def save_runs(runs: Sequence[Run], path: str | os.PathLike[str], title: str | None = None) -> None:
    """Write a page that compares runs; a single HTML file that works offline.

    Args:
        runs: the runs in the order of the table, as returned by :func:`gradgraph.runtime.saved.compared_runs.runs_in`.
        path: the path of the page.
        title: the title; by default the name of the file.

    Raises:
        OutputError: if ``path`` cannot be written.
    """
    check_suffix(path, ".html")
    head, *rows = table_of(runs)
    names = "".join(f'<th{_number(i)} scope="col">{_text(name)}</th>' for i, name in enumerate(head))
    cells = ("".join(f"<td{_number(i)}>{_text(cell)}</td>" for i, cell in enumerate(row)) for row in rows)
    table = f"<table><thead><tr>{names}</tr></thead><tbody><tr>{'</tr><tr>'.join(cells)}</tr></tbody></table>"
    drawn = panels(runs)
    curves = f'<h2>Curves</h2><div class="curves">{"".join(svg([panel]) for panel in drawn)}</div>' if drawn else ""
    called = title or Path(path).stem
    body = f'<h1>{_text(called)}</h1><div class="wide">{table}</div>{curves}'
    write_atomically(path, whole_page(called, body, text_of("runs.css")).encode())


def _number(column: int) -> str:
    return ' class="number"' if column else ""


def _text(value: str) -> str:
    return html.escape(shown(value))

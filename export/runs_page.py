"""A page that compares runs: a table of their metrics and the options that differ, and their learning curves."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from gradgraph.export.pages import escaped, table, text_of, whole_page
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
    drawn = panels(runs)
    curves = f'<h2>Curves</h2><div class="curves">{"".join(svg([panel]) for panel in drawn)}</div>' if drawn else ""
    called = title or Path(path).stem
    body = f"<h1>{escaped(called)}</h1>{table(head, rows)}{curves}"
    write_atomically(path, whole_page(called, body, text_of("runs.css")).encode())

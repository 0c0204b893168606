"""Everything that is made from tables: names and files in git, whole tables and the API reference on the site."""

from __future__ import annotations

from pathlib import Path

from tests.pages import (
    api_page,
    backends_page,
    cli_reference,
    names_in_help,
    names_page,
    operator_stubs,
    operators_page,
    rooms_page,
)
from tests.pages.marked import ROOT

MARKED = [*names_page.MARKED, *cli_reference.MARKED, *backends_page.MARKED, *operators_page.MARKED]


def write() -> None:
    """Write names between the marks of pages, and the files of the package that are made from tables."""
    for marked in MARKED:
        marked.write(ROOT, marked.names())
    names_in_help.PATH.write_text(names_in_help.text(), "utf-8")
    operator_stubs.STUB.write_text(operator_stubs.stub(), "utf-8")
    rooms_page.DRAWING.write_text(rooms_page.drawing(), "utf-8")


def write_site(folder: Path) -> None:
    """Write tables between the marks of pages in ``folder``, and the pages that git does not have."""
    for marked in MARKED:
        marked.write(folder, marked.table())
    for name in api_page.PAGES:
        (folder / api_page.FOLDER / name).write_text(api_page.page(name), "utf-8")

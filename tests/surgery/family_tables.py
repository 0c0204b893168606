"""Tables of docs/reference/language-families.md, and the command that writes one of them."""

from __future__ import annotations

import argparse
import warnings
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "language-families.md"
NOTES = " ¹²³⁴⁵"


def _parts(name: str) -> tuple[str, str, str]:
    """The page: what stands before the lines of a table, these, and what stands behind them."""
    before, begin, rest = PAGE.read_text().partition(f"<!-- {name}: begin -->\n")
    table, end, after = rest.partition(f"<!-- {name}: end -->")
    return before + begin, table, end + after


def named(name: str) -> list[str]:
    """The families that a table of the page has."""
    return list(lines_of(name))


def lines_of(name: str) -> dict[str, str]:
    """The lines of a table, by their families."""
    return {line.split("|")[1].strip(NOTES): line for line in _parts(name)[1].splitlines()[2:]}


def command(
    name: str,
    description: str | None,
    head: Sequence[str],
    families: Iterable[str],
    row: Callable[[str], list[str]],
    usual: Iterable[str] | None = None,
) -> None:
    """Say the rows of a table: those of ``usual`` families, or of all; with ``--save`` they are written to the page."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--save", action="store_true", help="write these rows to the table of the page")
    parser.add_argument("families", nargs="*", help="of these alone")
    given = parser.parse_args()
    warnings.filterwarnings("ignore")
    rows = lines_of(name)
    for family in given.families or usual or families:
        rows[family] = f"| {' | '.join(row(family))} |"
        print(rows[family], flush=True)
    if given.save:
        before, _, after = _parts(name)
        lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|", *(rows[family] for family in families)]
        PAGE.write_text(before + "\n".join(lines) + "\n" + after)


__all__ = ["PAGE", "command", "lines_of", "named"]

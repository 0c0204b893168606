"""Tables of families on docs/how-to/language-models.md, and the command that writes one of them."""

from __future__ import annotations

import argparse
import warnings
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "language-models.md"
NOTES = " ¹²³⁴⁵"


def _parts(name: str) -> tuple[str, str, str]:
    """The page: what stands before the lines of a table, these, and what stands behind them."""
    before, begin, rest = PAGE.read_text().partition(f"<!-- {name}: begin -->\n")
    table, end, after = rest.partition(f"<!-- {name}: end -->")
    return before + begin, table, end + after


def named(name: str) -> list[str]:
    """The families that a table of the page has."""
    return [line.split("|")[1].strip(NOTES) for line in _parts(name)[1].splitlines()[2:]]


def command(
    name: str, description: str | None, head: Sequence[str], families: Iterable[str], row: Callable[[str], list[str]]
) -> None:
    """Say the rows of a table; with ``--save`` they are written to the page."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--save", action="store_true", help="write the table of the page")
    parser.add_argument("families", nargs="*", help="of these alone; they are not written")
    given = parser.parse_args()
    warnings.filterwarnings("ignore")
    lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    for family in given.families or families:
        lines.append(f"| {' | '.join(row(family))} |")
        print(lines[-1], flush=True)
    if given.save and not given.families:
        before, _, after = _parts(name)
        PAGE.write_text(before + "\n".join(lines) + "\n" + after)


__all__ = ["PAGE", "command", "named"]

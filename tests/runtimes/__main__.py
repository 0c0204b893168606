"""The matrix of runtimes: ``python -m tests.runtimes [RUNTIME ...] [--write]``; it writes docs/reference/runtimes.md.

Without names it tries every runtime that is installed here. What is not keeps its rows in the page.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from tests.runtimes.matrix import Cell, measured, page, read, written
from tests.runtimes.runtimes import RUNTIMES, cases_of

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "runtimes.md"


def main() -> int:
    """Try, print, and write if asked; exit code 1 if a runtime trains silently wrong."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("runtimes", nargs="*", help=f"among {', '.join(RUNTIMES)}")
    parser.add_argument("--write", action="store_true", help="write docs/reference/runtimes.md")
    chosen = parser.parse_args()
    if unknown := set(chosen.runtimes) - RUNTIMES.keys():
        parser.error(f"there is no runtime {', '.join(sorted(unknown))}; use {', '.join(RUNTIMES)}")
    found: dict[tuple[str, str, str], Cell] = {}
    for name in chosen.runtimes or RUNTIMES:
        if missing := RUNTIMES[name].missing():
            print(f"{name}: {missing}")
            continue
        for network, sizes in cases_of(name):
            cell = found[name, network, sizes] = measured(name, network, sizes)
            print(f"{name}, {network}, {sizes} sizes: {cell.said}", flush=True)
        if chosen.write:
            cells = read() | found
            written(cells)
            PAGE.write_text(page(cells))
    return int(any(cell.kind == "wrong" for cell in found.values()))


if __name__ == "__main__":
    sys.exit(main())

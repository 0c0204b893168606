"""The syntax trees of the package, parsed once in a process."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
ROOMS = ("gradgraph", "frontend", "export", "cli")


@cache
def trees() -> dict[str, ast.Module]:
    """Return the tree of every module of the package, by its path from the root of the repository."""
    found: dict[str, ast.Module] = {}
    for room in ROOMS:  # rglob does not follow the links in gradgraph
        for path in sorted((ROOT / room).rglob("*.py")):
            found[path.relative_to(ROOT).as_posix()] = ast.parse(path.read_text("utf-8"))
    return found

"""No modules import each other in a circle: neither at their top, nor inside functions, nor for type checkers alone.

The layer contract in ``pyproject.toml`` keeps the rooms in order; this keeps the files of every room in order.
"""

from __future__ import annotations

import ast
import graphlib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDERS = {"gradgraph": "gradgraph", "gradgraph.frontend": "frontend", "gradgraph.export": "export",
           "gradgraph.cli": "cli", "benchmarks": "benchmarks"}  # fmt: skip
# a traced tensor and a size have arithmetic: its functions lie in other files, whose annotations name the two
METHODS = {("gradgraph.frontend.dims", "gradgraph.frontend.trace")}
ANNOTATED = "gradgraph.frontend.tensor"


def modules() -> dict[str, Path]:
    """Every module of the package and the benchmarks by its name."""
    found = {}
    for package, folder in FOLDERS.items():
        for path in (ROOT / folder).rglob("*.py"):
            inner = path.relative_to(ROOT / folder).with_suffix("").parts
            parts = inner[:-1] if inner[-1] == "__init__" else inner
            found[".".join((package, *parts))] = path
    return found


def imported(tree: ast.AST, known: dict[str, Path]) -> Iterator[str]:
    """The modules that a file imports anywhere in it."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in known)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                if inner in known or node.module in known:
                    yield inner if inner in known else str(node.module)


def circle(arrows: dict[str, set[str]]) -> list[str]:
    """The modules of a circle of imports; empty if there is none."""
    try:
        graphlib.TopologicalSorter(arrows).prepare()
    except graphlib.CycleError as error:
        return list(error.args[1])
    return []


@pytest.mark.sweep(0)
def test_no_modules_import_each_other() -> None:
    known = modules()
    arrows = {name: set(imported(ast.parse(path.read_text()), known)) - {name} for name, path in known.items()}
    for name, others in arrows.items():
        frontend_only = name.startswith("gradgraph.frontend.")
        others -= {other for other in others if (name, other) in METHODS or (other == ANNOTATED and frontend_only)}
    assert circle(arrows) == []


def test_a_circle_is_found() -> None:
    known = dict.fromkeys(("a", "a.b", "a.c"), Path())
    inside, for_types = "def f():\n    from a.c import g\n", "if TYPE_CHECKING:\n    from a import b\n"
    arrows = {"a.b": set(imported(ast.parse(inside), known)), "a.c": set(imported(ast.parse(for_types), known))}
    assert circle(arrows) in (["a.b", "a.c", "a.b"], ["a.c", "a.b", "a.c"])

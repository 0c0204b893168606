"""Docstrings begin with their subject or their verb, so that they are understood at first sight."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ROOMS = ("gradgraph", "frontend", "export", "cli")
# words that stand for something which the reader does not know yet
BEFORE_ITS_SUBJECT = {"What", "Those", "Of", "That", "Its"}


def beginnings(room: str) -> dict[str, str]:
    """The first word of every docstring, by place."""
    found = {}
    for path in sorted((ROOT / room).rglob("*.py")):  # rglob leaves out the links in gradgraph
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                text = ast.get_docstring(node)
                if text:
                    place = f"{path.relative_to(ROOT)}:{getattr(node, 'lineno', 1)}"
                    found[place] = text.split(maxsplit=1)[0].strip(",.:;")
    return found


@pytest.mark.parametrize("room", ROOMS)
def test_a_docstring_names_a_thing_before_it_describes_it(room: str) -> None:
    found = beginnings(room)
    assert len(found) > 20
    assert [f"{place} {word}" for place, word in found.items() if word in BEFORE_ITS_SUBJECT] == []

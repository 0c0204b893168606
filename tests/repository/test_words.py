"""Docstrings begin with their subject or their verb; headings and help use the words of the field."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from gradgraph.cli import app
from tests.kit.package_trees import ROOMS, ROOT, trees

# words that stand for something which the reader does not know yet
BEFORE_ITS_SUBJECT = {"What", "Those", "Of", "That", "Its", "It", "Which", "Likewise"}
RIDDLES = re.compile(r"\b(tells|told|what becomes of|those that)\b", re.IGNORECASE)


def documented(room: str) -> Iterator[tuple[str, ast.AST, str]]:
    """Yield the place, the node and the first word of every docstring."""
    for path, tree in trees().items():
        for node in ast.walk(tree) if path.startswith(f"{room}/") else ():
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                text = ast.get_docstring(node)
                if text:
                    yield f"{path}:{getattr(node, 'lineno', 1)}", node, text.split(maxsplit=1)[0].strip(",.:;")


@pytest.mark.sweep(0.15)
@pytest.mark.parametrize("room", ROOMS)
def test_a_docstring_names_a_thing_before_it_describes_it(room: str) -> None:
    found = list(documented(room))
    assert len(found) > 20
    assert [f"{place} {word}" for place, _, word in found if word in BEFORE_ITS_SUBJECT] == []


@pytest.mark.sweep(0.36)
@pytest.mark.parametrize("room", ROOMS)
def test_whether_introduces_a_truth_value(room: str) -> None:
    wrong = []
    for place, node, word in documented(room):
        returns = ast.unparse(node.returns) if isinstance(node, ast.FunctionDef) and node.returns else ""
        if word == "Whether" and not re.search(r"bool|TypeGuard|TypeIs|Array|Tensor|Var|Value|Traced", returns):
            wrong.append(f"{place} returns {returns}")
    assert wrong == []


@pytest.mark.parametrize("page", sorted((ROOT / "docs").rglob("*.md")), ids=lambda page: page.name)
def test_headings_have_the_words_of_the_field(page: Path) -> None:
    headings = re.findall(r"(?m)^#+ .*$", page.read_text(encoding="utf-8"))
    assert [heading for heading in headings if RIDDLES.search(heading)] == []


@pytest.mark.parametrize("name", app.COMMANDS)
def test_help_has_the_words_of_the_field(name: str) -> None:
    context = click.Context(app.cli, info_name="gradgraph")
    command = app.cli.get_command(context, name)
    assert command is not None
    text = command.get_help(click.Context(command, parent=context, info_name=name))
    assert RIDDLES.findall(" ".join(text.split())) == []

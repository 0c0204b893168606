"""Tests are collected in one order by every process: names of cases come from lists, dicts or sorted sets."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]


def is_set(node: ast.expr) -> bool:
    """Is it a set, or made of keys by an operator of sets? Its order differs from process to process."""
    if isinstance(node, ast.Call):
        return isinstance(node.func, ast.Name) and node.func.id in ("set", "frozenset")
    if isinstance(node, ast.BinOp):
        keys = any(isinstance(n, ast.Attribute) and n.attr == "keys" for n in ast.walk(node))
        return keys or is_set(node.left) or is_set(node.right)
    return isinstance(node, ast.Set | ast.SetComp)


def cases(tree: ast.AST) -> Iterator[ast.expr]:
    """The cases of every parametrised test and fixture in a file."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            if node.func.attr == "parametrize" and len(node.args) > 1:
                yield node.args[1]
            if node.func.attr == "fixture":
                yield from (k.value for k in node.keywords if k.arg == "params")


@pytest.mark.sweep(0)
def test_no_cases_come_from_a_set() -> None:
    found = [f"{path.relative_to(TESTS)}:{given.lineno}" for path in sorted(TESTS.rglob("test_*.py"))
             for given in cases(ast.parse(path.read_text("utf-8"))) if is_set(given)]  # fmt: skip
    assert found == []


def test_sets_are_told_from_lists() -> None:
    texts = ("TABLE.keys() - {'a'}", "{1, 2}", "set(x)", "sorted({1})", "[1]", "TABLE", "LISTED + [1]")
    told = {text: is_set(ast.parse(text, mode="eval").body) for text in texts}
    assert [text for text, found in told.items() if found] == ["TABLE.keys() - {'a'}", "{1, 2}", "set(x)"]

"""Every private method is called: one that overrides another is only called while the class above calls it."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
ROOMS = ("gradgraph", "frontend", "export", "cli")
MIXINS = {"ABC", "Generic", "Protocol", "Mapping", "Sequence", "Exception", "ValueError", "NamedTuple", "str", "dict"}


class Classes:
    """The classes of the package, by name, with their bases, and the attributes that each reads."""

    def __init__(self) -> None:
        self.methods: dict[str, set[str]] = {}
        self.read: dict[str, set[str]] = {}
        self.links: dict[str, set[str]] = {}  # to the classes above and below
        self.read_outside = set[str]()  # by code outside classes
        for tree in (ast.parse(p.read_text("utf-8")) for room in ROOMS for p in (ROOT / room).rglob("*.py")):
            for node in tree.body:
                if isinstance(node, ast.ClassDef):
                    self._add(node)
                else:
                    self.read_outside |= read_names(node)

    def _add(self, node: ast.ClassDef) -> None:
        own = {m.name for m in node.body if isinstance(m, ast.FunctionDef)}
        self.methods.setdefault(node.name, set()).update(own)
        self.read.setdefault(node.name, set()).update(read_names(node))
        for base in names_of_bases(node):
            self.links.setdefault(node.name, set()).add(base)
            self.links.setdefault(base, set()).add(node.name)

    def family(self, name: str) -> set[str]:
        """Return the class with all classes above and below it."""
        found, waiting = set[str](), [name]
        while waiting:
            if (one := waiting.pop()) not in found:
                found.add(one)
                waiting += self.links.get(one, ())
        return found


def names_of_bases(node: ast.ClassDef) -> set[str]:
    plain = (base.value if isinstance(base, ast.Subscript) else base for base in node.bases)
    return {ast.unparse(base).rpartition(".")[2] for base in plain} - MIXINS


def read_names(node: ast.AST) -> set[str]:
    return {each.attr for each in ast.walk(node) if isinstance(each, ast.Attribute)}


@pytest.mark.sweep(0)
def test_every_private_method_is_called_in_its_class_or_one_above_or_below() -> None:
    classes, unused, count = Classes(), [], 0
    for name, methods in classes.methods.items():
        family = classes.family(name)
        if family - classes.methods.keys():
            continue  # a class of a package may call the method
        read = classes.read_outside.union(*(classes.read[other] for other in family))
        private = {m for m in methods if m.startswith("_") and not m.startswith("__")} - {"_repr_html_"}  # of notebooks
        count += len(private)
        unused += [f"{name}.{method}" for method in private - read]
    assert count > 500
    assert unused == []

"""A list of all error messages of the package, read from its source, with ``<name>`` for values that are filled in."""

from __future__ import annotations

import ast
import functools
import itertools
from collections.abc import Iterator
from dataclasses import dataclass

from gradgraph import errors
from gradgraph.errors import GradgraphError
from tests.kit.package_trees import trees

CLASSES = {n: c for n, c in vars(errors).items() if isinstance(c, type) and issubclass(c, GradgraphError)}


@dataclass(frozen=True)
class Message:
    """The message of a ``raise``, or of a call of a function that creates an error.

    Attributes:
        kind: the class of the error.
        file, line: the location in the source.
        problem, remedy, shell: the parts of the sentence, with ``<name>`` for filled-in values; "" for absent parts.
    """

    kind: str
    file: str
    line: int
    problem: str
    remedy: str
    shell: str


@functools.cache
def messages() -> list[Message]:
    """Return all messages of the package, in the order of files and lines."""
    return [m for file, tree in trees().items() for m in sorted(_File(file, tree).messages(), key=lambda m: m.line)]


class _File:
    def __init__(self, name: str, tree: ast.Module) -> None:
        self.name, self.tree = name, tree
        self.functions = {n.name: n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef)}
        self.derived = {n.name: base.id for n in ast.walk(tree) if isinstance(n, ast.ClassDef)
                        for base in n.bases if isinstance(base, ast.Name) and base.id in CLASSES}  # fmt: skip
        self.constants = {t.id: n.value for n in tree.body if isinstance(n, ast.Assign)
                          for t in n.targets if isinstance(t, ast.Name)}  # fmt: skip

    def messages(self) -> Iterator[Message]:
        for scope in [self.tree, *self.functions.values()]:
            for call in _own_calls(scope):
                yield from self._of(call, scope)

    def _of(self, call: ast.Call, scope: ast.AST) -> Iterator[Message]:
        name = call.func.id if isinstance(call.func, ast.Name) else getattr(call.func, "attr", "")
        keywords = {k.arg: k.value for k in call.keywords if k.arg}
        if name == "refuse" and len(call.args) == 2:
            for reason in self._texts(call.args[1], scope):
                yield Message("ModelError", self.name, call.lineno, f"<node> {reason}", "", "")
        kind = self.derived.get(name, name)
        if kind not in CLASSES or not call.args:
            return
        spread = [
            self.constants.get(k.value.id) for k in call.keywords if k.arg is None and isinstance(k.value, ast.Name)
        ]
        for constant in spread:
            if isinstance(constant, ast.Dict):
                keywords |= {k.value: v for k, v in zip(constant.keys, constant.values, strict=True)
                             if isinstance(k, ast.Constant)}  # fmt: skip
        computed = any(k.arg is None for k in call.keywords) and "remedy" not in keywords
        shell = next(iter(self._texts(keywords["shell"], scope)), "") if "shell" in keywords else ""
        for sentence in self._texts(call.args[0], scope):
            error = GradgraphError(sentence)
            if computed:
                yield Message(kind, self.name, call.lineno, sentence, "as the sentence says, for what was given", "")
            elif "remedy" in keywords:
                for remedy in self._texts(keywords["remedy"], scope):
                    yield Message(kind, self.name, call.lineno, sentence, remedy, shell)
            else:
                yield Message(kind, self.name, call.lineno, error.problem, error.remedy or "", shell)

    def _texts(self, node: ast.expr, scope: ast.AST) -> list[str]:
        """Return the possible texts of ``node``; several if it is a choice, or is assigned in several places."""
        if isinstance(node, ast.Constant):
            return [str(node.value)]
        if isinstance(node, ast.JoinedStr):
            return ["".join(parts) for parts in itertools.product(*(self._part(v, scope) for v in node.values))]
        if isinstance(node, ast.IfExp):
            return [*self._texts(node.body, scope), *self._texts(node.orelse, scope)]
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
            return [a + b for a in self._texts(node.left, scope) for b in self._texts(node.right, scope)]
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "suggestion":
            return ["; did you mean '<name>'?"]
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in self.functions:
            made = self.functions[node.func.id]
            return [
                t for n in ast.walk(made) if isinstance(n, ast.Return) and n.value for t in self._texts(n.value, made)
            ]
        if isinstance(node, ast.Name):
            if isinstance(self.constants.get(node.id), ast.Constant):
                return self._texts(self.constants[node.id], scope)
            values = [n.value for n in ast.walk(scope) if isinstance(n, ast.Assign)
                      if any(isinstance(t, ast.Name) and t.id == node.id for t in n.targets)]  # fmt: skip
            texts = [t for v in values if v is not node for t in self._texts(v, scope)]
            texts += [t for v in self._handed_in(node.id, scope) for t in self._texts(v, self.tree)]
            return texts or [f"<{node.id}>"]
        return [f"<{_name_of(node)}>"]

    def _handed_in(self, name: str, scope: ast.AST) -> list[ast.expr]:
        """Return the expressions that calls in this file pass as parameter ``name`` of the function ``scope``."""
        if not isinstance(scope, ast.FunctionDef):
            return []
        names = [a.arg for a in scope.args.args]
        if name not in names:
            return []
        at = names.index(name) - (names[0] == "self")
        calls = [n for n in ast.walk(self.tree) if isinstance(n, ast.Call)
                 and scope.name in (getattr(n.func, "id", ""), getattr(n.func, "attr", ""))]  # fmt: skip
        return [c.args[at] for c in calls if at < len(c.args) and isinstance(c.args[at], ast.JoinedStr | ast.Constant)]

    def _part(self, node: ast.expr, scope: ast.AST) -> list[str]:
        if isinstance(node, ast.Constant):
            return [str(node.value)]
        assert isinstance(node, ast.FormattedValue)
        value = node.value
        if isinstance(value, ast.Call) and isinstance(value.func, ast.Name) and value.func.id == "suggestion":
            return ["; did you mean '<name>'?"]
        if isinstance(value, ast.Name) and isinstance(self.constants.get(value.id), ast.Constant):
            return self._texts(value, scope)
        texts = self._texts(value, scope) if isinstance(value, ast.Name) else []
        clauses = list(dict.fromkeys(text for text in texts if " " in text))
        return clauses or [f"<{_name_of(value)}>"]


def _own_calls(scope: ast.AST) -> Iterator[ast.Call]:
    """Yield the calls in ``scope``, except in nested functions."""
    stack = list(ast.iter_child_nodes(scope))
    while stack:
        node = stack.pop()
        if isinstance(node, ast.FunctionDef):
            continue
        if isinstance(node, ast.Call):
            yield node
        stack.extend(ast.iter_child_nodes(node))


def _name_of(node: ast.expr) -> str:
    """Return the most telling name in an expression: ``path`` for ``shown(path)``, ``dtype`` for ``spec.dtype``."""
    if isinstance(node, ast.Attribute):
        owner = _name_of(node.value)
        return owner if node.attr in ("name", "strerror", "shape") and owner != "self" else node.attr.strip("_")
    if isinstance(node, ast.Call):
        named = next((a for a in reversed(node.args) if not isinstance(a, ast.Constant)), None)
        return _name_of(named) if named is not None else _name_of(node.func)
    if isinstance(node, ast.Name):
        return node.id.strip("_").lower()
    if isinstance(node, ast.Subscript):
        return _name_of(node.value)
    return "…"

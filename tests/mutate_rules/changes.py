"""The mutants: one change each in one function of ``gradgraph/rules``, compiled."""

from __future__ import annotations

import ast
import copy
import importlib
import pkgutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import CodeType
from typing import Any

import gradgraph.rules.families

FOLDER = Path(gradgraph.rules.__file__ or "").parent
MODULES = {  # the full name of each, by the last part of its name
    m.name.rsplit(".", 1)[-1]: m.name for m in pkgutil.walk_packages([str(FOLDER)], "gradgraph.rules.") if not m.ispkg
}

OTHER: dict[type[ast.AST], type[ast.AST]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Div,
    ast.Div: ast.Mult,
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.BitAnd: ast.BitOr,
    ast.BitOr: ast.BitAnd,
}
PAIRS = ("Sin Cos", "Sinh Cosh", "Max Min", "ReduceMax ReduceMin", "Add Sub", "Mul Div", "And Or", "Floor Ceil")
RENAMED = {a: b for pair in PAIRS for a, b in (pair.split(), reversed(pair.split()))}
SWAPPED = {"Where": (1, 2), "Sub": (0, 1), "Div": (0, 1), "MatMul": (0, 1), "Pow": (0, 1)}  # which operands
ELSEWHERE = (  # what these give is tried elsewhere
    "elementwise.stepped_sign",  # for forward mode alone: tests/autodiff/test_forward.py
    "pool._refuse_windows_behind_the_end",  # tests/rules/test_conv.py
    "resize._copied",  # tests/passes/normal/test_resize_scales.py
    "windows.Windows.count",  # for lowering alone: tests/passes
)
FLAGS = ("allowzero", "count_include_pad", "exclusive", "keepdims", "largest", "reverse", "transA", "transB", "upper")
COMPARISONS = ("Equal", "Less", "Greater", "LessOrEqual", "GreaterOrEqual")


Span = tuple[int, int, int, int]  # first and last line, first and last column, as ``co_positions`` has them


@dataclass(frozen=True)
class Mutant:
    """``was`` became ``now`` in a function."""

    module: str
    function: str
    span: Span
    was: str
    now: str
    code: CodeType

    def __str__(self) -> str:
        return f"{self.module}.{self.function}: {self.was}  ->  {self.now}"


def changes(node: ast.AST, outputs: Sequence[str]) -> Iterator[ast.AST]:
    """What may stand in place of ``node``; ``outputs`` are parameters that hold what the operator gave."""
    if isinstance(node, ast.BinOp):
        if type(node.op) in OTHER:
            yield ast.BinOp(node.left, OTHER[type(node.op)](), node.right)  # type: ignore[arg-type]
        yield node.left
        if not isinstance(node.op, ast.Pow):
            yield node.right
        if isinstance(node.op, ast.MatMult | ast.Sub | ast.Div):
            yield ast.BinOp(node.right, node.op, node.left)
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub | ast.Not | ast.Invert):
        yield node.operand
    elif isinstance(node, ast.Compare) and len(node.ops) == 1:
        if type(node.ops[0]) in OTHER:
            yield ast.Compare(node.left, [OTHER[type(node.ops[0])]()], node.comparators)  # type: ignore[list-item]
        if isinstance(node.left, ast.Name) and isinstance(node.ops[0], ast.Lt | ast.Gt | ast.LtE | ast.GtE):
            yield from (ast.Compare(ast.Name(y, ast.Load()), node.ops, node.comparators) for y in outputs)
    elif isinstance(node, ast.IfExp):
        yield ast.IfExp(node.test, node.orelse, node.body)
    elif isinstance(node, ast.If):
        yield ast.If(ast.UnaryOp(ast.Not(), node.test), node.body, node.orelse)
    elif isinstance(node, ast.BoolOp):
        yield ast.BoolOp(ast.Or() if isinstance(node.op, ast.And) else ast.And(), node.values)
    elif isinstance(node, ast.Constant) and type(node.value) in (int, float):
        yield ast.Constant(node.value + 1)
        if node.value not in (0, 1):
            yield ast.Constant(-node.value)
    elif isinstance(node, ast.keyword) and _is_flag(node):
        yield ast.keyword(node.arg, ast.Constant(1 - node.value.value))  # type: ignore[attr-defined]
    elif isinstance(node, ast.Return) and isinstance(node.value, ast.Tuple):
        for i, e in enumerate(node.value.elts):
            if not (isinstance(e, ast.Constant) and e.value is None):
                kept = [ast.Constant(None) if j == i else x for j, x in enumerate(node.value.elts)]
                yield ast.Return(ast.Tuple(kept, ast.Load()))
    elif isinstance(node, ast.Call):
        yield from _calls(node, outputs)


def _is_flag(node: ast.AST) -> bool:
    """An attribute that is 0 or 1, and not any number."""
    return isinstance(node, ast.keyword) and node.arg in FLAGS and isinstance(node.value, ast.Constant)


def _calls(node: ast.Call, outputs: Sequence[str]) -> Iterator[ast.AST]:
    name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
    if isinstance(node.func, ast.Attribute) and name in RENAMED:
        yield ast.Call(ast.Attribute(node.func.value, RENAMED[name], ast.Load()), node.args, node.keywords)
    if name in SWAPPED and len(node.args) > max(SWAPPED[name]):
        args, (i, j) = list(node.args), SWAPPED[name]
        args[i], args[j] = args[j], args[i]
        yield ast.Call(node.func, args, node.keywords)
    if name in ("wide", "Abs", "Neg", "Sign", "cast") and len(node.args) > (name == "wide"):
        yield node.args[name == "wide"]
    if name == "all_wide":
        yield ast.List(node.args[1:], ast.Load())
    if name in COMPARISONS:
        for i, arg in enumerate(node.args):
            if isinstance(arg, ast.Name):
                for y in outputs:
                    yield ast.Call(node.func, [*node.args[:i], ast.Name(y, ast.Load()), *node.args[i + 1 :]], [])


def mutants_of(module: str) -> Iterator[Mutant]:
    """Of every function of a family, methods included; tables outside of functions stay as they are."""
    tree = ast.parse(Path(importlib.import_module(MODULES[module]).__file__ or "").read_text())
    for name, function in _functions(tree.body, ""):
        if function.returns is not None and any(
            word in ast.unparse(function.returns) for word in ("Case", "Point", "Draw")
        ):
            continue  # it makes cases
        if f"{module}.{name}" in ELSEWHERE:
            continue
        parameters = [a.arg for a in function.args.args]
        outputs = [p for p in parameters[:3] if p in ("y", "z")]
        bare = _bare(function)
        flags = [node.value for node in ast.walk(bare) if isinstance(node, ast.keyword) and _is_flag(node)]
        for i, node in enumerate(ast.walk(bare)):
            if any(node is flag for flag in flags):
                continue
            for k, now in enumerate(changes(node, outputs)):
                changed = copy.deepcopy(bare)
                found = _nth(changed, i)
                new = list(changes(found, outputs))[k]
                _replace(changed, found, ast.copy_location(new, found))
                was, text = (" ".join(ast.unparse(n).split())[:120] for n in (node, now))
                if was != text:
                    yield Mutant(module, name, _span(found), was, text, _compiled(changed))


def _span(node: Any) -> Span:
    return node.lineno, node.end_lineno, node.col_offset, node.end_col_offset


def _functions(body: Sequence[ast.stmt], prefix: str) -> Iterator[tuple[str, ast.FunctionDef]]:
    for statement in body:
        if isinstance(statement, ast.FunctionDef):
            yield prefix + statement.name, statement
        elif isinstance(statement, ast.ClassDef):
            yield from _functions(statement.body, f"{statement.name}.")


def _bare(function: ast.FunctionDef) -> ast.FunctionDef:
    """Without what runs when the function is defined, without types and without words."""
    bare = copy.deepcopy(function)
    bare.decorator_list, bare.args.defaults, bare.args.kw_defaults = [], [], [None] * len(bare.args.kwonlyargs)
    for node in list(ast.walk(bare)):
        if isinstance(node, ast.arg):
            node.annotation = None
        elif isinstance(node, ast.FunctionDef):
            node.returns = None
            if ast.get_docstring(node) is not None:
                node.body = node.body[1:] or [ast.Pass()]
        elif isinstance(node, ast.AnnAssign):
            node.annotation = ast.Name("Any", ast.Load())
    return bare


def _nth(tree: ast.AST, i: int) -> ast.AST:
    return next(node for k, node in enumerate(ast.walk(tree)) if k == i)


def _replace(tree: ast.AST, old: ast.AST, new: ast.AST) -> None:
    for parent in ast.walk(tree):
        for field, value in ast.iter_fields(parent):
            if value is old:
                setattr(parent, field, new)
            elif isinstance(value, list) and any(v is old for v in value):
                setattr(parent, field, [new if v is old else v for v in value])


def _compiled(function: ast.FunctionDef) -> CodeType:
    future = ast.ImportFrom("__future__", [ast.alias("annotations")], 0)
    tree = ast.fix_missing_locations(ast.Module([future, function], []))
    code = compile(tree, "<mutant>", "exec")
    return next(c for c in code.co_consts if isinstance(c, CodeType) and c.co_name == function.name)

"""Parse schedules written as text, in Python syntax: ``cosine``, ``warmup(100, cosine(1e-3, 1000))``."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import inspect
import operator
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from gradgraph.errors import BuildError, shown
from gradgraph.optim.plateau import Plateau
from gradgraph.optim.schedules import SCHEDULES, Schedule, function

_ARITHMETIC: dict[type, Callable[..., Any]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
}  # fmt: skip
EXAMPLE = "such as 'warmup(100, cosine(1e-3, 1000))'"
LONGEST = 10_000


def schedule_from(text: str, known: Mapping[str, float]) -> Schedule | Plateau:
    """Return the schedule that ``text`` names or calls.

    Args:
        text: a name, or a call in Python syntax, whose arguments are numbers, lists, strings and other schedules. The
            argument of ``function`` is written ``"rates.py:name"`` or ``"package.module:name"``.
        known: defaults for arguments (``lr``, ``total_steps``) that calls omit.

    Raises:
        BuildError: if ``text`` is not a call of a schedule, or an argument is missing or invalid.
    """
    try:
        tree = ast.parse(text, mode="eval") if len(text) <= LONGEST else None
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        tree = None
    if tree is None or not isinstance(tree.body, ast.Name | ast.Call):
        raise BuildError(f"'{shown(text)}' is not a schedule; write one as in Python, {EXAMPLE}")
    made = _value(tree.body, known)
    if not isinstance(made, Schedule | Plateau):
        raise BuildError(f"'{shown(text)}' is not a schedule; write one as in Python, {EXAMPLE}")
    return made


def moved(text: str, folder: Path) -> str:
    """Return ``text`` with relative paths of Python files resolved from ``folder``."""
    try:
        tree = ast.parse(text, mode="eval") if ".py:" in text and len(text) <= LONGEST else None
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        tree = None
    if tree is None:
        return text
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and ".py:" in node.value:
            node.value = str(folder / node.value)
    return ast.unparse(tree)


def _value(node: ast.expr, known: Mapping[str, float]) -> Any:
    match node:
        case ast.Constant(value=value) if isinstance(value, int | float | str | bool | None):
            return value
        case ast.UnaryOp(op=ast.USub(), operand=operand) if isinstance(operand, ast.Constant):
            return -_number(operand, known)
        case ast.BinOp(op=op, left=left, right=right) if type(op) in _ARITHMETIC:
            try:
                return _ARITHMETIC[type(op)](_number(left, known), _number(right, known))
            except ArithmeticError:
                raise BuildError(
                    f"'{shown(ast.unparse(node))}' in a schedule divides by zero or overflows; correct it"
                ) from None
        case ast.List(elts=items) | ast.Tuple(elts=items):
            return [_value(item, {}) for item in items]  # the length of each part of a sequence is unknown
        case ast.Name(id=name):
            return _called(name, [], [], known)
        case ast.Call(func=ast.Name(id=name), args=args, keywords=keywords):
            return _called(name, args, keywords, known)
    raise BuildError(f"arguments of a schedule are numbers, lists or schedules, not '{shown(ast.unparse(node))}'")


def _number(node: ast.expr, known: Mapping[str, float]) -> Any:
    value = _value(node, known)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise BuildError(f"'{shown(ast.unparse(node))}' in a schedule is not a number; write a number")
    return value


def _called(name: str, args: list[ast.expr], keywords: list[ast.keyword], known: Mapping[str, float]) -> Any:
    make = SCHEDULES.named(name)
    parameters = inspect.signature(make).parameters
    given = dict(zip(parameters, args, strict=False)) | {k.arg: k.value for k in keywords if k.arg}
    SCHEDULES.check_arguments(name, given)
    if len(args) > len(parameters):
        raise BuildError(f"the schedule {name} takes {len(parameters)} arguments, not {len(args)}")
    values: dict[str, Any] = {}
    for key, node in given.items():
        values[key] = _value(node, _within(name, values, known))
    for key, parameter in parameters.items():
        if key not in values and parameter.default is parameter.empty:
            if key not in known:
                raise BuildError(
                    f"the schedule {name} requires {key}",
                    remedy=f"add it, as in {name}({key}=…)",
                    shell=f"add it, as in --schedule '{name}({key}=…)'" + _HINTS.get(key, ""),
                )
            values[key] = known[key]
    if make is function:
        values["rate"] = imported(values["rate"])
    return make(**values)


_HINTS = {"lr": ", or add --lr", "total_steps": ", or, for `gradgraph train`, add --batch-size"}


def _within(name: str, values: Mapping[str, Any], known: Mapping[str, float]) -> Mapping[str, float]:
    """Return the defaults for nested calls: ``known``, with the steps of a warm-up subtracted from ``total_steps``."""
    if name == "warmup" and isinstance(values.get("steps"), int) and "total_steps" in known:
        return {**known, "total_steps": max(known["total_steps"] - values["steps"], 1)}
    return known


def imported(place: Any) -> Callable[..., Any]:
    """Import the function at ``"file.py:name"`` or ``"package.module:name"``.

    Raises:
        BuildError: if there is no such function.
    """
    where, colon, name = place.rpartition(":") if isinstance(place, str) else ("", "", "")
    if not colon or not where:
        raise BuildError(f"'{shown(place)}' names no module or file with the function; write 'file.py:name' or "
                         "'package.module:name'")  # fmt: skip
    try:
        found = getattr(_module(where), name)
    except (ImportError, AttributeError, OSError, SyntaxError) as error:
        raise BuildError(f"'{shown(place)}' cannot be imported: {shown(error)}") from None
    if not callable(found):
        raise BuildError(f"'{shown(place)}' is not a function")
    return found  # type: ignore[no-any-return]


def _module(where: str) -> Any:
    if not where.endswith(".py"):
        return importlib.import_module(where)
    spec = importlib.util.spec_from_file_location(Path(where).stem, where)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module

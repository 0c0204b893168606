"""gradgraph/graph/typed_operators.pyi, made from ONNX's schemas."""

from __future__ import annotations

import keyword
import re
from pathlib import Path

import onnx
from onnx.defs import OpSchema

from gradgraph.graph.shapes import OPSET

STUB = Path(__file__).parents[2] / "gradgraph" / "graph" / "typed_operators.pyi"
HEAD = f'''"""``op.Conv(...)`` as editors and type checkers see it: a method for each operator of ONNX's opset {OPSET}.

``python -m tests.pages`` makes this file from ONNX's schemas. Inputs are positional, and ``None`` stands
for one that is left out; attributes go by keyword, and an attribute that is left out has ONNX's default.
"""

from collections.abc import Iterable, Sequence
from typing import Any, Literal, SupportsFloat, SupportsIndex, TypeAlias, overload

import numpy as np
import onnx_ir as ir

from gradgraph.graph.builder import Var

Operand: TypeAlias = Var | float | Sequence[Any] | np.ndarray[Any, Any] | np.generic | None
Int: TypeAlias = SupportsIndex | ir.Attr | None
Float: TypeAlias = SupportsFloat | ir.Attr | None
Text: TypeAlias = str | ir.Attr | None
Tensor: TypeAlias = ir.TensorProtocol | ir.Attr | None
Graph: TypeAlias = ir.Graph | ir.Attr
Ints: TypeAlias = Iterable[SupportsIndex] | ir.Attr | None
Floats: TypeAlias = Iterable[SupportsFloat] | ir.Attr | None
Texts: TypeAlias = Sequence[str] | ir.Attr | None

class OperatorCalls:
'''
KINDS = {
    "INT": "Int",
    "FLOAT": "Float",
    "STRING": "Text",
    "TENSOR": "Tensor",
    "GRAPH": "Graph",
    "INTS": "Ints",
    "FLOATS": "Floats",
    "STRINGS": "Texts",
}
MOST_COUNTED = 4  # outputs of an operator that has any number of them; more are given by a variable


def stub() -> str:
    """The whole file."""
    latest = {s.name: s for s in onnx.defs.get_all_schemas_with_history() if s.domain == ""}
    schemas = [onnx.defs.get_schema(n, OPSET, "") for n, s in sorted(latest.items()) if _is_there(n)]
    return HEAD + "".join(map(_method, schemas))


def _is_there(name: str) -> bool:
    try:
        return not onnx.defs.get_schema(name, OPSET, "").deprecated
    except onnx.defs.SchemaError:
        return False


def _method(schema: OpSchema) -> str:
    attributes = [_attribute(a) for _, a in sorted(schema.attributes.items()) if str(a.type.name) in KINDS]
    if schema.max_output == 1:
        return _line(schema, [*attributes, 'name: str = ""'], "Var")
    counts = range(1, min(schema.max_output, MOST_COUNTED if _is_variadic(schema.outputs) else schema.max_output) + 1)
    given = [(f"outputs: Literal[{n}]{' = 1' if n == 1 else ''}", _tuple(n)) for n in counts]
    given += [("outputs: int", "Var | tuple[Var, ...]")]
    lines = [_line(schema, [outputs, *attributes, 'name: str = ""'], result) for outputs, result in given]
    return "".join(f"    @overload\n{line}" for line in lines)


def _line(schema: OpSchema, keywords: list[str], result: str) -> str:
    parameters = ["self", *_inputs(schema, keywords)]
    return f"    def {schema.name}({', '.join(parameters)}) -> {result}: ...\n"


def _inputs(schema: OpSchema, keywords: list[str]) -> list[str]:
    if _is_variadic(schema.inputs):
        *first, last = schema.inputs
        return [
            *(f"{_name(p)}: Operand" for p in first),
            *(["/"] if first else []),
            f"*{_name(last)}: Operand",
            *keywords,
        ]
    optional = OpSchema.FormalParameterOption.Optional
    named = [f"{_name(p)}: Operand{' = None' if p.option == optional else ''}" for p in schema.inputs]
    return [*named, *(["/"] if named else []), "*", *keywords]


def _attribute(attribute: OpSchema.Attribute) -> str:
    return f"{attribute.name}: {KINDS[attribute.type.name]}{'' if attribute.required else ' = None'}"


def _name(parameter: OpSchema.FormalParameter) -> str:
    name = re.sub(r"\W", "_", parameter.name)
    return f"{name}_" if keyword.iskeyword(name) or name == "self" else name


def _is_variadic(parameters: object) -> bool:
    last = list(parameters)[-1:]  # type: ignore[call-overload]
    return any(p.option == OpSchema.FormalParameterOption.Variadic for p in last)


def _tuple(count: int) -> str:
    return "Var" if count == 1 else f"tuple[{', '.join(['Var'] * count)}]"

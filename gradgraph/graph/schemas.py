"""ONNX's schemas of its own operators: numbers of inputs and outputs, attributes, and types."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, TypeAlias

import onnx
import onnx_ir as ir

Schema: TypeAlias = Any  # an onnx.defs.OpSchema; ONNX's type stubs are incomplete

_SINGLE = onnx.defs.OpSchema.FormalParameterOption.Single
_VARIADIC = onnx.defs.OpSchema.FormalParameterOption.Variadic


@dataclass(frozen=True)
class Formal:
    """A formal input or output of an operator.

    Attributes:
        name: the name in ONNX's specification.
        required: whether it must be present.
        variable: the type variable that it shares with other inputs and outputs, such as ``T``; None if there is none.
        allowed: the names of the allowed types, such as ``tensor(float)``.
    """

    name: str
    required: bool
    variable: str | None
    allowed: frozenset[str]


@dataclass(frozen=True)
class Signature:
    """The inputs, outputs and attributes of an operator at an opset.

    Attributes:
        inputs, outputs: the formal inputs and outputs.
        least, most: the smallest and largest number of inputs.
        least_outputs, most_outputs: the smallest and largest number of outputs.
        attributes: for each name, the type, and whether it is required.
    """

    inputs: tuple[Formal, ...]
    outputs: tuple[Formal, ...]
    least: int
    most: int
    least_outputs: int
    most_outputs: int
    attributes: dict[str, tuple[ir.AttributeType, bool]]

    def formal(self, i: int, of_output: bool) -> Formal:
        formals = self.outputs if of_output else self.inputs
        return formals[min(i, len(formals) - 1)]


@functools.cache
def schema_of(op_type: str, opset: int, domain: str = "") -> Schema | None:
    """Return ONNX's schema of an operator; None if ``domain`` does not have it at ``opset``, or it was removed."""
    try:
        schema = onnx.defs.get_schema(op_type, opset, domain)
    except onnx.defs.SchemaError:
        return None
    return None if schema.deprecated else schema


@functools.cache
def default_attributes(op_type: str, opset: int) -> dict[str, ir.Attr]:
    """Return the default values of an ai.onnx operator's attributes by name; empty for an unknown operator."""
    schema = schema_of(op_type, opset)
    known = {} if schema is None else schema.attributes
    return {n: ir.from_proto(a.default_value) for n, a in known.items() if a.default_value.name}


@functools.cache
def signature(op_type: str, opset: int) -> Signature | None:
    """Return the signature of an operator; None if ai.onnx does not have it at ``opset``, or it was removed."""
    schema = schema_of(op_type, opset)
    if schema is None:
        return None
    types = {c.type_param_str: _widened(c.allowed_type_strs) for c in schema.type_constraints}

    def formal(given: onnx.defs.OpSchema.FormalParameter) -> Formal:
        alike = given.type_str in types and (given.option != _VARIADIC or given.is_homogeneous)
        return Formal(
            given.name,
            given.option == _SINGLE,
            given.type_str if alike else None,
            types.get(given.type_str) or _widened([given.type_str]),
        )

    return Signature(
        tuple(map(formal, schema.inputs)),
        tuple(map(formal, schema.outputs)),
        schema.min_input,
        schema.max_input,
        schema.min_output,
        schema.max_output,
        {name: (ir.AttributeType(a.type.value), a.required) for name, a in schema.attributes.items()},
    )


def _widened(allowed: Iterable[str]) -> frozenset[str]:
    """Return the type names ``allowed``, adding double where float is allowed: reference evaluators run in double."""
    return frozenset(allowed) | {text.replace("(float)", "(double)") for text in allowed}


@functools.cache
def known_since() -> dict[str, int]:
    """Return the first opset of each ai.onnx operator."""
    versions: dict[str, int] = {}
    for schema in onnx.defs.get_all_schemas_with_history():
        if schema.domain == "":
            versions[schema.name] = min(schema.since_version, versions.get(schema.name, schema.since_version))
    return versions


def forget_schemas() -> None:
    """Clear cached schemas after one was registered or replaced."""
    for remembered in (schema_of, default_attributes, signature, known_since):
        remembered.cache_clear()

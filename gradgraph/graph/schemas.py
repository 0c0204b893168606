"""ONNX's schemas of operators: numbers of inputs and outputs, types, and attributes with their defaults."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import onnx
import onnx_ir as ir

Schema: TypeAlias = Any  # an onnx.defs.OpSchema; ONNX's type stubs are incomplete

FIXED_TYPES = {f"tensor({t.name.lower()})": t for t in ir.DataType if t != ir.DataType.UNDEFINED} | {
    "tensor(float)": ir.DataType.FLOAT,
    "tensor(double)": ir.DataType.DOUBLE,
}
_SINGLE = onnx.defs.OpSchema.FormalParameterOption.Single
_VARIADIC = onnx.defs.OpSchema.FormalParameterOption.Variadic
_TYPED_BY = {  # by operator, the attribute that determines the element type of its output
    "Cast": "to",
    **dict.fromkeys(["Bernoulli", "EyeLike", "Multinomial"], "dtype"),
    **dict.fromkeys(["RandomNormal", "RandomNormalLike", "RandomUniform", "RandomUniformLike"], "dtype"),
}
_TYPED_LIKE_INPUT = ("Bernoulli", "EyeLike", "RandomNormalLike", "RandomUniformLike")  # without the attribute dtype


@dataclass(frozen=True)
class Formal:
    """A formal input or output of an operator.

    Attributes:
        name: the name in ONNX's specification.
        required: whether it must be present.
        variable: the type variable that it shares with other inputs and outputs, such as ``T``; None if there is none.
        allowed: the names of the allowed types, such as ``tensor(float)``.
        type_str: its type if there is only one, such as ``tensor(int64)`` for a Shape, otherwise the name that the
            schema gives to its types.
    """

    name: str
    required: bool
    variable: str | None
    allowed: frozenset[str]
    type_str: str = field(compare=False)


@dataclass(frozen=True)
class Signature:
    """The inputs, outputs and attributes of an operator at an opset.

    Attributes:
        inputs, outputs: the formal inputs and outputs.
        least, most: the smallest and largest number of inputs.
        least_outputs, most_outputs: the smallest and largest number of outputs.
        attributes: for each name, the type, and whether it is required.
    """

    name: str
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

    def input_type(self, i: int) -> str:
        """Return the type of input ``i`` in the schema, or a text of its own if it shares no type with other inputs."""
        last = len(self.inputs) - 1
        if i > last and self.most <= len(self.inputs):
            return f"#{i}"
        found = self.inputs[min(i, last)]
        mixed = i >= last and self.most > len(self.inputs) and found.variable is None  # Loop, Scan
        return f"#{i}" if mixed else found.type_str

    @functools.cached_property
    def _places(self) -> dict[str, list[int]]:
        types = [self.input_type(i) for i in range(len(self.inputs))]
        return {t: [i for i, other in enumerate(types) if other == t] for t in types}

    def attribute(self, name: str, value: Any) -> ir.Attr:
        if isinstance(value, ir.Attr):
            return value
        if name not in self.attributes:
            raise TypeError(f"{self.name} has no attribute '{name}'; it has {', '.join(self.attributes) or 'none'}")
        kind, _ = self.attributes[name]
        return ir.Attr(name, kind, _ATTRIBUTE_VALUE.get(kind, lambda v: v)(value))

    def output_dtypes(
        self, operands: Sequence[ir.Value | None], attrs: dict[str, Any], count: int
    ) -> list[ir.DataType | None]:
        types = [self.formal(i, of_output=True).type_str for i in range(count)]
        dtypes = [self._dtype_among(operands, t) or FIXED_TYPES.get(t) for t in types]
        if dtypes[0] is None:
            dtypes[0] = self._dtype_from_attributes(attrs)
        if dtypes[0] is None and self.name in _TYPED_LIKE_INPUT and operands[0] is not None:
            dtypes[0] = operands[0].dtype
        return dtypes

    def _dtype_among(self, operands: Sequence[ir.Value | None], type_str: str) -> ir.DataType | None:
        """Return the type of the first operand whose schema type is ``type_str``, or None if there is none."""
        for i in self._places.get(type_str, ()):
            if i < len(operands) and (x := operands[i]) is not None:
                return x.dtype
        return None

    def _dtype_from_attributes(self, attrs: dict[str, Any]) -> ir.DataType | None:
        key = _TYPED_BY.get(self.name)
        if key in attrs:
            value = attrs[key]
            return ir.DataType(value.as_int() if isinstance(value, ir.Attr) else value)
        if self.name == "Constant" and not {"value_int", "value_ints"}.isdisjoint(attrs):
            return ir.DataType.INT64
        if self.name == "Constant" and not {"value_string", "value_strings"}.isdisjoint(attrs):
            return ir.DataType.STRING
        if self.name in ("ConstantOfShape", "Constant"):
            value = attrs.get("value")
            tensor = value.as_tensor() if isinstance(value, ir.Attr) else value
            return ir.DataType.FLOAT if tensor is None else tensor.dtype
        return None


_ATTRIBUTE_VALUE: dict[ir.AttributeType, Callable[[Any], Any]] = {
    ir.AttributeType.INT: int,
    ir.AttributeType.FLOAT: float,
    ir.AttributeType.INTS: lambda v: [int(x) for x in v],
    ir.AttributeType.FLOATS: lambda v: [float(x) for x in v],
}


_USUAL: dict[type, Callable[[str, Any], ir.Attr]] = {int: ir.AttrInt64, float: ir.AttrFloat32, str: ir.AttrString}


def attributes_without_schema(values: Mapping[str, Any]) -> list[ir.Attr]:
    """Return ``values`` as attributes of an operator without a schema; None values are omitted."""
    made = []
    for name, value in values.items():
        if (usual := _USUAL.get(type(value))) is not None:
            made.append(usual(name, value))
        elif isinstance(value, list | tuple) and value and all(isinstance(x, int) for x in value):
            made.append(ir.AttrInt64s(name, value))
        elif isinstance(value, list | tuple) and value and all(isinstance(x, float) for x in value):
            made.append(ir.AttrFloat32s(name, value))
        elif value is not None:
            made.append(ir.convenience.convert_attribute(name, value))
    return made


@functools.cache
def schema_of(op_type: str, opset: int, domain: str = "") -> Schema | None:
    """Return ONNX's schema of an operator; None if ``domain`` does not have it at ``opset``, or it was removed."""
    try:
        schema = onnx.defs.get_schema(op_type, opset, domain)
    except onnx.defs.SchemaError:
        return None
    return None if schema.deprecated else schema


@functools.cache
def default_attributes(op_type: str, opset: int, domain: str = "") -> dict[str, ir.Attr]:
    """Return the default values of an operator's attributes by name; empty for an unknown operator."""
    schema = schema_of(op_type, opset, domain)
    known = {} if schema is None else schema.attributes
    return {n: ir.from_proto(a.default_value) for n, a in known.items() if a.default_value.name}


@functools.cache
def signature(op_type: str, opset: int, domain: str = "") -> Signature | None:
    """Return the signature of an operator; None if ``domain`` does not have it at ``opset``, or it was removed."""
    schema = schema_of(op_type, opset, domain)
    if schema is None:
        return None
    types = {c.type_param_str: _widened(c.allowed_type_strs) for c in schema.type_constraints}
    only = {c.type_param_str: c.allowed_type_strs[0] for c in schema.type_constraints if len(c.allowed_type_strs) == 1}

    def formal(given: onnx.defs.OpSchema.FormalParameter) -> Formal:
        alike = given.type_str in types and (given.option != _VARIADIC or given.is_homogeneous)
        return Formal(
            given.name,
            given.option == _SINGLE,
            given.type_str if alike else None,
            types.get(given.type_str) or _widened([given.type_str]),
            only.get(given.type_str, given.type_str),
        )

    return Signature(
        op_type,
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

"""The part of an operator's schema that is needed to emit a node: types of inputs and outputs, kinds of attributes."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import onnx
import onnx_ir as ir

from gradgraph.errors import ModelError
from gradgraph.graph.schemas import Schema
from gradgraph.graph.shapes import OPSET

FIXED_TYPES = {f"tensor({t.name.lower()})": t for t in ir.DataType if t != ir.DataType.UNDEFINED} | {
    "tensor(float)": ir.DataType.FLOAT,
    "tensor(double)": ir.DataType.DOUBLE,
}

_CAST_TO = {
    "Cast": "to",
    **dict.fromkeys(["Bernoulli", "EyeLike", "Multinomial"], "dtype"),
    **dict.fromkeys(["RandomNormal", "RandomNormalLike", "RandomUniform", "RandomUniformLike"], "dtype"),
}
_TYPED_LIKE_INPUT = ("Bernoulli", "EyeLike", "RandomNormalLike", "RandomUniformLike")  # without the attribute dtype


class Signature:
    """The part of an operator's schema that is needed to emit a node."""

    def __init__(self, schema: Schema) -> None:
        self.name = schema.name
        # a type variable with one allowed type is that type (Shape's T1 is int64)
        only = {
            c.type_param_str: c.allowed_type_strs[0] for c in schema.type_constraints if len(c.allowed_type_strs) == 1
        }
        self.inputs: list[str] = [only.get(p.type_str, p.type_str) for p in schema.inputs]
        self.outputs: list[str] = [only.get(p.type_str, p.type_str) for p in schema.outputs]
        variadic = onnx.defs.OpSchema.FormalParameterOption.Variadic
        self.fewest = schema.min_input
        self.variadic_in = bool(schema.inputs) and schema.inputs[-1].option == variadic
        self.variadic_out = bool(schema.outputs) and schema.outputs[-1].option == variadic
        # a heterogeneous variadic (Loop, Scan) shares no type between its members
        self.homogeneous = not schema.inputs or schema.inputs[-1].is_homogeneous
        types = [self.input_type(i) for i in range(len(self.inputs))]
        self._places = {t: [i for i, other in enumerate(types) if other == t] for t in types}
        self.attributes = {name: ir.AttributeType(int(a.type.value)) for name, a in schema.attributes.items()}
        self.defaults = {n: _default(a.default_value) for n, a in schema.attributes.items() if a.default_value.name}

    def input_type(self, i: int) -> str:
        if i < len(self.inputs) and not (self.variadic_in and i == len(self.inputs) - 1 and not self.homogeneous):
            return self.inputs[i]
        return self.inputs[-1] if self.variadic_in and self.homogeneous else f"#{i}"

    def attribute(self, name: str, value: Any) -> ir.Attr:
        if isinstance(value, ir.Attr):
            return value
        if name not in self.attributes:
            raise TypeError(f"{self.name} has no attribute '{name}'; it has {', '.join(self.attributes) or 'none'}")
        kind = self.attributes[name]
        return ir.Attr(name, kind, _ATTRIBUTE_VALUE.get(kind, lambda v: v)(value))

    def output_dtypes(
        self, operands: Sequence[ir.Value | None], attrs: dict[str, Any], count: int
    ) -> list[ir.DataType | None]:
        types = [self.outputs[min(i, len(self.outputs) - 1)] for i in range(count)]
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
        key = _CAST_TO.get(self.name)
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


def signature(op_type: str, domain: str = "") -> Signature:
    """Return the signature of an operator.

    Raises:
        ModelError: if the operator is not in the schemas.
    """
    found = known_signature(op_type, domain)
    if found is None:
        raise ModelError(f"ONNX opset {OPSET} has no operator {domain + '.' if domain else ''}{op_type}")
    return found


@functools.cache
def known_signature(op_type: str, domain: str = "") -> Signature | None:
    """Return the signature of an operator, or ``None`` if it has no schema (custom domains)."""
    try:
        return Signature(onnx.defs.get_schema(op_type, OPSET, domain))
    except onnx.defs.SchemaError:
        return None


def _default(attribute: onnx.AttributeProto) -> Any:
    value = onnx.helper.get_attribute_value(attribute)
    return value.decode() if isinstance(value, bytes) else value

"""Flatbuffers as dicts: bytes to dicts and dicts to bytes, by a schema. Bounds are checked, and sizes limited."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from typing import Any

from flatbuffers import Builder
from flatbuffers import number_types as types
from flatbuffers.table import Table

Fields = Sequence[tuple[str, str]]
Schema = Mapping[str, Fields]  # fields of each table, in order: a name, and a scalar, "string", "[kind]" or a table

_SCALARS = {
    "bool": types.BoolFlags,
    "u8": types.Uint8Flags,
    "i32": types.Int32Flags,
    "i64": types.Int64Flags,
    "f32": types.Float32Flags,
}
_DATA_ALIGNMENT = 16  # alignment of byte vectors, which contain the data of tensors


class DamagedError(ValueError):
    """Raised for bytes that are not a flatbuffer of the schema."""


def read(content: bytes | memoryview, schema: Schema, root: str, identifier: bytes) -> dict[str, Any]:
    """Return the root table as a dict of dicts and lists; byte vectors are views of ``content``.

    Raises:
        DamagedError: if ``content`` has a different identifier, is truncated, or has offsets out of bounds.
    """
    if bytes(content[4:8]) != identifier:
        raise DamagedError(f"it does not start with the identifier '{identifier.decode()}'")
    try:
        values: dict[str, Any] = _Reader(memoryview(content), schema).value(0, root)
    except (struct.error, TypeError, UnicodeDecodeError) as error:  # TypeError: a negative offset
        raise DamagedError("it is truncated, or has offsets out of bounds") from error
    return values


class _Reader:
    def __init__(self, content: memoryview, schema: Schema) -> None:
        self._content, self._schema = content, schema
        self._left = len(content)  # tables and elements that may still be read: at most as many as there are bytes

    def value(self, at: int, kind: str) -> Any:
        """Return the scalar at ``at``, or the object to which the offset at ``at`` points."""
        here = Table(self._content, at)
        if kind in _SCALARS:
            return here.Get(_SCALARS[kind], at)
        if kind in self._schema:
            return self._table(Table(self._content, here.Indirect(at)), self._schema[kind])
        inner = "u8" if kind == "string" else kind[1:-1]
        start, count, width = here.Vector(0), here.VectorLen(0), _flags(inner).bytewidth
        if start + count * width > len(self._content):
            raise DamagedError("it has offsets out of bounds")
        if inner == "u8":
            data = self._content[start : start + count]
            return str(data, "utf-8") if kind == "string" else data
        self._spend(count)
        return [self.value(start + width * i, inner) for i in range(count)]

    def _table(self, table: Any, fields: Fields) -> dict[str, Any]:
        self._spend(len(fields))
        places = [table.Offset(4 + 2 * i) for i in range(len(fields))]  # 0 for an absent field
        return {name: self.value(table.Pos + p, kind) for p, (name, kind) in zip(places, fields, strict=True) if p}

    def _spend(self, count: int) -> None:
        """Count ``count`` more tables or elements as read; raise DamagedError if the total exceeds the file size.

        Tables may be shared, so a malicious file could expand without this limit.
        """
        self._left -= count
        if self._left < 0:
            raise DamagedError("it has more elements than bytes")


def write(values: Mapping[str, Any], schema: Schema, root: str, identifier: bytes) -> memoryview:
    """Return the bytes of a root table; absent fields and None are omitted."""
    builder = Builder()
    builder.Finish(_written(builder, schema, root, values), identifier)
    return memoryview(builder.Bytes)[builder.Head() :]


def _written(builder: Any, schema: Schema, kind: str, value: Any) -> int:
    """Write a string, a vector or a table after its own parts; return its offset."""
    if kind == "string":
        return int(builder.CreateString(value))
    if kind == "[u8]":
        builder.StartVector(1, len(value), _DATA_ALIGNMENT)
        builder.head -= len(value)
        builder.Bytes[builder.head : builder.head + len(value)] = value
        return int(builder.EndVector())
    if kind not in schema:
        inner, width = kind[1:-1], _flags(kind[1:-1]).bytewidth
        items = value if inner in _SCALARS else [_written(builder, schema, inner, x) for x in value]
        builder.StartVector(width, len(items), width)
        for x in reversed(items):
            _prepend(builder, inner, x)
        return int(builder.EndVector())
    rows = [(i, k, value[name]) for i, (name, k) in enumerate(schema[kind]) if value.get(name) is not None]
    parts = [(i, k, x if k in _SCALARS else _written(builder, schema, k, x)) for i, k, x in rows]
    builder.StartObject(len(schema[kind]))
    for i, k, x in sorted(parts, key=lambda part: -_flags(part[1]).bytewidth):  # widest first: unpadded
        _prepend(builder, k, x)
        builder.Slot(i)
    return int(builder.EndObject())


def _prepend(builder: Any, kind: str, x: Any) -> None:
    """Write a scalar, or the distance to the object at offset ``x``."""
    if kind in _SCALARS:
        builder.Prepend(_SCALARS[kind], x)
    else:
        builder.PrependUOffsetTRelative(x)


def _flags(kind: str) -> Any:
    return _SCALARS.get(kind, types.UOffsetTFlags)

"""A reader and a writer of flatbuffers: bytes to dicts and dicts to bytes, by a schema.

A table begins with the distance back to its vtable, which contains the offset of each field in the table, or 0 for an
absent field. Strings, vectors and nested tables are stored elsewhere; their field contains the distance forward to
them. All numbers are little-endian. Offsets are checked against the bounds of the file.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from typing import Any

Fields = Sequence[tuple[str, str]]
Schema = Mapping[str, Fields]  # fields of each table, in order: a name, and a scalar, "string", "[kind]" or a table

_SCALARS = {"bool": "<?", "u8": "<B", "i32": "<i", "i64": "<q", "f32": "<f"}
_DATA_ALIGNMENT = 16  # alignment of byte vectors, which contain the data of tensors
_MAGIC = 4  # size in bytes of the root's offset at the start, and of the identifier after it


class DamagedError(ValueError):
    """Raised for bytes that are not a flatbuffer of the schema."""


def read(content: bytes | memoryview, schema: Schema, root: str, identifier: bytes) -> dict[str, Any]:
    """Return the root table as a dict of dicts and lists; byte vectors are views of ``content``.

    Raises:
        DamagedError: if ``content`` has another identifier, is truncated, or has offsets out of bounds.
    """
    buffer = memoryview(content)
    if bytes(buffer[_MAGIC : 2 * _MAGIC]) != identifier:
        raise DamagedError(f"it does not start with the identifier '{identifier.decode()}'")
    try:
        return _Reader(buffer, schema).table(_follow(buffer, 0), root)
    except (struct.error, UnicodeDecodeError) as error:
        raise DamagedError("it is truncated, or has offsets out of bounds") from error


def _follow(buffer: memoryview, at: int) -> int:
    distance: int = struct.unpack_from("<I", buffer, at)[0]
    return at + distance


class _Reader:
    def __init__(self, buffer: memoryview, schema: Schema) -> None:
        self._buffer, self._schema = buffer, schema
        self._left = len(buffer)  # tables and elements that may still be read: at most as many as there are bytes

    def table(self, at: int, name: str) -> dict[str, Any]:
        vtable = at - struct.unpack_from("<i", self._buffer, at)[0]
        if not 0 <= vtable < len(self._buffer):
            raise DamagedError("it has offsets out of bounds")
        count = (struct.unpack_from("<H", self._buffer, vtable)[0] - 4) // 2
        found: dict[str, Any] = {}
        for i, (field, kind) in enumerate(self._schema[name]):
            self._spend(1)
            distance = struct.unpack_from("<H", self._buffer, vtable + 4 + 2 * i)[0] if i < count else 0
            if distance:
                found[field] = self._value(at + distance, kind)
        return found

    def _value(self, at: int, kind: str) -> Any:
        if kind in _SCALARS:
            return struct.unpack_from(_SCALARS[kind], self._buffer, at)[0]
        there = _follow(self._buffer, at)
        if kind == "string":
            return bytes(self._bytes(there)).decode()
        if kind == "[u8]":
            return self._bytes(there)
        if not kind.startswith("["):
            return self.table(there, kind)
        inner = kind[1:-1]
        count = struct.unpack_from("<I", self._buffer, there)[0]
        size = struct.calcsize(_SCALARS.get(inner, "<I"))
        if there + 4 + count * size > len(self._buffer):
            raise DamagedError("it has offsets out of bounds")
        self._spend(count)
        return [self._value(there + 4 + size * i, inner) for i in range(count)]

    def _bytes(self, at: int) -> memoryview:
        count = struct.unpack_from("<I", self._buffer, at)[0]
        if at + 4 + count > len(self._buffer):
            raise DamagedError("it has offsets out of bounds")
        return self._buffer[at + 4 : at + 4 + count]

    def _spend(self, count: int) -> None:
        """Count ``count`` more tables or elements as read; raise DamagedError if there are more than bytes in the file.

        Tables may be shared, so a malicious file could expand without this limit.
        """
        self._left -= count
        if self._left < 0:
            raise DamagedError("it has more elements than bytes")


def write(values: Mapping[str, Any], schema: Schema, root: str, identifier: bytes) -> bytearray:
    """Return the bytes of a root table; absent fields and None are omitted."""
    buffer = bytearray(2 * _MAGIC)
    buffer[_MAGIC:] = identifier
    _Writer(buffer, schema).refer(0, root, values)
    return buffer


class _Writer:
    def __init__(self, buffer: bytearray, schema: Schema) -> None:
        self._buffer, self._schema = buffer, schema

    def refer(self, at: int, kind: str, value: Any) -> None:
        """Append ``value``, and write the distance from ``at`` to its position at ``at``."""
        there = self._write(kind, value)
        struct.pack_into("<I", self._buffer, at, there - at)

    def _write(self, kind: str, value: Any) -> int:
        if kind == "string":
            return self._vector(value.encode() + b"\0", len(value.encode()), 1)
        if kind == "[u8]":
            return self._vector(value, len(value), _DATA_ALIGNMENT)
        if not kind.startswith("["):
            return self._table(kind, value)
        inner = kind[1:-1]
        if inner in _SCALARS:
            packed = b"".join(struct.pack(_SCALARS[inner], x) for x in value)
            return self._vector(packed, len(value), struct.calcsize(_SCALARS[inner]))
        there = self._vector(bytes(4 * len(value)), len(value), 4)
        for i, x in enumerate(value):
            self.refer(there + 4 + 4 * i, inner, x)
        return there

    def _vector(self, content: bytes | memoryview, count: int, alignment: int) -> int:
        """Append the number of elements, then the elements at a multiple of ``alignment``; return the position."""
        self._pad(max(alignment, 4), 4)
        there = len(self._buffer)
        self._buffer += struct.pack("<I", count)
        self._buffer += content
        return there

    def _table(self, name: str, values: Mapping[str, Any]) -> int:
        present = [(i, f, kind) for i, (f, kind) in enumerate(self._schema[name]) if values.get(f) is not None]
        # widest first, as each field is aligned to its size
        present.sort(key=lambda row: -_size(row[2]))
        distances, end = [0] * len(self._schema[name]), 8 if present and _size(present[0][2]) == 8 else 4
        for i, _, kind in present:
            distances[i] = end
            end += _size(kind)
        self._pad(2)
        vtable = len(self._buffer)
        self._buffer += struct.pack(f"<{2 + len(distances)}H", 4 + 2 * len(distances), end, *distances)
        self._pad(8)
        there = len(self._buffer)
        self._buffer += struct.pack("<i", there - vtable) + bytes(end - 4)
        for i, field, kind in present:
            if kind in _SCALARS:
                struct.pack_into(_SCALARS[kind], self._buffer, there + distances[i], values[field])
        for i, field, kind in present:
            if kind not in _SCALARS:
                self.refer(there + distances[i], kind, values[field])
        return there

    def _pad(self, alignment: int, ahead: int = 0) -> None:
        """Append zeros until the position ``ahead`` bytes later is a multiple of ``alignment``."""
        self._buffer += bytes(-(len(self._buffer) + ahead) % alignment)


def _size(kind: str) -> int:
    return struct.calcsize(_SCALARS.get(kind, "<I"))

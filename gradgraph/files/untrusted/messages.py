"""Untrusted ONNX messages: parsed here, and checked by ``gradgraph.files.protos``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import BinaryIO, TypeAlias

import onnx

from gradgraph.files.untrusted.regular import UnreadableError

LEAST_APART = 1 << 16  # bytes: the data of larger tensors stay in the file
_TENSOR: Mapping[int, Mapping[int, object]] = {}
_INSIDE: Mapping[int, object] = {7: {5: _TENSOR}}  # ModelProto.graph, GraphProto.initializer in onnx.proto
_SINGLE = 7
_RAW_DATA, _PLACE = 9, 14  # of TensorProto: raw_data, data_location
_PLAIN = (1, 2, 8, 12, 16)  # dims, data_type, name, doc_string, metadata_props
_VARINT, _EIGHT_BYTES, _COUNTED, _FOUR_BYTES = 0, 1, 2, 5  # wire types

Place: TypeAlias = Callable[[onnx.TensorProto, int, int], bool]


def message_of(content: bytes) -> onnx.ModelProto:
    """Parse the content of a ``.onnx`` file, without checking the model.

    Raises:
        UnreadableError: if the content cannot be parsed.
    """
    try:
        return onnx.ModelProto.FromString(content)
    except Exception as error:  # protobuf raises DecodeError, which no public module exports
        raise UnreadableError("its protobuf cannot be parsed, or its graphs are nested more than 32 deep") from error


def message_without_data(file: BinaryIO, place: Place) -> onnx.ModelProto | None:
    """Return the model in ``file``, without reading the data of large initializers.

    Args:
        place: a function that is called with each large initializer, without its data, and the offset and length of
            the data in the file. It records this location and returns True, or returns False to read the data.

    Returns:
        The model; None for a truncated or non-canonical file, which ``message_of`` reads or rejects.
    """
    size = file.seek(0, 2)
    file.seek(0)
    try:
        return message_of(bytes(_Walk(file, place).message(size, _INSIDE)))
    except (_OddError, UnreadableError):
        return None


class _OddError(Exception):
    """Raised for a truncated or non-canonical message."""


class _Walk:
    """One pass over the messages of a file, copying all fields except the data of large tensors."""

    def __init__(self, file: BinaryIO, place: Place) -> None:
        self._file, self._place, self._at = file, place, 0

    def message(self, size: int, inside: Mapping[int, object]) -> bytearray:
        """Return a copy of the message in the next ``size`` bytes, without the data of large tensors.

        ``inside`` maps the number of each field that may contain large tensors to the ``inside`` of its message.
        """
        end, copy, entered = self._at + size, bytearray(), set[int]()
        while self._at < end:
            key = self._varint()
            number, kind = key >> 3, key & 7
            copy += varint(key)
            if number == _SINGLE and number in inside:
                self._check(number not in entered)  # repeated messages are merged
                entered.add(number)
            if kind != _COUNTED:
                copy += self._plain(kind)
                continue
            length = self._varint()
            self._check(self._at + length <= end)
            within = inside.get(number) if length >= LEAST_APART else None
            if within is None:
                body: bytes | bytearray = self._read(length)
            else:
                body = self._tensor(length) if within is _TENSOR else self.message(length, within)  # type: ignore[arg-type]
            copy += varint(len(body)) + body
        self._check(self._at == end)
        return copy

    def _tensor(self, size: int) -> bytes:
        """Return the serialised tensor in the next ``size`` bytes, without its raw_data if large."""
        start, end = self._at, self._at + size
        header, data = bytearray(), list[tuple[int, int]]()
        plain = True
        while plain and self._at < end:
            key = self._varint()
            number, kind = key >> 3, key & 7
            if key == _RAW_DATA << 3 | _COUNTED:
                length = self._varint()
                data.append((self._at, length))
                self._skip(length)
            elif kind == _COUNTED and number in _PLAIN:
                length = self._varint()
                self._check(self._at + length <= end)
                header += varint(key) + varint(length) + self._read(length)
            elif kind == _VARINT and number in _PLAIN:
                header += varint(key) + self._plain(kind)
            else:
                plain = key == _PLACE << 3 | _VARINT and self._varint() == onnx.TensorProto.DEFAULT
        if plain and self._at == end and len(data) == 1 and data[0][1] >= LEAST_APART:
            try:
                tensor = onnx.TensorProto.FromString(bytes(header))
            except Exception:
                raise _OddError from None
            if self._place(tensor, *data[0]):
                return bytes(tensor.SerializeToString())
        self._skip(start - self._at)
        return self._read(size)

    def _plain(self, kind: int) -> bytes:
        """Return the bytes of the value of a field whose wire type, ``kind``, determines the length."""
        if kind == _VARINT:
            return varint(self._varint())
        self._check(kind in (_EIGHT_BYTES, _FOUR_BYTES))
        return self._read(8 if kind == _EIGHT_BYTES else 4)

    def _varint(self) -> int:
        """Read a varint and return it: seven bits per byte, low bits first, high bit set on all bytes but the last."""
        value = 0
        for shift in range(0, 70, 7):
            byte = self._read(1)[0]
            value |= (byte & 127) << shift
            if byte < 128:
                return value
        raise _OddError

    def _read(self, count: int) -> bytes:
        found = self._file.read(count)
        self._check(len(found) == count)
        self._at += count
        return found

    def _skip(self, count: int) -> None:
        self._at += count
        self._file.seek(self._at)

    @staticmethod
    def _check(usual: bool) -> None:
        if not usual:
            raise _OddError


def varint(number: int) -> bytes:
    """Return ``number`` as a varint: seven bits per byte, low bits first, high bit set on all bytes but the last."""
    written = bytearray()
    while number > 127:
        written.append(number & 127 | 128)
        number >>= 7
    written.append(number)
    return bytes(written)

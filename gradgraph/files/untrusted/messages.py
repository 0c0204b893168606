"""ONNX messages that anybody may have written: parsed here, and checked by ``gradgraph.files.protos``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import BinaryIO, TypeAlias

import onnx

from gradgraph.files.untrusted.regular import UnreadableError

LEAST_APART = 1 << 16  # bytes of data that are left in the file
_TENSOR: Mapping[int, Mapping[int, object]] = {}
_INSIDE: Mapping[int, object] = {7: {5: _TENSOR}}  # ModelProto.graph, GraphProto.initializer in onnx.proto
_SINGLE = 7
_RAW_DATA, _PLACE = 9, 14  # of TensorProto: raw_data, data_location
_PLAIN = (1, 2, 8, 12, 16)  # dims, data_type, name, doc_string, metadata_props
_VARINT, _EIGHT_BYTES, _COUNTED, _FOUR_BYTES = 0, 1, 2, 5  # wire types

Place: TypeAlias = Callable[[onnx.TensorProto, int, int], bool]


def message_of(content: bytes) -> onnx.ModelProto:
    """The model in the bytes of a file, before anybody has looked at what it says.

    Raises:
        UnreadableError: they do not parse.
    """
    try:
        return onnx.ModelProto.FromString(content)
    except Exception as error:  # protobuf raises DecodeError, a class of no public module
        raise UnreadableError("its protobuf does not parse, nor would graphs nested more than 32 deep") from error


def message_apart(file: BinaryIO, place: Place) -> onnx.ModelProto | None:
    """The model in ``file``, of which the data of large initializers are not read.

    Args:
        file: at its start.
        place: is given an initializer without its data, the byte of the file at which these begin, and how many they
            are; lets it say where they lie and returns True, or returns False where they are to be read as usual.

    Returns:
        None where the file is not written as plainly as exporters write it: ``message_of`` tells what it is.
    """
    size = file.seek(0, 2)
    file.seek(0)
    try:
        return message_of(bytes(_Walk(file, place).message(size, _INSIDE)))
    except (_OddError, UnreadableError):
        return None


class _OddError(Exception):
    """These bytes end too soon, or say in another way than usual what they say."""


class _Walk:
    """One pass over the messages of a file: fields are copied, but for the data of large tensors."""

    def __init__(self, file: BinaryIO, place: Place) -> None:
        self._file, self._place, self._at = file, place, 0

    def message(self, size: int, inside: Mapping[int, object]) -> bytearray:
        """The next ``size`` bytes, a message; ``inside`` are the fields of it in which there may be large tensors."""
        end, copy, entered = self._at + size, bytearray(), set[int]()
        while self._at < end:
            key = self._varint()
            number, kind = key >> 3, key & 7
            copy += varint(key)
            if number == _SINGLE and number in inside:
                self._check(number not in entered)  # two are one, whose fields are those of both
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
        """A tensor whose data are left where they are, if that is all that it has; else as it stands."""
        start, end = self._at, self._at + size
        apart, data = bytearray(), list[tuple[int, int]]()
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
                apart += varint(key) + varint(length) + self._read(length)
            elif kind == _VARINT and number in _PLAIN:
                apart += varint(key) + self._plain(kind)
            else:
                plain = key == _PLACE << 3 | _VARINT and self._varint() == onnx.TensorProto.DEFAULT
        if plain and self._at == end and len(data) == 1 and data[0][1] >= LEAST_APART:
            try:
                tensor = onnx.TensorProto.FromString(bytes(apart))
            except Exception:
                raise _OddError from None
            if self._place(tensor, *data[0]):
                return bytes(tensor.SerializeToString())
        self._skip(start - self._at)
        return self._read(size)

    def _plain(self, kind: int) -> bytes:
        """The value of a field whose length is told by its kind."""
        if kind == _VARINT:
            return varint(self._varint())
        self._check(kind in (_EIGHT_BYTES, _FOUR_BYTES))
        return self._read(8 if kind == _EIGHT_BYTES else 4)

    def _varint(self) -> int:
        """The next number: seven bits a byte, the low ones first; all bytes but the last have their high bit set."""
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
    """Seven bits a byte, the low ones first; all bytes but the last have their high bit set."""
    written = bytearray()
    while number > 127:
        written.append(number & 127 | 128)
        number >>= 7
    written.append(number)
    return bytes(written)

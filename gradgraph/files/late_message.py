"""The message in a model file that was just written: read when somebody first looks at it, so that most pay nothing."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, cast

import onnx

from gradgraph.files.held_files import CAN_HOLD, HeldFile
from gradgraph.files.large_weights import LEAST_KEPT

__all__ = ["message_in"]


def message_in(path: str | os.PathLike[str]) -> onnx.ModelProto:
    """The message in a ``.onnx`` file of ours; what lies in a file beside it is not read.

    A file of 8 MiB and more is held open, and read when an attribute of the message is first used: a file that takes
    its place meanwhile does no harm, and one that is written over is refused then, with a ModelError. Until then, and
    in Windows never, the message takes no memory. It is a ``onnx.ModelProto`` for ``isinstance``; only ``CopyFrom`` and
    ``MergeFrom`` of another message want ``message.__deepcopy__()``.
    """
    with Path(path).open("rb") as file:
        if not CAN_HOLD or os.fstat(file.fileno()).st_size < LEAST_KEPT:
            return onnx.ModelProto.FromString(file.read())
        return cast("onnx.ModelProto", _LateMessage(HeldFile(Path(path), file, own=True)))


class _LateMessage:
    """Stands for the message in a file until somebody uses it, and then hands everything on to that."""

    __slots__ = ("_file", "_message")
    __hash__ = None  # type: ignore[assignment]  # as messages have it

    def __init__(self, file: HeldFile) -> None:
        object.__setattr__(self, "_file", file)
        object.__setattr__(self, "_message", None)

    def _read(self) -> onnx.ModelProto:
        file: HeldFile | None = self._file
        if file is not None:
            message = onnx.ModelProto.FromString(b"".join(file.pieces(0, file.size)))
            object.__setattr__(self, "_message", message)  # first, for other threads
            object.__setattr__(self, "_file", None)
        found: onnx.ModelProto = self._message
        return found

    @property  # type: ignore[misc]  # an object has it as an attribute
    def __class__(self) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        return onnx.ModelProto

    def __getattr__(self, name: str) -> Any:
        return getattr(self._read(), name)

    def __setattr__(self, name: str, value: object) -> None:
        setattr(self._read(), name, value)

    def __eq__(self, other: object) -> bool:
        theirs = other._read() if type(other) is _LateMessage else other
        return bool(self._read() == theirs)

    def __repr__(self) -> str:
        return repr(self._read())

    def __str__(self) -> str:
        return str(self._read())

    def __dir__(self) -> list[str]:
        return dir(self._read())

    def __reduce__(self) -> Any:
        return onnx.ModelProto.FromString, (self._read().SerializeToString(),)

"""Files of weights that are held open: tensors are read from where they lie, and one mapping serves all of a file.

A file that takes the name later, be it what the same command writes, is never read in its place; one that is written
over is refused. A model's own file is held, too, for the weights inside it. (Windows lets nobody replace a file that is
open: there, a model's own is read at once, and external data are mapped when they are used.)
"""

from __future__ import annotations

import functools
import mmap
import os
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import onnx_ir as ir

from gradgraph.errors import ModelError, shown
from gradgraph.files.mapped import READ, Array

CAN_HOLD = os.name != "nt"


class HeldFile:
    """A file of weights, held open.

    Args:
        path: the file.
        file: as it is open now; it may be closed afterwards.
        own: whether it is the model itself, with weights inside.

    Attributes:
        location: what tensors inside a model call its file, whenever it is opened.
    """

    def __init__(self, path: Path, file: BinaryIO, own: bool) -> None:
        self.path, self.own = path, own
        self._handle = os.dup(file.fileno())
        weakref.finalize(self, os.close, self._handle)
        self._was = self._now()
        status = os.fstat(self._handle)
        self.location = "inside/" + "-".join(f"{n:x}" for n in (status.st_dev, status.st_ino, *self._was))

    @property
    def size(self) -> int:
        return self._was[0]

    @functools.cached_property
    def content(self) -> Array:
        """All of its bytes, mapped."""
        whole = mmap.mmap(self._handle, 0, access=mmap.ACCESS_READ) if self.size else b""  # nothing cannot be mapped
        return np.frombuffer(whole, np.uint8)

    def part(self, offset: int, length: int) -> Array:
        """Bytes of the file, mapped; raises ModelError where it was written over."""
        self._check_holds(offset + length)
        return self.content[offset : offset + length]

    def pieces(self, offset: int, length: int) -> Iterator[memoryview]:
        """Bytes of the file, a few at a time; raises ModelError where it was written over."""
        end = offset + length
        self._check_holds(end)
        while offset < end:
            piece = os.pread(self._handle, min(READ, end - offset), offset)
            self.check_uncut()
            offset += len(piece)
            yield memoryview(piece)

    def check_uncut(self) -> None:
        """Raise ModelError if somebody has written to the file since it was opened."""
        self._check_holds(0)

    def _check_holds(self, end: int) -> None:
        if self._now() != self._was or self.size < end:
            raise ModelError(
                f"'{shown(self.path)}', from which weights are read, was written over since the model was opened; open "
                "it again (while a file is in use, write another one and rename that)"
            )

    def _now(self) -> tuple[int, int]:
        status = os.fstat(self._handle)
        return status.st_size, status.st_mtime_ns

    def __deepcopy__(self, memo: Any) -> HeldFile:
        return self


class HeldTensor(ir.ExternalTensor):
    """A tensor whose data stay in a file that is held open.

    Args:
        file: that file.
        offset: the byte of it at which the data begin; they are as many as type and shape need.
        dtype, shape, name, doc_string, metadata_props: as for any tensor.
    """

    def __init__(self, file: HeldFile, offset: int, dtype: ir.DataType, *, shape: ir.Shape, name: str,
                 doc_string: str | None = None, metadata_props: dict[str, str] | None = None) -> None:  # fmt: skip
        length = -(-int(np.prod(shape.numpy(), dtype=object)) * dtype.bitwidth // 8)
        super().__init__(file.path.name, offset, length, dtype, shape=shape, name=name, doc_string=doc_string,
                         metadata_props=metadata_props, base_dir=file.path.parent)  # fmt: skip
        self.file = file

    def seen_as(self, dtype: ir.DataType, shape: ir.Shape, begin: int) -> HeldTensor:
        """The same bytes, from ``begin`` on, as numbers of another type."""
        return HeldTensor(self.file, (self.offset or 0) + begin, dtype, shape=shape, name=self.name or "")

    def pieces(self) -> Iterator[memoryview]:
        """The data, a few bytes at a time."""
        return self.file.pieces(self.offset or 0, self.nbytes)

    def _load(self) -> None:
        raw = self.file.part(self.offset or 0, self.nbytes)
        if self.dtype.bitwidth < 8:
            self._array = ir.PackedTensor(raw, self.dtype, shape=self.shape).numpy()
        else:
            self._array = raw.view(np.dtype(self.dtype.numpy()).newbyteorder("<")).reshape(self.shape.numpy())

    def __array__(self, dtype: Any = None) -> np.ndarray[Any, Any]:
        self.file.check_uncut()
        return super().__array__(dtype)

    def numpy(self) -> np.ndarray[Any, Any]:
        self.file.check_uncut()
        return super().numpy()

    def tobytes(self) -> bytes:
        return b"".join(self.pieces())

    def tofile(self, file: Any) -> None:
        for piece in self.pieces():
            file.write(piece)


def own_file(tensor: ir.TensorProtocol) -> HeldFile | None:
    """The file of the model itself, if ``tensor`` lies inside it."""
    return tensor.file if isinstance(tensor, HeldTensor) and tensor.file.own else None

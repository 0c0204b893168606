"""Weight files held open: tensors are read in place, and one mapping serves a whole file.

If another file replaces a held file under its name, even one written by this command, the original is still read. If a
held file is overwritten or truncated in place, every check raises ModelError: :class:`HeldFile` alone decides whether a
file still has the bytes with which it was opened. The model file itself is held open, too, for the weights inside it.
(Windows does not allow replacing an open file: there, the model file is read at once, and external data are mapped on
use.)
"""

from __future__ import annotations

import contextlib
import functools
import mmap
import os
import weakref
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import onnx_ir as ir

from gradgraph.errors import ModelError, shown
from gradgraph.files.digest import digest_in_threads
from gradgraph.files.mapped import READ, Array, is_at
from gradgraph.files.untrusted.regular import reason_of

CAN_HOLD = os.name != "nt"


class HeldFile:
    """A weight file, held open.

    Args:
        file: the open file, which the caller may close afterwards.
        own: whether the file is the model file itself, with weights inside.

    Attributes:
        path: the absolute path of the file.
        stamp: device, inode, size and time of the last write, as text; unequal for different contents.
        location: the name by which external tensors refer to this file if it is the model file itself.
    """

    def __init__(self, path: Path, file: BinaryIO, own: bool) -> None:
        self.path, self.own = path.absolute(), own
        with self._reading():
            self._handle = os.dup(file.fileno())
        weakref.finalize(self, os.close, self._handle)
        self._was = self._now()
        status = os.fstat(self._handle)
        self.stamp = "-".join(f"{n:x}" for n in (status.st_dev, status.st_ino, *self._was))
        self.location = f"inside/{self.stamp}"

    @property
    def size(self) -> int:
        return self._was[0]

    @property
    def modified(self) -> int:
        """The time (in ns) at which the file had last been written when it was opened."""
        return self._was[1]

    @functools.cached_property
    def content(self) -> Array:
        """All bytes of the file, memory-mapped."""
        with self._reading():
            whole = mmap.mmap(self._handle, 0, access=mmap.ACCESS_READ) if self.size else b""  # empty: not mappable
        return np.frombuffer(whole, np.uint8)

    @contextlib.contextmanager
    def _reading(self) -> Iterator[None]:
        """Convert errors of the operating system, such as too many open files, to a ModelError."""
        try:
            yield
        except OSError as error:
            raise ModelError(f"'{shown(self.path)}' cannot be read ({reason_of(error)})") from None

    def is_in_place(self) -> bool:
        """Whether the file is still at its path: no other file has replaced it."""
        return is_at(self.path, os.fstat(self._handle))

    def part(self, offset: int, length: int) -> Array:
        """Return ``length`` bytes from ``offset``, memory-mapped; raise ModelError if the file was overwritten."""
        self._check_holds(offset + length)
        return self.content[offset : offset + length]

    def pieces(self, offset: int, length: int) -> Iterator[memoryview]:
        """Yield ``length`` bytes from ``offset`` in pieces; raise ModelError if the file was overwritten."""
        end = offset + length
        self._check_holds(end)
        while offset < end:
            piece = self._read(offset, min(READ, end - offset))
            self.check_unchanged()
            offset += len(piece)
            yield memoryview(piece)

    def digest(self) -> str:
        """Return the digest of the whole file, which several threads read."""
        digest = digest_in_threads(self._read, self.size)
        self.check_unchanged()
        return digest

    def _read(self, offset: int, length: int) -> bytes:
        if CAN_HOLD:
            return os.pread(self._handle, length, offset)
        return self.content[offset : offset + length].tobytes()

    def check_unchanged(self) -> None:
        """Raise ModelError if the file was changed since it was opened; this takes a few microseconds."""
        self._check_holds(0)

    def _check_holds(self, end: int) -> None:
        if self._now() != self._was or self.size < end:
            raise ModelError(
                f"'{shown(self.path)}', from which weights are read, was overwritten or truncated since it was opened; "
                "restore it and open the model or step again (to replace a file in use, write another one and rename "
                "it)"
            )

    def _now(self) -> tuple[int, int]:
        status = os.fstat(self._handle)
        return status.st_size, status.st_mtime_ns

    def __deepcopy__(self, memo: Any) -> HeldFile:
        return self


class HeldTensor(ir.ExternalTensor):
    """A tensor whose data stay in a file that is held open.

    Args:
        offset: the offset of the data in bytes; type and shape determine their length.
        dtype, shape, name, doc_string, metadata_props: as for any tensor.
    """

    def __init__(self, file: HeldFile, offset: int, dtype: ir.DataType, *, shape: ir.Shape, name: str,
                 doc_string: str | None = None, metadata_props: dict[str, str] | None = None) -> None:  # fmt: skip
        length = -(-int(np.prod(shape.numpy(), dtype=object)) * dtype.bitwidth // 8)
        super().__init__(file.path.name, offset, length, dtype, shape=shape, name=name, doc_string=doc_string,
                         metadata_props=metadata_props, base_dir=file.path.parent)  # fmt: skip
        self.file = file

    def seen_as(self, dtype: ir.DataType, shape: ir.Shape, begin: int) -> HeldTensor:
        """Return a tensor of a different type and shape that shares this tensor's data, starting at byte ``begin``."""
        return HeldTensor(self.file, (self.offset or 0) + begin, dtype, shape=shape, name=self.name or "")

    def pieces(self) -> Iterator[memoryview]:
        """Yield the bytes of the tensor in pieces."""
        return self.file.pieces(self.offset or 0, self.nbytes)

    def _load(self) -> None:
        raw = self.file.part(self.offset or 0, self.nbytes)
        if self.dtype.bitwidth < 8:
            self._array = ir.PackedTensor(raw, self.dtype, shape=self.shape).numpy()
        else:
            self._array = raw.view(np.dtype(self.dtype.numpy()).newbyteorder("<")).reshape(self.shape.numpy())

    def __array__(self, dtype: Any = None) -> np.ndarray[Any, Any]:
        self.file.check_unchanged()
        return super().__array__(dtype)

    def numpy(self) -> np.ndarray[Any, Any]:
        self.file.check_unchanged()
        return super().numpy()

    def tobytes(self) -> bytes:
        return b"".join(self.pieces())

    def tofile(self, file: Any) -> None:
        for piece in self.pieces():
            file.write(piece)


def files_of(model: ir.Model) -> list[HeldFile]:
    """Return the open files that contain initializers of ``model``."""
    tensors = (value.const_value for value in model.graph.initializers.values())
    return list(dict.fromkeys(tensor.file for tensor in tensors if isinstance(tensor, HeldTensor)))


@contextlib.contextmanager
def read_by_path(files: Collection[HeldFile]) -> Iterator[None]:
    """Return a context in which other code opens ``files`` by their paths.

    Raises:
        ModelError: if a file was overwritten, truncated or replaced meanwhile.
    """
    before = [file for file in files if file.is_in_place()]
    try:
        yield
    finally:
        for file in files:
            file.check_unchanged()
        if lost := next((file for file in before if not file.is_in_place()), None):
            raise ModelError(
                f"'{shown(lost.path)}', which contains weights, was replaced or removed while onnxruntime read it; "
                "try again"
            )


def own_file(tensor: ir.TensorProtocol) -> HeldFile | None:
    """Return the model file if ``tensor`` is stored inside it; otherwise None."""
    return tensor.file if isinstance(tensor, HeldTensor) and tensor.file.own else None

"""External data: checks, reading and writing of weights in separate files.

No file outside the model's own directory is opened.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import onnx
import onnx_ir as ir

from gradgraph.errors import ModelError, shown
from gradgraph.files.atomic import write_atomically
from gradgraph.files.held_files import CAN_HOLD, HeldFile, HeldTensor
from gradgraph.files.mapped import READ, pieces
from gradgraph.files.protos import proto_tensors
from gradgraph.files.untrusted.contained_paths import path_inside
from gradgraph.files.untrusted.regular import MissingFileError, UnreadableError, open_regular
from gradgraph.graph.checks import check_tensor

PAGE = 4096  # bytes: tensors start at page boundaries, so that runtimes can map them


class Entry(NamedTuple):
    """The file of external data, with offset and length in bytes (−1 if the stored text is not a number)."""

    location: str
    offset: int
    length: int


def is_external(tensor: onnx.TensorProto) -> bool:
    return bool(tensor.data_location == onnx.TensorProto.EXTERNAL)


def location_of(tensor: onnx.TensorProto) -> str:
    """Return the name of the file with the external data of ``tensor``; "" if there is none."""
    return next((e.value for e in tensor.external_data if e.key == "location"), "")


def external_entry(tensor: onnx.TensorProto) -> Entry:
    """Return the location of the external data of ``tensor``; a missing length is computed from type and shape."""
    entries = {e.key: e.value for e in tensor.external_data}
    location = entries.get("location", "")
    size = check_tensor(tensor.name, tensor.data_type, tensor.dims)
    try:
        return Entry(location, int(entries.get("offset") or 0), int(entries.get("length") or size))
    except ValueError:
        return Entry(location, -1, -1)


def point_at(tensor: onnx.TensorProto, location: str, offset: int, length: int) -> None:
    """Set the location of the external data of ``tensor``."""
    tensor.data_location = onnx.TensorProto.EXTERNAL
    for key, value in {"location": location, "offset": offset, "length": length}.items():
        tensor.external_data.add(key=key, value=str(value))


def lie_in(tensor: onnx.TensorProto, location: str) -> None:
    """Change the file of the external data of ``tensor`` to ``location``, keeping offset and length."""
    for entry in tensor.external_data:
        if entry.key == "location":
            entry.value = location


def put_inside(tensor: onnx.TensorProto, raw: bytes) -> None:
    """Store ``raw`` inside ``tensor`` as its data."""
    tensor.ClearField("external_data")
    tensor.data_location = onnx.TensorProto.DEFAULT
    tensor.raw_data = raw


def raw_bytes(tensor: onnx.TensorProto) -> bytes:
    """Return the data stored in ``tensor``, in any field, as the bytes of ``raw_data``."""
    if tensor.HasField("raw_data"):
        return bytes(tensor.raw_data)
    return bytes(onnx.numpy_helper.from_array(onnx.numpy_helper.to_array(tensor)).raw_data)


def is_packed(tensor: onnx.TensorProto) -> bool:
    """Whether the elements of ``tensor`` are smaller than a byte, such as int4."""
    return ir.DataType(tensor.data_type).bitwidth < 8


# --- reading ------------------------------------------------------------------------------------------


class DataFiles:
    """Checks that external tensors are in files of ``base_dir`` (and of one more folder, for a symlinked model).

    Args:
        model: the path of the model, which may be a symlink into another directory.
        remedy: the remedy in error messages about missing or damaged data; by default, to download the model again.
    """

    def __init__(self, base_dir: str | os.PathLike[str], model: Path | None = None, remedy: str = "") -> None:
        self.base, self._model, self._remedy = Path(base_dir), model, remedy
        self._sizes: dict[str, tuple[Path, int]] = {}

    def check(self, tensor: onnx.TensorProto) -> Path:
        """Return the real path of the file with the data of ``tensor``.

        Raises:
            ModelError: if the directory does not contain the file, or the file does not contain the data.
        """
        entry = external_entry(tensor)
        path, file_size = self._file(entry.location, tensor.name)
        check_range(tensor, file_size, self._remedy)
        return path

    def _file(self, location: str, name: str) -> tuple[Path, int]:
        if location not in self._sizes:
            self._sizes[location] = self._checked(
                location, f"external data '{shown(location)}' of tensor '{shown(name)}'"
            )
        return self._sizes[location]

    def _checked(self, location: str, what: str) -> tuple[Path, int]:
        try:
            real = path_inside(self.base, location, self._model)
            return real, real.stat().st_size
        except MissingFileError:
            raise ModelError(f"{what} are missing; {self._remedy or 'put that file next to the model'}") from None
        except (UnreadableError, OSError) as error:
            raise ModelError(f"{what} cannot be read ({error}); put the data next to the model") from None


def check_range(tensor: onnx.TensorProto, file_size: int, remedy: str = "") -> None:
    """Raise ModelError unless external data match type and shape, and end within a file of ``file_size`` bytes."""
    what = f"external data of tensor '{shown(tensor.name)}'"
    damaged = remedy or "export or download the model again"
    _, offset, length = external_entry(tensor)
    if offset == length == -1:
        raise ModelError(f"{what} have an offset or length that is not a number; {damaged}")
    size = check_tensor(tensor.name, tensor.data_type, tensor.dims)
    if offset < 0 or length != size:
        raise ModelError(
            f"{what} span {length:,} bytes from byte {offset:,}, but its type and shape need {size:,}; {damaged}"
        )
    if offset + length > file_size:
        remedy = remedy or "download the data file again"
        raise ModelError(f"{what} end at byte {offset + length:,}, but the file has {file_size:,} bytes; {remedy}")


def locate(proto: onnx.ModelProto, data: DataFiles | None, own: HeldFile | None = None) -> dict[str, Path | HeldFile]:
    """Check the external tensors of ``proto``; return the real path of each file, or the open file, by location.

    Args:
        data: the checks of external files; None if the folder of the model is unknown.
        own: the model file from which ``proto`` was read, if data of large tensors were left in it.

    Raises:
        ModelError: if a file is missing, damaged or outside the folder, or the folder is unknown.
    """
    located: dict[str, Path | HeldFile] = {}
    for tensor in filter(is_external, proto_tensors(proto)):
        location = external_entry(tensor).location
        if own is not None and location == own.location:
            check_range(tensor, own.size)
            located[location] = own
            continue
        if location.startswith("*/"):
            raise ModelError(
                f"tensor '{shown(tensor.name)}' refers to another process's memory; save the model with its data"
            )
        if data is None:
            raise ModelError(
                f"tensor '{shown(tensor.name)}' keeps its data in the file '{shown(location)}'; pass the model's path, "
                "or onnx_ir.load(path), so that the file can be found"
            )
        path = data.check(tensor)
        if location not in located:
            located[location] = _opened(path) if CAN_HOLD else path
    return located


def _opened(path: Path) -> HeldFile:
    try:
        with open_regular(path) as file:
            return HeldFile(path, file, own=False)
    except UnreadableError as error:
        raise ModelError(f"the external data in '{shown(path)}' cannot be read ({error}); check the file") from None


def attach(model: ir.Model, located: Mapping[str, Path | HeldFile]) -> None:
    """Set the file of every external tensor of ``model`` to its checked file in ``located``.

    Tensors in bodies and attributes are memory-mapped now.
    """
    for value in stored_values(model):
        if isinstance(value.const_value, ir.ExternalTensor):
            value.const_value = _moved(value.const_value, located)
    store_inside(value for value in stored_values(model) if value.graph is not model.graph)
    bodies: list[ir.Graph | ir.Function] = [model.graph, *model.functions.values()]
    for node in (n for body in bodies for n in body.all_nodes()):
        for attr in node.attributes.values():
            if isinstance(attr.value, ir.ExternalTensor):
                held = _held(_moved(attr.value, located))
                node.attributes[attr.name] = ir.AttrTensor(attr.name, held, doc_string=attr.doc_string)


def _moved(tensor: ir.ExternalTensor, located: Mapping[str, Path | HeldFile]) -> ir.ExternalTensor:
    real = located[str(tensor.location)]
    kept: dict[str, Any] = {"shape": tensor.shape, "name": tensor.name, "doc_string": tensor.doc_string}
    kept["metadata_props"] = dict(tensor.metadata_props)
    if isinstance(real, HeldFile):
        return HeldTensor(real, tensor.offset or 0, tensor.dtype, **kept)
    return ir.ExternalTensor(real.name, tensor.offset, tensor.length, tensor.dtype, base_dir=real.parent, **kept)


def check_found(model: ir.Model) -> None:
    """Raise ModelError if a file is missing to which the initializers of ``model`` refer."""
    tensors = (v.const_value for v in stored_values(model))
    paths = {tensor.path: tensor for tensor in tensors if type(tensor) is ir.ExternalTensor}
    for path, tensor in paths.items():
        with found(tensor):
            Path(path).stat()


@contextlib.contextmanager
def found(tensor: ir.ExternalTensor) -> Iterator[None]:
    """Return a context that converts the error about a missing file of ``tensor`` to a ModelError."""
    try:
        yield
    except FileNotFoundError:
        raise ModelError(
            f"'{shown(tensor.path)}', to which the model refers for the data of '{shown(tensor.name)}', is missing; "
            "restore that file"
        ) from None


# --- writing ------------------------------------------------------------------------------------------


def stored_values(model: ir.Model) -> list[ir.Value]:
    """Return the initializers of all graphs of ``model``, including bodies."""
    return [v for g in model.graphs() if isinstance(g, ir.Graph) for v in g.initializers.values()]


def bytes_of(weights: Iterable[ir.Value]) -> int:
    return sum(t.nbytes for v in weights if (t := v.const_value) is not None and t.dtype != ir.DataType.STRING)


def store_inside(weights: Iterable[ir.Value]) -> None:
    """Replace the external tensors of ``weights`` with mapped tensors, which protobuf writes inside the model."""
    for value in weights:
        if isinstance(value.const_value, ir.ExternalTensor):
            value.const_value = _held(value.const_value)


def _held(tensor: ir.ExternalTensor) -> ir.TensorProtocol:
    with found(tensor):
        array = tensor.numpy()
    return ir.Tensor(array, dtype=tensor.dtype, name=tensor.name, doc_string=tensor.doc_string,
                     metadata_props=dict(tensor.metadata_props))  # fmt: skip


def unused_data_name(target: Path) -> str:
    taken = set(data_names(target))
    candidates = (f"{target.name}{f'.{i}' if i else ''}.data" for i in range(len(taken) + 1))
    return next(c for c in candidates if c not in taken)


def store_outside(weights: Collection[ir.Value], folder: Path, name: str) -> None:
    """Write the data of ``weights`` to the file ``name``, and make the weights external, in place.

    Weights below 1 KiB stay in the model.
    """
    data = DataFile(name)
    stored = {v: v.const_value for v in weights if v.const_value is not None and bytes_of([v]) >= 1024}
    store_inside(v for v in weights if v not in stored)
    offsets = {v: data.place(tensor.nbytes, functools.partial(tensor_pieces, tensor)) for v, tensor in stored.items()}
    write_atomically(folder / name, itertools.chain(data.chunks(), [bytes(-data.size % PAGE)]))
    for value, tensor in stored.items():
        value.const_value = ir.ExternalTensor(
            name,
            offsets[value],
            tensor.nbytes,
            tensor.dtype,
            shape=ir.Shape(tensor.shape.numpy()),
            name=value.name or "",
            base_dir=folder,
        )


def tensor_pieces(tensor: ir.TensorProtocol) -> Iterator[bytes | memoryview]:
    """Yield the bytes of ``tensor``; for a tensor in a file, in pieces that do not stay in memory.

    Raises:
        ModelError: if the file was truncated since it was opened, or the model file was overwritten.
    """
    if isinstance(tensor, ir.LazyTensor):
        tensor = tensor.raw()  # its own method tobytes would copy the computed tensor
    if isinstance(tensor, HeldTensor):
        yield from tensor.pieces()
        return
    if not isinstance(tensor, ir.ExternalTensor):
        yield from pieces(tensor.numpy()) if _is_plain(tensor) else [tensor.tobytes()]
        return
    left = tensor.nbytes
    with found(tensor), Path(tensor.path).open("rb", buffering=0) as file:
        file.seek(tensor.offset or 0)
        while left:
            piece = file.read(min(left, READ))
            if not piece:
                raise ModelError(f"'{shown(tensor.path)}' was truncated while it was read; get that file again")
            left -= len(piece)
            yield piece


def _is_plain(tensor: ir.TensorProtocol) -> bool:
    """Whether the bytes of ``tensor`` are in memory, or in a mapped file, in their serialized form."""
    array = tensor.raw if isinstance(tensor, ir.Tensor) else None
    return isinstance(array, np.ndarray) and array.dtype.isnative and tensor.dtype.bitwidth >= 8


class DataFile:
    """A file, yet to be written, with the data of several tensors, each of which starts at a page boundary.

    Attributes:
        location: the name of the file.
        size: the size of the file in bytes, with the data placed so far.
    """

    def __init__(self, location: str) -> None:
        self.location, self.size = location, 0
        self._parts: list[tuple[int, int, Callable[[], Iterable[bytes | memoryview]]]] = []
        self._offsets: dict[Hashable, int] = {}

    def place(self, size: int, read: Callable[[], Iterable[bytes | memoryview]], key: Hashable = None) -> int:
        """Reserve ``size`` bytes, which ``read`` returns later, and return their offset in the file.

        Tensors with equal keys, unless None, share one place.
        """
        if key in self._offsets:
            return self._offsets[key]
        offset = self.size + -self.size % PAGE
        self._parts.append((offset, size, read))
        self.size = offset + size
        if key is not None:
            self._offsets[key] = offset
        return offset

    def chunks(self) -> Iterator[bytes | memoryview]:
        """Yield the content of the file in pieces."""
        written = 0
        for offset, size, read in self._parts:
            yield bytes(offset - written)
            yield from read()
            written = offset + size


def data_names(target: Path) -> list[str]:
    """Return the names of the existing files among ``<name>.data``, ``<name>.1.data``, …."""
    if not target.parent.is_dir():
        return []
    names = [p.name for p in target.parent.iterdir() if p.name.startswith(target.name) and p.name.endswith(".data")]
    middles = {n: n[len(target.name) : -len(".data")] for n in names}
    return [n for n, middle in middles.items() if middle == "" or (middle.startswith(".") and middle[1:].isdigit())]

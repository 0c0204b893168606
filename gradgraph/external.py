"""External data: weights in files beside a model, where they may lie, and how they are written there.

Reading opens no file outside the model's own directory.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import onnx
import onnx_ir as ir

from gradgraph.atomic import write_atomically
from gradgraph.checks import check_tensor
from gradgraph.errors import ModelError, shown
from gradgraph.protos import proto_tensors

# --- reading ------------------------------------------------------------------------------------------


class DataFiles:
    """The one directory (two for a symlinked model) whose files external tensors may lie in."""

    def __init__(self, base_dir: str | os.PathLike[str], model: Path | None = None) -> None:
        self.base = Path(base_dir)
        self.roots = [Path(os.path.realpath(base_dir))]
        if model is not None and model.is_symlink():
            self.roots.append(Path(os.path.realpath(model)).parent)
        self._sizes: dict[str, tuple[Path, int]] = {}

    def file(self, location: str, name: str) -> tuple[Path, int]:
        """The real path behind ``location`` and its size, after all checks."""
        if location not in self._sizes:
            self._sizes[location] = self._checked(
                location, f"external data '{shown(location)}' of tensor '{shown(name)}'"
            )
        return self._sizes[location]

    def _checked(self, location: str, what: str) -> tuple[Path, int]:
        parts = location.replace("\\", "/").split("/")
        if not location or "\0" in location:
            raise ModelError(f"{what} name no file; the model is damaged")
        if parts[0] == "" or ":" in parts[0] or ".." in parts:
            raise ModelError(f"{what} lie outside the model's folder; only relative paths within it are read")
        path = self.base / location
        try:
            real = path.resolve(strict=True)
            status = real.stat()
        except (OSError, RuntimeError):
            raise ModelError(f"{what} are missing; put that file beside the model") from None
        inside = any(real.is_relative_to(root) for root in self.roots[:1]) or real.parent in self.roots[1:]
        if not inside:
            raise ModelError(f"{what} are a symlink out of the model's folder; copy the file itself beside the model")
        if not stat.S_ISREG(status.st_mode):
            raise ModelError(f"{what} are not a regular file; copy the data beside the model")
        if status.st_nlink > 1:
            raise ModelError(f"{what} are a hard link to a file elsewhere; copy the file itself beside the model")
        return real, status.st_size


def locate(proto: onnx.ModelProto, data: DataFiles | None) -> dict[str, Path]:
    """Check all external tensors of ``proto``; the real file of each location."""
    located: dict[str, Path] = {}
    for tensor in proto_tensors(proto):
        if tensor.data_location != onnx.TensorProto.EXTERNAL:
            continue
        entries = {e.key: e.value for e in tensor.external_data}
        location = entries.get("location", "")
        if location.startswith("*/"):
            raise ModelError(
                f"tensor '{shown(tensor.name)}' refers to another process's memory; save the model with its data"
            )
        if data is None:
            raise ModelError(
                f"tensor '{shown(tensor.name)}' keeps its data in the file '{shown(location)}'; pass the model's path, "
                "or base_dir, so that the file can be found"
            )
        located[location], file_size = data.file(location, tensor.name)
        _check_range(tensor, entries, file_size)
    return located


def _check_range(tensor: onnx.TensorProto, entries: Mapping[str, str], file_size: int) -> None:
    what = f"external data of tensor '{shown(tensor.name)}'"
    size = check_tensor(tensor.name, tensor.data_type, tensor.dims)
    try:
        offset, length = int(entries.get("offset") or 0), int(entries.get("length") or size)
    except ValueError:
        raise ModelError(f"{what} have an offset or length that is no number; the model is damaged") from None
    if offset < 0 or length < 0 or length != size:
        raise ModelError(
            f"{what} span {length} bytes from {offset}, but its type and shape need {size}; the model is damaged"
        )
    if offset + length > file_size:
        raise ModelError(f"{what} end at byte {offset + length} of a file of {file_size}; download the data file again")


def attach(model: ir.Model, located: Mapping[str, Path]) -> None:
    """Point every external tensor at the real file that was checked."""
    for graph in model.graphs():
        for value in graph.initializers.values() if isinstance(graph, ir.Graph) else ():
            if isinstance(value.const_value, ir.ExternalTensor):
                value.const_value = _moved(value.const_value, located)
    bodies: list[ir.Graph | ir.Function] = [model.graph, *model.functions.values()]
    for node in (n for body in bodies for n in body.all_nodes()):
        for attr in node.attributes.values():
            if isinstance(attr.value, ir.ExternalTensor):
                node.attributes[attr.name] = ir.AttrTensor(attr.name, _moved(attr.value, located))


def _moved(tensor: ir.ExternalTensor, located: Mapping[str, Path]) -> ir.ExternalTensor:
    real = located[str(tensor.location)]
    return ir.ExternalTensor(
        real.name,
        tensor.offset,
        tensor.length,
        tensor.dtype,
        shape=tensor.shape,
        name=tensor.name,
        base_dir=real.parent,
    )


# --- writing ------------------------------------------------------------------------------------------


def bytes_of(weights: Iterable[ir.Value]) -> int:
    return sum(t.nbytes for v in weights if (t := v.const_value) is not None and t.dtype != ir.DataType.STRING)


def store_inside(weights: Iterable[ir.Value]) -> None:
    for value in weights:
        if isinstance(value.const_value, ir.ExternalTensor):
            value.const_value = ir.Tensor(value.const_value.numpy(), dtype=value.const_value.dtype, name=value.name)


def unused_data_name(target: Path) -> str:
    taken = set(data_names(target))
    candidates = (f"{target.name}{f'.{i}' if i else ''}.data" for i in range(len(taken) + 1))
    return next(c for c in candidates if c not in taken)


def store_outside(weights: Iterable[ir.Value], folder: Path, name: str) -> None:
    stored = [v for v in weights if bytes_of([v]) >= 1024]
    write_atomically(folder / name, _padded(v.const_value for v in stored))
    offset = 0
    for value in stored:
        tensor = value.const_value
        assert tensor is not None
        value.const_value = ir.ExternalTensor(
            name,
            offset,
            tensor.nbytes,
            tensor.dtype,
            shape=ir.Shape(tensor.shape.numpy()),
            name=value.name or "",
            base_dir=folder,
        )
        offset += tensor.nbytes + -tensor.nbytes % _PAGE


_PAGE = 4096  # tensors start at page boundaries, so that runtimes can map them


def _padded(tensors: Iterable[ir.TensorProtocol | None]) -> Iterator[bytes]:
    for tensor in tensors:
        if tensor is not None:
            yield tensor.tobytes()
            yield bytes(-tensor.nbytes % _PAGE)


def data_names(target: Path) -> list[str]:
    """``<name>.data``, ``<name>.1.data``, … as far as they are there."""
    if not target.parent.is_dir():
        return []
    names = [p.name for p in target.parent.iterdir() if p.name.startswith(target.name) and p.name.endswith(".data")]
    middles = {n: n[len(target.name) : -len(".data")] for n in names}
    return [n for n, middle in middles.items() if middle == "" or (middle.startswith(".") and middle[1:].isdigit())]

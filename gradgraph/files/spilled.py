"""Spilling: large weights in memory are moved to a temporary file, which all sessions map."""

from __future__ import annotations

import functools
import os
import shutil
import tempfile
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir

from gradgraph.errors import OutputError
from gradgraph.files.atomic import explain_errors
from gradgraph.files.external import PAGE, DataFile, bytes_of, store_outside, tensor_pieces
from gradgraph.files.large_weights import LEAST_BYTES
from gradgraph.files.mapped import Array, pieces

_NAME = "weights.data"


class Folder:
    """A temporary folder that is deleted with its last reference. Mappings of its files stay valid.

    Args:
        inside: the parent folder; by default the system's folder for temporary files.
    """

    def __init__(self, inside: Path | None = None) -> None:
        self.path = Path(tempfile.mkdtemp(prefix="gradgraph-", dir=inside))
        weakref.finalize(self, _remove, self.path, os.getpid())

    def __deepcopy__(self, memo: Any) -> Folder:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return _no_folder, ()  # a copy in another process does not own the folder, and must not delete it


def _remove(path: Path, owner: int) -> None:
    if os.getpid() == owner:  # only the owner removes it, not a forked child
        shutil.rmtree(path, ignore_errors=True)


def _no_folder() -> None:
    return None


class SpilledWeights:
    """A callable that moves large weights to a file in ``folder``, which must exist as long as the weights are used.

    It is called after each new weight, so that at most one large weight is in memory.
    """

    def __init__(self, folder: Path) -> None:
        self._path = folder / _NAME
        with explain_errors(self._path), self._path.open("wb"):
            pass  # create it empty

    def __call__(self, model: ir.Model) -> None:
        """Move the large weights of ``model`` from memory to the file, in place.

        Raises:
            OutputError: if the file cannot be written.
        """
        for value in model.graph.initializers.values():
            tensor = value.const_value
            if tensor is None or isinstance(tensor, ir.ExternalTensor) or bytes_of([value]) < LEAST_BYTES:
                continue
            with explain_errors(self._path), self._path.open("ab") as file:
                file.write(bytes(-file.tell() % PAGE))
                offset = file.tell()
                file.writelines(tensor_pieces(tensor))
            value.const_value = ir.ExternalTensor(
                self._path.name, offset, tensor.nbytes, tensor.dtype, shape=ir.Shape(tensor.shape.numpy()),
                name=value.name or "", base_dir=self._path.parent,
            )  # fmt: skip


def spill(model: ir.Model, least: int, limit: int) -> Folder | None:
    """Move weights of ``model`` of at least ``least`` bytes from memory to a temporary file, in place.

    Returns:
        The folder of the file, to be kept as long as the weights are used; None if these weights total at most
        ``limit`` bytes and stay in memory.

    Raises:
        OutputError: if the file cannot be written.
    """
    held = [
        v
        for v in model.graph.initializers.values()
        if v.const_value is not None and not isinstance(v.const_value, ir.ExternalTensor) and bytes_of([v]) >= least
    ]
    if bytes_of(held) <= limit:
        return None
    folder = Folder()
    try:
        store_outside(held, folder.path, _NAME)
    except OutputError as error:
        raise OutputError(
            f"{bytes_of(held) / 1e9:.1f} GB of weights in memory are too many for protobuf, and cannot be written to a "
            f"temporary file: {error}",
            remedy="set TMPDIR to a folder with more space, or write the model there first, onnx_ir.save(model, path, "
            "external_data='weights.data'), and build that path",
            shell="set TMPDIR to a folder with more space",
        ) from None
    return folder


def spill_arrays(arrays: Sequence[Array]) -> tuple[list[Array], Folder]:
    """Copy ``arrays`` to a temporary file, and map the file.

    Returns:
        The mapped bytes of each array, page-aligned, and the folder of the file, to be kept as long as the bytes are
        used.

    Raises:
        OSError: if the file cannot be written.
    """
    folder = Folder()
    data = DataFile(_NAME)
    offsets = [data.place(array.nbytes, functools.partial(pieces, array)) for array in arrays]
    with (folder.path / _NAME).open("wb") as file:
        file.writelines(data.chunks())
    whole = np.memmap(folder.path / _NAME, np.uint8, "r")
    return [whole[at : at + array.nbytes] for at, array in zip(offsets, arrays, strict=True)], folder

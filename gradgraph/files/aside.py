"""Weights that lie in memory, more of them than a protobuf message holds, in a temporary file that all sessions map."""

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
from gradgraph.files.atomic import says_why
from gradgraph.files.external import PAGE, DataFile, bytes_of, store_outside, tensor_pieces
from gradgraph.files.large_weights import LEAST_BYTES
from gradgraph.files.mapped import Array, pieces

_NAME = "weights.data"


class Folder:
    """A folder for a moment: it goes when nobody refers to it any more. What was mapped of its files stays.

    Args:
        inside: the folder that it lies in; by default that of temporary files.
    """

    def __init__(self, inside: Path | None = None) -> None:
        self.path = Path(tempfile.mkdtemp(prefix="gradgraph-", dir=inside))
        weakref.finalize(self, _remove, self.path, os.getpid())

    def __deepcopy__(self, memo: Any) -> Folder:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return _no_folder, ()  # another process reads the file while this one keeps it


def _remove(path: Path, owner: int) -> None:
    if os.getpid() == owner:  # and not a child of it, which ends sooner
        shutil.rmtree(path, ignore_errors=True)


def _no_folder() -> None:
    return None


class PutAside:
    """Large weights that are made one after the other, each put into a file before the next one is made.

    Args:
        folder: that the file lies in, and as long as the weights are read.
    """

    def __init__(self, folder: Path) -> None:
        self._path = folder / _NAME
        with says_why(self._path), self._path.open("wb"):
            pass  # it is there, and empty

    def __call__(self, model: ir.Model) -> None:
        """Let the large weights of ``model`` that lie in memory lie in the file, in place; raises OutputError."""
        for value in model.graph.initializers.values():
            tensor = value.const_value
            if tensor is None or isinstance(tensor, ir.ExternalTensor) or bytes_of([value]) < LEAST_BYTES:
                continue
            with says_why(self._path), self._path.open("ab") as file:
                file.write(bytes(-file.tell() % PAGE))
                offset = file.tell()
                file.writelines(tensor_pieces(tensor))
            value.const_value = ir.ExternalTensor(
                self._path.name, offset, tensor.nbytes, tensor.dtype, shape=ir.Shape(tensor.shape.numpy()),
                name=value.name or "", base_dir=self._path.parent,
            )  # fmt: skip


def write_aside(model: ir.Model, least: int, limit: int) -> Folder | None:
    """Let the weights of ``model`` that lie in memory, of ``least`` bytes and more, lie in a temporary file, in place.

    Returns:
        What keeps that file; None where they have ``limit`` bytes or less, and stay in memory.

    Raises:
        OutputError: they cannot be written.
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
            remedy="let TMPDIR name a folder with more room, or write the model there first, onnx_ir.save(model, path, "
            "external_data='weights.data'), and build that path",
            shell="let TMPDIR name a folder with more room",
        ) from None
    return folder


def mapped_aside(arrays: Sequence[Array]) -> tuple[list[Array], Folder]:
    """The bytes of ``arrays`` in a temporary file, mapped, each at the start of a page; and what keeps that file.

    Raises:
        OSError: they cannot be written.
    """
    folder = Folder()
    data = DataFile(_NAME)
    offsets = [data.place(array.nbytes, functools.partial(pieces, array)) for array in arrays]
    with (folder.path / _NAME).open("wb") as file:
        file.writelines(data.chunks())
    whole = np.memmap(folder.path / _NAME, np.uint8, "r")
    return [whole[at : at + array.nbytes] for at, array in zip(offsets, arrays, strict=True)], folder

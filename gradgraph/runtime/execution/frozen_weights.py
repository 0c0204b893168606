"""Frozen weights in external data files, mapped once and shared by all sessions."""

from __future__ import annotations

import contextlib
import logging
import math
import os
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort

from gradgraph.files.external import Entry, external_entry, is_external, is_packed, lie_in, location_of
from gradgraph.files.held_files import HeldFile, read_by_path
from gradgraph.files.large_weights import LEAST_KEPT
from gradgraph.files.mapped import Array, passing_through
from gradgraph.files.models import to_proto
from gradgraph.files.protos import reads
from gradgraph.files.spilled import Folder, spill_arrays
from gradgraph.runtime.execution.ort_values import to_ortvalue
from gradgraph.step.bases import bases_of, to_proto_beside
from gradgraph.step.step import Step

log = logging.getLogger("gradgraph")

_AS_THEY_LIE = ("DequantizeLinear", "Gather", "GatherND", "PackedMatMul")
"""Operators that read weights in the order of the file."""
_PACKED_BY = ("MatMul", "Gemm", "FusedMatMul", "MatMulNBits", "Transpose")
"""Operators of which each keeps its own copy of a weight; onnxruntime transposes weights when it opens a session."""


class FrozenWeights:
    """Initializers with external data, mapped into memory.

    Args:
        file_of: returns the open file of an initializer.

    Attributes:
        size: total size in bytes; a part of a file that several initializers share counts once.

    Raises:
        ModelError: if a file was changed or truncated.
    """

    def __init__(self, file_of: Callable[[onnx.TensorProto], HeldFile], tensors: Sequence[onnx.TensorProto]) -> None:
        self._file_of = file_of
        self._files = {external_entry(tensor).location: file_of(tensor) for tensor in tensors}
        self._values: dict[tuple[Any, ...], ort.OrtValue] = {}
        self._raw: list[np.ndarray[Any, Any]] = []
        lying = [(tensor, self._read(tensor)) for tensor in tensors]
        self._moved, self._folder = _at_whole_addresses(lying)
        for tensor, raw in lying:
            self._value(tensor, raw)
        self.size = sum({place[:3]: place[2] for place in self._values}.values())

    def _read(self, tensor: onnx.TensorProto) -> Array:
        """Return the bytes of an initializer, mapped; raise ModelError if its file was changed."""
        entry = external_entry(tensor)
        return self._file_of(tensor).part(entry.offset, entry.length)

    def check_unchanged(self) -> None:
        """Raise ModelError if a file was overwritten or truncated since it was opened."""
        for file in self._files.values():
            file.check_unchanged()

    def read_by_path(self) -> contextlib.AbstractContextManager[None]:
        """Return a context in which onnxruntime opens the files by their paths; see ``held_files.read_by_path``."""
        return read_by_path(self._files.values())

    def _value(self, tensor: onnx.TensorProto, raw: Array | None = None) -> ort.OrtValue:
        """Return an OrtValue over the bytes of an initializer: ``raw``, or by default its mapped file.

        OrtValues are cached by location, type and shape, since lowered models may use bytes in a different shape.
        """
        entry = external_entry(tensor)
        key = (*entry, tensor.data_type, *tensor.dims)
        if key not in self._values:
            raw = self._read(tensor) if raw is None else raw
            raw = self._moved.get(entry, raw)
            self._raw.append(raw)
            if is_packed(tensor):
                # two elements per byte: onnxruntime only needs the address, the logical shape and the type
                dims = tuple(tensor.dims)
                strides = tuple(math.prod(dims[i + 1 :]) for i in range(len(dims)))
                seen = np.lib.stride_tricks.as_strided(raw, dims, strides, writeable=False)
                value = ort.OrtValue.ortvalue_from_numpy_with_onnx_type(seen, tensor.data_type)
            else:
                value = to_ortvalue(_array(tensor, raw))
            self._values[key] = value
        return self._values[key]

    def passing_through(self) -> contextlib.AbstractContextManager[None]:
        """Return a context in which pages of the mapped weights are released after sessions have read them."""
        return passing_through(self._raw)

    def holds(self, tensor: onnx.TensorProto, raw: bytes) -> bool:
        """Return whether the bytes of ``tensor`` in its file equal ``raw``."""
        return np.array_equal(self._read(tensor).view(np.uint8), np.frombuffer(raw, np.uint8))

    def given_to(self, settings: ort.SessionOptions, model: onnx.ModelProto, copied: bool) -> onnx.ModelProto:
        """Add the external weights of ``model`` to session options, in place; return the model for the session.

        With ``copied``, the session may copy the weights of matrix products into its own memory (repacked): it reads
        them from their files one by one. Otherwise all sessions share the mapped weights, as operators in
        ``_AS_THEY_LIE`` always do.
        """
        used = {t.name: t for t in model.graph.initializer if is_external(t)}
        if not used:
            return model
        packed = repacked(model) if copied else set()
        locations = {name: location_of(tensor) for name, tensor in used.items()}
        one_of_each = {locations[name]: tensor for name, tensor in used.items()}
        opened = {location: self._file_of(tensor) for location, tensor in one_of_each.items()}
        files = {name: opened[location].path.resolve() for name, location in locations.items()}
        in_place = {location for location, file in opened.items() if file.is_in_place()}
        # only in memory; onnxruntime folds constants of weights in files from those files, even if it is given values
        held = {name for name, location in locations.items() if location not in in_place}
        held |= {name for name in packed.intersection(used) if external_entry(used[name]) in self._moved}
        folder = _above({files[name].parent for name in used if name not in held})  # onnxruntime supports only one
        far = [name for name in used if folder is None or name in held]
        if far:
            settings.add_external_initializers(far, [self._value(used[name]) for name in far])
        if not copied:
            settings.add_session_config_entry("session.disable_prepacking", "1")
        if folder is None:
            return model
        settings.add_session_config_entry("session.model_external_initializers_file_folder_path", str(folder))
        slim = onnx.ModelProto()
        slim.CopyFrom(model)
        for tensor in slim.graph.initializer:
            if tensor.name in used and tensor.name not in far:
                if tensor.name not in packed:
                    settings.add_initializer(tensor.name, self._value(used[tensor.name]))
                lie_in(tensor, files[tensor.name].relative_to(folder).as_posix())
        return slim


def repacked(model: onnx.ModelProto) -> set[str]:
    """Return the names of the tensors that a session copies if it may copy weights: not only read as in the file."""
    return {x for node in model.graph.node if node.op_type not in _AS_THEY_LIE for x in reads(node)}


def read_in_place(model: onnx.ModelProto) -> set[str]:
    """Return the names of the tensors that nodes read in the order of the file."""
    return {x for node in model.graph.node if node.op_type in _AS_THEY_LIE for x in reads(node)}


def copies_of(model: onnx.ModelProto) -> Counter[str]:
    """Return how many copies of each tensor a session keeps if it may copy weights.

    Each product (such as of the forward and the backward pass) packs its own; all other nodes that do not read weights
    in the order of the file share one.
    """
    found, shared = Counter[str](), set[str]()
    for node in model.graph.node:
        if node.op_type in _PACKED_BY:
            found.update(reads(node))
        elif node.op_type not in _AS_THEY_LIE:
            shared.update(reads(node))
    found.update(shared)
    return found


def _above(folders: Collection[Path]) -> Path | None:
    """Return the folder that contains all ``folders``; None if there is none."""
    try:
        return Path(os.path.commonpath(folders)) if folders else None
    except ValueError:  # on several drives
        return None


def computes_with_weights(model: onnx.ModelProto) -> bool:
    """Whether the model computes constants from external weights, such as transposes, which onnxruntime may fold."""
    stored = {"", *(tensor.name for tensor in model.graph.initializer)}
    lying = {tensor.name for tensor in model.graph.initializer if is_external(tensor)}
    return any(
        node.op_type not in _AS_THEY_LIE and not lying.isdisjoint(node.input) and stored.issuperset(node.input)
        for node in model.graph.node
    )


def _at_whole_addresses(
    weights: Sequence[tuple[onnx.TensorProto, Array]],
) -> tuple[dict[Entry, Array], Folder | None]:
    """Copy misaligned weights (such as those inside a .onnx file) to a temporary mapped file.

    Return the mapped copies by original location, and the folder of the file. A session that packs weights reads them
    from that file, so that no second copy stays in memory. If the weights are small, or the file cannot be written,
    return ({}, None); ``_array`` then copies the weights in memory.
    """
    moved = {external_entry(tensor): raw for tensor, raw in weights if not _is_aligned(tensor, raw)}
    if sum(raw.nbytes for raw in moved.values()) < LEAST_KEPT:
        return {}, None
    try:
        arrays, folder = spill_arrays(list(moved.values()))
    except OSError as error:
        log.debug("misaligned weights are copied in memory, since a temporary file cannot be written: %s", error)
        return {}, None
    return dict(zip(moved, arrays, strict=True)), folder


def _is_aligned(tensor: onnx.TensorProto, raw: Array) -> bool:
    address: int = raw.__array_interface__["data"][0]
    return is_packed(tensor) or address % onnx.helper.tensor_dtype_to_np_dtype(tensor.data_type).itemsize == 0


def proto_and_weights(model: ir.Model) -> tuple[onnx.ModelProto, FrozenWeights | None]:
    """Return ``model`` as a protobuf message, and its large external weights, which stay in their files."""
    bases = bases_of(model)
    if not bases:
        return to_proto(model), None
    proto = to_proto_beside(model, bases)
    files = {location: base.opened() for location, base in bases.items()}
    outside = [t for t in proto.graph.initializer if is_external(t)]
    return proto, FrozenWeights(lambda tensor: files[location_of(tensor)], outside)


def external_weights(step: Step, *models: onnx.ModelProto) -> FrozenWeights:
    """Map the external initializers of a step's models; raise ModelError if a file was changed or truncated."""
    tensors = [t for model in models for t in model.graph.initializer if is_external(t)]
    return FrozenWeights(step.file_of, tensors)


def initial_value(step: Step, tensor: onnx.TensorProto) -> np.ndarray[Any, Any]:
    """Return an initializer as an array, mapped if external; raise ModelError if its file was changed or truncated."""
    if is_external(tensor) and not is_packed(tensor):
        return _array(tensor, step.external(tensor))
    if is_external(tensor):
        inside = onnx.TensorProto(name=tensor.name, data_type=tensor.data_type, dims=tensor.dims)
        inside.raw_data = step.external(tensor).tobytes()
        tensor = inside
    return np.asarray(onnx.numpy_helper.to_array(tensor), onnx.helper.tensor_dtype_to_np_dtype(tensor.data_type))


def _array(tensor: onnx.TensorProto, raw: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Return the array of an initializer over its bytes ``raw``; misaligned bytes are copied."""
    mapped = raw.view(onnx.helper.tensor_dtype_to_np_dtype(tensor.data_type)).reshape(tuple(tensor.dims))
    return np.require(mapped, requirements="A")  # in files of other programs, a tensor may begin at any byte

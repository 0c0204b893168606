"""Weights that nobody trains and that lie in files beside the models: mapped once, and given to all sessions."""

from __future__ import annotations

import contextlib
import logging
import math
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort

from gradgraph.files.external import Entry, external_entry, is_external, is_packed, lie_in, location_of
from gradgraph.files.large_weights import LEAST_KEPT
from gradgraph.files.mapped import Array, passing_through
from gradgraph.files.models import to_proto
from gradgraph.files.protos import reads
from gradgraph.files.spilled import Folder, spill_arrays
from gradgraph.runtime.execution.ort_values import to_ortvalue
from gradgraph.step.bases import bases_of, to_proto_beside
from gradgraph.step.step import Step
from gradgraph.step.weight_files import MappedFile

log = logging.getLogger("gradgraph")

_AS_THEY_LIE = ("DequantizeLinear", "Gather", "GatherND", "PackedMatMul")
"""Operators that read weights in the order of the file."""


class FrozenWeights:
    """Initializers whose data lie in files beside the models.

    Args:
        read: gives the bytes of one, in the memory that its file is mapped to.
        file_of: the file that it lies in.
        tensors: all of them.

    Attributes:
        size: their bytes.

    Raises:
        ModelError: a file is not what was saved, or was cut.
    """

    def __init__(
        self,
        read: Callable[[onnx.TensorProto], np.ndarray[Any, Any]],
        file_of: Callable[[onnx.TensorProto], Path],
        tensors: Sequence[onnx.TensorProto],
    ) -> None:
        self._read, self._file_of = read, file_of
        self._values: dict[tuple[Any, ...], ort.OrtValue] = {}
        self._raw: list[np.ndarray[Any, Any]] = []
        lying = [(tensor, read(tensor)) for tensor in tensors]
        self._moved, self._folder = _at_whole_addresses(lying)
        for tensor, raw in lying:
            self._value(tensor, raw)
        self.size = sum({place[:3]: place[2] for place in self._values}.values())

    def _value(self, tensor: onnx.TensorProto, raw: Array | None = None) -> ort.OrtValue:
        """An OrtValue over the memory of a tensor's file; lowered models may see the same bytes in another way."""
        entry = external_entry(tensor)
        key = (*entry, tensor.data_type, *tensor.dims)
        if key not in self._values:
            raw = self._read(tensor) if raw is None else raw
            raw = self._moved.get(entry, raw)
            self._raw.append(raw)
            if is_packed(tensor):
                # onnxruntime takes the address, the sizes and the type; of its elements, two share a byte
                dims = tuple(tensor.dims)
                strides = tuple(math.prod(dims[i + 1 :]) for i in range(len(dims)))
                seen = np.lib.stride_tricks.as_strided(raw, dims, strides, writeable=False)
                value = ort.OrtValue.ortvalue_from_numpy_with_onnx_type(seen, tensor.data_type)
            else:
                value = to_ortvalue(_array(tensor, raw))
            self._values[key] = value
        return self._values[key]

    def passing_through(self) -> contextlib.AbstractContextManager[None]:
        """A block in which sessions read the weights, and their files do not fill memory."""
        return passing_through(self._raw)

    def holds(self, tensor: onnx.TensorProto, raw: bytes) -> bool:
        """Whether the file of ``tensor`` has these bytes for it."""
        return np.array_equal(self._read(tensor).view(np.uint8), np.frombuffer(raw, np.uint8))

    def given_to(self, settings: ort.SessionOptions, model: onnx.ModelProto, copied: bool) -> onnx.ModelProto:
        """Add the weights of ``model`` to the settings of its session; returns the model to make that of.

        Args:
            copied: what products read, into the session's own memory, in the order in which they do. Else it stays
                where it is and all sessions share it, as they do what only ``_AS_THEY_LIE`` read.
        """
        used = {t.name: t for t in model.graph.initializer if is_external(t)}
        if not used:
            return model
        packed = {x for n in model.graph.node if n.op_type not in _AS_THEY_LIE for x in reads(n)} if copied else set()
        locations = {name: location_of(tensor) for name, tensor in used.items()}
        one_of_each = {locations[name]: tensor for name, tensor in used.items()}
        paths = {location: self._file_of(tensor) for location, tensor in one_of_each.items()}
        files = {name: paths[location] for name, location in locations.items()}
        folders = Counter(files[name].parent for name in used if name not in packed)
        folder = folders.most_common(1)[0][0] if folders else None  # onnxruntime knows one
        far = [name for name in used if name in packed or files[name].parent != folder]
        if far:
            settings.add_external_initializers(far, [self._value(used[name]) for name in far])
        if folder is None:
            return model
        settings.add_session_config_entry("session.model_external_initializers_file_folder_path", str(folder))
        if not copied:
            settings.add_session_config_entry("session.disable_prepacking", "1")
        slim = onnx.ModelProto()
        slim.CopyFrom(model)
        for tensor in slim.graph.initializer:
            if tensor.name in used and tensor.name not in far:
                settings.add_initializer(tensor.name, self._value(used[tensor.name]))
                lie_in(tensor, files[tensor.name].name)
        return slim


def computes_with_weights(model: onnx.ModelProto) -> bool:
    """Whether onnxruntime may compute further constants of weights that lie in files, such as their transposes."""
    stored = {"", *(tensor.name for tensor in model.graph.initializer)}
    lying = {tensor.name for tensor in model.graph.initializer if is_external(tensor)}
    return any(
        node.op_type not in _AS_THEY_LIE and not lying.isdisjoint(node.input) and stored.issuperset(node.input)
        for node in model.graph.node
    )


def _at_whole_addresses(
    weights: Sequence[tuple[onnx.TensorProto, Array]],
) -> tuple[dict[Entry, Array], Folder | None]:
    """Weights that begin between two numbers, as they do inside a .onnx, in a temporary file, mapped; and that file.

    So a session that packs them does so from there, and no copy of them stays in memory. Few of them are left to
    ``_array``, and so are all where the file cannot be written.
    """
    moved = {external_entry(tensor): raw for tensor, raw in weights if not _is_aligned(tensor, raw)}
    if sum(raw.nbytes for raw in moved.values()) < LEAST_KEPT:
        return {}, None
    try:
        arrays, folder = spill_arrays(list(moved.values()))
    except OSError as error:
        log.debug("weights are copied in memory, as no temporary file can be written: %s", error)
        return {}, None
    return dict(zip(moved, arrays, strict=True)), folder


def _is_aligned(tensor: onnx.TensorProto, raw: Array) -> bool:
    address: int = raw.__array_interface__["data"][0]
    return is_packed(tensor) or address % onnx.helper.tensor_dtype_to_np_dtype(tensor.data_type).itemsize == 0


def proto_and_weights(model: ir.Model) -> tuple[onnx.ModelProto, FrozenWeights | None]:
    """``model`` as protobuf; large weights of its external data stay in their files, and are given to its sessions."""
    bases = bases_of(model)
    if not bases:
        return to_proto(model), None
    proto = to_proto_beside(model, bases)
    files = {location: base.held or MappedFile(base.path, None) for location, base in bases.items()}

    def read(tensor: onnx.TensorProto) -> np.ndarray[Any, Any]:
        entry = external_entry(tensor)
        return files[entry.location].part(entry.offset, entry.length)

    def file_of(tensor: onnx.TensorProto) -> Path:
        return bases[external_entry(tensor).location].path.resolve()

    return proto, FrozenWeights(read, file_of, [t for t in proto.graph.initializer if is_external(t)])


def external_weights(step: Step, *models: onnx.ModelProto) -> FrozenWeights:
    """The large initializers of models of a step, mapped from their files and not read into memory, or ModelError."""
    tensors = [t for model in models for t in model.graph.initializer if is_external(t)]
    return FrozenWeights(step.external, step.file_of, tensors)


def initial_value(step: Step, tensor: onnx.TensorProto) -> np.ndarray[Any, Any]:
    """An initializer of one of a step's models; one that lies beside them is mapped; raises ModelError."""
    if is_external(tensor) and not is_packed(tensor):
        return _array(tensor, step.external(tensor))
    if is_external(tensor):
        inside = onnx.TensorProto(name=tensor.name, data_type=tensor.data_type, dims=tensor.dims)
        inside.raw_data = step.external(tensor).tobytes()
        tensor = inside
    return np.asarray(onnx.numpy_helper.to_array(tensor), onnx.helper.tensor_dtype_to_np_dtype(tensor.data_type))


def _array(tensor: onnx.TensorProto, raw: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """The numbers of ``tensor``, whose bytes are ``raw``."""
    mapped = raw.view(onnx.helper.tensor_dtype_to_np_dtype(tensor.data_type)).reshape(tuple(tensor.dims))
    return np.require(mapped, requirements="A")  # files of others may have it begin at any byte

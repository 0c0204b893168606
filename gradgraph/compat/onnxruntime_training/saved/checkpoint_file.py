"""The checkpoint file: parameters, optimizer state and properties, in the format of onnxruntime-training 1.19.

A nominal checkpoint contains the names of the parameters without their values. A checkpoint of more than EXTERNAL bytes
has its tensors in a second file, ``<file>.data``.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, TypeVar

import numpy as np
import onnx

from gradgraph.compat.onnxruntime_training.saved import flatbuffer
from gradgraph.errors import CheckpointError, shown
from gradgraph.files.atomic import write_atomically

IDENTIFIER = b"ODTC"
VERSION = 2
EXTERNAL = 1_800 << 20  # bytes of tensors: offsets in a flatbuffer have 31 bits
SMALLEST_OUTSIDE = 64  # bytes: smaller tensors are never written to the second file
GROUP = "group0"  # one group for all parameters

T = TypeVar("T")
Array = np.ndarray[Any, Any]
Property = int | float | str

_SCHEMA: flatbuffer.Schema = {
    "Checkpoint": (
        ("version", "i32"),
        ("module_state", "ModuleState"),
        ("optimizer_groups", "[OptimizerGroup]"),
        ("property_bag", "PropertyBag"),
    ),
    "ModuleState": (
        ("requires_grad_params", "[Tensor]"),
        ("frozen_params", "[Tensor]"),
        ("is_nominal_state", "bool"),
        ("has_external_data", "bool"),
    ),
    "OptimizerGroup": (
        ("group_name", "string"),
        ("step", "i64"),
        ("initial_learning_rate", "f32"),
        ("optimizer_states", "[ParameterOptimizerState]"),
    ),
    "ParameterOptimizerState": (("param_name", "string"), ("momentums", "[Tensor]")),
    "PropertyBag": (("ints", "[IntProperty]"), ("floats", "[FloatProperty]"), ("strings", "[StringProperty]")),
    "IntProperty": (("name", "string"), ("value", "i64")),
    "FloatProperty": (("name", "string"), ("value", "f32")),
    "StringProperty": (("name", "string"), ("value", "string")),
    "Tensor": (
        ("name", "string"),
        ("doc_string", "string"),
        ("dims", "[i64]"),
        ("data_type", "i32"),
        ("raw_data", "[u8]"),
        ("string_data", "[string]"),
        ("external_data_offset", "i64"),
    ),
}


@dataclass
class OptimizerGroup(Generic[T]):
    """The state of an optimizer.

    Attributes:
        step: the number of updates so far.
        initial_lr: the initial learning rate of a schedule.
        moments: for each parameter, its moments by name ("momentum0", …): arrays, or tensors of onnxruntime.
    """

    step: int = 0
    initial_lr: float = float(np.float32(1e-3))
    moments: dict[str, dict[str, T]] = field(default_factory=dict)


@dataclass
class Checkpoint:
    """The contents of a checkpoint file.

    Attributes:
        trained, frozen: parameters by name; empty arrays if the checkpoint is nominal.
        groups: the optimizer states by name.
        properties: the user-defined properties.
        nominal: whether the checkpoint contains only names.
    """

    trained: dict[str, Array] = field(default_factory=dict)
    frozen: dict[str, Array] = field(default_factory=dict)
    groups: dict[str, OptimizerGroup[Array]] = field(default_factory=dict)
    properties: dict[str, Property] = field(default_factory=dict)
    nominal: bool = False


# --- reading ------------------------------------------------------------------------------------------


def read_checkpoint(path: str | os.PathLike[str]) -> Checkpoint:
    """Read a checkpoint file.

    Raises:
        CheckpointError: if the file does not exist, or is not a complete checkpoint file of onnxruntime-training.
    """
    file = Path(path)
    what = f"'{shown(file)}'"
    if file.exists() and not file.is_file():
        raise CheckpointError(
            f"{what} is not a file; pass the path of a checkpoint (early versions, which are folders, must be saved "
            "again with onnxruntime-training 1.19)"
        )
    try:
        content = file.read_bytes()
    except (OSError, ValueError) as error:
        reason = (error.strerror if isinstance(error, OSError) else None) or str(error)
        raise CheckpointError(f"cannot read the checkpoint {what}: {shown(reason)}; check its path") from error
    try:
        values = flatbuffer.read(content, _SCHEMA, "Checkpoint", IDENTIFIER)
        return _Loading(file).checkpoint(values)
    except (ValueError, KeyError) as error:  # malformed bytes, or shapes that NumPy rejects
        why = f"it lacks {error}" if isinstance(error, KeyError) else str(error)
        raise CheckpointError(f"{what} is not a checkpoint of onnxruntime-training: {why}; save it again") from error


class _Loading:
    def __init__(self, path: Path) -> None:
        self._path = path
        self._outside: Array | None = None

    def checkpoint(self, values: Mapping[str, Any]) -> Checkpoint:
        version = values.get("version", 0)
        if not 1 <= version <= VERSION:
            raise CheckpointError(
                f"'{shown(self._path)}' is a checkpoint of version {version}; supported are 1 to {VERSION}; save it "
                "with onnxruntime-training 1.19"
            )
        module = values.get("module_state", {})
        nominal = bool(module.get("is_nominal_state", False))
        tensors = {part: module.get(part, []) for part in ("requires_grad_params", "frozen_params")}
        read = {part: {t["name"]: self._tensor(t, nominal) for t in rows} for part, rows in tensors.items()}
        groups = {group["group_name"]: self._group(group) for group in values.get("optimizer_groups", [])}
        absent: dict[str, Property] = {"ints": 0, "floats": 0.0, "strings": ""}
        bag = values.get("property_bag", {})
        properties = {row["name"]: row.get("value", none) for part, none in absent.items() for row in bag.get(part, [])}
        return Checkpoint(read["requires_grad_params"], read["frozen_params"], groups, properties, nominal)

    def _group(self, group: Mapping[str, Any]) -> OptimizerGroup[Array]:
        moments = {
            row["param_name"]: {t["name"]: self._tensor(t) for t in row.get("momentums", [])}
            for row in group.get("optimizer_states", [])
        }
        return OptimizerGroup(group.get("step", 0), group.get("initial_learning_rate", 0.0), moments)

    def _tensor(self, tensor: Mapping[str, Any], nominal: bool = False) -> Array:
        name, dims = shown(tensor["name"]), tensor.get("dims", [])
        try:
            dtype = np.dtype(onnx.helper.tensor_dtype_to_np_dtype(tensor.get("data_type", 0)))
        except KeyError:
            raise flatbuffer.DamagedError(f"'{name}' has an unknown element type") from None
        if nominal:
            return np.empty(0, dtype)
        size = math.prod(dims) * dtype.itemsize
        offset = tensor.get("external_data_offset", -1)
        raw = tensor.get("raw_data", b"") if offset < 0 else self._external(offset, size)
        if dtype.hasobject or any(d < 0 for d in dims) or len(raw) != size:
            raise flatbuffer.DamagedError(f"'{name}' has {len(raw)} bytes; expected {dims} of {dtype}")
        return np.frombuffer(raw, dtype).reshape(dims)

    def _external(self, offset: int, size: int) -> Array:
        if self._outside is None:
            data = external_path(self._path)
            try:
                self._outside = np.memmap(data, np.uint8, "r")
            except (OSError, ValueError) as error:
                raise CheckpointError(
                    f"the checkpoint '{shown(self._path)}' keeps its tensors in '{shown(data)}', which cannot be "
                    "read; put it in the same folder"
                ) from error
        return self._outside[offset : offset + max(size, 0)]


def external_path(path: Path) -> Path:
    return path.with_name(path.name + ".data")


# --- writing ------------------------------------------------------------------------------------------


def write_checkpoint(checkpoint: Checkpoint, path: str | os.PathLike[str], external: int = EXTERNAL) -> None:
    """Write a checkpoint file atomically; if its tensors exceed ``external`` bytes, they go to a second file.

    Raises:
        OutputError: if a file cannot be written.
    """
    file, saving = Path(path), _Saving()
    moments = [m for group in checkpoint.groups.values() for row in group.moments.values() for m in row.values()]
    size = sum(a.nbytes for a in (*checkpoint.trained.values(), *checkpoint.frozen.values(), *moments))
    saving.outside = bytearray() if size > external else None
    content = flatbuffer.write(saving.checkpoint(checkpoint), _SCHEMA, "Checkpoint", IDENTIFIER)
    if saving.outside is not None:
        write_atomically(external_path(file), saving.outside)
    write_atomically(file, content)


class _Saving:
    outside: bytearray | None = None

    def checkpoint(self, it: Checkpoint) -> dict[str, Any]:
        module = {
            "requires_grad_params": self._tensors(it.trained, it.nominal),
            "frozen_params": self._tensors(it.frozen, it.nominal),
            "is_nominal_state": it.nominal or None,
            "has_external_data": True if self.outside is not None else None,
        }
        groups = [
            {
                "group_name": name,
                "step": group.step,
                "initial_learning_rate": group.initial_lr,
                "optimizer_states": [
                    {"param_name": p, "momentums": self._tensors(row)} for p, row in sorted(group.moments.items())
                ],
            }
            for name, group in sorted(it.groups.items())
        ]
        return {
            "version": VERSION,
            "module_state": module,
            "optimizer_groups": groups,
            "property_bag": _bag(it.properties) if it.properties else None,
        }

    def _tensors(self, arrays: Mapping[str, Array], nominal: bool = False) -> list[dict[str, Any]]:
        return [self._tensor(name, array, nominal) for name, array in arrays.items()]

    def _tensor(self, name: str, array: Array, nominal: bool) -> dict[str, Any]:
        kind = onnx.helper.np_dtype_to_tensor_dtype(array.dtype)
        shape = [] if nominal else list(array.shape)
        row = {"name": name, "dims": shape, "data_type": kind}
        raw = b"" if nominal else np.ascontiguousarray(array).tobytes()
        if self.outside is None or len(raw) < SMALLEST_OUTSIDE:
            return {**row, "raw_data": raw}
        row["external_data_offset"] = len(self.outside)
        self.outside += raw
        return row


def _bag(properties: Mapping[str, Property]) -> dict[str, Any]:
    kinds = {int: "ints", float: "floats", str: "strings"}
    bag: dict[str, list[dict[str, Any]]] = {kind: [] for kind in kinds.values()}
    for name, value in sorted(properties.items()):
        bag[kinds[type(value)]].append({"name": name, "value": value})
    return bag

"""Flat weights: all weights in one float32 vector, with a table of offsets."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import onnx

from gradgraph.arguments import PATH, checked
from gradgraph.errors import ModelError, shown
from gradgraph.export.artifacts import Arrays, opened_trainer
from gradgraph.files.atomic import write_atomically
from gradgraph.files.mapped import pieces
from gradgraph.files.suffixes import check_suffix
from gradgraph.files.untrusted.documents import Fields, json_of, tables_of
from gradgraph.files.untrusted.regular import UnreadableError, regular_bytes
from gradgraph.passes.normal.opsets.older import IR_VERSIONS
from gradgraph.runtime.trainer import Trainer
from gradgraph.step.manifest import Manifest
from gradgraph.step.step import Step

__all__ = ["FlatWeights", "Place", "flat_models", "flat_weights"]

Which = Literal["trainable", "all"]
_KIND = "gradgraph flat weights"


@dataclass(frozen=True)
class Place:
    """The place of a tensor in a flat vector.

    Attributes:
        name: the name of the tensor.
        offset: the index of its first element in the vector.
        shape: its shape.
    """

    name: str
    offset: int
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        """The number of elements."""
        return math.prod(self.shape)


@dataclass(frozen=True, eq=False, repr=False)
class FlatWeights:
    """Tensors concatenated in one float32 vector.

    Attributes:
        buffer: the vector.
        table: the place of each tensor, in order, without gaps.

    Raises:
        ModelError: if the places in ``table`` do not cover the vector exactly.
    """

    buffer: np.ndarray[Any, np.dtype[np.float32]]
    table: tuple[Place, ...]

    def __post_init__(self) -> None:
        end = 0
        for place in self.table:
            if place.offset != end or any(d < 0 for d in place.shape):
                raise ModelError(
                    f"the table of the flat vector has a gap or an overlap before '{shown(place.name)}'; write it again"
                )
            end += place.size
        if self.buffer.dtype != np.float32 or self.buffer.shape != (end,):
            raise ModelError(
                f"the flat vector is {self.buffer.dtype}{list(self.buffer.shape)}, but its table describes "
                f"float32[{end}]; pass a vector of that type and length"
            )
        if len({p.name for p in self.table}) < len(self.table):
            raise ModelError("the table of the flat vector has a duplicate name; write it again")

    def arrays(self) -> Arrays:
        """Return the tensors by name, as views of the vector, for ``trainer.load_state_dict(..., strict=False)``."""
        return {p.name: self.buffer[p.offset : p.offset + p.size].reshape(p.shape) for p in self.table}

    def replaced(self, buffer: np.ndarray[Any, Any]) -> FlatWeights:
        """Return flat weights with this table and the vector ``buffer``."""
        return FlatWeights(np.ascontiguousarray(buffer, np.float32), self.table)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the vector (float32, little-endian) to ``path``, a ``.bin``, and the table to ``path`` with the suffix
        ``.json``.

        Raises:
            OutputError: if a file cannot be written.
        """
        check_suffix(path, ".bin")
        _write(Path(path), self.table, [self.buffer])

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> FlatWeights:
        """Load the files written by ``save``.

        Raises:
            ModelError: if a file is missing or damaged, or the two files do not match.
        """
        path = Path(path)
        beside = path.with_suffix(".json")
        read, contents = path, list[bytes]()
        try:
            for read in (beside, path):
                contents.append(regular_bytes(read))
        except UnreadableError as error:
            raise ModelError(
                f"cannot read '{shown(read)}' ({error}); flat weights consist of two files, a .bin and a .json of the "
                "same name"
            ) from None
        document, numbers = contents
        try:
            rows = tables_of(Fields(json_of(document), "it").value("tensors"), "'tensors'")
            table = tuple(Place(r.text("name"), r.whole("offset"), r.wholes("shape")) for r in rows)
        except UnreadableError as error:
            raise ModelError(
                f"'{shown(beside)}' is not a table of flat weights ({error}); write both files again"
            ) from None
        if len(numbers) % 4:
            raise ModelError(f"'{shown(path)}' is truncated: it has {len(numbers)} bytes; write it again")
        return cls(np.frombuffer(numbers, "<f4").astype(np.float32), table)


@checked(checkpoint=PATH.or_none())
def flat_weights(
    step: Step | str | os.PathLike[str],
    checkpoint: str | os.PathLike[str] | None = None,
    *,
    which: Which = "trainable",
) -> FlatWeights:
    """Return the weights of a step in one float32 vector, in the order of the manifest.

    Args:
        step: a step, or its folder.
        checkpoint: the checkpoint of a run; without one, the initial weights are used.
        which: ``"trainable"``, or ``"all"`` to include running statistics.

    Raises:
        ModelError: if the step is damaged, or a weight is neither float32 nor float16.
        CheckpointError: if the checkpoint is damaged, or belongs to another step.
    """
    trainer = opened_trainer(step, checkpoint)
    table = _table(trainer.manifest, which)
    buffer = np.empty(sum(p.size for p in table), np.float32)
    for place, array in zip(table, _seen(trainer, table), strict=True):
        buffer[place.offset : place.offset + place.size] = array.reshape(-1)
    return FlatWeights(buffer, table)


def save_flat(
    step: Step | str | os.PathLike[str], path: str | os.PathLike[str], checkpoint: str | os.PathLike[str] | None = None
) -> tuple[Place, ...]:
    """Write ``flat_weights(step, checkpoint)`` to ``path`` without building the vector in memory; return the table.

    Raises:
        ModelError, CheckpointError: as for ``flat_weights``.
        OutputError: if a file cannot be written.
    """
    check_suffix(path, ".bin")
    trainer = opened_trainer(step, checkpoint)
    table = _table(trainer.manifest, "trainable")
    _write(Path(path), table, _seen(trainer, table))
    return table


def _seen(trainer: Trainer, table: Sequence[Place]) -> list[np.ndarray[Any, Any]]:
    values = trainer.state.seen([p.name for p in table])
    return [values[p.name] for p in table]


def _write(path: Path, table: Sequence[Place], arrays: Iterable[np.ndarray[Any, Any]]) -> None:
    """Write the concatenated ``arrays`` to ``path``, and the table to ``path`` with the suffix ``.json``."""
    rows = [{"name": p.name, "offset": p.offset, "shape": list(p.shape)} for p in table]
    document = {"kind": _KIND, "dtype": "float32", "elements": sum(p.size for p in table), "tensors": rows}
    write_atomically(path.with_suffix(".json"), (json.dumps(document, indent=1) + "\n").encode())
    write_atomically(path, (piece for array in arrays for piece in pieces(array.astype("<f4", copy=False))))


def flat_models(step: Step | str | os.PathLike[str], *, which: Which = "trainable") -> dict[str, onnx.ModelProto]:
    """Return two ONNX models that convert between the weights of train.onnx and a flat vector.

    The inputs of ``"flatten"`` are the weights by name, and its output is the vector ``flat``; ``"unflatten"`` is the
    inverse.

    Raises:
        ModelError: as for ``flat_weights``.
    """
    manifest = (step if isinstance(step, Step) else Step.load(step)).manifest
    table = _table(manifest, which)
    known = {s.name: s for s in manifest.state}
    info, node, tensor = onnx.helper.make_tensor_value_info, onnx.helper.make_node, onnx.numpy_helper.from_array
    kinds = {p.name: onnx.helper.np_dtype_to_tensor_dtype(np.dtype(known[p.name].dtype)) for p in table}
    weights = [info(p.name, kinds[p.name], p.shape) for p in table]
    flat = [info("flat", onnx.TensorProto.FLOAT, [sum(p.size for p in table)])]
    parts = [f"{p.name}.flat" for p in table]
    wide = [f"{p.name}.float32" for p in table]
    rows = list(zip(table, parts, wide, strict=True))
    down = [tensor(np.array([-1], np.int64), "vector")]
    flatten = [node("Reshape", [p.name, "vector"], [part]) for p, part, _ in rows]
    flatten += [node("Cast", [part], [w], to=onnx.TensorProto.FLOAT) for _, part, w in rows]
    up = [tensor(np.array([p.size for p in table], np.int64), "sizes")]
    up += [tensor(np.array(p.shape, np.int64), f"{p.name}.shape") for p in table]
    unflatten = [node("Split", ["flat", "sizes"], parts, axis=0)]
    unflatten += [node("Reshape", [part, f"{p.name}.shape"], [w], allowzero=1) for p, part, w in rows]
    unflatten += [node("Cast", [w], [p.name], to=kinds[p.name]) for p, _, w in rows]
    graphs = {
        "flatten": ([*flatten, node("Concat", wide, ["flat"], axis=0)], weights, flat, down),
        "unflatten": (unflatten, flat, weights, up),
    }
    opset, version = [onnx.helper.make_opsetid("", manifest.opset)], IR_VERSIONS[manifest.opset]
    return {
        name: onnx.helper.make_model(
            onnx.helper.make_graph(nodes, name, fed, given, kept), opset_imports=opset, ir_version=version,
            producer_name="gradgraph",
        )
        for name, (nodes, fed, given, kept) in graphs.items()
    }  # fmt: skip


def _table(manifest: Manifest, which: Which) -> tuple[Place, ...]:
    if which not in ("trainable", "all"):
        raise ModelError(f"which is '{shown(which)}'; pass 'trainable' or 'all'")
    kinds = ("parameter",) if which == "trainable" else ("parameter", "statistic")
    table, end = list[Place](), 0
    for spec in manifest.state:
        if spec.kind not in kinds:
            continue
        if spec.dtype not in ("float32", "float16"):
            raise ModelError(
                f"the weight '{shown(spec.name)}' is {spec.dtype}, which a float32 vector cannot represent exactly; "
                "write a .safetensors instead"
            )
        table.append(Place(spec.name, end, tuple(int(d or 0) for d in spec.shape)))
        end += table[-1].size
    if not table:
        raise ModelError("the step has no weights to flatten")
    return tuple(table)

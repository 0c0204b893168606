"""The step: three ONNX models and a manifest, all that any runtime needs to train.

==============  ====================================================  ==============================================
file            inputs                                                outputs
==============  ====================================================  ==============================================
init.onnx       none                                                  every state tensor, by its name
train.onnx      batch, targets, hyperparameters, every state tensor   loss, metrics, every state tensor's ``next``
eval.onnx       batch, targets, the state tensors that it reads       loss, metrics, the model's own outputs
==============  ====================================================  ==============================================

``manifest.json`` says which name plays which part; each model carries the same text in its ``metadata_props`` under
``gradgraph``. Large frozen weights, which train.onnx and eval.onnx both hold, lie once in ``frozen.bin``.
"""

from __future__ import annotations

import hashlib
import json
import os
import stat
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
from google.protobuf.message import DecodeError, Message  # type: ignore[import-untyped,unused-ignore]

from gradgraph.arguments import FLAG, PATH, Kind, checked
from gradgraph.atomic import write_folder_atomically
from gradgraph.calls import operator_name
from gradgraph.checks import check_tensor
from gradgraph.digest import digest_of
from gradgraph.errors import ModelError, escaped, escaped_json, shown
from gradgraph.findings import Finding
from gradgraph.manifest import DIGESTS, Manifest, StateSpec, TargetSpec, TensorSpec, dtype_name
from gradgraph.mapped import MappedFile, not_as_saved
from gradgraph.protos import check_proto, proto_tensors

__all__ = ["Manifest", "StateSpec", "Step", "TargetSpec", "TensorSpec", "dtype_name"]

METADATA_KEY = "gradgraph"
WRITTEN_KEY = "gradgraph.nodes_written"  # of train.onnx: the number of its nodes before clean-up
MODELS = ("train", "init", "eval")
MANIFEST_FILE = "manifest.json"
FROZEN_FILE = "frozen.bin"
INIT_FILE = "init.bin"
FILES = frozenset([*(f"{name}.onnx" for name in MODELS), MANIFEST_FILE, FROZEN_FILE, INIT_FILE])

LARGE = 1 << 20  # bytes: initializers of this size leave train.onnx and eval.onnx for the shared file
PROTOBUF_ROOM = 1 << 30  # bytes: above it init.onnx keeps its weights beside it too (protobuf ends at 2 GiB)
ALIGNMENT = 4096  # runtimes map external data page by page


@dataclass(eq=False)
class Step:
    """A training step, ready to be saved or run.

    Args:
        train, init, eval: the three models of the table above.
        manifest: the part that each of their inputs and outputs plays.
        folder: where the models were loaded from; their external data, if any, lies there.
        findings: what the build saw in the model that its author may not want: weights that were left out, tensors that
            do not follow a weight; of a step that was loaded there are none.

    Raises:
        ModelError: manifest and models contradict each other.
    """

    train: onnx.ModelProto
    init: onnx.ModelProto
    eval: onnx.ModelProto
    manifest: Manifest
    folder: Path | None = field(default=None, kw_only=True)
    findings: tuple[Finding, ...] = field(default=(), kw_only=True, repr=False)
    _init_stamp: tuple[int, ...] = field(default=(), init=False, repr=False)
    _digests: dict[str, str] = field(default_factory=dict, init=False, repr=False)
    _mapped: dict[str, MappedFile] = field(default_factory=dict, init=False, repr=False)

    def __post_init__(self) -> None:
        _check_against_graphs(self.manifest, self.train, self.init, self.eval)

    @checked(folder=PATH, force=FLAG)
    def save(self, folder: str | os.PathLike[str], *, force: bool = False) -> Path:
        """Write the step folder: all of it or nothing.

        Raises:
            OutputError: the folder cannot be written, or is not empty and ``force`` is not given.
        """
        text = self.manifest.to_json()
        frozen, initial = _ExternalData(FROZEN_FILE), _ExternalData(INIT_FILE)
        room = _weight_bytes(self.init) < PROTOBUF_ROOM
        models = {
            "train": self._with_external(self.train, frozen),
            "init": self._with_external(self.init, None if room else initial),
            "eval": self._with_external(self.eval, frozen),
        }
        contents: dict[str, Any] = {}
        for name, model in models.items():
            onnx.helper.set_model_props(model, {METADATA_KEY: text, **_foreign_metadata(model)})
            contents[f"{name}.onnx"] = model.SerializeToString()
        for data in (frozen, initial):
            if data.size:
                contents[data.location] = data.chunks()
        digests = {name: digest_of([c] if isinstance(c, bytes) else c) for name, c in contents.items()}
        for data in (frozen, initial):
            if data.size:  # once more, as the digest has read its chunks
                contents[data.location] = data.chunks()
        contents[MANIFEST_FILE] = (_with_digests(text, digests) + "\n").encode()
        write_folder_atomically(Path(folder), contents, force=force)
        return Path(folder)

    @classmethod
    def load(cls, folder: str | os.PathLike[str]) -> Step:
        """Read and check a step folder. Nothing is executed, and nothing outside the folder is opened.

        Raises:
            ModelError: a file is missing, damaged, of a newer version, or contradicts another one.
        """
        Kind("a gradgraph.Step, or the folder of one", PATH.fits).check("the step", folder)
        folder = Path(folder)
        try:
            is_folder = folder.is_dir()
        except OSError:  # a name that no folder can have
            is_folder = False
        if not is_folder:
            raise ModelError(f"'{shown(folder)}' is not a step folder; give the folder that `gradgraph build` wrote")
        text = _read(folder / MANIFEST_FILE).decode("utf-8", "replace")
        manifest = Manifest.from_json(text, str(folder / MANIFEST_FILE))
        digests = _digests_in(text, folder / MANIFEST_FILE)
        stamp = _stamp(folder / "init.onnx")
        models = {name: _load_model(folder / f"{name}.onnx", manifest, digests) for name in MODELS}
        step = cls(models["train"], models["init"], models["eval"], manifest, folder=folder)
        step._init_stamp, step._digests = stamp, digests
        step._take_in_small()
        return step

    def _take_in_small(self) -> None:
        """Small weights, which a step that we have saved keeps inside: whoever lowers a model looks at their values."""
        for tensor in (*self.train.graph.initializer, *self.eval.graph.initializer):
            if is_external(tensor) and external_entry(tensor)[2] < LARGE:
                _put_inside(tensor, self.external(tensor).tobytes())

    def external(self, tensor: onnx.TensorProto) -> np.ndarray[Any, Any]:
        """The bytes of a weight that lies beside the models, where they are mapped.

        A file is mapped when its weights are first used, and compared with its digest then. One that takes its place
        later is not read.

        Raises:
            ModelError: the file is not what was saved, or was cut since.
        """
        if self.folder is None:
            raise ModelError(
                f"the weights of '{shown(tensor.name)}' lie in an external file that is not known here; "
                "load the model with its external data first"
            )
        location, offset, length = external_entry(tensor)
        return self._file(location).part(offset, length)

    def _file(self, location: str) -> MappedFile:
        if location not in self._mapped:
            assert self.folder is not None
            self._mapped[location] = MappedFile(self.folder / location, self._digests.get(location))
        return self._mapped[location]

    def check_uncut(self) -> None:
        """Raise ModelError if a file of large weights, which is mapped, was cut: to read it would end the process."""
        for file in list(self._mapped.values()):  # another trainer of this step may map one meanwhile
            file.check_uncut()

    def release_init(self) -> None:
        """Keep the initial weights in their file only, if there is one: whoever asks for ``init`` again reads that."""
        if self._init_stamp:
            vars(self).pop("init", None)
            self._mapped.pop(INIT_FILE, None)

    def __getstate__(self) -> dict[str, Any]:
        """For copies and pickles, which map the files anew."""
        return {**vars(self), "_mapped": {}}

    def __getattr__(self, name: str) -> Any:
        """``init`` after it was released.

        Raises:
            ModelError: the file is not there any more, or is another one.
        """
        folder = vars(self).get("folder")
        if name != "init" or folder is None:
            raise AttributeError(f"'{type(self).__name__}' object has no attribute '{name}'")
        path = folder / "init.onnx"
        if _stamp(path) != self._init_stamp:
            raise ModelError(
                f"'{shown(path)}' is gone, or not the file that this step was loaded from; load the step again"
            )
        self.init = _load_model(path, self.manifest, self._digests)
        return self.init

    def resolved(self, name: str) -> onnx.ModelProto:
        """A copy of one of the models (``"train"``, ``"init"``, ``"eval"``) with all weights inside."""
        model: onnx.ModelProto = getattr(self, name)
        if self.folder is None or not any(is_external(t) for t in proto_tensors(model)):
            return _copy(model)
        copy = _copy(model)
        for tensor in proto_tensors(copy):
            if is_external(tensor):
                _put_inside(tensor, self.external(tensor).tobytes())
        return copy

    @property
    def nodes(self) -> dict[str, int]:
        """Number of nodes of each model, and of train.onnx before clean-up where that is known (``train_written``)."""
        counts = {name: len(getattr(self, name).graph.node) for name in MODELS}
        written = next((p.value for p in self.train.metadata_props if p.key == WRITTEN_KEY), "")
        if written.isdecimal() and len(written) <= 9 and int(written) >= counts["train"]:
            counts["train_written"] = int(written)
        return counts

    def summary(self) -> str:
        """A few lines for people: what is trained, what is frozen, how large the state is, what goes in."""
        m = self.manifest
        kinds: dict[str, list[StateSpec]] = {}
        for s in m.state:
            kinds.setdefault(s.kind, []).append(s)
        trainable = [s for s in kinds.get("parameter", []) if s.name in set(m.trainable)]
        frozen = [t for t in self.eval.graph.initializer if t.name in set(m.frozen)]
        state_bytes = sum(s.nbytes for s in m.state)
        rows = [
            ("trainable", f"{_count(trainable)} in {len(trainable)} tensors"),
            ("frozen", f"{sum(_elements(t.dims) for t in frozen):,} in {len(m.frozen)} tensors"),
            *((f"{k} state", f"{_count(v)} in {len(v)} tensors") for k, v in kinds.items() if k != "parameter"),
            ("state", f"{len(m.state)} tensors, {_readable(state_bytes)}"),
            ("inputs", ", ".join(map(str, m.inputs)) or "none"),
            ("targets", ", ".join(map(str, m.targets)) or "none"),
            ("outputs", ", ".join(m.outputs) or "none"),
            ("loss", _call(m.loss)),
            ("optimizer", _call(m.optimizer)),
            ("fed per step", ", ".join(f"{k}={v:g}" for k, v in m.hyperparameters.items()) or "none"),
            ("nodes", _node_counts(self.nodes)),
            ("operators", _most_frequent(operator_name(node.op_type, node.domain) for node in self.train.graph.node)),
        ]
        return "\n".join(escaped(f"{label:16}{value}") for label, value in rows)

    def _with_external(self, model: onnx.ModelProto, data: _ExternalData | None) -> onnx.ModelProto:
        """A copy whose large initializers lie in ``data``; the rest of the file stays as it is."""
        slim = _copy(model, without="graph")
        slim.graph.CopyFrom(_copy(model.graph, without="initializer"))
        for tensor in model.graph.initializer:
            raw = self.external(tensor).tobytes() if is_external(tensor) else _raw_bytes(tensor)
            if data is None or len(raw) < LARGE or _is_packed(tensor):
                kept = slim.graph.initializer.add()
                kept.CopyFrom(tensor)
                if is_external(kept):
                    _put_inside(kept, raw)
            else:
                slim.graph.initializer.append(data.add(tensor, raw))
        return slim


# --- manifest against graphs ---------------------------------------------------------------------------


def _check_against_graphs(
    manifest: Manifest, train: onnx.ModelProto, init: onnx.ModelProto, eval_: onnx.ModelProto
) -> None:
    """A forged or stale manifest must not steer a run: every name, dtype and shape is looked up in the graphs."""
    fed: dict[str, TensorSpec] = {s.name: s for s in (*manifest.inputs, *manifest.targets, *manifest.state)}
    scalars = {name: TensorSpec(name, "float32", ()) for name in manifest.hyperparameters}
    next_of = {s.next: TensorSpec(s.next, s.dtype, s.shape) for s in manifest.state}
    results = dict.fromkeys([manifest.loss_output, *manifest.metrics])

    _check_values("train.onnx", "input", train.graph.input, fed | scalars, exact=True)
    _check_values("train.onnx", "output", train.graph.output, results | next_of)
    _check_values("init.onnx", "input", init.graph.input, {}, exact=True)
    _check_values("init.onnx", "output", init.graph.output, {s.name: s for s in manifest.state}, exact=True)
    known = {v.name: fed.get(v.name) for v in eval_.graph.input}
    for name, spec in known.items():
        if spec is None:
            raise ModelError(
                f"eval.onnx has the input '{shown(name)}', which the manifest does not list; build the step again"
            )
    _check_values("eval.onnx", "input", eval_.graph.input, known)
    _check_values("eval.onnx", "output", eval_.graph.output, results | dict.fromkeys(manifest.outputs))


def _check_values(
    file: str, what: str, values: Any, expected: Mapping[str, TensorSpec | None], exact: bool = False
) -> None:
    found = {v.name: v for v in values}
    for name in expected:
        if name not in found:
            raise ModelError(f"{file} has no {what} '{shown(name)}', which the manifest lists; build the step again")
    if exact:
        for name in found:
            if name not in expected:
                raise ModelError(
                    f"{file} has the {what} '{shown(name)}', which the manifest does not list; build the step again"
                )
    for name, spec in expected.items():
        tensor = found[name].type.tensor_type
        if spec is None:
            continue
        if dtype_name(tensor.elem_type) != spec.dtype:
            raise ModelError(
                f"the {what} '{shown(name)}' of {file} is {dtype_name(tensor.elem_type)}, but the manifest says "
                f"{spec.dtype}; build the step again"
            )
        if tensor.HasField("shape") and not _compatible(tensor.shape, spec.shape):
            raise ModelError(
                f"the {what} '{shown(name)}' of {file} has another shape than the manifest's {list(spec.shape)}; "
                "build the step again"
            )


def _compatible(shape: onnx.TensorShapeProto, spec: tuple[int | str | None, ...]) -> bool:
    """Same rank, and no two numbers that differ (a named dimension may stand for any number)."""
    dims = [d.dim_value if d.HasField("dim_value") else None for d in shape.dim]
    return len(dims) == len(spec) and all(
        a == b for a, b in zip(dims, spec, strict=True) if isinstance(a, int) and isinstance(b, int)
    )


# --- reading ---------------------------------------------------------------------------------------------


def _read(path: Path) -> bytes:
    try:
        if not stat.S_ISREG(path.stat().st_mode):  # a FIFO would wait for ever
            raise ModelError(f"'{shown(path)}' is not a regular file; build the step again")
        return path.read_bytes()
    except OSError as error:
        raise ModelError(f"cannot read '{shown(path)}' ({error.strerror}); build the step again") from None


def _stamp(path: Path) -> tuple[int, ...]:
    """What tells a file from another one of that name; nothing if it is not there."""
    try:
        info = path.stat()
    except OSError:
        return ()
    return info.st_dev, info.st_ino, info.st_size, info.st_mtime_ns


def _with_digests(manifest: str, digests: Mapping[str, str]) -> str:
    document = {**json.loads(manifest), DIGESTS: dict(digests)}
    return escaped_json(json.dumps(document, indent=1, ensure_ascii=False, allow_nan=False))


def _digests_in(manifest: str, path: Path) -> dict[str, str]:
    """The digests that manifest.json gives; none if it is from before there were digests."""
    digests = json.loads(manifest).get(DIGESTS, {})
    if not isinstance(digests, dict) or not all(isinstance(d, str) and name in FILES for name, d in digests.items()):
        raise ModelError(f"'{shown(path)}' is damaged (its digests are not those of files); build the step again")
    return digests


def _load_model(path: Path, manifest: Manifest, digests: Mapping[str, str]) -> onnx.ModelProto:
    content = _read(path)
    try:
        model = onnx.ModelProto.FromString(content)
    except DecodeError:
        raise ModelError(f"'{shown(path)}' is damaged: it is not an ONNX file; build the step again") from None
    stored = next((p.value for p in model.metadata_props if p.key == METADATA_KEY), None)
    if stored is None or Manifest.from_json(stored, str(path)) != manifest:
        raise ModelError(f"'{shown(path)}' does not belong to the manifest.json beside it; build the step again")
    external = [t for t in model.graph.initializer if is_external(t)]
    if len(external) != sum(is_external(t) for t in proto_tensors(model)):
        raise ModelError(f"'{shown(path)}' keeps more than initializers outside; build the step again")
    for tensor in external:
        _check_external(tensor, path)
    check_proto(model)
    if path.name in digests and digest_of([content]) != digests[path.name]:
        raise not_as_saved(path)
    return model


def _check_external(tensor: onnx.TensorProto, model: Path) -> None:
    """External data must lie in one of our two files, inside its bounds, and be as long as the shape says."""
    expected = check_tensor(tensor.name, tensor.data_type, tensor.dims)
    location, offset, length = external_entry(tensor)
    where = f"the external data of '{shown(tensor.name)}' in '{shown(model)}'"
    if location not in (FROZEN_FILE, INIT_FILE):
        raise ModelError(
            f"{where} points to '{shown(location)}', but a step keeps it in {FROZEN_FILE}; build the step again"
        )
    path = model.parent / location
    try:
        info = path.lstat()
    except OSError:
        raise ModelError(f"{where} is missing: there is no '{shown(path)}'; build the step again") from None
    if _is_packed(tensor):
        raise ModelError(f"{where} have elements of less than a byte, which a step keeps inside; build the step again")
    if not stat.S_ISREG(info.st_mode):
        raise ModelError(f"{where} points to '{shown(path)}', which is not a regular file; build the step again")
    if info.st_nlink > 1:
        raise ModelError(f"{where} lies in '{shown(path)}', a hard link to another file; put a copy of it in its place")
    if offset < 0 or length != expected or offset + length > info.st_size:
        raise ModelError(
            f"{where} does not fit: {expected} bytes expected, {length} at offset {offset} of {info.st_size} stored; "
            "build the step again"
        )


def external_entry(tensor: onnx.TensorProto) -> tuple[str, int, int]:
    entries = {e.key: e.value for e in tensor.external_data}
    try:
        return entries.get("location", ""), int(entries.get("offset", "0")), int(entries.get("length", "-1"))
    except ValueError:
        return entries.get("location", ""), -1, -1


def _put_inside(tensor: onnx.TensorProto, raw: bytes) -> None:
    tensor.ClearField("external_data")
    tensor.data_location = onnx.TensorProto.DEFAULT
    tensor.raw_data = raw


def _raw_bytes(tensor: onnx.TensorProto) -> bytes:
    if tensor.HasField("raw_data"):
        return bytes(tensor.raw_data)
    return bytes(onnx.numpy_helper.from_array(onnx.numpy_helper.to_array(tensor)).raw_data)


# --- writing ---------------------------------------------------------------------------------------------


class _ExternalData:
    """Large tensors on their way into one file; equal contents are stored once."""

    def __init__(self, location: str) -> None:
        self.location = location
        self.size = 0
        self._parts: list[bytes] = []
        self._offsets: dict[bytes, int] = {}

    def add(self, tensor: onnx.TensorProto, raw: bytes) -> onnx.TensorProto:
        """The stand-in for ``tensor`` that points here."""
        digest = hashlib.sha256(raw).digest()
        if digest not in self._offsets:
            padding = -self.size % ALIGNMENT
            self._offsets[digest] = self.size + padding
            self._parts += [bytes(padding), raw]
            self.size += padding + len(raw)
        stub = onnx.TensorProto(name=tensor.name, data_type=tensor.data_type, dims=tensor.dims)
        stub.data_location = onnx.TensorProto.EXTERNAL
        entries = {"location": self.location, "offset": self._offsets[digest], "length": len(raw)}
        for key, value in entries.items():
            stub.external_data.add(key=key, value=str(value))
        return stub

    def chunks(self) -> Iterator[bytes]:
        return iter(self._parts)


def _copy(message: Any, without: str = "") -> Any:
    """A copy of a protobuf message less one field, which is never copied on the way."""
    copy = type(message)()
    for descriptor, value in message.ListFields():
        if descriptor.name == without:
            continue
        if isinstance(value, Message):
            getattr(copy, descriptor.name).CopyFrom(value)
        elif hasattr(value, "extend"):
            getattr(copy, descriptor.name).extend(value)
        else:
            setattr(copy, descriptor.name, value)
    return copy


def _foreign_metadata(model: onnx.ModelProto) -> dict[str, str]:
    return {p.key: p.value for p in model.metadata_props if p.key != METADATA_KEY}


def is_external(tensor: onnx.TensorProto) -> bool:
    return bool(tensor.data_location == onnx.TensorProto.EXTERNAL)


def _is_packed(tensor: onnx.TensorProto) -> bool:
    """Whether an element takes less than a byte (int4 and its like)."""
    return ir.DataType(tensor.data_type).bitwidth < 8


# --- sizes -----------------------------------------------------------------------------------------------


def _elements(dims: Any) -> int:
    return int(np.prod([int(d) for d in dims], dtype=object)) if len(dims) else 1


def _weight_bytes(model: onnx.ModelProto) -> int:
    return sum(check_tensor(t.name, t.data_type, t.dims) for t in model.graph.initializer)


def _count(specs: list[StateSpec]) -> str:
    return f"{sum(_elements(s.shape) for s in specs):,}"


def _readable(size: float) -> str:
    for unit in ("B", "KiB", "MiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} GiB"


def _node_counts(nodes: Mapping[str, int]) -> str:
    """``train 57, init 7, eval 12 (train 80 before clean-up)``."""
    written = nodes.get("train_written", 0)
    removed = f" (train {written:,} before clean-up)" if written > nodes["train"] else ""
    return ", ".join(f"{name} {nodes[name]:,}" for name in MODELS) + removed


def _most_frequent(op_types: Iterable[str], shown_kinds: int = 8) -> str:
    """``Mul 59, Add 32 and 12 more``."""
    counts = Counter(op_types).most_common()
    more = len(counts) - shown_kinds
    listed = ", ".join(f"{shown(kind)} {count:,}" for kind, count in counts[:shown_kinds])
    return f"{listed} and {more} more kinds" if more > 0 else listed


def _call(part: Mapping[str, Any]) -> str:
    """``adamw(lr=0.001)`` from ``{"name": "adamw", "arguments": {"lr": 0.001}}``."""
    return f"{part['name']}({', '.join(f'{k}={v}' for k, v in part['arguments'].items())})"

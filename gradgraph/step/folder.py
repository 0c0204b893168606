"""Files of a step folder: their names, and how they are written, read and checked."""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeAlias

import onnx

from gradgraph.errors import ModelError, escaped_json, shown
from gradgraph.files.digest import Digest, digest_of
from gradgraph.files.external import (
    DataFile,
    DataFiles,
    check_range,
    external_entry,
    is_external,
    point_at,
    put_inside,
    raw_bytes,
)
from gradgraph.files.large_weights import LEAST_BYTES, LEAST_KEPT
from gradgraph.files.models import structured
from gradgraph.files.protos import check_proto, copied, proto_tensors
from gradgraph.files.untrusted.documents import json_of
from gradgraph.files.untrusted.messages import message_of
from gradgraph.files.untrusted.regular import UnreadableError, regular_bytes
from gradgraph.graph.checks import check_tensor
from gradgraph.step.bases import Base, described
from gradgraph.step.manifest import BASES, DIGESTS, Manifest, train_file
from gradgraph.step.origins import Origins, write_origins
from gradgraph.step.weight_files import not_as_saved

METADATA_KEY = "gradgraph"
MANIFEST_FILE = "manifest.json"
FROZEN_FILE = "frozen.bin"
INIT_FILE = "init.bin"

HALVES = ("gradient", "apply")  # of a step with separate files

ALL_FILES = (  # as globs
    "train.onnx",
    "train.*.onnx",
    "init.onnx",
    "eval.onnx",
    *(f"{half}.onnx" for half in HALVES),
    MANIFEST_FILE,
    FROZEN_FILE,
    INIT_FILE,
)


Reader: TypeAlias = Callable[[onnx.TensorProto], Iterable[memoryview]]  # bytes of an external tensor


def model_names(manifest: Manifest) -> list[str]:
    """Return the names of a step folder's models: train graphs, init, eval, and gradient and apply if it has them."""
    halves = HALVES if manifest.separate else ()
    return [*(train_file(step).removesuffix(".onnx") for step in manifest.parts), "init", "eval", *halves]


# --- writing ------------------------------------------------------------------------------------------


def folder_contents(
    models: Mapping[str, onnx.ModelProto], manifest: Manifest, read: Reader, shared: Mapping[str, tuple[str, Base]]
) -> dict[str, Any]:
    """Return the contents of the files of a step folder by name, in the order in which they must be written.

    Args:
        models: the models by name, as in ``model_names``.
        manifest: the manifest, which is stored in manifest.json and in the metadata of each model.
        read: returns the bytes of a weight that is already external.
        shared: the base files whose weights are not copied, by location in the models, with relative paths.
    """
    text = manifest.to_json()
    frozen, initial = DataFile(FROZEN_FILE), DataFile(INIT_FILE)
    beside_init = None if weight_bytes(models["init"]) < LEAST_KEPT else initial
    contents: dict[str, Any] = {}
    elsewhere = {location: path for location, (path, _) in shared.items()}
    for name in model_names(manifest):
        model = with_external(models[name], beside_init if name == "init" else frozen, read, elsewhere)
        if name not in ("init", "eval"):
            write_origins(model, Origins.of_step(manifest, models["eval"], model))
        others = {p.key: p.value for p in model.metadata_props if p.key != METADATA_KEY}
        onnx.helper.set_model_props(model, {METADATA_KEY: text, **others})
        contents[f"{name}.onnx"] = model.SerializeToString()
    digests = {name: digest_of([content]) for name, content in contents.items()}
    for data in (frozen, initial):
        if data.size:
            contents[data.location] = _digesting(data, digests)
    contents[MANIFEST_FILE] = _with_digests(text, digests, dict(shared.values()))
    return contents


def _digesting(data: DataFile, digests: dict[str, str]) -> Iterator[bytes | memoryview]:
    """Yield the content of ``data``; after the last piece, record its digest in ``digests``."""
    digest = Digest()
    for piece in data.chunks():
        digest.update(piece)
        yield piece
    digests[data.location] = digest.text()


def with_external(
    model: onnx.ModelProto, data: DataFile | None, read: Reader, elsewhere: Mapping[str, str]
) -> onnx.ModelProto:
    """Return a copy of ``model`` with its large initializers moved to ``data``.

    Args:
        data: the file for large initializers; None to store them inside the model.
        read: returns the bytes of a weight that is already external.
        elsewhere: the relative paths of base files, whose weights are not copied, by their location in ``model``.
    """
    slim = copied(model, lambda field: field.name != "graph")
    slim.graph.CopyFrom(copied(model.graph, lambda field: field.name != "initializer"))
    for tensor in model.graph.initializer:
        kept = slim.graph.initializer.add()
        entry = external_entry(tensor) if is_external(tensor) else None
        size = check_tensor(tensor.name, tensor.data_type, tensor.dims)
        stays = entry is not None and entry.location in elsewhere
        if not stays and (data is None or size < LEAST_BYTES):
            kept.CopyFrom(tensor)
            if entry is not None:
                put_inside(kept, b"".join(read(tensor)))
            continue
        kept.MergeFrom(onnx.TensorProto(name=tensor.name, data_type=tensor.data_type, dims=tensor.dims))
        if entry is not None and stays:
            point_at(kept, elsewhere[entry.location], entry.offset, size)
        elif data is not None:
            offset = data.place(size, *_source(tensor, read))
            point_at(kept, data.location, offset, size)
    return slim


def _source(tensor: onnx.TensorProto, read: Reader) -> tuple[Callable[[], Iterable[bytes | memoryview]], object]:
    """Return a function that reads the bytes of ``tensor``, and a key shared by tensors with equal bytes."""
    if is_external(tensor):
        return functools.partial(read, tensor), external_entry(tensor)
    raw = raw_bytes(tensor)
    return lambda: [raw], hashlib.sha256(raw).digest()


def _with_digests(manifest: str, digests: Mapping[str, str], shared: Mapping[str, Base]) -> Iterator[bytes]:
    """Yield the content of manifest.json, written last, because it contains the digests of all files."""
    document = {**json_of(manifest), DIGESTS: dict(digests), **({BASES: described(shared)} if shared else {})}
    yield (escaped_json(json.dumps(document, indent=1, ensure_ascii=False, allow_nan=False)) + "\n").encode()


def weight_bytes(model: onnx.ModelProto) -> int:
    """Return the size of the weights of ``model`` in bytes, including external weights."""
    return sum(check_tensor(t.name, t.data_type, t.dims) for t in model.graph.initializer)


# --- reading ------------------------------------------------------------------------------------------


def file_bytes(path: Path) -> bytes:
    try:
        return regular_bytes(path)
    except UnreadableError as error:
        raise ModelError(f"cannot read '{shown(path)}' ({error}); build the step again") from None


def stamp(path: Path) -> tuple[int, ...]:
    """Return device, inode, size and modification time of a file, for change detection; empty if it does not exist."""
    try:
        info = path.stat()
    except OSError:
        return ()
    return info.st_dev, info.st_ino, info.st_size, info.st_mtime_ns


def digests_in(text: str, manifest: Manifest, path: Path) -> dict[str, str]:
    """Return the digests of the files of a step folder, as recorded in manifest.json.

    Files without a digest are not compared: to edit a file by hand, remove its digest.
    """
    digests = json_of(text).get(DIGESTS, {})
    files = {*(f"{name}.onnx" for name in model_names(manifest)), MANIFEST_FILE, FROZEN_FILE, INIT_FILE}
    if not isinstance(digests, dict) or not all(isinstance(d, str) and name in files for name, d in digests.items()):
        raise ModelError(f"'{shown(path)}' is damaged (its digests are invalid); build the step again")
    return digests


def load_checked(
    path: Path, manifest: Manifest, digests: Mapping[str, str], bases: Mapping[str, Base]
) -> onnx.ModelProto:
    """Load a model of a step folder, after checking its digest, its copy of the manifest and its external data.

    ``digests`` are the expected digests by file name, ``bases`` the base files listed in manifest.json by location.

    Raises:
        ModelError: if the file is damaged, changed, or refers to files outside the step.
    """
    content = file_bytes(path)
    try:
        model = message_of(content)
    except UnreadableError:
        raise ModelError(f"'{shown(path)}' is damaged: it is not an ONNX file; build the step again") from None
    stored = next((p.value for p in model.metadata_props if p.key == METADATA_KEY), None)
    if stored is None or Manifest.from_json(stored, str(path)) != manifest:
        raise ModelError(f"'{shown(path)}' does not match manifest.json in the same folder; build the step again")
    external = [t for t in model.graph.initializer if is_external(t)]
    if len(external) != sum(is_external(t) for t in proto_tensors(model)):
        raise ModelError(
            f"'{shown(path)}' has external tensors that are not initializers, which a step never has; build the step "
            "again"
        )
    files = DataFiles(path.parent, remedy="build the step again")
    for tensor in external:
        _check_external(tensor, path, files, bases)
    if path.name in digests and digest_of([content]) != digests[path.name]:
        raise not_as_saved(path)  # before anything in it is reported
    check_proto(model)
    if path.name == "init.onnx":  # it is run as it is; the other models are checked further when they are opened
        structured(model)
    return model


def _check_external(tensor: onnx.TensorProto, model: Path, files: DataFiles, bases: Mapping[str, Base]) -> None:
    """Raise ModelError unless the data of a tensor are in frozen.bin, init.bin or a base file of manifest.json."""
    location = external_entry(tensor).location
    where = f"the external data of '{shown(tensor.name)}' in '{shown(model)}'"
    if location not in (FROZEN_FILE, INIT_FILE, *bases):
        raise ModelError(
            f"{where} are in '{shown(location)}', but a step stores them in {FROZEN_FILE} or {INIT_FILE}; build the "
            "step again"
        )
    try:
        if location in bases:
            check_range(tensor, bases[location].size)
        else:
            files.check(tensor)
    except ModelError as error:
        raise ModelError(f"'{shown(model)}' cannot be used: {error}") from None


def is_small(tensor: onnx.TensorProto) -> bool:
    """Whether an external tensor is so small that ``Step.save`` stores it inside the model."""
    return external_entry(tensor).length < LEAST_BYTES

"""Base files: files of weights that a step refers to instead of copying them.

A step built from a model with large external weights leaves them in the model's files. With ``share_weights``, a step
folder stores the relative path, size and digest of each such file. A file is used only if its size and digest match,
so an untrusted step folder cannot make its reader use a file that the author did not have. Weights in memory that
exceed protobuf's limit are written to a temporary file (``gradgraph.files.spilled``), which is also a base file.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import onnx
import onnx_ir as ir

from gradgraph.errors import ModelError, OutputError, shown
from gradgraph.files.external import found, point_at, store_inside, stored_values
from gradgraph.files.held_files import HeldFile, HeldTensor
from gradgraph.files.large_weights import LEAST_BYTES, LEAST_KEPT, large_in_file, large_outside, path_of, place_of
from gradgraph.files.spilled import Folder, spill
from gradgraph.files.untrusted.documents import json_of
from gradgraph.step.manifest import BASES
from gradgraph.step.weight_files import weight_file

MOST_IN_MEMORY = 1_500_000_000  # bytes of weights in memory that a step's models may hold; protobuf ends at 2**31

_REMEDY = "restore it, or build the step again"


@dataclass(frozen=True)
class Base:
    """A file of weights.

    Args:
        path: the path of the file.
        size: its size in bytes.
        digest: the expected digest, if known.
        folder: the temporary folder that contains the file, if gradgraph wrote it.
        held: the open file, if it has been held open since the model was loaded.
        modified: the time (in ns) at which the file had last been written when a step was built; None if unknown.

    Attributes:
        own: whether the file is the model file itself, with weights inside.
        lasts: whether a saved step can refer to the file: it is neither temporary nor the model file itself.
    """

    path: Path
    size: int
    digest: str | None = None
    folder: Folder | None = field(default=None, repr=False, compare=False)
    held: HeldFile | None = field(default=None, repr=False, compare=False)
    modified: int | None = field(default=None, repr=False, compare=False)

    @property
    def own(self) -> bool:
        return self.held is not None and self.held.own

    @property
    def lasts(self) -> bool:
        return self.folder is None and not self.own

    def opened(self) -> HeldFile:
        """Return the open file.

        Raises:
            ModelError: if the file cannot be read, or is not the one that the step was built on or saved with.
        """
        if self.held is not None:
            return self.held
        file = weight_file(self.path, self.digest, changed)
        if self.modified not in (None, file.modified):
            raise changed(self.path)
        return file

    def elsewhere(self) -> Base:
        """Return this base as another process opens it, for copies and pickles."""
        return self if self.held is None else replace(self, held=None)


# --- a built step -----------------------------------------------------------------------------------------


def bases_of(model: ir.Model) -> dict[str, Base]:
    """Return the files with the large external weights of ``model``, by location; empty if there are few such weights.

    Weights in memory that exceed protobuf's limit are first moved to a temporary file, in place.

    Raises:
        ModelError: if a file is missing, or if two tensors were loaded from it before and after it was replaced.
    """
    aside = spill(model, LEAST_BYTES, MOST_IN_MEMORY)
    bases: dict[str, Base] = {}
    for tensor in large_outside(model):
        base = _base_of(tensor, aside)
        known = bases.setdefault(place_of(tensor), base)
        if known.modified != base.modified or known.size != base.size:
            raise changed(base.path)
    return bases


def _base_of(tensor: ir.ExternalTensor, aside: Folder | None) -> Base:
    if isinstance(tensor, HeldTensor):
        file = tensor.file
        return Base(file.path, file.size, held=file, modified=file.modified)
    path = Path(path_of(tensor))
    ours = aside is not None and path.parent == aside.path
    with found(tensor):
        status = path.stat()
    return Base(path, status.st_size, folder=aside if ours else None, modified=status.st_mtime_ns)


def to_proto_beside(model: ir.Model, bases: Mapping[str, Base]) -> onnx.ModelProto:
    """Return ``model`` as protobuf, with weights in ``bases`` external and all other weights inside."""
    staying = {v: t for v in model.graph.initializers.values() if (t := large_in_file(v)) and place_of(t) in bases}
    store_inside(v for v in stored_values(model) if v not in staying)
    proto: onnx.ModelProto = ir.to_proto(model)
    named = {v.name: tensor for v, tensor in staying.items()}
    for kept in proto.graph.initializer:
        if (tensor := named.get(kept.name)) is not None:
            kept.ClearField("external_data")
            point_at(kept, place_of(tensor), tensor.offset or 0, tensor.nbytes)
    return proto


# --- a step folder --------------------------------------------------------------------------------------


def path_from(folder: Path, base: Path) -> str:
    """Return the path of ``base`` relative to ``folder``, as in manifest.json.

    Raises:
        OutputError: if ``folder`` and ``base`` are on different drives.
    """
    try:
        return Path(os.path.relpath(os.path.realpath(base), os.path.realpath(folder))).as_posix()
    except ValueError:
        raise OutputError(
            f"'{shown(folder)}' is on a different drive from '{shown(base)}', so there is no relative path between "
            "them; write the step to the model's drive, or remove share_weights"
        ) from None


def described(bases: Mapping[str, Base]) -> dict[str, Any]:
    """Return the entries of manifest.json for ``bases``."""
    return {location: {"bytes": base.size, "digest": base.digest} for location, base in bases.items()}


def bases_in(manifest: str, path: Path) -> dict[str, Base]:
    """Return the base files named in ``manifest``, the text of manifest.json at ``path``.

    Raises:
        ModelError: if an entry is damaged, or a file is missing or its size differs from the recorded one.
    """
    found = json_of(manifest).get(BASES, {})
    if not isinstance(found, dict) or not all(_is_description(*item) for item in found.items()):
        raise ModelError(f"'{shown(path)}' is damaged (its {BASES} are invalid); build the step again")
    return {location: _there(location, entry, path.parent) for location, entry in found.items()}


def _is_description(location: str, entry: Any) -> bool:
    """Whether ``location`` is a plain relative path, and ``entry`` has a size and a digest."""
    odd = "\0" in location or "\\" in location or location.startswith("/") or ":" in location.split("/")[0]
    if odd or not location or not isinstance(entry, dict) or entry.keys() != {"bytes", "digest"}:
        return False
    size, digest = entry["bytes"], entry["digest"]
    return isinstance(size, int) and size >= LEAST_BYTES and isinstance(digest, str) and bool(digest)


def _there(location: str, entry: Mapping[str, Any], folder: Path) -> Base:
    path = folder / location
    what = f"'{shown(path)}', which contains frozen weights of the step '{shown(folder)}',"
    try:
        status = path.stat()
    except (OSError, RuntimeError, ValueError):
        raise ModelError(f"{what} is missing; {_REMEDY} (the folder and that file can be moved together)") from None
    if not stat.S_ISREG(status.st_mode):
        raise ModelError(f"{what} is not a regular file; {_REMEDY}")
    if status.st_size != entry["bytes"]:
        raise ModelError(f"{what} has {status.st_size:,} bytes instead of {entry['bytes']:,}; {_REMEDY}")
    return Base(path.absolute(), status.st_size, entry["digest"])  # for processes that change their folder


def changed(path: Path) -> ModelError:
    """Return the error for a base file whose content has changed."""
    return ModelError(
        f"'{shown(path)}', which contains frozen weights of a step, has changed since the step was built; {_REMEDY}"
    )


def nothing_to_share() -> OutputError:
    return OutputError(
        f"this step was not built from a model with {LEAST_KEPT >> 20} MiB or more of weights in external data (that "
        f"have {LEAST_BYTES >> 10} KiB or more each), so there is nothing to share",
        remedy="remove share_weights, or store the model's weights as external data: onnx.save_model(model, path, "
        "save_as_external_data=True), then gradgraph.build(path)",
        shell="remove --share-weights, or store the model's weights as external data",
    )

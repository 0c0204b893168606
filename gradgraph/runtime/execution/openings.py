"""A cache of optimised models in the user's cache folder, with which a step opens faster the next time.

Opening a step lowers it for this machine and lets onnxruntime optimise the result. Both depend only on the step, its
external weights, the sizes, options, processor, versions, and the source files of this package; all of these are in the
cache key (of external weights, the digest or stamp of their files). The cached model is the model that onnxruntime
executed. Loaded without further optimisations, it has the same nodes, so results are bitwise identical. Its nodes are
stored in an order from which onnxruntime derives the same execution order, so memory use is the same, too
(``node_order``).

Large constants of the step and its external weights are read from the step, not duplicated.

A file that is truncated, damaged, of another version, stored under another key or writable by other users is ignored.
GRADGRAPH_OPENINGS=off disables the cache.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib.metadata
import logging
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort

from gradgraph.backends.backend import Backend
from gradgraph.backends.ort_native import library
from gradgraph.errors import GradgraphError
from gradgraph.files.atomic import explain_errors, write_atomically
from gradgraph.files.external import external_entry, is_external, location_of, point_at
from gradgraph.files.protos import proto_tensors
from gradgraph.files.untrusted.messages import message_of
from gradgraph.files.untrusted.regular import UnreadableError, regular_bytes
from gradgraph.machine import custom_ops
from gradgraph.machine.caches import FILE_MODE, cache_folder, check_ours, open_private
from gradgraph.machine.hardware import instructions, processor
from gradgraph.rules.named_operators import OPERATORS
from gradgraph.runtime.execution.session import CPU, Placement, RuntimeOptions

log = logging.getLogger("gradgraph")

MOST = 512 << 20  # bytes of all files; the least recently used are removed first
LARGEST = 64 << 20  # bytes of one model
LEAST = 200  # nodes; smaller models open quickly without a cache
LEAST_APART = 1 << 10  # bytes; constants of at least this size are read from the step
# bytes of external weights that onnxruntime may write out; they are in memory twice meanwhile
LARGEST_WRITTEN = 64 << 20
_OF_THE_STEP = "gradgraph:step/"  # prefix of the location of such a constant, followed by its name in the step
_MARK = b"gradgraph opening 2\n"
_DIGEST = hashlib.sha256().digest_size


@dataclass(frozen=True)
class Opening:
    """A cached model.

    Attributes:
        executed: whether onnxruntime has already optimised the model; if False, it is only lowered.
    """

    model: onnx.ModelProto
    executed: bool


def folder() -> Path:
    """Return the cache folder, ``gradgraph/openings`` in the user's cache."""
    return cache_folder() / "openings"


def is_on() -> bool:
    return os.environ.get("GRADGRAPH_OPENINGS", "") != "off"


@functools.cache
def _size_rules() -> str:
    return importlib.metadata.version("onnx-shape-inference")


def key_of(
    model: onnx.ModelProto, backend: Backend, placement: Placement, options: RuntimeOptions, *further: object
) -> str | None:
    """Return a digest of everything that affects how ``model`` is lowered and optimised; None if it is not cached.

    ``further`` are additional parts of the key, hashed by their ``repr``.
    """
    is_known = placement.providers == (CPU,) and type(options) is RuntimeOptions
    if not is_on() or not is_known or options.custom_ops or custom_ops.KNOWN or not _is_ours(backend):
        return None
    versions = (ort.__version__, ort.get_build_info(), onnx.__version__, ir.__version__, np.__version__, _size_rules())
    machine = (processor(), instructions(), os.cpu_count())
    key = hashlib.sha256()
    for part in (_MARK, versions, machine, _sources(), _kernels(), backend.name, placement, options, *further):
        key.update(repr(part).encode() + b"\0")
    key.update(model.SerializeToString(deterministic=True))
    return key.hexdigest()


def read(key: str | None, source: onnx.ModelProto) -> Opening | None:
    """Return the cached model for ``source`` under ``key``, or None if it is missing, damaged or does not fit."""
    if key is None:
        return None
    path = _path(key)
    try:
        check_ours(path)
        content = memoryview(regular_bytes(path, LARGEST + 1024))
        digest, body = content[len(_MARK) :][:_DIGEST], content[len(_MARK) + _DIGEST :]
        if content[: len(_MARK)] != _MARK or digest != _digest(key, body):
            return None
        model = message_of(bytes(body[1:]))
    except UnreadableError:
        return None
    except GradgraphError as error:
        log.warning("%s; until then, the cache of opened steps is not used", error)
        return None
    if not _is_filled(model, source) or not _locations(model) <= _locations(source):
        return None
    with contextlib.suppress(OSError):
        os.utime(path)
    return Opening(model, bool(body[0]))


def is_worth_it(model: onnx.ModelProto) -> bool:
    """Whether the lowered ``model`` is large enough to be cached."""
    return len(model.graph.node) >= LEAST


def keep(key: str, source: onnx.ModelProto, lowered: onnx.ModelProto, executed: onnx.ModelProto | None) -> None:
    """Write the ``executed`` model, or else the ``lowered`` one, to the cache, unless it is too large.

    The model is modified: large constants are replaced by references to ``source``. If the folder is not writable,
    nothing is written.
    """
    model = lowered if executed is None else executed
    _take_out_constants(model, source)
    if model.ByteSize() > LARGEST:
        return
    body = bytes([executed is not None]) + model.SerializeToString()
    path = _path(key)
    try:
        with explain_errors(path):
            open_private(path.parent)
            write_atomically(path, _MARK + _digest(key, body) + body, FILE_MODE)
    except GradgraphError as error:  # the only effect is a slower opening next time
        log.debug("%s; this opened step is not cached", error)
        return
    _forget_beyond(MOST)


def lies_beside(
    executed: onnx.ModelProto, lowered: onnx.ModelProto, holds: Callable[[onnx.TensorProto, bytes], bool]
) -> bool:
    """Make weights of ``executed`` refer to the files of the equal weights of ``lowered``, in place.

    Args:
        executed: the model that onnxruntime executes.
        lowered: the model that it was created from.
        holds: returns whether the bytes of an external tensor in its file equal other bytes.

    Returns:
        Whether every external weight of ``executed`` equals a weight of ``lowered``.
    """
    lying = {t.name: t for t in lowered.graph.initializer if is_external(t)}
    for tensor in executed.graph.initializer:
        theirs = lying.get(tensor.name)
        is_like = theirs is not None and (tensor.data_type, tensor.dims) == (theirs.data_type, theirs.dims)
        if is_external(tensor):
            if theirs is None or not is_like or external_entry(tensor)[1:] != external_entry(theirs)[1:]:
                return False
            tensor.CopyFrom(theirs)
        elif theirs is not None and is_like and holds(theirs, tensor.raw_data):
            tensor.CopyFrom(theirs)
    return True


def _take_out_constants(model: onnx.ModelProto, source: onnx.ModelProto) -> None:
    """Replace large constants of ``model`` with references to constants of ``source`` with the same bytes, in place."""
    names = {raw: name for name, raw in _large_constants(source)}
    for tensor in model.graph.initializer if names else ():
        raw = tensor.raw_data
        name = names.get(raw) if len(raw) >= LEAST_APART else None
        if name is not None:
            tensor.ClearField("raw_data")
            point_at(tensor, _OF_THE_STEP + name, 0, len(raw))


def _is_filled(model: onnx.ModelProto, source: onnx.ModelProto) -> bool:
    """Copy constants of ``source`` back into ``model``; return False if one is missing or of the wrong size."""
    theirs = dict(_large_constants(source))
    for tensor in filter(is_external, model.graph.initializer):
        if (location := location_of(tensor)).startswith(_OF_THE_STEP):
            raw = theirs.get(location.removeprefix(_OF_THE_STEP), b"")
            if len(raw) != external_entry(tensor).length:
                return False
            tensor.ClearField("external_data")
            tensor.ClearField("data_location")
            tensor.raw_data = raw
    return True


def _large_constants(model: onnx.ModelProto) -> Iterator[tuple[str, bytes]]:
    """Yield name and bytes of each large constant that is not external."""
    for tensor in model.graph.initializer:
        if not is_external(tensor) and len(raw := tensor.raw_data) >= LEAST_APART:
            yield tensor.name, raw


def kept() -> tuple[int, int]:
    """Return the number of cached models and their total bytes."""
    sizes = [size for _, size, _ in _by_last_use()]
    return len(sizes), sum(sizes)


def forget() -> None:
    """Clear the cache."""
    _forget_beyond(0)


def _forget_beyond(most: int) -> None:
    files = list(_by_last_use())
    total = sum(size for _, size, _ in files)
    for _, size, path in files:
        if total <= most:
            return
        with contextlib.suppress(OSError):  # another process may have removed it
            path.unlink(missing_ok=True)
        total -= size


def _by_last_use() -> list[tuple[int, int, Path]]:
    """Return time of last use, size in bytes and path of each cached file, least recently used first."""
    found = []
    with contextlib.suppress(OSError):
        for path in folder().glob("*.opening"):
            with contextlib.suppress(OSError):
                status = path.lstat()
                found.append((status.st_mtime_ns, status.st_size, path))
    return sorted(found)


def _path(key: str) -> Path:
    return folder() / f"{key}.opening"


def _digest(key: str, body: bytes | memoryview) -> bytes:
    digest = hashlib.sha256(key.encode())
    digest.update(body)
    return digest.digest()


def _locations(model: onnx.ModelProto) -> set[str]:
    """Return the external data files that ``model`` reads."""
    return {location_of(tensor) for tensor in proto_tensors(model) if is_external(tensor)}


@functools.cache
def _sources() -> str:
    """Return a digest of name, size and time of every file in this package, since edits may change the lowering."""
    digest = hashlib.sha256()
    for place, folders, files in os.walk(Path(custom_ops.__file__).parents[1], followlinks=True):
        folders[:] = sorted(name for name in folders if name != "__pycache__")
        at = Path(place)
        for name in sorted(files):
            status = (at / name).stat()
            digest.update(f"{name} {status.st_size} {status.st_mtime_ns}\n".encode())
    return digest.hexdigest()


def _kernels() -> tuple[object, ...]:
    """Return path, size and modification time of the native library, if built; lowering depends on its kernels."""
    found = library.here()
    if not found.is_built:
        return ()
    status = found.path.stat()
    return str(found.path), status.st_size, status.st_mtime_ns


def _is_ours(backend: Backend) -> bool:
    """Whether lowering for ``backend`` uses only code of this package; only such code is part of the cache key."""
    functions: list[Any] = [operator.portable for operator in OPERATORS.values()]
    return all(_of_this_package(function) for function in [*functions, *_functions_of(backend)])


def _functions_of(backend: Backend) -> Iterator[Any]:
    each: Backend | None = backend
    while each is not None:
        lowering = each.lowering
        of_layouts = (rewrite for layout in lowering.layouts for rewrite in layout.rewrites)
        for rewrite in (*lowering.before, *of_layouts, *lowering.after, *lowering.last):
            yield from (rewrite.apply, *rewrite.then)
        for form in lowering.forms:
            yield form.write
            yield form.when
        each = each.extends


def _of_this_package(function: Any) -> bool:
    plain = function.func if isinstance(function, partial) else function
    return (getattr(plain, "__module__", None) or "").partition(".")[0] == __name__.partition(".")[0]

"""Reading models safely, writing artefacts atomically.

Whatever is at an output path is the old artefact or the new one, never a mixture: a temporary file beside it is
written, flushed to the disk and renamed. Reading opens no file outside the model's own directory and executes nothing.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import secrets
import shutil
import socket
import stat
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TypeAlias

import onnx
import onnx_ir as ir

from gradgraph.arguments import PATH, Kind, checked
from gradgraph.checks import check_tensor, in_order, validate
from gradgraph.errors import GradgraphError, ModelError, OutputError, shown
from gradgraph.maps import without_maps
from gradgraph.paths import output_target
from gradgraph.protos import check_proto, proto_tensors

__all__ = [
    "check_writable",
    "link_atomically",
    "load_model",
    "save_model",
    "to_proto",
    "validate",
    "write_atomically",
    "write_folder_atomically",
]

Data: TypeAlias = bytes | bytearray | memoryview | Iterable[bytes | memoryview]
Source: TypeAlias = str | os.PathLike[str] | onnx.ModelProto | ir.Model
PATH_OR_MODEL = Kind("a path, an onnx.ModelProto or an onnx_ir.Model", PATH.fits)  # asked once the others are ruled out

INLINE_LIMIT = 1_500_000_000  # bytes of weights inside the .onnx file; protobuf ends at 2**31
PROTOBUF_LIMIT = 2**31
_STALE = 24 * 3600  # seconds after which a temporary of another machine counts as abandoned


# --- writing files ------------------------------------------------------------------------------------


@checked(path=PATH)
def write_atomically(path: str | os.PathLike[str], data: Data, mode: int | None = None) -> None:
    """Write ``data`` to ``path``: afterwards the file is complete and on the disk, or as it was before.

    The old file's mode is kept unless ``mode`` is given, a symlink's target is replaced rather than the link, and
    abandoned temporaries of earlier writers are swept.

    Raises:
        OutputError: the folder is missing or read-only, the disk is full, or ``path`` is not a regular file.
    """
    with says_why(path):
        target = output_target(path)
        former = _mode_of(target)
        _sweep(target)
        temporary = _temporary(target)
        try:
            _write(temporary, data, former if mode is None else mode)
            os.replace(temporary, target)  # noqa: PTH105 - says what it is: the atomic step
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
        _sync_folder(target.parent)


def link_atomically(source: str | os.PathLike[str], path: str | os.PathLike[str]) -> None:
    """Let ``path`` be another name of the file ``source``, in place of what was there.

    Raises:
        OutputError: ``source`` is not there, or the file system has no such links.
    """
    with says_why(path):
        target = output_target(path)
        _sweep(target)
        temporary = _temporary(target)
        try:
            os.link(os.path.realpath(source), temporary)
            temporary.replace(target)  # which does nothing if both are the same file already
        finally:
            temporary.unlink(missing_ok=True)


def check_writable(path: str | os.PathLike[str]) -> None:
    """Find out whether ``write_atomically`` could write there, by making and removing its temporary file.

    Raises:
        OutputError: it could not.
    """
    with says_why(path):
        target = output_target(path)
        _mode_of(target)
        temporary = _temporary(target)
        temporary.touch(exist_ok=False)
        temporary.unlink()


def write_folder_atomically(path: str | os.PathLike[str], files: Mapping[str, Data], force: bool = False) -> None:
    """Write a folder of ``files`` (name to data) as one artefact: it appears complete, or not at all.

    A missing or empty folder is filled. With ``force``, a folder that an earlier call wrote (it has a
    ``manifest.json`` and nothing but such artefacts) is replaced as a whole.

    Raises:
        OutputError: the folder holds something else, or the disk does not let us.
    """
    with says_why(path):
        target = output_target(path)
        _sweep(target)
        _check_replaceable(target, files, force)
        temporary = _temporary(target)
        try:
            temporary.mkdir()
            for name, data in files.items():
                if Path(name).name != name or name in ("", ".."):
                    raise OutputError(f"'{shown(name)}' cannot be the name of a file in a folder; use a plain name")
                _write(temporary / name, data, None)
            _sync_folder(temporary)
            _swap_in(temporary, target)
        except BaseException:
            shutil.rmtree(temporary, ignore_errors=True)
            raise
        _sync_folder(target.parent)


def _swap_in(new: Path, target: Path) -> None:
    """Rename ``new`` to ``target``; what was there steps aside first and comes back should the rename fail."""
    if not target.exists():
        new.rename(target)
        return
    old = new.with_name(new.name.removesuffix(_TEMPORARY) + _REPLACED)
    target.rename(old)
    try:
        new.rename(target)
    except BaseException:
        old.rename(target)
        raise
    shutil.rmtree(old, ignore_errors=True)


def _check_replaceable(target: Path, files: Mapping[str, Data], force: bool) -> None:
    if not target.exists():
        return
    if not target.is_dir():
        raise OutputError(f"'{shown(target)}' is a file, and a folder is to be written there; choose another path")
    there = sorted(p.name for p in target.iterdir())
    if not there:
        return
    if not force:
        raise OutputError(
            f"the folder '{shown(target)}' is not empty",
            remedy="choose another one, or replace it with force=True",
            shell="choose another one, or replace it with --force",
        )
    foreign = [n for n in there if n not in files and not n.endswith((".onnx", ".onnx.data", ".bin"))]
    if foreign or not _has_manifest(target):
        what = f"holds '{shown(foreign[0])}'" if foreign else "has no manifest.json of ours"
        raise OutputError(f"the folder '{shown(target)}' {what}, so it is not replaced; choose another one")


def _has_manifest(folder: Path) -> bool:
    try:
        return isinstance(json.loads((folder / "manifest.json").read_text("utf-8")), dict)
    except (OSError, ValueError):
        return False


def _write(path: Path, data: Data, mode: int | None) -> None:
    chunks = [data] if isinstance(data, bytes | bytearray | memoryview) else data
    with path.open("xb") as file:
        for chunk in chunks:
            file.write(chunk)
        if mode is not None:
            os.fchmod(file.fileno(), mode) if hasattr(os, "fchmod") else path.chmod(mode)
        file.flush()
        os.fsync(file.fileno())


def _mode_of(target: Path) -> int | None:
    try:
        status = target.stat()
    except FileNotFoundError:
        return None
    if not stat.S_ISREG(status.st_mode):
        raise OutputError(f"'{shown(target)}' is not a regular file; choose another path to write to")
    if not os.access(target, os.W_OK):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(target))
    return stat.S_IMODE(status.st_mode)


def _sync_folder(folder: Path) -> None:
    if os.name == "nt":
        return  # Windows cannot open a folder, and journals renames itself
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # some network file systems have no such call
            raise
    finally:
        os.close(handle)


@contextlib.contextmanager
def says_why(path: str | os.PathLike[str]) -> Iterator[None]:
    """What the system says while something is written to ``path`` becomes an OutputError with a remedy."""
    try:
        yield
    except GradgraphError:
        raise
    except (OSError, ValueError) as error:
        reason = (error.strerror if isinstance(error, OSError) else None) or str(error)
        where = f"cannot write '{shown(os.fspath(path))}'"
        remedy = {
            errno.ENOENT: "create the folder it lies in first",
            errno.ENOTDIR: "a part of its path is a file",
            errno.EACCES: "choose a folder that you may write to",
            errno.EPERM: "choose a folder that you may write to",
            errno.EROFS: "choose a folder that you may write to",
            errno.ENOSPC: "free some space and try again",
            errno.EDQUOT: "free some space and try again",
        }.get(error.errno or 0 if isinstance(error, OSError) else 0, "choose another path")
        raise OutputError(f"{where}: {shown(reason)} (what was there before is untouched)", remedy=remedy) from error


# --- temporaries --------------------------------------------------------------------------------------

_TEMPORARY = ".gradgraph-tmp"
_REPLACED = ".gradgraph-old"


def _temporary(target: Path) -> Path:
    return target.with_name(f"{_prefix(target)}{_host()}-{os.getpid()}-{secrets.token_hex(4)}{_TEMPORARY}")


def _prefix(target: Path) -> str:
    return f".{target.name[:100]}."


def _host() -> str:
    return "".join(c for c in socket.gethostname() if c.isalnum())[:32] or "host"


def _sweep(target: Path) -> None:
    """Remove what killed writers of ``target`` left; a replaced folder comes back if its successor never arrived."""
    for entry in _left_behind(target):
        with contextlib.suppress(OSError):
            if entry.name.endswith(_REPLACED) and not target.exists():
                entry.rename(target)
            elif entry.is_dir():
                shutil.rmtree(entry)
            else:
                entry.unlink()


def _left_behind(target: Path) -> list[Path]:
    prefix = _prefix(target)
    try:
        names = [n for n in os.listdir(target.parent) if n.startswith(prefix)]  # noqa: PTH208 - names are enough
    except OSError:
        return []
    names = [n for n in names if n.endswith((_TEMPORARY, _REPLACED))]
    return [target.parent / n for n in names if _abandoned(target.parent / n, n[len(prefix) :])]


def _abandoned(entry: Path, rest: str) -> bool:
    host, _, tail = rest.partition("-")
    pid = tail.partition("-")[0]
    if host == _host() and pid.isdigit() and os.name != "nt" and not _alive(int(pid)):
        return True
    try:
        return time.time() - entry.stat().st_mtime > _STALE
    except OSError:
        return False


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except (PermissionError, OverflowError):
        return True
    return True


# --- reading models -----------------------------------------------------------------------------------


def load_model(source: Source, base_dir: str | os.PathLike[str] | None = None) -> ir.Model:
    """The model as an onnx-ir model of our own: what the caller passed is never modified.

    Args:
        source: path of a ``.onnx`` file, ``onnx.ModelProto`` or ``onnx_ir.Model``.
        base_dir: where the external data of a ModelProto lie; a path's own directory is its base directory.

    External data are mapped, not read. Their file must lie in the base directory; as an exception for download
    caches, a model file that is itself a symlink may keep its data beside the file that its link points to.

    Raises:
        ModelError: nothing readable there, or the model is not well formed (see ``gradgraph.checks.validate``).
    """
    if isinstance(source, ir.Model):
        validate(source)
        return _copy(source)
    if isinstance(source, onnx.ModelProto):
        return _from_proto(source, "the model", None if base_dir is None else _Data(base_dir))
    PATH_OR_MODEL.check("the model", source)
    path = Path(source)
    return _from_proto(read_message(path), f"'{shown(path)}'", _Data(base_dir or path.parent, path))


def _copy(model: ir.Model) -> ir.Model:
    """A clone that shares the tensors; cloning needs sorted nodes, so an unsorted model goes through protobuf."""
    if _is_sorted(model):
        return model.clone()
    tensors = {v.name: v.const_value for v in model.graph.initializers.values()}
    copy: ir.Model = ir.from_proto(ir.to_proto(model))
    for value in copy.graph.initializers.values():
        value.const_value = tensors[value.name]
    copy.graph.sort()
    return copy


def _is_sorted(model: ir.Model) -> bool:
    seen: set[ir.Node] = set()
    for graph in model.graphs():
        for node in graph:
            if any(
                v is not None and (p := v.producer()) is not None and p.graph is graph and p not in seen
                for v in node.inputs
            ):
                return False
            seen.add(node)
    return True


def read_message(path: Path) -> onnx.ModelProto:
    """The message in the file; it is not looked at.

    Raises:
        ModelError: no regular file, or no message in it.
    """
    what = f"'{shown(path)}'"
    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):
            kind = "a folder" if stat.S_ISDIR(status.st_mode) else "not a regular file"
            raise ModelError(f"{what} is {kind}; give the path of a .onnx file")
        content = path.read_bytes()
    except FileNotFoundError:
        raise ModelError(f"there is no file {what}; check the path of the model") from None
    except (OSError, ValueError) as error:
        reason = (error.strerror if isinstance(error, OSError) else None) or str(error)
        raise ModelError(f"cannot read {what}: {shown(reason)}; check the path and its permissions") from error
    if not content:
        raise ModelError(f"{what} is empty; export or download the model again")
    try:
        return onnx.ModelProto.FromString(content)
    except Exception as error:  # protobuf raises DecodeError, a class of no public module
        raise ModelError(
            f"{what} is no ONNX model, or is truncated (its protobuf does not parse, nor would graphs nested "
            "more than 32 deep); export or download it again"
        ) from error


def _from_proto(proto: onnx.ModelProto, what: str, data: _Data | None) -> ir.Model:
    try:
        check_proto(proto)
        proto = without_maps(proto)
        located = _locate(proto, data)
        model: ir.Model = ir.from_proto(proto)
        _attach(model, located)
        validate(model)
        if not in_order(model.graph):
            model.graph.sort()
        for function in model.functions.values():
            function.sort()
    except ModelError as error:
        raise ModelError(f"{what} cannot be used: {error}", error.findings) from error.__cause__
    except (ir.serde.SerdeError, ValueError, NotImplementedError, TypeError) as error:
        raise ModelError(f"{what} cannot be used: {_first_line(error)}; export it again with a current onnx") from error
    return model


def _first_line(error: BaseException) -> str:
    cause: BaseException = error
    while cause.__cause__ is not None:
        cause = cause.__cause__
    return shown(str(cause).split("\n", 1)[0] or type(cause).__name__)


# --- external data --------------------------------------------------------------------------------------


class _Data:
    """The one directory (two for a symlinked model) whose files external tensors may lie in."""

    def __init__(self, base_dir: str | os.PathLike[str], model: Path | None = None) -> None:
        self.base = Path(base_dir)
        self.roots = [Path(os.path.realpath(base_dir))]
        if model is not None and model.is_symlink():
            self.roots.append(Path(os.path.realpath(model)).parent)
        self._sizes: dict[str, tuple[Path, int]] = {}

    def file(self, location: str, name: str) -> tuple[Path, int]:
        """The real path behind ``location`` and its size, after all checks."""
        if location not in self._sizes:
            self._sizes[location] = self._checked(
                location, f"external data '{shown(location)}' of tensor '{shown(name)}'"
            )
        return self._sizes[location]

    def _checked(self, location: str, what: str) -> tuple[Path, int]:
        parts = location.replace("\\", "/").split("/")
        if not location or "\0" in location:
            raise ModelError(f"{what} name no file; the model is damaged")
        if parts[0] == "" or ":" in parts[0] or ".." in parts:
            raise ModelError(f"{what} lie outside the model's folder; only relative paths within it are read")
        path = self.base / location
        try:
            real = path.resolve(strict=True)
            status = real.stat()
        except (OSError, RuntimeError):
            raise ModelError(f"{what} are missing; put that file beside the model") from None
        inside = any(real.is_relative_to(root) for root in self.roots[:1]) or real.parent in self.roots[1:]
        if not inside:
            raise ModelError(f"{what} are a symlink out of the model's folder; copy the file itself beside the model")
        if not stat.S_ISREG(status.st_mode):
            raise ModelError(f"{what} are not a regular file; copy the data beside the model")
        if status.st_nlink > 1:
            raise ModelError(f"{what} are a hard link to a file elsewhere; copy the file itself beside the model")
        return real, status.st_size


def _locate(proto: onnx.ModelProto, data: _Data | None) -> dict[str, Path]:
    """Check all external tensors of ``proto``; the real file of each location."""
    located: dict[str, Path] = {}
    for tensor in proto_tensors(proto):
        if tensor.data_location != onnx.TensorProto.EXTERNAL:
            continue
        entries = {e.key: e.value for e in tensor.external_data}
        location = entries.get("location", "")
        if location.startswith("*/"):
            raise ModelError(
                f"tensor '{shown(tensor.name)}' refers to another process's memory; save the model with its data"
            )
        if data is None:
            raise ModelError(
                f"tensor '{shown(tensor.name)}' keeps its data in the file '{shown(location)}'; pass the model's path, "
                "or base_dir, so that the file can be found"
            )
        located[location], file_size = data.file(location, tensor.name)
        _check_range(tensor, entries, file_size)
    return located


def _check_range(tensor: onnx.TensorProto, entries: Mapping[str, str], file_size: int) -> None:
    what = f"external data of tensor '{shown(tensor.name)}'"
    size = check_tensor(tensor.name, tensor.data_type, tensor.dims)
    try:
        offset, length = int(entries.get("offset") or 0), int(entries.get("length") or size)
    except ValueError:
        raise ModelError(f"{what} have an offset or length that is no number; the model is damaged") from None
    if offset < 0 or length < 0 or length != size:
        raise ModelError(
            f"{what} span {length} bytes from {offset}, but its type and shape need {size}; the model is damaged"
        )
    if offset + length > file_size:
        raise ModelError(f"{what} end at byte {offset + length} of a file of {file_size}; download the data file again")


def _attach(model: ir.Model, located: Mapping[str, Path]) -> None:
    """Point every external tensor at the real file that was checked."""
    for graph in model.graphs():
        for value in graph.initializers.values() if isinstance(graph, ir.Graph) else ():
            if isinstance(value.const_value, ir.ExternalTensor):
                value.const_value = _moved(value.const_value, located)
    bodies: list[ir.Graph | ir.Function] = [model.graph, *model.functions.values()]
    for node in (n for body in bodies for n in body.all_nodes()):
        for attr in node.attributes.values():
            if isinstance(attr.value, ir.ExternalTensor):
                node.attributes[attr.name] = ir.AttrTensor(attr.name, _moved(attr.value, located))


def _moved(tensor: ir.ExternalTensor, located: Mapping[str, Path]) -> ir.ExternalTensor:
    real = located[str(tensor.location)]
    return ir.ExternalTensor(
        real.name,
        tensor.offset,
        tensor.length,
        tensor.dtype,
        shape=tensor.shape,
        name=tensor.name,
        base_dir=real.parent,
    )


# --- writing models -----------------------------------------------------------------------------------


@checked(path=PATH)
def save_model(model: onnx.ModelProto | ir.Model, path: str | os.PathLike[str]) -> None:
    """Write the model to ``path``, atomically; weights of more than INLINE_LIMIT bytes go to ``<name>.data`` beside it.

    The data file is written first, under a name that no older model refers to, so that at any moment the model file
    and its data belong together.

    Raises:
        OutputError: the file cannot be written, or the model without its initializers exceeds 2 GB.
    """
    own = model.clone() if isinstance(model, ir.Model) else load_model(model)
    weights = [
        v for g in own.graphs() if isinstance(g, ir.Graph) for v in g.initializers.values() if v.const_value is not None
    ]
    with says_why(path):
        target = output_target(path)
    if _bytes_of(weights) <= INLINE_LIMIT:
        _store_inside(weights)
        write_atomically(path, _serialized(own, target))
        return
    data, former = _unused_data_name(target), _identity(target)
    try:
        _store_outside(weights, target.parent, data)
        write_atomically(path, _serialized(own, target))
    except BaseException:
        if _identity(target) == former:  # else the new model is in its place, and only the last flush has failed
            (target.parent / data).unlink(missing_ok=True)
        raise
    for name in _data_names(target):
        if name != data:
            with contextlib.suppress(OSError):
                (target.parent / name).unlink(missing_ok=True)


def _serialized(model: ir.Model, target: Path) -> bytes:
    try:
        return ir.to_proto(model).SerializeToString()
    except ValueError as error:
        raise OutputError(f"cannot write '{shown(target)}': without its initializers it still exceeds 2 GB") from error


def _identity(path: Path) -> tuple[int, int] | None:
    """What tells a file from one that takes its place."""
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_dev, status.st_ino


def to_proto(model: ir.Model) -> onnx.ModelProto:
    """``model`` as protobuf with its external data inside: a ModelProto does not know the folder that they lie in.

    Raises:
        ModelError: they are more than protobuf writes.
    """
    weights = [v for g in model.graphs() if isinstance(g, ir.Graph) for v in g.initializers.values()]
    size = _bytes_of(weights)
    if size >= PROTOBUF_LIMIT:
        raise ModelError(
            f"the result holds {size / 1e9:.1f} GB of weights, and a ModelProto at most {PROTOBUF_LIMIT / 1e9:.1f} GB",
            remedy="pass out='result.onnx', which writes them beside it, or an onnx_ir.Model, which gives one",
            shell="write it to a file: gradgraph grad MODEL -o result.onnx",
        )
    _store_inside(weights)
    return ir.to_proto(model)


def _bytes_of(weights: Iterable[ir.Value]) -> int:
    return sum(t.nbytes for v in weights if (t := v.const_value) is not None and t.dtype != ir.DataType.STRING)


def _store_inside(weights: Iterable[ir.Value]) -> None:
    for value in weights:
        if isinstance(value.const_value, ir.ExternalTensor):
            value.const_value = ir.Tensor(value.const_value.numpy(), dtype=value.const_value.dtype, name=value.name)


def _unused_data_name(target: Path) -> str:
    taken = set(_data_names(target))
    candidates = (f"{target.name}{f'.{i}' if i else ''}.data" for i in range(len(taken) + 1))
    return next(c for c in candidates if c not in taken)


def _store_outside(weights: Iterable[ir.Value], folder: Path, name: str) -> None:
    stored = [v for v in weights if _bytes_of([v]) >= 1024]
    write_atomically(folder / name, _padded(v.const_value for v in stored))
    offset = 0
    for value in stored:
        tensor = value.const_value
        assert tensor is not None
        value.const_value = ir.ExternalTensor(
            name,
            offset,
            tensor.nbytes,
            tensor.dtype,
            shape=ir.Shape(tensor.shape.numpy()),
            name=value.name or "",
            base_dir=folder,
        )
        offset += tensor.nbytes + -tensor.nbytes % _PAGE


_PAGE = 4096  # tensors start at page boundaries, so that runtimes can map them


def _padded(tensors: Iterable[ir.TensorProtocol | None]) -> Iterator[bytes]:
    for tensor in tensors:
        if tensor is not None:
            yield tensor.tobytes()
            yield bytes(-tensor.nbytes % _PAGE)


def _data_names(target: Path) -> list[str]:
    """``<name>.data``, ``<name>.1.data``, … as far as they are there."""
    if not target.parent.is_dir():
        return []
    names = [p.name for p in target.parent.iterdir() if p.name.startswith(target.name) and p.name.endswith(".data")]
    middles = {n: n[len(target.name) : -len(".data")] for n in names}
    return [n for n, middle in middles.items() if middle == "" or (middle.startswith(".") and middle[1:].isdigit())]

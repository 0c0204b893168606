"""Reading models safely, and writing them.

Reading opens no file outside the model's own directory, and executes no code of the file.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, TypeAlias

import onnx
import onnx_ir as ir

from gradgraph.arguments import PATH, Kind, checked
from gradgraph.errors import ModelError, OutputError, shown
from gradgraph.files.atomic import explain_errors, write_atomically
from gradgraph.files.external import (
    DataFiles,
    attach,
    bytes_of,
    check_found,
    data_names,
    external_entry,
    is_external,
    locate,
    point_at,
    put_inside,
    store_inside,
    store_outside,
    stored_values,
    unused_data_name,
)
from gradgraph.files.held_files import CAN_HOLD, HeldFile, own_file
from gradgraph.files.large_weights import LEAST_KEPT, large_outside
from gradgraph.files.maps import without_maps
from gradgraph.files.model_metadata import check_metadata
from gradgraph.files.path_kinds import Kind as Place
from gradgraph.files.path_kinds import kind_of, model_of, wrong_kind
from gradgraph.files.paths import output_target
from gradgraph.files.protos import check_proto
from gradgraph.files.streamed import model_pieces
from gradgraph.files.suffixes import check_suffix
from gradgraph.files.untrusted.messages import message_of, message_without_data
from gradgraph.files.untrusted.regular import (
    IrregularFileError,
    MissingFileError,
    UnreadableError,
    open_regular,
    reason_of,
)
from gradgraph.graph.checks import check_tensor, in_order, is_sorted, validate
from gradgraph.graph.constant_nodes import lift_weights

Source: TypeAlias = str | os.PathLike[str] | onnx.ModelProto | ir.Model
PATH_OR_MODEL = Kind("a path, an onnx.ModelProto or an onnx_ir.Model", PATH.fits)  # models are recognised before

INLINE_LIMIT = 1_500_000_000  # bytes of weights inside the .onnx file; protobuf ends at 2**31
PROTOBUF_LIMIT = 2**31
LEAST_HELD = LEAST_KEPT  # bytes: smaller files are read at once
_UNKNOWN = "?"  # PaddlePaddle's name of every unknown dimension; equal names do not mean equal sizes


# --- reading ------------------------------------------------------------------------------------------


def load_model(source: Source, base_dir: str | os.PathLike[str] | None = None) -> ir.Model:
    """Load a model as a new onnx-ir model; the source is never modified.

    Args:
        source: the path of a ``.onnx`` file (or of a run's folder, for its trained model), an ``onnx.ModelProto`` or an
            ``onnx_ir.Model``.
        base_dir: the folder of the external data; by default the folder of the path. A ModelProto has no default.

    External data are mapped, not read. Their file must be in the base directory; as an exception for download caches, a
    symlinked model file may have its data next to the link's target.

    Weights stored as Constant nodes become initializers (``gradgraph.graph.constant_nodes``).

    Raises:
        ModelError: if the model cannot be read, or is malformed (see ``gradgraph.graph.checks.validate``).
    """
    if isinstance(source, ir.Model):
        validate(source)
        check_metadata(source.metadata_props)
        check_found(source)
        return _understood(_copy(source))
    if isinstance(source, onnx.ModelProto):
        return _from_proto(source, "the model", None if base_dir is None else DataFiles(base_dir))
    PATH_OR_MODEL.check("the model", source)
    path = model_of(source)
    proto, own = _message(path, held=True)
    return _from_proto(proto, f"'{shown(path)}'", DataFiles(base_dir or path.parent, path), own)


def _copy(model: ir.Model) -> ir.Model:
    """Return a clone of ``model`` that shares its tensors, made by way of protobuf if its nodes are unsorted."""
    if all(map(is_sorted, model.graphs())):
        return model.clone()
    tensors = {v.name: v.const_value for v in model.graph.initializers.values()}
    copy: ir.Model = ir.from_proto(ir.to_proto(model))
    for value in copy.graph.initializers.values():
        value.const_value = tensors[value.name]
    copy.graph.sort()
    return copy


def read_message(path: Path) -> onnx.ModelProto:
    """Parse a ``.onnx`` file without checking the model.

    Raises:
        ModelError: if ``path`` is not a regular file, or its content is not an ONNX model.
    """
    return _message(path, held=False)[0]


def _message(path: Path, held: bool) -> tuple[onnx.ModelProto, HeldFile | None]:
    """Parse a ``.onnx`` file; with ``held``, large initializers may stay in the file, which is also returned."""
    what = f"'{shown(path)}'"
    try:
        with open_regular(path) as file:
            found = message_inside(path, file) if held else None
            content = b"" if found else file.read()
    except UnreadableError as error:
        raise _not_read(path, error) from None
    except OSError as error:
        raise _not_read(path, UnreadableError(reason_of(error))) from None
    if found:
        return found
    if not content:
        raise ModelError(f"{what} is empty; export or download the model again")
    try:
        return message_of(content), None
    except UnreadableError as error:
        raise ModelError(
            wrong_kind(path, Place.MODEL)
            or f"{what} is not an ONNX model, or is truncated ({error}); export or download it again"
        ) from error.__cause__


def written_message(path: Path) -> onnx.ModelProto:
    """Return the model in a ``.onnx`` file written by gradgraph; external data are not read.

    Large weights inside the file are read one at a time, so that each is in memory only once.

    Raises:
        ModelError: if the file is overwritten while it is read.
    """
    with path.open("rb") as file:
        if (found := message_inside(path, file)) is None:
            return onnx.ModelProto.FromString(file.read())
    proto, own = found
    for tensor in filter(is_external, proto.graph.initializer):
        place = external_entry(tensor)
        if place.location == own.location:
            put_inside(tensor, b"".join(own.pieces(place.offset, place.length)))
            tensor.ClearField("data_location")  # as stored in the file
    return proto


def message_inside(path: Path, file: BinaryIO) -> tuple[onnx.ModelProto, HeldFile] | None:
    """Return the model in ``file`` with large initializers left in the file; None if the file must be read as a whole.

    ``file``, open at ``path``, is positioned at its start before and after the call.
    """
    if not CAN_HOLD or os.fstat(file.fileno()).st_size < LEAST_HELD:
        return None
    own = HeldFile(path, file, own=True)

    def place(tensor: onnx.TensorProto, offset: int, length: int) -> bool:
        with contextlib.suppress(ModelError):
            fits = length == check_tensor(tensor.name, tensor.data_type, tensor.dims) > 0
            if fits:
                point_at(tensor, own.location, offset, length)
            return fits
        return False  # faults are reported when all is read

    found = message_without_data(file, place)
    file.seek(0)
    return None if found is None else (found, own)


def _not_read(path: Path, error: UnreadableError) -> ModelError:
    what = f"'{shown(path)}'"
    if isinstance(error, MissingFileError):
        return ModelError(f"there is no file {what}; check the path of the model")
    if isinstance(error, IrregularFileError):
        kind = kind_of(path)
        called = kind.value if kind in (Place.STEP, Place.RUN) else str(error).removeprefix("it is ")
        return ModelError(f"{what} is {called}; give the path of a .onnx file")
    return ModelError(f"cannot read {what}: {error}; check the path and its permissions")


def _from_proto(proto: onnx.ModelProto, what: str, data: DataFiles | None, own: HeldFile | None = None) -> ir.Model:
    try:
        check_proto(proto)
        proto = without_maps(proto)
        located = locate(proto, data, own)
        model = _in_memory(proto)
        attach(model, located)
        validate(model)
        check_metadata(model.metadata_props)
        if not in_order(model.graph):
            model.graph.sort()
        for function in model.functions.values():
            function.sort()
    except ModelError as error:
        raise ModelError(f"{what} cannot be used: {error}", error.findings) from error.__cause__
    return _understood(model)


def structured(proto: onnx.ModelProto) -> ir.Model:
    """Return ``proto``, which has passed ``check_proto``, as an onnx-ir model; external data are not checked.

    Raises:
        ModelError: if it is malformed (see ``gradgraph.graph.checks.validate``).
    """
    model = _in_memory(proto)
    validate(model)
    return model


def _in_memory(proto: onnx.ModelProto) -> ir.Model:
    try:
        model: ir.Model = ir.from_proto(proto)
    except (ir.serde.SerdeError, ValueError, NotImplementedError, TypeError) as error:
        raise ModelError(f"{_first_line(error)}; export it again with a current onnx") from error
    return model


def _understood(model: ir.Model) -> ir.Model:
    """Convert weights in Constant nodes to initializers, and sizes ``?`` (PaddlePaddle) to unknown sizes, in place."""
    lift_weights(model)
    for graph in model.graphs():
        for value in (*graph.inputs, *(v for node in graph for v in node.outputs)):
            if value.shape is not None and _UNKNOWN in value.shape.dims:
                value.shape = ir.Shape([None if dim == _UNKNOWN else dim for dim in value.shape])
    return model


def _first_line(error: BaseException) -> str:
    cause: BaseException = error
    while cause.__cause__ is not None:
        cause = cause.__cause__
    return shown(str(cause).split("\n", 1)[0] or type(cause).__name__)


# --- writing ------------------------------------------------------------------------------------------


@checked(path=PATH)
def save_model(model: onnx.ModelProto | ir.Model, path: str | os.PathLike[str]) -> None:
    """Write the model to ``path``, atomically.

    Weights are written to ``<name>.data`` next to ``path`` if they exceed INLINE_LIMIT bytes, or if the model has large
    weights that are not in memory: external ones (``large_outside``), so that they can be mapped again, or ones that
    are computed when they are read.

    The data file is written first, under a new name, so that the model file and its data always match.

    Raises:
        OutputError: if the file cannot be written or has the extension of another format, or if the model without its
            initializers exceeds 2 GB.
    """
    check_suffix(path, ".onnx")
    own = model.clone() if isinstance(model, ir.Model) else load_model(model)
    weights = stored_values(own)
    with explain_errors(path):
        target = output_target(path)
    if not is_saved_external(own):
        with _within_limit(target):
            write_atomically(path, model_pieces(own))
        return
    data, former = unused_data_name(target), _identity(target)
    try:
        store_outside(weights, target.parent, data)
        with _within_limit(target):
            write_atomically(path, ir.to_proto(own).SerializeToString())
    except BaseException:
        if _identity(target) == former:  # otherwise the new model is in place, and only the last flush has failed
            (target.parent / data).unlink(missing_ok=True)
        raise
    for name in data_names(target):
        if name != data:
            with contextlib.suppress(OSError):
                (target.parent / name).unlink(missing_ok=True)


def is_saved_external(model: ir.Model) -> bool:
    """Whether ``save_model`` writes the weights of ``model`` to a separate file."""
    return (
        any(own_file(tensor) is None for tensor in large_outside(model))
        or bytes_of(v for v in stored_values(model) if isinstance(v.const_value, ir.LazyTensor)) >= LEAST_KEPT
        or bytes_of(stored_values(model)) > INLINE_LIMIT
    )


@contextlib.contextmanager
def _within_limit(target: Path) -> Iterator[None]:
    """Return a context that raises OutputError if the model without its weights exceeds protobuf's limit."""
    try:
        yield
    except ValueError as error:
        raise OutputError(f"cannot write '{shown(target)}': without its initializers it still exceeds 2 GB") from error


def _identity(path: Path) -> tuple[int, int] | None:
    """Return (device, inode) of a file, which differ after it is replaced; None if it does not exist."""
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_dev, status.st_ino


def to_proto(model: ir.Model) -> onnx.ModelProto:
    """Convert ``model`` to protobuf with its external data inside, as a ModelProto has no base folder.

    Raises:
        ModelError: if the weights exceed protobuf's limit.
    """
    weights = stored_values(model)
    check_fits(bytes_of(weights))
    store_inside(weights)
    return ir.to_proto(model)


def check_fits(size: int) -> None:
    """Raise ModelError if weights of ``size`` bytes exceed the limit of a ModelProto."""
    if size >= PROTOBUF_LIMIT:
        raise ModelError(
            f"the result has {size / 1e9:.1f} GB of weights, but a ModelProto can store at most "
            f"{PROTOBUF_LIMIT / 1e9:.1f} GB",
            remedy="pass the path of a model whose weights are external data, and write the result to a file "
            "(out= of a transform, the path of export)",
            shell="write it to a file: gradgraph grad MODEL -o result.onnx",
        )

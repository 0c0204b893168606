"""``.ort`` files for reduced builds of onnxruntime, and the list of operators that such a build needs.

onnxruntime itself writes both, in a separate process. It reads models with large weights in external files, and
pre-packing is disabled, so that it needs 1.5 times the size of the weights in memory instead of 3.1 times.
"""

from __future__ import annotations

import contextlib
import functools
import os
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import onnx
import onnx_ir as ir

from gradgraph.arguments import FLAG, PATH, Kind, checked
from gradgraph.errors import ModelError, RuntimeUnavailableError, shown
from gradgraph.files.atomic import check_replaceable, write_atomically, write_folder_atomically
from gradgraph.files.external import DataFile, bytes_of, store_outside, stored_values
from gradgraph.files.mapped import pieces_of
from gradgraph.files.models import PROTOBUF_LIMIT
from gradgraph.files.suffixes import FOLDER, check_suffix
from gradgraph.files.untrusted.regular import open_regular
from gradgraph.machine import processes
from gradgraph.machine.custom_ops import KNOWN, absolute
from gradgraph.passes.normal import load_runnable
from gradgraph.step.folder import MANIFEST_FILE, model_names, weight_bytes, with_external
from gradgraph.step.step import Step

__all__ = ["ort_model", "required_operators", "save_ort", "save_required_operators"]

CONFIG = "required_operators.config"
_LIMIT = 600  # seconds
_SOURCE = Kind(
    "a gradgraph.Step, its folder, or a model: its path or an onnx.ModelProto",
    lambda value: isinstance(value, Step | onnx.ModelProto) or PATH.fits(value),
)

# A script that writes an .ort file next to each model in the folder of each level, then the list of operators that all
# of them need. Its settings are those of onnxruntime.tools.convert_onnx_models_to_ort, except that pre-packing is
# disabled, for which that tool has no option.
_CONVERT = """
import mmap, pathlib, sys
import onnxruntime as ort
from onnxruntime.tools.ort_format_model import create_config_from_models, ort_model_processor

class Mapped:  # in place of a file that is read whole, and copied once more
    def __init__(self, path, mode):
        self.path = path
    def read(self):
        with open(self.path, "rb") as file:
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)

ort_model_processor.open, ort_model_processor.bytearray = Mapped, lambda content: content
folder, config, types, library = pathlib.Path(sys.argv[1]), sys.argv[2], sys.argv[3] == "types", sys.argv[4]
for path in sorted(folder.glob("*/*.onnx")):
    level, _, platform = path.parent.name.partition("-")
    options = ort.SessionOptions()
    options.graph_optimization_level = getattr(ort.GraphOptimizationLevel, f"ORT_{level.upper()}_ALL")
    options.optimized_model_filepath = str(path.with_suffix(".ort"))
    for entry, value in (("save_model_format", "ORT"), ("qdqisint8allowed", "0"), ("disable_prepacking", "1")):
        options.add_session_config_entry(f"session.{entry}", value)
    if library:
        options.register_custom_ops_library(library)
    without = ["NchwcTransformer"] if level == "enable" and platform != "amd64" else None
    ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"], disabled_optimizers=without)
create_config_from_models(sorted(folder.glob("*/*.ort")), folder / config, types)
"""
# optimisation levels; functions are inlined in all of them. The last one includes NCHWc convolutions, which onnxruntime
# uses on x86-64 when it reads an .onnx, but which an .ort file for any processor cannot contain
_AS_IT_IS, _OPTIMISED, _IN_BLOCKS = "disable", "enable", "enable-amd64"
Writer = Callable[[Path], None]  # writes a model to the path, and its large weights to an external file


@checked(source=_SOURCE, types=FLAG, custom_ops=PATH.or_none())
def required_operators(
    source: Step | str | os.PathLike[str] | onnx.ModelProto,
    *,
    types: bool = False,
    custom_ops: str | os.PathLike[str] | None = None,
) -> str:
    """Return the text of a configuration file with the operators that a reduced build of onnxruntime needs to run a
    step or model, for the build option ``--include_ops_by_config``.

    The list includes operators in functions and loops, and operators that onnxruntime's optimizers write, among them
    the NCHWc convolutions of x86-64.

    Args:
        source: a step, its folder, or a model: its path, or a ModelProto.
        types: whether to include the element types of each operator, for
            ``--enable_reduced_operator_type_support``.
        custom_ops: the library of custom ops in the model, unless registered with ``gradgraph.extend.library``.

    Raises:
        ModelError: if onnxruntime rejects a model.
        RuntimeUnavailableError: if onnxruntime's converter does not run.
    """
    levels: dict[str, Mapping[str, Writer]] = dict.fromkeys((_AS_IT_IS, _OPTIMISED, _IN_BLOCKS), _models(source))
    with _converted(levels, types, custom_ops) as (_, config):
        return config


@checked(path=PATH)
def save_required_operators(
    source: Step | str | os.PathLike[str] | onnx.ModelProto,
    path: str | os.PathLike[str],
    *,
    types: bool = False,
    custom_ops: str | os.PathLike[str] | None = None,
) -> str:
    """Write the text of ``required_operators`` to ``path``, and return it.

    Raises:
        ModelError, RuntimeUnavailableError: as for ``required_operators``.
        OutputError: if ``path`` cannot be written.
    """
    check_suffix(path, ".config")
    text = required_operators(source, types=types, custom_ops=custom_ops)
    write_atomically(path, text.encode())
    return text


def ort_model(model: onnx.ModelProto, *, custom_ops: str | os.PathLike[str] | None = None) -> bytes:
    """Return a model in ORT format, as the bytes of an ``.ort`` file; its optimisations suit any processor.

    Raises:
        ModelError: if onnxruntime rejects the model.
        RuntimeUnavailableError: if onnxruntime's converter does not run.
    """
    with _converted({_OPTIMISED: {"model": _writer(model)}}, False, custom_ops) as (made, _):
        return (made / _OPTIMISED / "model.ort").read_bytes()


def write_ort_models(
    models: Mapping[Path, onnx.ModelProto | ir.Model], custom_ops: str | os.PathLike[str] | None = None
) -> str:
    """Write models as ``.ort`` files; return the text of the list of operators that a build needs to run all of them.

    Args:
        models: the models by the path to write each to.
        custom_ops: as for ``required_operators``.

    Raises:
        ModelError, RuntimeUnavailableError: as for ``ort_model``.
        OutputError: if a file cannot be written.
    """
    called = {f"model-{i}": path for i, path in enumerate(models)}
    writers = {name: _writer(models[path]) for name, path in called.items()}
    with _converted({_OPTIMISED: writers}, False, custom_ops) as (made, config):
        for name, path in called.items():
            write_atomically(path, _read(made / _OPTIMISED / f"{name}.ort"))
    return config


@checked(folder=PATH, force=FLAG, types=FLAG)
def save_ort(
    step: Step | str | os.PathLike[str],
    folder: str | os.PathLike[str],
    *,
    force: bool = False,
    types: bool = False,
    custom_ops: str | os.PathLike[str] | None = None,
) -> Path:
    """Write a step as a folder of ``.ort`` files, with ``manifest.json``, and ``required_operators.config`` for a
    reduced build of onnxruntime.

    All models except init.ort are optimised.

    Raises:
        ModelError: if the step is damaged, or onnxruntime rejects one of its models.
        RuntimeUnavailableError: if onnxruntime's converter does not run.
        OutputError: if the folder cannot be written, or is not empty and ``force`` is not set.
    """
    check_suffix(folder, FOLDER)
    step = step if isinstance(step, Step) else Step.load(step)
    models = _models(step)
    # checked now, as the conversion takes long
    check_replaceable(Path(folder), [*(f"{name}.ort" for name in models), MANIFEST_FILE, CONFIG], force)
    first = {"init": models.pop("init")}  # optimising it would fold the zeros of optimizer state, and store them
    with _converted({_AS_IT_IS: first, _OPTIMISED: models}, types, custom_ops) as (made, config):
        contents: dict[str, Any] = {f"{name}.ort": _read(made / _OPTIMISED / f"{name}.ort") for name in models}
        contents["init.ort"] = _read(made / _AS_IT_IS / "init.ort")
        contents[CONFIG] = config.encode()
        contents[MANIFEST_FILE] = (step.manifest.to_json() + "\n").encode()
        write_folder_atomically(Path(folder), contents, force=force)
    return Path(folder)


def _models(source: Any) -> dict[str, Writer]:
    """Return a writer function for each model of a step, step folder or model, by file name without suffix."""
    if not isinstance(source, Step | onnx.ModelProto) and Path(source).is_dir():
        source = Step.load(source)
    if isinstance(source, Step):
        return {name: functools.partial(_write_of_step, source, name) for name in model_names(source.manifest)}
    return {"model": _writer(source if isinstance(source, onnx.ModelProto) else load_runnable(source))}


def _writer(model: onnx.ModelProto | ir.Model) -> Writer:
    return functools.partial(_write_message if isinstance(model, onnx.ModelProto) else _write_beside, model)


def _write_message(model: onnx.ModelProto, path: Path) -> None:
    try:
        path.write_bytes(model.SerializeToString())
    except ValueError:
        raise _too_large() from None


def _write_beside(model: ir.Model, path: Path) -> None:
    work = model.clone()
    weights = stored_values(work)
    _check_size(bytes_of(weights))
    store_outside(weights, path.parent, f"{path.name}.data")
    _write_message(ir.to_proto(work), path)


def _write_of_step(step: Step, name: str, path: Path) -> None:
    model = step._model(name)
    _check_size(weight_bytes(model))
    data = DataFile(f"{path.name}.data")
    _write_message(with_external(model, data, step.pieces, {}), path)
    with (path.parent / data.location).open("wb") as file:
        file.writelines(data.chunks())


def _check_size(weights: int) -> None:
    if weights >= PROTOBUF_LIMIT:
        raise _too_large()


def _too_large() -> ModelError:
    return ModelError("a model above 2 GB cannot be an .ort file; write it as .onnx")


def _read(path: Path) -> Iterator[bytes]:
    with open_regular(path) as file:
        yield from pieces_of(file)


@contextlib.contextmanager
def _converted(
    levels: Mapping[str, Mapping[str, Writer]], types: bool, custom_ops: str | os.PathLike[str] | None
) -> Iterator[tuple[Path, str]]:
    """Convert models, by optimisation level and name, in a temporary folder with a subfolder of ``.ort`` files for each
    level; yield the folder and the list of operators in all models.
    """
    libraries = list(dict.fromkeys([*KNOWN, *absolute(custom_ops or ())]))
    if len(libraries) > 1:
        raise ModelError("onnxruntime's converter accepts one custom-op library; combine them into one")
    with tempfile.TemporaryDirectory(prefix="gradgraph-") as scratch:
        folder = Path(scratch)
        for level, models in levels.items():
            (folder / level).mkdir()
            for name, write in models.items():
                write(folder / level / f"{name}.onnx")
        words = [scratch, CONFIG, "types" if types else "", *map(str, libraries), ""]
        try:
            ran = processes.run_python(_CONVERT, *words, text=True, errors="replace", timeout=_LIMIT)
        except (OSError, subprocess.SubprocessError) as error:
            raise RuntimeUnavailableError(
                f"onnxruntime's converter does not run ({shown(error)}); write an .onnx instead"
            ) from None
        if ran.returncode:
            lines = ran.stderr.strip().splitlines() or [f"the process ended with {ran.returncode}"]
            raise ModelError(f"onnxruntime's converter rejects the model ({shown(lines[-1])}); write an .onnx instead")
        lines = (folder / CONFIG).read_text("utf-8").splitlines(keepends=True)
        yield folder, "".join(line for line in lines if not line.startswith("#"))  # comments name temporary files

"""For small builds of onnxruntime: ``.ort`` files, and the list of operators that a build needs.

Both are made by onnxruntime's own converter, which its Python package brings, in a process of its own.
"""

from __future__ import annotations

import os
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import onnx

from gradgraph.arguments import FLAG, PATH, Kind, checked
from gradgraph.errors import ModelError, RuntimeUnavailableError, shown
from gradgraph.files.atomic import check_replaceable, write_atomically, write_folder_atomically
from gradgraph.files.models import load_model, to_proto
from gradgraph.files.suffixes import FOLDER, check_suffix
from gradgraph.machine import processes
from gradgraph.machine.custom_ops import KNOWN, absolute
from gradgraph.step.folder import MANIFEST_FILE, model_names
from gradgraph.step.step import Step

__all__ = ["ort_model", "required_operators", "save_ort", "save_required_operators"]

CONFIG = "required_operators.config"
_LIMIT = 600  # seconds
_SOURCE = Kind(
    "a gradgraph.Step, the folder of one, or a model: its path or an onnx.ModelProto",
    lambda value: isinstance(value, Step | onnx.ModelProto) or PATH.fits(value),
)

# Of the models in the folder of each level an .ort file beside it; then what all of these need.
_CONVERT = """
import os, pathlib, sys
from onnxruntime.tools import convert_onnx_models_to_ort as tool
from onnxruntime.tools.ort_format_model import create_config_from_models
setting = "ORT_CONVERT_ONNX_MODELS_TO_ORT_OPTIMIZATION_LEVEL"
folder, config, types, library = pathlib.Path(sys.argv[1]), sys.argv[2], sys.argv[3] == "types", sys.argv[4]
for level in sorted(f for f in folder.iterdir() if f.is_dir()):
    os.environ[setting] = level.name.partition("-")[0]
    tool.convert_onnx_models_to_ort(level, optimization_styles=[tool.OptimizationStyle.Fixed],
                                    custom_op_library_path=pathlib.Path(library) if library else None,
                                    target_platform="amd64" if level.name.endswith("amd64") else None)
create_config_from_models(sorted(folder.glob("*/*.ort")), folder / config, types)
"""
# levels; functions are inlined in all. On x86-64 convolutions may be in blocks of channels, which no .ort file has
_AS_IT_IS, _OPTIMISED, _IN_BLOCKS = "disable", "all", "all-amd64"


@checked(source=_SOURCE, types=FLAG, custom_ops=PATH.or_none())
def required_operators(
    source: Step | str | os.PathLike[str] | onnx.ModelProto,
    *,
    types: bool = False,
    custom_ops: str | os.PathLike[str] | None = None,
) -> str:
    """List what a build of onnxruntime must have to run these ``.onnx`` files: text for ``--include_ops_by_config``.

    Operators in bodies of functions and of loops are among them, and those that onnxruntime's optimizers write; on
    x86-64 also its convolutions in blocks of channels.

    Args:
        source: a step, the folder of one, or a model: its path, or a ModelProto.
        types: with the element types of each, for ``--enable_reduced_operator_type_support``.
        custom_ops: a library of operators that the model calls, if ``gradgraph.extend.library`` does not know it.

    Raises:
        ModelError: onnxruntime refuses a model.
        RuntimeUnavailableError: its converter does not run.
    """
    with tempfile.TemporaryDirectory(prefix="gradgraph-") as folder:
        levels: dict[str, Any] = dict.fromkeys((_AS_IT_IS, _OPTIMISED, _IN_BLOCKS), _models(source))
        return _convert(levels, Path(folder), types, custom_ops)


@checked(path=PATH)
def save_required_operators(
    source: Step | str | os.PathLike[str] | onnx.ModelProto,
    path: str | os.PathLike[str],
    *,
    types: bool = False,
    custom_ops: str | os.PathLike[str] | None = None,
) -> str:
    """Write ``required_operators(source)`` to ``path`` and return it.

    Raises:
        ModelError, RuntimeUnavailableError: as for ``required_operators``.
        OutputError: ``path`` cannot be written.
    """
    check_suffix(path, ".config")
    text = required_operators(source, types=types, custom_ops=custom_ops)
    write_atomically(path, text.encode())
    return text


def ort_model(model: onnx.ModelProto, *, custom_ops: str | os.PathLike[str] | None = None) -> bytes:
    """The ``.ort`` file of a model, optimised for any processor.

    Raises:
        ModelError: onnxruntime refuses the model.
        RuntimeUnavailableError: its converter does not run.
    """
    return ort_models({"model": model}, custom_ops)[0]["model"]


def ort_models(
    models: Mapping[str, onnx.ModelProto], custom_ops: str | os.PathLike[str] | None
) -> tuple[dict[str, bytes], str]:
    """The ``.ort`` files of several models, and what a build of onnxruntime needs for all of them: as ``ort_model``."""
    with tempfile.TemporaryDirectory(prefix="gradgraph-") as folder:
        config = _convert({_OPTIMISED: models}, Path(folder), False, custom_ops)
        made = Path(folder) / _OPTIMISED
        return {name: (made / f"{name}.ort").read_bytes() for name in models}, config


@checked(folder=PATH, force=FLAG, types=FLAG)
def save_ort(
    step: Step | str | os.PathLike[str],
    folder: str | os.PathLike[str],
    *,
    force: bool = False,
    types: bool = False,
    custom_ops: str | os.PathLike[str] | None = None,
) -> Path:
    """Write a step as ``.ort`` files: each model, ``manifest.json``, and ``required_operators.config`` for a build that
    runs just these.

    The initial state stays as it is computed in init.onnx; the other models are optimised.

    Raises:
        ModelError: the step is damaged, or onnxruntime refuses one of its models.
        RuntimeUnavailableError: onnxruntime's converter does not run.
        OutputError: the folder cannot be written, or is not empty and ``force`` is not given.
    """
    check_suffix(folder, FOLDER)
    step = step if isinstance(step, Step) else Step.load(step)
    models = _models(step)
    check_replaceable(
        Path(folder), [*(f"{name}.ort" for name in models), MANIFEST_FILE, CONFIG], force
    )  # it takes time
    first = {"init": models.pop("init")}  # whose zeros would be stored if it were optimised
    with tempfile.TemporaryDirectory(prefix="gradgraph-") as scratch:
        config = _convert({_AS_IT_IS: first, _OPTIMISED: models}, Path(scratch), types, custom_ops)
        made = {f"{name}.ort": Path(scratch, _OPTIMISED, f"{name}.ort") for name in models}
        made["init.ort"] = Path(scratch, _AS_IT_IS, f"init.{_AS_IT_IS}.ort")
        contents: dict[str, Any] = {name: file.read_bytes() for name, file in made.items()}
    contents[CONFIG] = config.encode()
    contents[MANIFEST_FILE] = (step.manifest.to_json() + "\n").encode()
    write_folder_atomically(Path(folder), contents, force=force)
    return Path(folder)


def _models(source: Any) -> dict[str, onnx.ModelProto]:
    """Read models, with all weights inside, by the names of their files."""
    if not isinstance(source, Step | onnx.ModelProto) and Path(source).is_dir():
        source = Step.load(source)
    if isinstance(source, Step):
        return {name: source.resolved(name) for name in model_names(source.manifest)}
    return {"model": to_proto(load_model(source))}


def _convert(
    levels: Mapping[str, Mapping[str, onnx.ModelProto]],
    folder: Path,
    types: bool,
    custom_ops: str | os.PathLike[str] | None,
) -> str:
    """Write the ``.ort`` files of models at their level of optimisation into folders of these names in ``folder``.

    Returns:
        What all of these need.
    """
    for level, models in levels.items():
        (folder / level).mkdir()
        for name, model in models.items():
            try:
                (folder / level / f"{name}.onnx").write_bytes(model.SerializeToString())
            except ValueError:
                raise ModelError("a model above 2 GB has no .ort file") from None
    libraries = list(dict.fromkeys([*KNOWN, *absolute(custom_ops or ())]))
    if len(libraries) > 1:
        raise ModelError("onnxruntime's converter takes one library of custom operators; put them into one")
    words = [str(folder), CONFIG, "types" if types else "", *map(str, libraries), ""]
    try:
        ran = processes.run_python(_CONVERT, *words, text=True, errors="replace", timeout=_LIMIT)
    except (OSError, subprocess.SubprocessError) as error:
        raise RuntimeUnavailableError(f"onnxruntime's converter does not run: {shown(error)}") from None
    if ran.returncode:
        lines = ran.stderr.strip().splitlines() or [f"the process ended with {ran.returncode}"]
        raise ModelError(f"onnxruntime's converter refuses the model: {shown(lines[-1])}")
    lines = (folder / CONFIG).read_text("utf-8").splitlines(keepends=True)
    return "".join(line for line in lines if not line.startswith("#"))  # comments name temporary files

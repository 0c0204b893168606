"""Export a step or a model as C source files: ``gradgraph.export.c``."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx

from gradgraph.arguments import FLAG, PATH, WHOLE, Kind, checked
from gradgraph.errors import ArgumentError, BuildError, shown
from gradgraph.export.artifacts import Weights, opened_trainer
from gradgraph.export.c.c_files import files, way_to_set
from gradgraph.export.c.c_functions import Unit, function
from gradgraph.export.c.c_names import is_prefix
from gradgraph.export.c.c_reading import refusal
from gradgraph.export.c.program import C_TYPES, Tensor
from gradgraph.files.atomic import write_folder_atomically
from gradgraph.files.models import to_proto
from gradgraph.files.protos import reads
from gradgraph.files.suffixes import FOLDER, check_suffix
from gradgraph.graph.prune import needed
from gradgraph.passes.normal import normalise
from gradgraph.passes.normal.sizes.fixed import fix_sizes
from gradgraph.step.folder import MANIFEST_FILE
from gradgraph.step.step import Step

_SOURCE = Kind(
    "a gradgraph.Step, its folder, or a model: its path or an onnx.ModelProto",
    lambda value: isinstance(value, Step | onnx.ModelProto) or PATH.fits(value),
)
_SIZES = Kind(
    "a dict of numbers by dimension, such as {'batch': 1}",
    lambda value: isinstance(value, Mapping) and all(map(WHOLE.fits, value.values())),
)
LARGEST_SHOWN = 3


@dataclass(frozen=True)
class Sizes:
    """The memory that an exported program needs, in bytes.

    Attributes:
        state: weights, statistics, optimizer state and counters, in RAM.
        arena: working memory, in RAM.
        constants: initial weights and frozen weights, in flash.
        folder: the folder of the C files.
    """

    folder: Path
    state: int
    arena: int
    constants: int

    @property
    def ram(self) -> int:
        return self.state + self.arena


@checked(source=_SOURCE, folder=PATH, ram=WHOLE.or_none(), sizes=_SIZES.or_none(), force=FLAG)
def c(
    source: Step | str | os.PathLike[str] | onnx.ModelProto,
    folder: str | os.PathLike[str],
    ram: int | None = None,
    *,
    sizes: Mapping[str, int] | None = None,
    checkpoint: str | os.PathLike[str] | None = None,
    weights: Weights | None = None,
    name: str = "",
    force: bool = False,
) -> Sizes:
    """Write a step or a model as C99 source files that need no runtime, and return their memory requirements.

    A step becomes ``trainer_step``, ``trainer_evaluate`` and ``trainer_predict``; a model becomes ``model_run``.

    Args:
        source: a step, its folder, or a model.
        folder: the folder for the C files.
        ram: the available RAM in bytes, excluding function arguments; None for no limit.
        sizes: the sizes of symbolic dimensions by name, such as ``{"batch": 1}``.
        checkpoint: a checkpoint of the step, to start from its state instead of the initial one.
        weights: arrays by name, which replace weights of the step or the checkpoint.
        name: the prefix of all names in C; ``trainer`` or ``model`` by default.
        force: replace an existing folder of an earlier export.

    Raises:
        BuildError: an operator or element type is not supported in C, a size is not fixed, or the program needs more
            than ``ram``.
        ModelError: the step or the model is damaged.
        OutputError: the folder is not empty, has the extension of a file format, or cannot be written.
    """
    if name and not is_prefix(name):
        raise ArgumentError(
            f"name must be a C identifier of at most 31 characters that C does not use itself, not '{shown(name)}'"
        )
    check_suffix(folder, FOLDER)
    whole = dict(sizes or {})
    step = _step_of(source)
    if step is None:
        if checkpoint is not None or weights is not None:
            raise BuildError("a plain model has no state to replace; omit checkpoint and weights, or pass a step")
        unit = _of_model(source, name or "model", whole)
    else:
        unit = _of_step(step, name or "trainer", whole, opened_trainer(step, checkpoint, weights).state.read())
    contents = files(unit)
    if ram is not None and unit.state_bytes + unit.arena > ram:
        raise _too_large(unit, ram)
    write_folder_atomically(folder, contents, force)
    constants = sum(t.nbytes for t in unit.text.arrays.values())
    return Sizes(Path(folder), unit.state_bytes, unit.arena, constants)


def _step_of(source: Any) -> Step | None:
    if isinstance(source, Step):
        return source
    if isinstance(source, onnx.ModelProto):
        return None
    return Step.load(source) if (Path(source) / MANIFEST_FILE).exists() else None


def _of_model(source: Any, name: str, sizes: Mapping[str, int]) -> Unit:
    model = normalise(source)
    fix_sizes(model, sizes)
    run = function("run", "Computes the outputs of the model.", to_proto(model), {}, sizes={})
    return Unit(name, [run], {}, {}, {})


def _of_step(step: Step, name: str, sizes: Mapping[str, int], initial: Mapping[str, np.ndarray[Any, Any]]) -> Unit:
    manifest = step.manifest
    manifest.check_sizes(sizes)
    if manifest.steps:
        listed = ", ".join(f"'{shown(n)}'" for n in manifest.steps)
        raise BuildError(f"C export does not support several named steps ({listed})", remedy="build each alone")
    for spec in manifest.state:
        if spec.dtype not in C_TYPES:
            raise refusal(f"state '{shown(spec.name)}'", f"it has the type {spec.dtype}")
    ordered = sorted(manifest.state, key=lambda s: (-np.dtype(s.dtype).itemsize, way_to_set(initial[s.name]), s.kind))
    state = {s.name: Tensor(tuple(initial[s.name].shape), s.dtype, s.name, "state") for s in ordered}
    nexts = {s.name: s.next for s in manifest.state}
    functions = [
        function("step", "Trains on one batch.", step.resolved("train"), state, sizes=sizes, nexts=nexts),
    ]
    evaluated = [manifest.loss_output, *manifest.metrics] if manifest.loss_output else []
    averages = dict(manifest.averages)
    for suffix, about, keep in (
        ("evaluate", "Computes loss and metrics of one batch.", evaluated),
        ("predict", "Computes the outputs of the model.", list(manifest.outputs)),
    ):
        if keep:
            model = _pruned(step.resolved("eval"), keep)
            arena = max(f.plan.arena for f in functions)
            functions.append(function(suffix, about, model, state, sizes=sizes, averages=averages, arena=arena))
    labels = {t.name: t for t in manifest.targets if t.classes is not None}
    return Unit(name, functions, state, dict(initial), {s.name: s.kind for s in manifest.state}, labels)


def _pruned(model: onnx.ModelProto, keep: list[str]) -> onnx.ModelProto:
    """Return ``model`` with only the outputs in ``keep`` and the inputs that they depend on, in place."""
    graph = model.graph
    nodes, names = needed(graph.node, keep, lambda node: node.output, reads)
    outputs, inputs = [o for o in graph.output if o.name in keep], [i for i in graph.input if i.name in names]
    for field, kept in (("output", outputs), ("input", inputs), ("node", nodes)):
        graph.ClearField(field)
        getattr(graph, field).extend(kept)
    return model


def _too_large(unit: Unit, ram: int) -> BuildError:
    largest = max(unit.functions, key=lambda f: f.plan.arena)
    _, alive = largest.plan.peak
    tensors = sorted([*alive, *unit.state.values()], key=lambda t: -t.nbytes)[:LARGEST_SHOWN]
    listed = ", ".join(f"'{shown(t.name)}' {list(t.shape)} with {t.nbytes:,}" for t in tensors)
    return BuildError(
        f"the program needs {unit.state_bytes + unit.arena:,} bytes of RAM ({unit.state_bytes:,} of state and "
        f"{unit.arena:,} of working memory), but ram is {ram:,}; the largest tensors are {listed}",
        remedy="use a smaller batch, train fewer layers, or use SGD, which has no state",
    )

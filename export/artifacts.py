"""The inference model and the weights of a step, with the state of a checkpoint or the initial state."""

from __future__ import annotations

import os
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir

from gradgraph.arguments import checked
from gradgraph.files.atomic import write_atomically
from gradgraph.files.models import Source, load_model, save_model, to_proto, written_message
from gradgraph.files.streamed import safetensors_pieces
from gradgraph.files.suffixes import check_suffix
from gradgraph.graph.shapes import OPSET
from gradgraph.passes.normal import normalise
from gradgraph.passes.normal.opsets.older import IR_VERSIONS, write_at
from gradgraph.passes.normal.simplifying.clean import clean_up
from gradgraph.passes.normal.sizes.fixed import SIZES, Sizes, fix_sizes
from gradgraph.runtime.execution.exported import plain
from gradgraph.runtime.execution.frozen_weights import initial_value
from gradgraph.runtime.execution.session import RuntimeOptions
from gradgraph.runtime.saved.partial import AS_IN_MODEL, OfModel
from gradgraph.runtime.trainer import Trainer
from gradgraph.step.step import Step

Path = str | os.PathLike[str]
Arrays = dict[str, np.ndarray[Any, Any]]
Weights = Mapping[str, np.ndarray[Any, Any]] | str | os.PathLike[str]


def inference_model(
    step: Step | Path,
    checkpoint: Path | None = None,
    outputs: str | Sequence[str] | None = None,
    *,
    averaged: bool = True,
    mixed: bool = False,
    weights: Weights | None = None,
    sizes: Sizes | None = None,
) -> onnx.ModelProto:
    """Return the trained model as plain ONNX: no loss, no optimizer, layers in evaluation mode.

    Args:
        step: a step, or its folder.
        checkpoint: the checkpoint of a run; without one, the initial weights are used.
        outputs: the names of the outputs to keep; by default all.
        averaged: whether to use averages of the weights, if the optimizer has any.
        mixed: whether to keep the mixed precision of the step; otherwise the model is float32.
        weights: weights that replace those of the step or checkpoint by name, in a form that
            ``Trainer.load_state_dict`` accepts. Weights that are not in it keep their values.
        sizes: values of symbolic sizes, as for ``gradgraph.build``.

    Raises:
        BuildError: if ``mixed`` is set, but the step is not in mixed precision.
        ModelError: if the step is damaged, or the model has no output other than its loss.
        UnknownNameError: if the model has no output of a given name.
        CheckpointError: if the checkpoint is damaged, or belongs to another step.
    """
    trainer = opened_trainer(step, checkpoint, weights)
    if not sizes:
        return trainer.export(outputs=outputs, averaged=averaged, mixed=mixed)
    return to_proto(served(trainer, outputs, averaged=averaged, mixed=mixed, sizes=sizes))


def save_inference(
    step: Step | Path,
    path: Path,
    checkpoint: Path | None = None,
    outputs: str | Sequence[str] | None = None,
    *,
    averaged: bool = True,
    mixed: bool = False,
    weights: Weights | None = None,
    sizes: Sizes | None = None,
) -> onnx.ModelProto:
    """Write the model of ``inference_model`` to ``path``, and return it.

    Raises:
        BuildError, ModelError, UnknownNameError, CheckpointError: as for ``inference_model``.
        OutputError: if ``path`` cannot be written; an existing file is left intact.
    """
    check_suffix(path, ".onnx")
    trainer = opened_trainer(step, checkpoint, weights)
    if not sizes:
        return trainer.export(path, outputs=outputs, averaged=averaged, mixed=mixed)
    save_model(plain(served(trainer, outputs, averaged=averaged, mixed=mixed, sizes=sizes)), path)
    return written_message(pathlib.Path(path))


def served(
    trainer: Trainer,
    outputs: str | Sequence[str] | None = None,
    *,
    averaged: bool = True,
    mixed: bool = False,
    sizes: Sizes | None = None,
) -> ir.Model:
    """Return the model that ``inference_model`` describes, with the weights of ``trainer``, which are not copied."""
    model = trainer.exported(outputs, averaged=averaged, mixed=mixed, preprocess=True)
    return model if not sizes else _with_sizes(model, sizes)


def weights(step: Step | Path, checkpoint: Path | None = None, *, averaged: bool = True) -> Arrays:
    """Return all weights of the model by name: trained weights, running statistics and frozen weights.

    Large frozen weights are memory-mapped from the step's files.

    Raises:
        ModelError, CheckpointError: as for ``inference_model``.
    """
    trainer = opened_trainer(step, checkpoint)
    manifest = trainer.manifest
    names = [s.name for s in manifest.state if s.kind in ("parameter", "statistic")]
    moving = trainer.state.seen_for_use(names, manifest.averages if averaged else {})
    still = {t.name: t for t in trainer.definition.eval.graph.initializer}
    frozen = {n: initial_value(trainer.definition, still[n]) for n in manifest.frozen if n in still}
    return OfModel({**moving, **frozen})


def save_weights(step: Step | Path, path: Path, checkpoint: Path | None = None, *, averaged: bool = True) -> Arrays:
    """Write ``weights(step, checkpoint)`` to ``path`` as safetensors, and return them.

    Raises:
        ModelError, CheckpointError: as for ``inference_model``.
        OutputError: if ``path`` cannot be written; an existing file is left intact.
    """
    check_suffix(path, ".safetensors")
    arrays = weights(step, checkpoint, averaged=averaged)
    write_atomically(path, safetensors_pieces(dict(sorted(arrays.items())), {AS_IN_MODEL: "1"}))
    return arrays


@checked(sizes=SIZES)
def fixed_sizes(model: Source, sizes: Sizes) -> onnx.ModelProto:
    """Return a copy of an inference model whose symbolic sizes are replaced by numbers.

    Values computed from these sizes become constants. A model of opset 17 to 21 keeps its opset; other models are
    converted to opset 21.

    Raises:
        ArgumentError: if ``sizes`` are invalid.
        ModelError: if the model is damaged.
        UnknownNameError: if ``sizes`` names a dimension or an input that the model does not have.
        BuildError: if an input does not fit the given shape.
    """
    return to_proto(_with_sizes(load_model(model), sizes))


def _with_sizes(model: ir.Model, sizes: Sizes) -> ir.Model:
    """Return ``model``, which may be changed, with symbolic sizes replaced as in ``fixed_sizes``; shares weights."""
    fix_sizes(model, sizes)
    opset = model.opset_imports.get("", OPSET)
    folded = clean_up(normalise(model, keep_quantization=True))
    return write_at(folded, opset if opset in IR_VERSIONS else OPSET)


def opened_trainer(
    step: Step | Path,
    checkpoint: Path | None,
    weights: Weights | None = None,
    options: RuntimeOptions | None = None,
) -> Trainer:
    """Return a trainer of ``step`` on the CPU with the state of ``checkpoint``, if any.

    ``weights`` then replace the weights of the checkpoint by name.
    """
    trainer = Trainer(step, device="cpu", options=options)
    if checkpoint is not None:
        trainer.load(checkpoint)
    if weights is not None:
        trainer.load_state_dict(weights, strict=False)
    return trainer

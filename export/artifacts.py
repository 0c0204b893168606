"""The inference model and the weights of a step, from a checkpoint or as they were at the start."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx
import safetensors.numpy

from gradgraph.atomic import write_atomically
from gradgraph.files import save_model
from gradgraph.runtime.trainer import Trainer
from gradgraph.step import Step

Path = str | os.PathLike[str]
Arrays = dict[str, np.ndarray[Any, Any]]


def inference_model(
    step: Step | Path,
    checkpoint: Path | None = None,
    outputs: Sequence[str] | None = None,
    *,
    averaged: bool = True,
    mixed: bool = False,
) -> onnx.ModelProto:
    """The trained model as plain ONNX: no loss, no optimizer, layers in evaluation form.

    Args:
        step: a step, or the folder of one.
        checkpoint: the state of a run; the weights are those before training without one.
        outputs: those of the model's outputs that it is to have; by default all.
        averaged: averages of the weights, where the optimizer keeps some.
        mixed: keep the mixed precision of the step; the model is float32 otherwise.

    Raises:
        BuildError: ``mixed``, and the step is not in mixed precision.
        ModelError: the step is damaged, or keeps no output of the model.
        UnknownNameError: the model has no such output.
        CheckpointError: the checkpoint is damaged, or of another step.
    """
    return _trainer(step, checkpoint).export(outputs=outputs, averaged=averaged, mixed=mixed)


def save_inference(
    step: Step | Path,
    path: Path,
    checkpoint: Path | None = None,
    outputs: Sequence[str] | None = None,
    *,
    averaged: bool = True,
    mixed: bool = False,
) -> onnx.ModelProto:
    """Write ``inference_model(step, checkpoint, outputs)`` to ``path`` and return it.

    Raises:
        BuildError, ModelError, UnknownNameError, CheckpointError: as for ``inference_model``.
        OutputError: ``path`` cannot be written; what was there is intact.
    """
    model = inference_model(step, checkpoint, outputs, averaged=averaged, mixed=mixed)
    save_model(model, path)
    return model


def weights(step: Step | Path, checkpoint: Path | None = None, *, averaged: bool = True) -> Arrays:
    """Every weight of the model by its name: trained, running statistics, frozen; each with its shape and dtype.

    Raises:
        ModelError, CheckpointError: as for ``inference_model``.
    """
    trainer = _trainer(step, checkpoint)
    manifest = trainer.manifest
    names = [s.name for s in manifest.state if s.kind in ("parameter", "statistic")]
    moving = trainer.state.read_for_use(names, manifest.averages if averaged else {})
    still = {t.name: t for t in trainer.definition.resolved("eval").graph.initializer}
    return {**moving, **{n: onnx.numpy_helper.to_array(still[n]) for n in manifest.frozen if n in still}}


def save_weights(step: Step | Path, path: Path, checkpoint: Path | None = None, *, averaged: bool = True) -> Arrays:
    """Write ``weights(step, checkpoint)`` to ``path`` as safetensors and return them.

    Raises:
        ModelError, CheckpointError: as for ``inference_model``.
        OutputError: ``path`` cannot be written; what was there is intact.
    """
    arrays = weights(step, checkpoint, averaged=averaged)
    write_atomically(path, safetensors.numpy.save({n: np.asarray(a, order="C") for n, a in sorted(arrays.items())}))
    return arrays


def _trainer(step: Step | Path, checkpoint: Path | None) -> Trainer:
    trainer = Trainer(step, device="cpu")
    if checkpoint is not None:
        trainer.load(checkpoint)
    return trainer

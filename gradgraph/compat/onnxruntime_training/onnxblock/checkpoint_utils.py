"""Functions that write a model's parameters to a checkpoint file, and copy them from a checkpoint to a model."""

from __future__ import annotations

import os
from collections.abc import Sequence

import onnx

from gradgraph.compat.onnxruntime_training.saved.checkpoint_file import Checkpoint, read_checkpoint, write_checkpoint
from gradgraph.errors import CompatibilityError


def save_checkpoint(
    parameters: tuple[Sequence[onnx.TensorProto], Sequence[onnx.TensorProto]],
    path_to_checkpoint: str | os.PathLike[str],
    nominal_checkpoint: bool = False,
) -> None:
    """Write the parameters from ``TrainingBlock.parameters()`` to a checkpoint file.

    Args:
        parameters: the trained parameters, and the frozen ones.
        path_to_checkpoint: the path of the file.
        nominal_checkpoint: write only the names of the parameters, without their values.

    Raises:
        CompatibilityError: if ``parameters`` is None.
        OutputError: if the file cannot be written.
    """
    if parameters is None:
        raise CompatibilityError("there are no parameters; pass the result of TrainingBlock.parameters()")
    trained, frozen = ({t.name: onnx.numpy_helper.to_array(t) for t in part} for part in parameters)
    write_checkpoint(Checkpoint(trained, frozen, nominal=nominal_checkpoint), path_to_checkpoint)


def load_checkpoint_to_model(path_to_checkpoint: str | os.PathLike[str], model: onnx.ModelProto) -> None:
    """Replace initializers of ``model``, in place, with the parameters of a checkpoint with the same names.

    Raises:
        CheckpointError: if the file does not exist, or is damaged.
        CompatibilityError: if the checkpoint is nominal.
    """
    checkpoint = read_checkpoint(path_to_checkpoint)
    if checkpoint.nominal:
        raise CompatibilityError("the checkpoint is nominal and has no values; use the complete one")
    arrays = checkpoint.trained | checkpoint.frozen
    for tensor in model.graph.initializer:
        if tensor.name in arrays:
            tensor.CopyFrom(onnx.numpy_helper.from_array(arrays[tensor.name], tensor.name))

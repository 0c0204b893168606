"""Parameters of a model written to a checkpoint file, and of a checkpoint file to a model."""

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
    """Write the parameters that ``TrainingBlock.parameters()`` gives to a checkpoint file.

    Args:
        parameters: the trained and the frozen ones.
        nominal_checkpoint: only their names.

    Raises:
        CompatibilityError: there are none.
        OutputError: the file cannot be written.
    """
    if parameters is None:
        raise CompatibilityError("no parameters are given; pass what TrainingBlock.parameters() gives")
    trained, frozen = ({t.name: onnx.numpy_helper.to_array(t) for t in part} for part in parameters)
    write_checkpoint(Checkpoint(trained, frozen, nominal=nominal_checkpoint), path_to_checkpoint)


def load_checkpoint_to_model(path_to_checkpoint: str | os.PathLike[str], model: onnx.ModelProto) -> None:
    """Replace those initializers of ``model``, in place, that the checkpoint has.

    Raises:
        CheckpointError: there is no such file, or it is damaged.
        CompatibilityError: it is nominal.
    """
    checkpoint = read_checkpoint(path_to_checkpoint)
    if checkpoint.nominal:
        raise CompatibilityError("the checkpoint is nominal and holds no numbers; give the complete one")
    arrays = checkpoint.trained | checkpoint.frozen
    for tensor in model.graph.initializer:
        if tensor.name in arrays:
            tensor.CopyFrom(onnx.numpy_helper.from_array(arrays[tensor.name], tensor.name))

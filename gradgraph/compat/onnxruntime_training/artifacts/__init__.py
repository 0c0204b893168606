"""Generation of training, eval and optimizer models and a checkpoint, as by onnxruntime-training."""

from __future__ import annotations

import contextlib
import os
from enum import Enum
from pathlib import Path

import onnx

from gradgraph.arguments import FLAG, PATH, TEXT, checked
from gradgraph.compat.onnxruntime_training import onnxblock
from gradgraph.compat.onnxruntime_training.onnxblock.onnxblock import LossBlock
from gradgraph.errors import CompatibilityError, listed
from gradgraph.export.ort_format import CONFIG, write_ort_models
from gradgraph.files.atomic import write_atomically
from gradgraph.files.models import save_model, to_proto
from gradgraph.graph.constant_nodes import SEPARATE, set_ir_version
from gradgraph.passes.normal import load_runnable


class LossType(Enum):
    """The losses that ``generate_artifacts`` accepts by name."""

    MSELoss = 1
    CrossEntropyLoss = 2
    BCEWithLogitsLoss = 3
    L1Loss = 4


class OptimType(Enum):
    """The optimizers that ``generate_artifacts`` accepts by name."""

    AdamW = 1
    SGD = 2


@checked(artifact_directory=PATH.or_none(), prefix=TEXT, ort_format=FLAG, custom_op_library=PATH.or_none(),
         nominal_checkpoint=FLAG)  # fmt: skip
def generate_artifacts(
    model: onnx.ModelProto | str,
    requires_grad: list[str] | None = None,
    frozen_params: list[str] | None = None,
    loss: LossType | onnxblock.Block | None = None,
    optimizer: OptimType | onnxblock.Block | None = None,
    artifact_directory: str | os.PathLike[str] | None = None,
    prefix: str = "",
    ort_format: bool = False,
    custom_op_library: str | os.PathLike[str] | None = None,
    additional_output_names: list[str] | None = None,
    nominal_checkpoint: bool = False,
    loss_input_names: list[str] | None = None,
) -> None:
    """Write ``training_model.onnx``, ``eval_model.onnx``, ``optimizer_model.onnx`` and ``checkpoint``.

    Args:
        model: an ``onnx.ModelProto``, or a path; it is not changed.
        requires_grad: names of the parameters to train.
        frozen_params: names of frozen parameters. A parameter in neither list is a constant of the model.
        loss: a ``LossType`` or a block; with ``None``, the first output of the model is the loss.
        optimizer: an ``OptimType`` or an optimizer of ``onnxblock.optim``; with ``None``, no optimizer model is
            written.
        artifact_directory: the output folder; by default the working directory.
        prefix: prefix of file names.
        ort_format: also write each model as ``.ort``, with ``required_operators.config`` for a reduced build.
        custom_op_library: the path of a library with custom operators; see ``onnxblock.custom_op_library``.
        additional_output_names: values that the models output after the loss.
        nominal_checkpoint: also write ``nominal_checkpoint``, with only the names of the parameters.
        loss_input_names: inputs of the loss; all outputs of the model by default.

    Raises:
        CompatibilityError: if loss, optimizer or names are invalid.
        ModelError, UnknownNameError, DifferentiationError, UnsupportedOperatorError: as for ``gradgraph.build``.
        OutputError: if a file cannot be written.
    """
    path = model if isinstance(model, str) else None
    loaded = _loaded(model)
    both = sorted({*(requires_grad or ())} & {*(frozen_params or ())})
    if both:
        raise CompatibilityError(f"a parameter is either trained or frozen, but both lists name {listed(both)}")
    if additional_output_names and not isinstance(additional_output_names, list):
        raise CompatibilityError("additional_output_names must be a list of names")
    block = LossBlock(_loss_block(loss), loss_input_names or [], additional_output_names or [])
    for names, trains in ((requires_grad, True), (frozen_params, False)):
        for name in names or ():
            block.requires_grad(name, trains)
    library = contextlib.nullcontext() if custom_op_library is None else onnxblock.custom_op_library(custom_op_library)
    with onnxblock.base(loaded, path), library:
        block(*(output.name for output in loaded.graph.output))
    training, evaluation = block.to_model_proto()
    updating = None if optimizer is None else _optimizer_model(optimizer, loaded, block.parameters())

    folder = Path.cwd() if artifact_directory is None else Path(artifact_directory)
    made = {"training_model": training, "eval_model": evaluation, "optimizer_model": updating}
    models = {f"{prefix}{name}": proto for name, proto in made.items() if proto is not None}
    for name, proto in models.items():
        save_model(proto, folder / f"{name}.onnx")
    if ort_format:
        paths = {folder / f"{name}.ort": proto for name, proto in models.items()}
        operators = write_ort_models(paths, custom_op_library)
        write_atomically(folder / f"{prefix}{CONFIG}", operators.encode())
    onnxblock.save_checkpoint(block.parameters(), folder / f"{prefix}checkpoint")
    if nominal_checkpoint:
        onnxblock.save_checkpoint(block.parameters(), folder / f"{prefix}nominal_checkpoint", nominal_checkpoint=True)


def _loaded(model: onnx.ModelProto | str) -> onnx.ModelProto:
    if isinstance(model, onnx.ModelProto) and model.ir_version >= SEPARATE:
        return model
    if not isinstance(model, onnx.ModelProto | str):
        raise CompatibilityError(f"the model must be an onnx.ModelProto or a path, not {type(model).__name__}")
    loaded = load_runnable(model)
    # a loss adds initializers that are no inputs
    set_ir_version(loaded, max(loaded.ir_version, SEPARATE))
    return to_proto(loaded)


def _loss_block(loss: LossType | onnxblock.Block | None) -> onnxblock.Block:
    if loss is None:
        return onnxblock.blocks.PassThrough()
    if isinstance(loss, LossType):
        made: onnxblock.Block = getattr(onnxblock.loss, loss.name)()
        return made
    if isinstance(loss, onnxblock.Block):
        return loss
    raise CompatibilityError(
        "the loss must be a LossType or an onnxblock.Block of gradgraph.compat.onnxruntime_training, "
        f"not {type(loss).__name__}"
    )


def _optimizer_model(
    optimizer: OptimType | onnxblock.Block,
    model: onnx.ModelProto,
    parameters: tuple[list[onnx.TensorProto], list[onnx.TensorProto]],
) -> onnx.ModelProto:
    block = getattr(onnxblock.optim, optimizer.name)() if isinstance(optimizer, OptimType) else optimizer
    if not isinstance(block, onnxblock.ForwardBlock):
        raise TypeError(
            f"the optimizer must be an OptimType or a block of onnxblock.optim, not {type(optimizer).__name__}"
        )
    opset = next((o.version for o in model.opset_import if o.domain in ("", "ai.onnx")), None)
    with onnxblock.empty_base(opset_version=opset):
        block(parameters)
    return block.to_model_proto()

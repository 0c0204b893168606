"""Large external weights of a model."""

from __future__ import annotations

from pathlib import Path

import onnx_ir as ir

from gradgraph.files.held_files import own_file

# A model of 50 MB has weights of 200 KB: with 1 MiB here, a build took 3.9 times its size. Passes may inspect the
# values of smaller ones, which can be constants.
LEAST_BYTES = 1 << 17  # of a weight that may stay outside the models of a step
# Three copies of 8 MiB are negligible compared with opening anything in onnxruntime.
LEAST_KEPT = 1 << 23  # total bytes of such weights below which a build copies them into the step


def large_outside(model: ir.Model) -> list[ir.ExternalTensor]:
    """The large external weights of ``model``; none if they are small in total."""
    tensors = [t for v in model.graph.initializers.values() if (t := large_in_file(v)) is not None]
    return tensors if sum(t.nbytes for t in tensors) >= LEAST_KEPT else []


def large_in_file(value: ir.Value) -> ir.ExternalTensor | None:
    """The tensor of an initializer, if it is large and external."""
    tensor = value.const_value
    return tensor if isinstance(tensor, ir.ExternalTensor) and tensor.nbytes >= LEAST_BYTES else None


def path_of(tensor: ir.ExternalTensor) -> str:
    return str(Path(tensor.path).absolute())


def place_of(tensor: ir.ExternalTensor) -> str:
    """The file of a tensor as a step's models refer to it: its path, or the location of a held file."""
    own = own_file(tensor)
    return path_of(tensor) if own is None else own.location

"""Large external weights of a model."""

from __future__ import annotations

from pathlib import Path

import onnx_ir as ir

from gradgraph.files.held_files import own_file

# Weights of at least LEAST_BYTES may stay outside the models of a step. A model of 50 MB has weights of about 200 KB:
# with a limit of 1 MiB, a build took 3.9 times the model's size. Smaller weights may be constants that passes inspect.
LEAST_BYTES = 1 << 17
# If such weights total less than LEAST_KEPT bytes, a build copies them into the step. Three copies of 8 MiB are
# negligible compared with opening anything in onnxruntime.
LEAST_KEPT = 1 << 23


def large_outside(model: ir.Model) -> list[ir.ExternalTensor]:
    """Return the large external weights of ``model``; an empty list if they total less than LEAST_KEPT bytes."""
    tensors = [t for v in model.graph.initializers.values() if (t := large_in_file(v)) is not None]
    return tensors if sum(t.nbytes for t in tensors) >= LEAST_KEPT else []


def large_in_file(value: ir.Value) -> ir.ExternalTensor | None:
    """Return the tensor of an initializer if it is external and has at least LEAST_BYTES; otherwise None."""
    tensor = value.const_value
    return tensor if isinstance(tensor, ir.ExternalTensor) and tensor.nbytes >= LEAST_BYTES else None


def path_of(tensor: ir.ExternalTensor) -> str:
    return str(Path(tensor.path).absolute())


def place_of(tensor: ir.ExternalTensor) -> str:
    """Return the path of the file with the tensor's data, or ``HeldFile.location`` if it is inside the model file."""
    own = own_file(tensor)
    return path_of(tensor) if own is None else own.location

"""Large weights of a model that lie in files."""

from __future__ import annotations

from pathlib import Path

import onnx_ir as ir

from gradgraph.files.held_files import own_file

# A model of 50 MB has weights of 200 KB: with 1 MiB here, a build took 3.9 times its size. Smaller ones may be
# constants whose values whoever lowers a model looks at.
LEAST_BYTES = 1 << 17  # of a weight that may lie outside the models of a step
# Three copies of 8 MiB are less than what onnxruntime takes to open anything.
LEAST_KEPT = 1 << 23  # bytes of such weights together: of fewer, a step that is built has a copy


def large_outside(model: ir.Model) -> list[ir.ExternalTensor]:
    """The large weights of ``model`` that lie in files; none if these are few."""
    tensors = [t for v in model.graph.initializers.values() if (t := large_in_file(v)) is not None]
    return tensors if sum(t.nbytes for t in tensors) >= LEAST_KEPT else []


def large_in_file(value: ir.Value) -> ir.ExternalTensor | None:
    """The tensor of an initializer, if it is large and lies in a file."""
    tensor = value.const_value
    return tensor if isinstance(tensor, ir.ExternalTensor) and tensor.nbytes >= LEAST_BYTES else None


def path_of(tensor: ir.ExternalTensor) -> str:
    return str(Path(tensor.path).absolute())


def place_of(tensor: ir.ExternalTensor) -> str:
    """The file that a tensor lies in, as a step's models call it: its path, or what stands for a file held open."""
    own = own_file(tensor)
    return path_of(tensor) if own is None else own.location

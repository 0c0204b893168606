"""Declared types and shapes of the inputs and outputs of a step's models, from the manifest."""

from __future__ import annotations

import onnx_ir as ir

from gradgraph.data.record.specs import Dim, numpy_dtype
from gradgraph.step.manifest import Manifest


def write_interface(model: ir.Model, manifest: Manifest) -> ir.Model:
    """Set the types and shapes of the inputs and outputs of a step's model to those in ``manifest``, in place.

    Passes that rewrite nodes may have lost a type or a shape. The model's own outputs keep their declarations.
    """
    known = _declared(manifest)
    for value in (*model.graph.inputs, *model.graph.outputs):
        if (found := known.get(value.name or "")) is not None:
            dtype, shape = found
            if dtype is not None or value.shape is None:  # a loss computed by the model itself may have axes
                value.shape = ir.Shape(shape)
            if dtype is not None:
                value.type = ir.TensorType(ir.DataType.from_numpy(numpy_dtype(dtype)))
    return model


def _declared(manifest: Manifest) -> dict[str, tuple[str | None, tuple[Dim, ...]]]:
    """Return the element type (None if the model determines it) and shape of each input and output in the manifest."""
    tensors = (*manifest.inputs, *manifest.targets, *manifest.state)
    found: dict[str, tuple[str | None, tuple[Dim, ...]]] = {t.name: (t.dtype, t.shape) for t in tensors}
    found |= {s.next: (s.dtype, s.shape) for s in manifest.state}
    for part in manifest.parts.values():
        found |= dict.fromkeys(part.hyperparameters, ("float32", ()))
        found |= dict.fromkeys({part.loss_output, *part.metrics, *part.reports} - {*manifest.outputs}, (None, ()))
        found |= {m.sums: (None, m.shape) for m in part.trained_measures}
    if manifest.separate is not None:
        found |= {gradient: found[weight] for weight, gradient in manifest.separate.gradients.items()}
        if manifest.separate.weight:
            found[manifest.separate.weight] = (None, ())
    return found

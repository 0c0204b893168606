"""Fuse the activation after a native BatchNormalization into it, and its gradient into the norm's gradient.

    y = Clip(z), z = BatchNormalization(v)        dz = ClipGrad(dy, z, y), dv = BatchNormalizationGrad(dz, v, ...)

z and dz are never written: the norm's gradient recomputes z bit for bit from its inputs. This saves three passes and
two tensors.
"""

from __future__ import annotations

from typing import Any

import onnx_ir as ir

from gradgraph.backends.ort_native.native_bounds import (
    activations,
    bound,
    bounds_of,
    is_free,
    is_gradient_of,
    is_native,
)

GRADIENTS = ("BatchNormalizationGrad", "UnscaledBatchNormalizationGrad")


def fold_activations(model: ir.Model) -> None:
    """Fuse activations after native norms of the main graph into them, in place."""
    graph = model.graph
    for node in activations(graph):
        z, y, kind = node.inputs[0], node.outputs[0], bounds_of(node)
        norm = None if z is None else z.producer()
        if norm is None or z is None or kind is None or not is_native(norm, "BatchNormalization") or not is_free(norm):
            continue
        of_relu = [n for n, _ in y.uses()] if node.op_type == "Relu" else []
        gradients = [n for n in dict.fromkeys([*(n for n, _ in z.uses()), *of_relu]) if is_gradient_of(n, node)]
        others = {n for n, _ in z.uses()} - {node, *gradients}
        lead = len(gradients) <= 1 and all(_leads_to(norm, gradient.outputs[0]) for gradient in gradients)
        if others or z.is_graph_output() or y.is_graph_output() or not lead:
            continue
        bound(norm, kind)
        for gradient in gradients:
            _take_over(graph, norm, gradient, kind)
        y.replace_all_uses_with(z)
        graph.remove(node, safe=True)


def _leads_to(norm: ir.Node, dz: ir.Value) -> bool:
    """Return whether the gradient of ``norm`` is the only reader of ``dz``."""
    readers = [(n, i) for n, i in dz.uses() if i == 0 and is_native(n, *GRADIENTS) and n.graph is norm.graph]
    if dz.is_graph_output() or len(readers) != 1 or len(dz.uses()) != 1:
        return False
    reader = readers[0][0]
    return is_free(reader) and list(reader.inputs[1:]) == [*norm.inputs[:2], *norm.outputs[1:]]


def _take_over(graph: ir.Graph, norm: ir.Node, gradient: ir.Node, kind: dict[str, Any]) -> None:
    """Fuse the activation's ``gradient`` into the gradient of ``norm``, which then reads dy and the bias."""
    (reader,) = [n for n, _ in gradient.outputs[0].uses()]
    reader.resize_inputs(6)
    reader.replace_input_with(5, norm.inputs[2])
    reader.replace_input_with(0, gradient.inputs[0])
    bound(reader, kind)
    graph.remove(gradient, safe=True)

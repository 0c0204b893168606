"""The eval model (the model with its loss, in evaluation mode), and the inference model extracted from it."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir

from gradgraph.building.selection import as_input
from gradgraph.errors import CompatibilityError, shown, suggestion
from gradgraph.graph.prune import prune
from gradgraph.passes.normal.sizes.infer import infer_shapes


def eval_graph(model: onnx.ModelProto, parameters: Collection[str]) -> onnx.ModelProto:
    """Return ``model`` with its parameters as inputs, and Dropout and BatchNormalization in evaluation mode."""
    work: ir.Model = ir.from_proto(model)
    for node in work.graph:
        if node.domain == "" and node.op_type == "Dropout" and len(node.inputs) > 2:
            node.resize_inputs(2)
        if node.domain == "" and node.op_type == "BatchNormalization" and "training_mode" in node.attributes:
            del node.attributes["training_mode"]
            if not any(v.uses() or v.is_graph_output() for v in node.outputs[1:]):
                node.resize_outputs(1)
    for name in [n for n in work.graph.initializers if n in parameters]:
        value = work.graph.initializers[name]
        if value.is_graph_input():
            del work.graph.initializers[name]
            value.const_value = None
        else:
            as_input(work.graph, name)
    return ir.to_proto(work)


def inference_graph(
    model: onnx.ModelProto, outputs: Sequence[str], parameters: Mapping[str, np.ndarray[Any, Any]]
) -> ir.Model:
    """Return the part of an eval model that computes ``outputs``, with the parameters inside.

    Raises:
        CompatibilityError: if ``outputs`` is empty, or the eval model does not have one of them.
    """
    if not outputs or isinstance(outputs, str):
        raise CompatibilityError("no output is named; pass a list of names in graph_output_names")
    work: ir.Model = ir.from_proto(model)
    graph = work.graph
    known = {v.name: v for v in graph.inputs} | {v.name: v for n in graph for v in n.outputs if v.name}
    for name in outputs:
        if name not in known:
            given = [v.name or "" for v in graph.outputs]
            raise CompatibilityError(f"the eval model has no value '{shown(name)}'{suggestion(name, given)}")
    if any(known[name].type is None for name in outputs):
        infer_shapes(work)
    graph.outputs[:] = [known[name] for name in outputs]
    for value in list(graph.inputs):
        array = parameters.get(value.name or "")
        if array is not None:
            graph.inputs.remove(value)
            value.const_value = ir.tensor(array, name=value.name)
            graph.register_initializer(value)
    prune(work)
    graph.inputs[:] = [v for v in graph.inputs if v.uses() or v.is_graph_output()]
    return work

"""Names and values of the graph that blocks write into; also imported by users' own blocks."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable

import onnx

_LARGE = 1024  # elements: larger initializers do not determine shapes
_tokens = itertools.count(1)


def get_output_from_output_name(onnx_model: onnx.ModelProto, output_name: str) -> onnx.ValueInfoProto:
    """Return the model's output of this name.

    Raises:
        LookupError: if there is no output of this name.
    """
    return _named(onnx_model.graph.output, output_name, "output")


def get_input_from_input_name(onnx_model: onnx.ModelProto, input_name: str) -> onnx.ValueInfoProto:
    """Return the model's input of this name.

    Raises:
        LookupError: if there is no input of this name.
    """
    return _named(onnx_model.graph.input, input_name, "input")


def _named(values: Iterable[onnx.ValueInfoProto], name: str, kind: str) -> onnx.ValueInfoProto:
    for value in values:
        if value.name == name:
            return value
    raise LookupError(f"The provided {kind} name {name} is not a graph {kind}.")


def generate_graph_name(token: str) -> str:
    """Return a unique name that contains ``token``."""
    return f"onnx::{token}::{next(_tokens)}"


def node_arg_exists(model: onnx.ModelProto, node_arg_name: str) -> bool:
    """Whether a node reads or writes a value of this name."""
    return any(node_arg_name in (*node.input, *node.output) for node in model.graph.node)


def register_graph_outputs(model: onnx.ModelProto, output_names: Iterable[str] | str) -> None:
    """Set the outputs of ``model`` to the values of these names.

    Raises:
        LookupError: if the model has no type for one of the values.
    """
    names = [output_names] if isinstance(output_names, str) else list(output_names)
    known = {v.name: v for v in (*model.graph.value_info, *model.graph.output)}
    for name in names:
        if name not in known:
            raise LookupError(f"The provided name {name} is not a graph value info or a graph output.")
    chosen = [known[name] for name in names]
    del model.graph.output[:]
    model.graph.output.extend(chosen)


def inferred(model: onnx.ModelProto) -> onnx.ModelProto:
    """Return a copy of ``model`` with types and shapes inferred by ONNX."""
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    found = onnx.shape_inference.infer_shapes(without_large(model)).graph
    del copy.graph.value_info[:], copy.graph.output[:]
    copy.graph.value_info.extend(found.value_info)
    copy.graph.output.extend(found.output)
    return copy


def without_large(model: onnx.ModelProto) -> onnx.ModelProto:
    """Return a copy of ``model`` with large initializers as inputs, so that ONNX can check models of any size."""
    light = onnx.ModelProto(ir_version=model.ir_version, opset_import=model.opset_import, functions=model.functions)
    graph = model.graph
    light.graph.name = graph.name or "graph"
    for field in ("node", "input", "output", "value_info", "sparse_initializer"):
        getattr(light.graph, field).extend(getattr(graph, field))
    inputs = {v.name for v in graph.input}
    for tensor in graph.initializer:
        if math.prod(tensor.dims) <= _LARGE:
            light.graph.initializer.append(tensor)
        elif tensor.name not in inputs:
            light.graph.input.append(onnx.helper.make_tensor_value_info(tensor.name, tensor.data_type, tensor.dims))
    return light

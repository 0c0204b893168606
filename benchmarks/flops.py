"""Floating-point operations of a forward pass: two per multiplication in MatMul, Gemm, Conv and recurrent layers."""

from __future__ import annotations

import math

import onnx

Shapes = dict[str, tuple[int, ...]]

GATES = {"LSTM": 4, "GRU": 3, "RNN": 1}


def forward_flops(model: onnx.ModelProto) -> int:
    """Return the operations of all matrix products and convolutions of a model with static shapes.

    Raises:
        KeyError: the shape of a product is unknown.
    """
    inferred = onnx.shape_inference.infer_shapes(model, data_prop=True)
    known = shapes_of(inferred.graph)
    return sum(node_flops(node, known) for node in inferred.graph.node)


def shapes_of(graph: onnx.GraphProto) -> Shapes:
    """Return the shapes of all tensors whose sizes are known, by name."""
    values = [*graph.input, *graph.output, *graph.value_info]
    dims = {v.name: v.type.tensor_type.shape.dim for v in values if v.type.tensor_type.HasField("shape")}
    shapes = {n: tuple(d.dim_value for d in ds) for n, ds in dims.items() if all(d.HasField("dim_value") for d in ds)}
    return shapes | {t.name: tuple(t.dims) for t in graph.initializer}


def node_flops(node: onnx.NodeProto, shapes: Shapes) -> int:
    if node.op_type == "MatMul":
        return 2 * math.prod(shapes[node.output[0]]) * shapes[node.input[0]][-1]
    if node.op_type == "Gemm":
        transposed = next((a.i for a in node.attribute if a.name == "transA"), 0)
        return 2 * math.prod(shapes[node.output[0]]) * shapes[node.input[0]][0 if transposed else 1]
    if node.op_type == "Conv":
        return 2 * math.prod(shapes[node.output[0]]) * math.prod(shapes[node.input[1]][1:])
    if node.op_type == "ConvTranspose":
        return 2 * math.prod(shapes[node.input[0]]) * math.prod(shapes[node.input[1]][1:])
    if node.op_type in GATES:
        time, batch, features = shapes[node.input[0]]
        directions, rows, _ = shapes[node.input[1]]
        return 2 * time * batch * directions * rows * (features + rows // GATES[node.op_type])
    return 0

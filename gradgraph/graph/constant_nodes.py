"""Constant nodes converted to initializers: for the normal form, and at load for files that keep weights in them."""

from __future__ import annotations

import copy

import onnx_ir as ir

_WERE_NODES = "gradgraph.weights_were_nodes"  # metadata of a model, which surgery may copy to another file
_MANY = 4  # Constant nodes per initializer above which initializers are the exception
SEPARATE = 4  # from this IR version on, initializers need not be inputs
_COUNTS = (ir.DataType.BOOL, ir.DataType.INT32, ir.DataType.INT64, ir.DataType.STRING)  # types without learned numbers


def lift_weights(model: ir.Model) -> None:
    """Convert the Constant nodes of ``model`` to initializers, in place, if the model stores its weights in them.

    PaddlePaddle's exporter, ndonnx, and PyTorch's exporter of frozen scripts write no initializers; later tools may add
    a few. Which of the converted tensors are weights is then decided as for any initializer. In all other files, a
    Constant node is a constant of a formula and is left unchanged.
    """
    graphs = (model.graph, *model.graph.subgraphs())
    nodes = [(graph, node, t) for graph in graphs for node in graph if (t := tensor_in(node)) is not None]
    tensors = sum(tensor.size > 1 and tensor.dtype not in _COUNTS for _, _, tensor in nodes)
    stored = sum(value.dtype not in _COUNTS for graph in graphs for value in graph.initializers.values())
    if tensors <= _MANY * stored:
        return
    for graph, node, tensor in nodes:
        if graph is model.graph or not node.outputs[0].is_graph_output():
            become_initializer(node, tensor, graph)
    set_ir_version(model, max(model.ir_version, SEPARATE))
    model.metadata_props[_WERE_NODES] = "yes"


def set_ir_version(model: ir.Model, version: int) -> None:
    """Set the IR version of ``model``, in place; initializers that had to be inputs before are inputs no longer.

    They were constants to onnxruntime, which would now read them as defaults that a caller may override.
    """
    if model.ir_version < SEPARATE <= version:
        model.graph.inputs[:] = [v for v in model.graph.inputs if not v.is_initializer()]
    model.ir_version = version


def weights_were_nodes(model: ir.Model) -> bool:
    """Whether the model's file stored the weights in Constant nodes, mixed with other constants."""
    return _WERE_NODES in model.metadata_props


def tensor_in(node: ir.Node) -> ir.TensorProtocol | None:
    """Return the tensor in a Constant node; None for numbers and strings, and for other nodes."""
    if node.op_type != "Constant" or node.domain or "value" not in node.attributes:
        return None
    tensor = node.attributes.get_tensor("value")
    return None if tensor is None or tensor.dtype == ir.DataType.STRING else tensor


def become_initializer(node: ir.Node, tensor: ir.TensorProtocol, home: ir.Graph) -> ir.Value | None:
    """Replace ``node``, which has one output, with an initializer of ``home`` and return it; None if the node must
    stay.
    """
    old, graph = node.outputs[0], node.graph
    assert graph is not None
    if old.is_graph_output() and graph is not home:
        return None  # a body's outputs must be computed in the body
    new = ir.Value(name=old.name, type=ir.TensorType(tensor.dtype), shape=ir.Shape(tensor.shape.numpy()))
    new.const_value = own_tensor(tensor, old.name)
    old.replace_all_uses_with(new, replace_graph_outputs=True)
    old.name = None
    graph.remove(node, safe=True)
    home.register_initializer(new)
    return new


def own_tensor(tensor: ir.TensorProtocol, name: str | None) -> ir.TensorProtocol:
    """Return a copy of ``tensor`` called ``name``, as onnx-ir renames in place; external data stay in their file."""
    if isinstance(tensor, ir.ExternalTensor):
        twin = copy.copy(tensor)
        twin.name = name or ""
        return twin
    if tensor.dtype == ir.DataType.STRING:
        return ir.StringTensor(tensor.numpy(), name=name)
    return ir.Tensor(tensor.numpy(), dtype=tensor.dtype, name=name, metadata_props=dict(tensor.metadata_props))

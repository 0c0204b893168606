"""Constant nodes that become initializers, as the normal form wants; those that hold the weights of a file at once."""

from __future__ import annotations

import copy

import onnx_ir as ir

_WERE_NODES = "gradgraph.weights_were_nodes"  # metadata of a model, which surgery may write to another file
_MANY = 4  # Constant nodes to an initializer, where initializers are the exception
_COUNTS = (ir.DataType.BOOL, ir.DataType.INT32, ir.DataType.INT64, ir.DataType.STRING)  # no learned numbers


def lift_weights(model: ir.Model) -> None:
    """Make the Constant nodes of ``model`` initializers, in place, if it keeps its weights in them.

    PaddlePaddle's exporter, ndonnx and PyTorch's of frozen scripts write no initializers; tools may add a few. Which of
    these tensors are weights is then told as for initializers. In all other files a Constant node is a number in a
    formula, and stays.
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
    model.ir_version = max(model.ir_version, 4)  # before, initializers had to be inputs
    model.metadata_props[_WERE_NODES] = "yes"


def weights_were_nodes(model: ir.Model) -> bool:
    """Did the file keep its weights as Constant nodes, among the numbers of its formulas?"""
    return _WERE_NODES in model.metadata_props


def tensor_in(node: ir.Node) -> ir.TensorProtocol | None:
    """The tensor that a Constant node holds; None for numbers and strings, and for other nodes."""
    if node.op_type != "Constant" or node.domain or "value" not in node.attributes:
        return None
    tensor = node.attributes.get_tensor("value")
    return None if tensor is None or tensor.dtype == ir.DataType.STRING else tensor


def become_initializer(node: ir.Node, tensor: ir.TensorProtocol, home: ir.Graph) -> ir.Value | None:
    """Replace the one output of ``node`` by an initializer of ``home`` of the same name; None if it must stay."""
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
    """Copy ``tensor`` under another name: onnx-ir renames a value's tensor with it, and ours may be the caller's.

    Data that lie in a file stay there.
    """
    if isinstance(tensor, ir.ExternalTensor):
        twin = copy.copy(tensor)
        twin.name = name or ""
        return twin
    if tensor.dtype == ir.DataType.STRING:
        return ir.StringTensor(tensor.numpy(), name=name)
    return ir.Tensor(tensor.numpy(), dtype=tensor.dtype, name=name, metadata_props=dict(tensor.metadata_props))

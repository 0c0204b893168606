"""Convert Constant nodes to initializers: for the normal form, and for files that store weights in Constant nodes."""

from __future__ import annotations

import copy

import onnx_ir as ir

_WERE_NODES = "gradgraph.weights_were_nodes"  # metadata key of a model; surgery may copy it to another file
_MANY = 4  # more Constant nodes per initializer than this: weights are in Constant nodes
SEPARATE = 4  # from this IR version on, initializers need not be inputs
_COUNTS = (ir.DataType.BOOL, ir.DataType.INT32, ir.DataType.INT64, ir.DataType.STRING)  # types without learned numbers


def lift_weights(model: ir.Model) -> None:
    """Convert the Constant nodes of ``model`` to initializers, in place, if the model stores its weights in them.

    PaddlePaddle's exporter, ndonnx, and PyTorch's exporter of frozen scripts write no initializers; later tools may add
    a few. Which of the converted tensors are weights is then decided as for any initializer. In all other files,
    Constant nodes contain constants of formulas and are left unchanged.
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
    """Set the IR version of ``model`` in place, and remove initializers from its inputs if older versions required it.

    Such initializers were constants to onnxruntime. At the new version, it would treat them as default values of inputs
    that a caller may override.
    """
    if model.ir_version < SEPARATE <= version:
        model.graph.inputs[:] = [v for v in model.graph.inputs if not v.is_initializer()]
    model.ir_version = version


def weights_were_nodes(model: ir.Model) -> bool:
    """Whether the model's file stored the weights in Constant nodes, mixed with other constants."""
    return _WERE_NODES in model.metadata_props


def tensor_in(node: ir.Node) -> ir.TensorProtocol | None:
    """Return the tensor of a Constant node; None for strings, for other forms of value, and for other nodes."""
    if node.op_type != "Constant" or node.domain or "value" not in node.attributes:
        return None
    tensor = node.attributes.get_tensor("value")
    return None if tensor is None or tensor.dtype == ir.DataType.STRING else tensor


def become_initializer(node: ir.Node, tensor: ir.TensorProtocol, home: ir.Graph) -> ir.Value | None:
    """Replace a Constant node by an initializer of ``home`` and return it; None if the node must stay."""
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
    """Return a copy of ``tensor`` named ``name``; onnx-ir renames in place. External data are not read."""
    if isinstance(tensor, ir.ExternalTensor):
        twin = copy.copy(tensor)
        twin.name = name or ""
        return twin
    if tensor.dtype == ir.DataType.STRING:
        return ir.StringTensor(tensor.numpy(), name=name)
    return ir.Tensor(tensor.numpy(), dtype=tensor.dtype, name=name, metadata_props=dict(tensor.metadata_props))

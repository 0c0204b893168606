"""Pass: make every constant an initializer of the main graph.

onnx-ir's own pass is not used: it leaves constants of bodies in the bodies, and does not mark them.
"""

from __future__ import annotations

import onnx_ir as ir

from gradgraph.graph.constant_nodes import become_initializer, tensor_in
from gradgraph.graph.marks import is_detached, mark_constant
from gradgraph.passes.normal.edit import graph_of, nodes_of


def gather_constants(model: ir.Model) -> None:
    """Make every constant an initializer of the main graph.

    1. A Constant node (value, value_int(s), value_float(s)) becomes an initializer marked as constant, which is never
       trained. A Constant node with a string or sparse value stays.
    2. An initializer that is also a graph input (required in IR version 3) is no longer an input.
    3. An Identity of an initializer is replaced by the initializer, unless it is a graph output or detached.
    4. An initializer gets the type and shape of its data, as in onnxruntime, whatever is declared: replacing the head
       of a network may leave old declarations behind.
    """
    main = model.graph
    for value in main.initializers.values():
        if (tensor := value.const_value) is not None:
            if tensor.dtype != value.dtype:
                value.type = ir.TensorType(tensor.dtype)
            if value.shape is None or value.shape.dims != tensor.shape.dims:
                value.shape = ir.Shape(tensor.shape.numpy())
    main.inputs[:] = [v for v in main.inputs if not v.is_initializer()]
    for node in list(nodes_of(model)):
        if node.domain:
            continue
        if node.op_type == "Constant":
            _register(node, main)
        elif node.op_type == "Identity" and not is_detached(node) and not node.outputs[0].is_graph_output():
            source = node.inputs[0]
            if source is not None and source.is_initializer():
                node.outputs[0].replace_all_uses_with(source)
                graph_of(node).remove(node, safe=True)


def _register(node: ir.Node, main: ir.Graph) -> None:
    if not {"value", "value_int", "value_ints", "value_float", "value_floats"} & set(node.attributes):
        return
    tensor = tensor_in(node)
    if tensor is None:  # onnx-ir's own accessor renames the tensor, which may be the caller's
        tensor = ir.convenience.get_const_tensor(node.outputs[0])
    if tensor is not None and tensor.dtype != ir.DataType.STRING:
        become_constant(node, tensor, main)


def become_constant(node: ir.Node, tensor: ir.TensorProtocol, main: ir.Graph) -> bool:
    """Replace the output of ``node`` with a marked initializer of the same name; return False if the node must stay."""
    if (new := become_initializer(node, tensor, main)) is None:
        return False
    mark_constant(new)
    return True

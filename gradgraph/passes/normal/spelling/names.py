"""Pass: give every node and value a unique name.

onnx-ir's own pass is not used: it allows equal names in different bodies, whose nodes may move to one graph.
"""

from __future__ import annotations

import onnx_ir as ir

from gradgraph.graph.builder import Builder
from gradgraph.graph.checks import UNNAMED
from gradgraph.graph.constant_nodes import own_tensor
from gradgraph.passes.normal.edit import graphs_of, is_wanted

_ADDED_BLINDLY = ("gemm_input_shape", "gemm_output_shape")  # onnxruntime adds these when it fuses MatMul and Add


def write_one_domain(model: ir.Model) -> None:
    """Import ONNX's own domain under its short name, the empty string."""
    if (opset := model.opset_imports.pop("ai.onnx", None)) is not None:
        model.opset_imports.setdefault("", opset)


def make_names_unique(model: ir.Model) -> None:
    """Give every node and value a unique name, in place.

    1. Existing names of values in the main graph are kept.
    2. A node or value without a name gets that of its operator, and such a node is marked (UNNAMED). A node name that
       is already used gets a suffix ``_1``, ``_2``, …
    3. Values in bodies of If, Loop and Scan are renamed if an outer graph or another body uses their name.
    4. Initializers of bodies move to the main graph, where they can be selected by name.
    5. Absent inputs and outputs stay absent, and trailing absent ones are removed.
    6. Initializers are renamed if they have a name that onnxruntime adds without checking whether it is used; models
       that it optimized have such names.
    """
    nodes, values = Builder(_ADDED_BLINDLY), Builder(_ADDED_BLINDLY)
    seen = _hold_main_names(model.graph, values)
    for graph in graphs_of(model):
        for value in (*graph.inputs, *list(graph.initializers.values())):
            _name(value, "x", values, seen)
        for node in graph:
            if not node.name:
                node.meta[UNNAMED] = True
            node.name = nodes.fresh(node.name or node.op_type)
            _drop_absent(node)
            for value in node.outputs:
                if value.name or is_wanted(value):
                    _name(value, node.name, values, seen)
    for graph in list(graphs_of(model))[1:]:
        for value in list(graph.initializers.values()):
            _hoist(value, graph, model.graph)


def _hold_main_names(graph: ir.Graph, values: Builder) -> set[ir.Value]:
    seen: set[ir.Value] = set()
    for value in (*graph.inputs, *graph.initializers.values(), *graph.outputs, *(v for n in graph for v in n.outputs)):
        if value.name and value not in seen and not (value.is_initializer() and value.name in _ADDED_BLINDLY):
            values.fresh(value.name)
            seen.add(value)
    return seen


def _name(value: ir.Value, default: str, values: Builder, seen: set[ir.Value]) -> None:
    if value not in seen:
        name = values.fresh(value.name or default)
        if name != value.name:
            if value.const_value is not None:
                value.const_value = own_tensor(value.const_value, value.name)
            value.name = name
        seen.add(value)


def _drop_absent(node: ir.Node) -> None:
    count = len(node.outputs)
    while count > 1 and not node.outputs[count - 1].name and not is_wanted(node.outputs[count - 1]):
        count -= 1
    if count < len(node.outputs):
        node.resize_outputs(count)
    count, least = len(node.inputs), 2 if node.op_type == "Loop" else 0  # a Loop keeps its first two inputs
    while count > least and node.inputs[count - 1] is None:
        count -= 1
    if count < len(node.inputs):
        node.resize_inputs(count)


def _hoist(value: ir.Value, graph: ir.Graph, main: ir.Graph) -> None:
    if value.is_graph_input() or value.name is None:
        return
    if value.is_graph_output():  # the outputs of a body must be computed in it
        node = ir.node("Identity", [value])
        node.outputs[0].name, node.name = f"{value.name}/out", f"{value.name}/Identity"
        node.outputs[0].type, node.outputs[0].shape = value.type, value.shape
        graph.append(node)
        for i, output in enumerate(graph.outputs):
            if output is value:
                graph.outputs[i] = node.outputs[0]
    del graph.initializers[value.name]
    main.register_initializer(value)

"""Pass: every Loop has a first condition."""

from __future__ import annotations

import onnx_ir as ir

from gradgraph.passes.normal.edit import Editor, nodes_of


def write_conditions(model: ir.Model) -> None:
    """Give every Loop a first condition: true where there is none, which some runtimes take for false."""
    editor = Editor(model)
    for node in nodes_of(model):
        if node.op_type == "Loop" and node.domain == "" and (len(node.inputs) < 2 or node.inputs[1] is None):
            node.resize_inputs(max(2, len(node.inputs)))
            node.replace_input_with(1, editor.op.const(True).value)
    editor.op.finish(model.graph)

"""Pass: give every Loop an initial condition."""

from __future__ import annotations

import onnx_ir as ir

from gradgraph.graph.nodes import input_at
from gradgraph.passes.normal.edit import Editor, calls_of


def write_conditions(model: ir.Model) -> None:
    """Set an absent initial condition of a Loop to true, in place: some runtimes read an absent one as false."""
    editor = Editor(model)
    for node in calls_of(model, "Loop"):
        if input_at(node, 1) is None:
            node.resize_inputs(max(2, len(node.inputs)))
            node.replace_input_with(1, editor.op.const(True).value)
    editor.op.finish(model.graph)

"""Reshape scalars that are combined with tensors whose last axis has size 1, mainly 1x1 weights in an optimizer.

onnxruntime 1.31 aligns shapes at the last axis, and iterates element by element if they start with equal axes and end
with a broadcast one: a scalar times [1280, 320, 1, 1] takes 2,525 us, but 25 us if the scalar has shape [1, 1, 1, 1].
AdamW's updates took 140 of 375 ms of a step of MobileNetV2.
"""

from __future__ import annotations

import onnx_ir as ir

from gradgraph.graph import shapes
from gradgraph.graph.shape_inference import shape_of
from gradgraph.passes.normal.edit import Editor, graph_of, nodes_of

ARITHMETIC = ("Add", "Sub", "Mul", "Div", "Pow", "Mod", "Min", "Max", "Sum", "Mean", "Where", "PRelu")
LOGIC = ("And", "Or", "Xor", "Equal", "Greater", "GreaterOrEqual", "Less", "LessOrEqual")


def reshape_numbers(model: ir.Model) -> None:
    """Reshape each scalar that is combined with a tensor whose last axis has size 1 to the rank of the tensor."""
    editor = Editor(model)
    raised: dict[tuple[ir.Value, int, ir.Graph], ir.Value] = {}
    for node in [n for n in nodes_of(model) if n.domain == "" and n.op_type in ARITHMETIC + LOGIC]:
        rank = _rank_of_columns(node)
        for i, x in enumerate(node.inputs):
            if rank and x is not None and shapes.is_number(shape_of(x), rank - 1):
                key = x, rank, graph_of(node)
                if key not in raised:
                    raised[key] = editor.op.Reshape(editor.op.wrap(x), [1] * rank).value
                    editor.place(node)
                node.replace_input_with(i, raised[key])


def _rank_of_columns(node: ir.Node) -> int:
    """Return the rank of an output that has the shape of an input and a last axis of size 1; else 0."""
    y = shape_of(node.outputs[0])
    if y is None or len(y) < 2 or y[-1] != 1:
        return 0
    known = None not in y and any(shape_of(x) == y for x in node.inputs if x is not None)
    return len(y) if known else 0

"""Passes: repair forms that runtimes tolerate, but that are invalid or obsolete, or that some of them misread."""

from __future__ import annotations

from collections.abc import Iterable

import onnx_ir as ir

from gradgraph.graph import ranks
from gradgraph.graph.nodes import input_at
from gradgraph.graph.shape_inference import shape_of
from gradgraph.passes.normal.edit import Editor, attributes, calls_of


def repair(model: ir.Model) -> bool:
    """Rewrite invalid or obsolete forms of nodes as valid ones, in place; return True if any node was rewritten.

    1. A vector of one element in place of a scalar (limits of Range in some function bodies, bounds of Clip) becomes a
       scalar.
    2. Empty roi, scales or sizes of a Resize, which opset 11 required as placeholders, become absent inputs; so does a
       roi without tf_crop_and_resize.
    3. Axes and sizes that are not vectors (PyTorch's exporter writes some as scalars) become vectors.
    """
    editor = Editor(model)
    changed = False
    for node in calls_of(model, *_SCALARS, *_VECTORS):
        if node.op_type == "Resize":
            changed |= _drop_place_holders(node)
        changed |= _reshape(editor, node, _SCALARS.get(node.op_type, ()), [])
        changed |= _reshape(editor, node, _VECTORS.get(node.op_type, ()), [-1])
    return changed


def write_conditions(model: ir.Model) -> None:
    """Set an absent initial condition of a Loop to true, in place: some runtimes read an absent one as false."""
    editor = Editor(model)
    for node in calls_of(model, "Loop"):
        if input_at(node, 1) is None:
            node.resize_inputs(max(2, len(node.inputs)))
            node.replace_input_with(1, editor.op.const(True).value)
    editor.op.finish(model.graph)


_SCALARS = {"Clip": (1, 2), "Range": (0, 1, 2)}  # inputs that are scalars
_VECTORS = {  # inputs that are vectors of axes, sizes or indices
    "Compress": (1,),
    "ConstantOfShape": (0,),
    "Expand": (1,),
    "Resize": (1, 2, 3),
    "Squeeze": (1,),
    "Unsqueeze": (1,),
    **dict.fromkeys(ranks.REDUCTIONS, (1,)),
}


def _reshape(editor: Editor, node: ir.Node, places: Iterable[int], sizes: list[int]) -> bool:
    """Reshape each of the inputs at ``places`` to ``sizes`` if its rank differs; return True if there were any."""
    changed = False
    for i in places:
        value = input_at(node, i)
        shape = shape_of(value)
        if value is not None and shape is not None and len(shape) != len(sizes):
            reshaped = editor.op.Reshape(editor.op.wrap(value), editor.op.const(sizes, ir.DataType.INT64))
            editor.place(node)
            node.replace_input_with(i, reshaped.value)
            changed = True
    return changed


def _drop_place_holders(node: ir.Node) -> bool:
    crops = attributes(node).get("coordinate_transformation_mode") == "tf_crop_and_resize"
    dropped = [
        i
        for i, value in enumerate(node.inputs)
        if i and value is not None and (shape_of(value) == (0,) or (i == 1 and not crops))
    ]
    for i in dropped:
        node.replace_input_with(i, None)
    return bool(dropped)

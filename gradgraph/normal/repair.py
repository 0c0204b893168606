"""Pass: forms that runtimes tolerate, though the specification does not allow or no longer needs them."""

from __future__ import annotations

import onnx_ir as ir

from gradgraph import shapes
from gradgraph.normal.edit import Editor, attributes, nodes_of


def repair(model: ir.Model) -> bool:
    """Rewrite, so that a rule sees the proper form only; True if anything was.

    1. Range with vectors of length 1 (in some function bodies): scalars;
    2. Resize with empty roi, scales or sizes, which opset 11 demanded as place holders: absent inputs; a roi without
       tf_crop_and_resize is dropped as well;
    3. axes of Squeeze, Unsqueeze and reductions that are a scalar (PyTorch's exporter writes some): a vector.
    """
    editor = Editor(model)
    changed = False
    for node in list(nodes_of(model)):
        if node.domain == "" and node.op_type == "Range":
            changed |= _make_scalar(editor, node)
        elif node.domain == "" and node.op_type == "Resize":
            changed |= _drop_place_holders(node)
        elif node.domain == "" and (node.op_type in ("Squeeze", "Unsqueeze") or node.op_type.startswith("Reduce")):
            changed |= _make_vector(editor, node)
    return changed


def _make_scalar(editor: Editor, node: ir.Node) -> bool:
    vectors = [i for i, value in enumerate(node.inputs) if value is not None and shapes.shape_of(value) == (1,)]
    for i in vectors:
        value = node.inputs[i]
        if value is not None:
            scalar = editor.op.Reshape(editor.op.wrap(value), editor.op.const([], ir.DataType.INT64))
            editor.place(node)
            node.replace_input_with(i, scalar.value)
    return bool(vectors)


def _make_vector(editor: Editor, node: ir.Node) -> bool:
    axes = node.inputs[1] if len(node.inputs) > 1 else None
    if axes is None or shapes.shape_of(axes) != ():
        return False
    vector = editor.op.Reshape(editor.op.wrap(axes), editor.op.const([1], ir.DataType.INT64))
    editor.place(node)
    node.replace_input_with(1, vector.value)
    return True


def _drop_place_holders(node: ir.Node) -> bool:
    crops = attributes(node).get("coordinate_transformation_mode") == "tf_crop_and_resize"
    dropped = [
        i
        for i, value in enumerate(node.inputs)
        if i and value is not None and (shapes.shape_of(value) == (0,) or (i == 1 and not crops))
    ]
    for i in dropped:
        node.replace_input_with(i, None)
    return bool(dropped)

"""Pass: quantisation to int8 that onnxruntime's optimizer would break, written with uint8; the numbers are the same.

The optimizer copies a QuantizeLinear or DequantizeLinear beyond a node that only moves numbers, and changes the types
of zero points from int8 to uint8; from opset 21 on the copy says ``output_dtype`` as well, which then contradicts:
"output_dtype INT8 does not match y_zero_point type UINT8". Nodes that use uint8 already stay as they are.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from gradgraph.graph.shapes import constant_of, is_static, shape_of
from gradgraph.passes.normal.edit import Editor, nodes_of

_MOVING = frozenset({"Flatten", "MaxPool", "Reshape", "Slice", "Squeeze", "Transpose", "Unsqueeze"})
_SHIFT = 128


def write_unsigned(model: ir.Model) -> None:
    """Rewrite, in place, each QuantizeLinear to int8 that is read by DequantizeLinear alone and might be copied."""
    editor = Editor(model)
    for node in [n for n in nodes_of(model) if n.op_type == "QuantizeLinear" and n.domain == ""]:
        readers = list(node.outputs[0].consumers())
        if _is_read_by(node, readers) and _might_be_copied(node, readers):
            zeros = {n: _zero_point(n) for n in (node, *readers)}
            if not any(zero is None for zero in zeros.values()):
                _shift(editor, node, zeros)
    editor.op.finish(model.graph)


def _is_read_by(node: ir.Node, readers: list[ir.Node]) -> bool:
    y = node.outputs[0]
    alone = all(n.op_type == "DequantizeLinear" and n.domain == "" for n in readers) and not y.is_graph_output()
    return y.dtype == ir.DataType.INT8 and alone


def _might_be_copied(node: ir.Node, readers: list[ir.Node]) -> bool:
    before = node.inputs[0].producer() if node.inputs[0] is not None else None
    behind = [n for reader in readers for n in reader.outputs[0].consumers()]
    return _says_its_type(node) or any(n is not None and n.op_type in _MOVING for n in (before, *behind))


def _says_its_type(node: ir.Node) -> bool:
    return "output_dtype" in node.attributes and node.attributes["output_dtype"].as_int() != 0


def _zero_point(node: ir.Node) -> np.ndarray | None:
    """The zero point, if it is constant; as many zeros as there are scales if the node has none."""
    scale, given = node.inputs[1], node.inputs[2] if len(node.inputs) > 2 else None
    if given is not None:
        return constant_of(given)
    shape = shape_of(scale)
    return np.zeros([int(d or 0) for d in shape], np.int8) if shape is not None and is_static(shape) else None


def _shift(editor: Editor, node: ir.Node, zeros: dict[ir.Node, np.ndarray | None]) -> None:
    for each, zero in zeros.items():
        assert zero is not None
        each.resize_inputs(3)
        each.replace_input_with(2, editor.op.const((zero.astype(np.int16) + _SHIFT).astype(np.uint8)).value)
    node.attributes.pop("output_dtype", None)
    node.outputs[0].type = ir.TensorType(ir.DataType.UINT8)

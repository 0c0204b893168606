"""Passes: rewrite quantised nodes that onnxruntime's optimizer would break; results stay the same.

It copies a QuantizeLinear or DequantizeLinear past a node that only moves data, and changes zero points from
int8 to uint8. From opset 21 on it also writes ``output_dtype``, which then contradicts the zero point: "output_dtype
INT8 does not match y_zero_point type UINT8". It does not change nodes that already use uint8.

It also fuses ``DequantizeLinear → AveragePool → QuantizeLinear`` into QLinearAveragePool and copies all attributes, but
this operator has no dilations: "Unrecognized attribute: dilations for operator QLinearAveragePool".

It fuses ``DequantizeLinear → MatMul`` into MatMulNBits also in bodies of If, Loop and Scan, but looks for the integers
in the body only: "TransposeDQWeightsForMatMulNBits Missing required weight".
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from gradgraph.graph.nodes import input_at, inputs_of, is_standard, made_by
from gradgraph.graph.shape_inference import shape_of
from gradgraph.graph.shapes import all_sizes, constant_of
from gradgraph.passes.normal.edit import Editor, calls_of, graph_of

_MOVING = frozenset({"Flatten", "MaxPool", "Reshape", "Slice", "Squeeze", "Transpose", "Unsqueeze"})
_SHIFT = 128


def write_unsigned(model: ir.Model, everywhere: bool = False) -> None:
    """Convert int8 QuantizeLinear nodes read only by DequantizeLinear, and these readers, to uint8, in place.

    With ``everywhere``, also where the optimizer would not break them.
    """
    editor = Editor(model)
    for node in calls_of(model, "QuantizeLinear"):
        readers = list(node.outputs[0].consumers())
        if _is_read_by(node, readers) and (everywhere or _might_be_copied(node, readers)):
            zeros = {n: zero for n in (node, *readers) if (zero := _zero_point(n)) is not None}
            if len(zeros) == len({node, *readers}):
                _shift(editor, node, zeros)
    editor.op.finish(model.graph)


def omit_dilations(model: ir.Model) -> None:
    """Remove the dilations of AveragePools between DequantizeLinear and QuantizeLinear if they are all 1, in place."""
    for node in calls_of(model, "AveragePool"):
        is_quantised = any(reader.op_type == "QuantizeLinear" for reader in node.outputs[0].consumers())
        is_quantised = is_quantised and made_by(node.inputs[0], "DequantizeLinear") is not None
        if is_quantised and {*node.attributes.get_ints("dilations", [])} == {1}:
            del node.attributes["dilations"]


def dequantize_outside(model: ir.Model) -> None:
    """Move each DequantizeLinear of a product in a body to the main graph if all that it reads is there, in place.

    The product then reads floats. If both factors are dequantized, both nodes stay: onnxruntime multiplies integers.
    """
    for node in calls_of(model, "MatMul", "Gemm"):
        made = made_by(node.inputs[1], "DequantizeLinear")
        if made is None or made.graph is model.graph or made_by(node.inputs[0], "DequantizeLinear") is not None:
            continue
        if all(v.graph is model.graph and v.producer() is None for v in inputs_of(made)):
            graph_of(made).remove(made)
            model.graph.insert_before(model.graph[0], made)


def _is_read_by(node: ir.Node, readers: list[ir.Node]) -> bool:
    y = node.outputs[0]
    alone = all(is_standard(n, "DequantizeLinear") for n in readers) and not y.is_graph_output()
    return y.dtype == ir.DataType.INT8 and alone


def _might_be_copied(node: ir.Node, readers: list[ir.Node]) -> bool:
    before = node.inputs[0].producer() if node.inputs[0] is not None else None
    behind = [n for reader in readers for n in reader.outputs[0].consumers()]
    says_its_type = node.attributes.get_int("output_dtype", 0) != 0
    return says_its_type or any(n is not None and n.op_type in _MOVING for n in (before, *behind))


def _zero_point(node: ir.Node) -> np.ndarray | None:
    """Return the constant zero point of ``node``, or zeros (one per scale) if it has none; None if it is unknown."""
    if (given := input_at(node, 2)) is not None:
        return constant_of(given)
    sizes = all_sizes(shape_of(node.inputs[1]))
    return None if sizes is None else np.zeros(sizes, np.int8)


def _shift(editor: Editor, node: ir.Node, zeros: dict[ir.Node, np.ndarray]) -> None:
    for each, zero in zeros.items():
        each.resize_inputs(3)
        each.replace_input_with(2, editor.op.const((zero.astype(np.int16) + _SHIFT).astype(np.uint8)).value)
    node.attributes.pop("output_dtype", None)
    node.outputs[0].type = ir.TensorType(ir.DataType.UINT8)

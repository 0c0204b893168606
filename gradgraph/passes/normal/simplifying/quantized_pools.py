"""Pass: omit dilations of 1 from quantised average pools, as onnxruntime's optimizer would break them.

It fuses ``DequantizeLinear → AveragePool → QuantizeLinear`` into QLinearAveragePool and copies all attributes, but this
operator has no dilations: "Unrecognized attribute: dilations for operator QLinearAveragePool".
"""

from __future__ import annotations

import onnx_ir as ir

from gradgraph.graph.nodes import made_by
from gradgraph.passes.normal.edit import calls_of


def omit_dilations(model: ir.Model) -> None:
    """Remove the dilations of AveragePools between DequantizeLinear and QuantizeLinear if they are all 1, in place."""
    for node in calls_of(model, "AveragePool"):
        is_quantised = any(reader.op_type == "QuantizeLinear" for reader in node.outputs[0].consumers())
        is_quantised = is_quantised and made_by(node.inputs[0], "DequantizeLinear") is not None
        if is_quantised and {*node.attributes.get_ints("dilations", [])} == {1}:
            del node.attributes["dilations"]

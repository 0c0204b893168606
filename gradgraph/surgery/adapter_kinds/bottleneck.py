"""Bottleneck adapters (Houlsby et al. 2019, arXiv:1902.00751): ``y + relu(y·D + d)·U + u`` after a layer and its bias.

y is the output of the layer. D (outputs, rank) and U (rank, outputs) are trained matrices, d and u their biases. D is
initialised like a linear layer and U with zeros, so that the output is unchanged at first. A bottleneck cannot be
merged into a weight.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from gradgraph.files.model_metadata import Adapter
from gradgraph.surgery.adapter_kinds.kind import KINDS, Kind, zeros
from gradgraph.surgery.adapter_kinds.writer import Writer
from gradgraph.surgery.linear_layers import Layer, drawn


def put(work: ir.Model, layer: Layer, wanted: Adapter, rng: np.random.Generator) -> Adapter:
    """Insert two linear layers after ``layer`` (1×1 Convs after a Conv); return the adapter."""
    writer, width, rank = Writer(work, layer.node, wanted, layer.dtype), layer.sizes[1], wanted.rank
    ones = [1] * len(layer.kernel)
    in_front, behind = (
        ((rank, width, *ones), (width, rank, *ones)) if layer.kind == "Conv" else ((width, rank), (rank, width))
    )
    down = writer.weight("bottleneck_down.weight", drawn(rng, in_front, width, layer.dtype))
    down_bias = writer.weight("bottleneck_down.bias", np.zeros(rank))
    up = writer.weight("bottleneck_up.weight", np.zeros(behind))
    up_bias = writer.weight("bottleneck_up.bias", np.zeros(width))

    def linear(x: ir.Value, weight: ir.Value, bias: ir.Value) -> ir.Value:
        if layer.kind == "Conv":
            return writer.node("Conv", x, weight, bias)
        return writer.node("Add", writer.node("MatMul", x, weight), bias)

    def formula(y: ir.Value) -> ir.Value:
        inner = writer.node("Relu", linear(y, down, down_bias))
        if wanted.dropout:
            inner = writer.node("Dropout", inner, writer.constant(wanted.dropout))
        return writer.node("Add", y, linear(inner, up, up_bias))

    return wanted.put_at(writer.instead(layer.result, formula), down, down_bias, up, up_bias)


KINDS.add(
    "bottleneck",
    Kind("two small layers with a ReLU between them, after a layer", put,
         ("down.weight", "down.bias", "up.weight", "up.bias"), zeros, ((1, 0, 0, None), (0, 0, 1, None)), drops=True),
)  # fmt: skip

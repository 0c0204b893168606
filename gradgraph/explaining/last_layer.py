"""The last linear layer of a model: the logits that it computes, and the features that it reads."""

from __future__ import annotations

from typing import NamedTuple

import onnx_ir as ir

from gradgraph.autodiff.probabilities import probabilities
from gradgraph.autodiff.select import target_of
from gradgraph.errors import BuildError, shown
from gradgraph.graph.nodes import made_by
from gradgraph.graph.shape_inference import shape_of
from gradgraph.surgery.heads import last_linear
from gradgraph.surgery.linear_layers import stored


class LastLayer(NamedTuple):
    """The last linear layer before an output.

    Attributes:
        output: the output.
        logits: the result of the layer, with its bias: [batch, classes].
        features: what the layer reads: [batch, width].
        weight: the stored weight.
        has_bias: whether the layer has a bias.
        is_binary: whether the output is a Sigmoid, or one number for each sample.
    """

    output: ir.Value
    logits: ir.Value
    features: ir.Value
    weight: ir.Value
    has_bias: bool
    is_binary: bool


def last_layer(graph: ir.Graph, output: str | None) -> LastLayer:
    """Return the last linear layer before ``output``, or before its Softmax, LogSoftmax or Sigmoid.

    Raises:
        BuildError: if another operation follows the layer, or it does not compute one row for each sample.
        ModelError: if there is no such layer.
    """
    y = target_of(graph, output)
    found, log = probabilities(y), made_by(y, "LogSoftmax")
    logits = log.inputs[0] if log is not None else y if found is None else found.logits
    name = shown(y.name)
    if logits is None:
        raise BuildError(f"the output '{name}' contains probabilities whose logits are not in the model; choose the "
                         "logits with output=")  # fmt: skip
    head = last_linear(logits)
    node, weight = head.layer.node, stored(head.layer.weight)
    x, shape = node.inputs[0], shape_of(logits)
    if head.behind or x is None or weight is None or head.layer.kind not in ("Gemm", "MatMul") or head.layer.weighs:
        what = head.behind[0].op_type if head.behind else head.layer.kind
        raise BuildError(f"the output '{name}' is computed by a node of type {what}, not by a linear layer (MatMul or "
                         "Gemm with a stored weight); choose another with output=")  # fmt: skip
    if shape is None or len(shape) != 2 or not isinstance(shape[1], int):
        raise BuildError(f"the last linear layer before '{name}' has shape {None if shape is None else list(shape)}, "
                         "not [batch, classes] with a known number of classes; choose another output")  # fmt: skip
    has_bias = head.sum is not None or head.layer.bias is not None
    is_binary = shape[1] == 1 or (found is not None and found.kind == "Sigmoid")
    return LastLayer(y, logits, x, weight, has_bias, is_binary)

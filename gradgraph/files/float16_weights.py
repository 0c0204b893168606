"""Weights stored as float16, each with a Cast to float32."""

from __future__ import annotations

import copy

import numpy as np
import onnx

STORED = ".float16"  # suffix of the stored tensor's name
LEAST = 256  # elements: smaller weights are stored as float32


def widened(model: onnx.ModelProto) -> onnx.ModelProto:
    """Return a copy of ``model`` whose float16 weights are float32 again; return ``model`` itself if it has none."""
    narrow = {t.name: t for t in model.graph.initializer if t.name.endswith(STORED)}
    casts = {n.input[0]: n.output[0] for n in model.graph.node if n.op_type == "Cast" and n.input[0] in narrow}
    if not casts:
        return model
    wide = copy.deepcopy(model)
    nodes = [n for n in wide.graph.node if not (n.op_type == "Cast" and n.input[0] in casts)]
    del wide.graph.node[:]
    wide.graph.node.extend(nodes)
    for tensor in wide.graph.initializer:
        if tensor.name in casts:
            numbers = onnx.numpy_helper.to_array(tensor).astype(np.float32)
            tensor.CopyFrom(onnx.numpy_helper.from_array(numbers, casts[tensor.name]))
    return wide

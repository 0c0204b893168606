"""Training models of onnxruntime-training: their forward part is kept, and gradients are written anew.

They compute gradients by operators of com.microsoft that stock onnxruntime does not have, and add them up in place.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir

from gradgraph.compat.onnxruntime_training.graphs import value_names as names
from gradgraph.compat.onnxruntime_training.graphs.inference_graph import inference_graph
from gradgraph.compat.onnxruntime_training.graphs.training_graph import training_graph

_DOMAIN = "com.microsoft"
_ACCUMULATOR = "InPlaceAccumulatorV2"
_STANDARD = {  # what it writes in place of standard operators: these, and how many outputs they have
    "BatchNormInternal": ("BatchNormalization", 3),
    "ConcatTraining": ("Concat", 1),
    "GRUTraining": ("GRU", 2),
    "LSTMTraining": ("LSTM", 3),
    "SplitTraining": ("Split", None),
}


def is_old(model: onnx.ModelProto) -> bool:
    """Was this training model made by onnxruntime-training?"""
    return any(n.domain == _DOMAIN and n.op_type == _ACCUMULATOR for n in model.graph.node)


def made_anew(model: onnx.ModelProto, parameters: Mapping[str, np.ndarray[Any, Any]]) -> onnx.ModelProto:
    """The training model of the same forward pass, loss and parameters.

    Args:
        parameters: those of the checkpoint, trained and frozen; empty where it is nominal.

    Raises:
        ModelError, DifferentiationError, UnsupportedOperatorError: it has operators that are not known.
    """
    outputs = [v.name for v in model.graph.output if names.parameter_of_accumulated(v.name) is None]
    trained = [p for v in model.graph.input if (p := names.parameter_of_buffer(v.name)) is not None]
    forward = inference_graph(model, outputs, parameters)
    for node in forward.graph:
        if node.domain != _DOMAIN or node.op_type not in _STANDARD:
            continue
        node.op_type, count = _STANDARD[node.op_type]
        node.domain = ""
        if node.op_type == "BatchNormalization":
            node.attributes["training_mode"] = ir.AttrInt64("training_mode", 1)
        if count is not None:  # what follows is for its gradient, which goes
            node.resize_outputs(count)
    used = {"", *(node.domain for node in forward.graph)}
    for domain in [d for d in forward.opset_imports if d not in used]:
        del forward.opset_imports[domain]
    proto: onnx.ModelProto = ir.to_proto(forward)
    return training_graph(proto, outputs, trained, [p for p in parameters if p not in trained])

"""Cross-entropy in basic operators, for libraries that differentiate models but have no losses."""

from __future__ import annotations

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

TARGET, LOSS = "target", "loss"


LOG_SOFTMAX = [helper.make_node("LogSoftmax", ["loss.logits"], ["loss.log"], axis=1)]
SOFTMAX_LOG = [  # equivalent for moderate logits
    helper.make_node("Softmax", ["loss.logits"], ["loss.softmax"], axis=1),
    helper.make_node("Log", ["loss.softmax"], ["loss.log"]),
]


def with_loss(
    model: onnx.ModelProto, classes: np.ndarray, log_softmax: list[onnx.NodeProto]
) -> tuple[onnx.ModelProto, np.ndarray]:
    """Return the model with the input ``target`` (one-hot) and the only output ``loss``, and the target.

    Args:
        model: a model whose first output is logits, with the classes on axis 1.
        classes: the class indices of the target.
        log_softmax: ``LOG_SOFTMAX``, or ``SOFTMAX_LOG`` for libraries that do not support LogSoftmax.
    """
    result = onnx.ModelProto()
    result.CopyFrom(model)
    graph = result.graph
    logits = graph.output[0]
    shape = [d.dim_value for d in logits.type.tensor_type.shape.dim]
    one_hot = np.moveaxis(np.eye(shape[1], dtype=np.float32)[classes], -1, 1)
    scale = numpy_helper.from_array(np.array(-1.0 / classes.size, np.float32), "loss.scale")
    graph.initializer.append(scale)
    graph.input.append(helper.make_tensor_value_info(TARGET, TensorProto.FLOAT, shape))
    graph.node.extend(
        [
            helper.make_node("Identity", [logits.name], ["loss.logits"]),
            *log_softmax,
            helper.make_node("Mul", ["loss.log", TARGET], ["loss.chosen"]),
            helper.make_node("ReduceSum", ["loss.chosen"], ["loss.sum"], keepdims=0),
            helper.make_node("Mul", ["loss.sum", scale.name], [LOSS]),
        ]
    )
    del graph.output[:]
    graph.output.append(helper.make_tensor_value_info(LOSS, TensorProto.FLOAT, []))
    return result, np.ascontiguousarray(one_hot)


def parameters(model: onnx.ModelProto) -> list[str]:
    """Return the names of the initializers to train: float32 tensors except scalars and running statistics."""
    statistics = (".running_mean", ".running_var")
    return [
        t.name
        for t in model.graph.initializer
        if t.data_type == TensorProto.FLOAT and t.dims and not t.name.endswith(statistics)
    ]

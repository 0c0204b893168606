"""onnxsim: its compiled training loop on its simplified model, with plain SGD as a custom optimizer."""

from __future__ import annotations

import numpy as np
import onnx
import onnx.parser
import onnxruntime
import onnxsim
from onnx import numpy_helper

from benchmarks.job import CannotError, Job
from benchmarks.peers.appended_loss import LOSS, SOFTMAX_LOG, TARGET, parameters, with_loss

SGD = """<ir_version: 8, opset_import: ["" : 17]>
sgd (float[n] param, float[n] grad, float lr) => (float[n] next) { change = Mul(grad, lr) next = Sub(param, change) }"""


class Peer:
    versions = f"onnxsim {onnxsim.__version__}, onnxruntime {onnxruntime.__version__}"

    def __init__(self, job: Job) -> None:
        if job.optimizer != "sgd":
            raise CannotError("onnxsim has no AdamW")
        if not job.path("training.onnx").exists():
            raise CannotError("PyTorch cannot export it at opset 17")
        batch = job.batch()
        model, _ = onnxsim.simplify(without_flatten(onnx.load(job.path("training.onnx"))))
        names = parameters(model)
        model, target = with_loss(model, batch["target"], SOFTMAX_LOG)
        optimizer = onnxsim.compile_training.CustomOptimizer(onnx.parser.parse_model(SGD), 0)
        options = {"providers": ["CPUExecutionProvider"]}
        self.loop = onnxsim.compile_training_loop(model, LOSS, names, optimizer=optimizer, **options)
        self.feeds, self.rate = {"x": batch["x"], TARGET: target}, job.learning_rate

    def step(self) -> float:
        return float(self.loop(self.feeds, self.rate))


def without_flatten(model: onnx.ModelProto) -> onnx.ModelProto:
    """Replace Flatten, which has no gradient in onnxsim, by Reshape."""
    inferred = onnx.shape_inference.infer_shapes(model, data_prop=True).graph
    shapes = {v.name: v.type.tensor_type.shape.dim for v in (*inferred.value_info, *inferred.output)}
    for node in model.graph.node:
        if node.op_type == "Flatten":
            sizes = np.array([d.dim_value for d in shapes[node.output[0]]], np.int64)
            shape = numpy_helper.from_array(sizes, f"{node.output[0]}.shape")
            model.graph.initializer.append(shape)
            node.op_type = "Reshape"
            node.input.append(shape.name)
            del node.attribute[:]
    return model

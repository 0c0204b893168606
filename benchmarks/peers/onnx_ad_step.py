"""onnx-ad: its reverse pass on the model with parameters as inputs, with an appended update."""

from __future__ import annotations

from importlib.metadata import version

import numpy as np
import onnx
import onnxruntime as ort
from onnx import TensorProto, helper, numpy_helper
from onnx_ad import reverse

from benchmarks.job import CannotError, Job
from benchmarks.peers.appended_loss import LOG_SOFTMAX, LOSS, TARGET, parameters, with_loss


class Peer:
    versions = f"onnx-ad {version('onnx-ad')}, onnxruntime {ort.__version__}"

    def __init__(self, job: Job) -> None:
        if job.optimizer != "sgd":
            raise CannotError("onnx-ad has no optimizers")
        if not job.path("training.onnx").exists():
            raise CannotError("PyTorch cannot export it at opset 17")
        batch = job.batch()
        model = onnx.load(job.path("training.onnx"))
        names = parameters(model)
        model, target = with_loss(model, batch["target"], LOG_SOFTMAX)
        weights = as_inputs(model, names)
        step = with_update(reverse(model, inputs=names, outputs=[LOSS], layout="onnx"), names, job.learning_rate)
        options = ort.SessionOptions()
        options.intra_op_num_threads = job.threads
        self.session = ort.InferenceSession(step.SerializeToString(), options, providers=["CPUExecutionProvider"])
        seed = next(i for i in self.session.get_inputs() if i.name == f"adj_{LOSS}")
        feeds = {**weights, "x": batch["x"], TARGET: target, seed.name: np.ones([1] * len(seed.shape), np.float32)}
        self.feeds = {name: ort.OrtValue.ortvalue_from_numpy(value) for name, value in feeds.items()}
        self.names = names

    def step(self) -> float:
        loss, *after = self.session.run_with_ort_values([LOSS, *map(after_update, self.names)], self.feeds)
        self.feeds.update(zip(self.names, after, strict=True))
        return float(loss.numpy())


def as_inputs(model: onnx.ModelProto, names: list[str]) -> dict[str, np.ndarray]:
    """Turn the initializers ``names`` into inputs; return their values."""
    kept = [t for t in model.graph.initializer if t.name not in names]
    values = {t.name: numpy_helper.to_array(t) for t in model.graph.initializer if t.name in names}
    del model.graph.initializer[:]
    model.graph.initializer.extend(kept)
    model.graph.input.extend(helper.make_tensor_value_info(n, TensorProto.FLOAT, v.shape) for n, v in values.items())
    return values


def after_update(name: str) -> str:
    return f"{name}.after"


def with_update(model: onnx.ModelProto, names: list[str], rate: float) -> onnx.ModelProto:
    """Append SGD; onnx-ad's gradients have a trailing axis with one entry per seed."""
    graph = model.graph
    graph.initializer.append(numpy_helper.from_array(np.array([-1], np.int64), "update.last"))
    graph.initializer.append(numpy_helper.from_array(np.array(rate, np.float32), "update.rate"))
    for name in names:
        gradient, change, after = f"{name}.gradient", f"{name}.change", after_update(name)
        graph.node.append(helper.make_node("Squeeze", [f"adj_{name}", "update.last"], [gradient]))
        graph.node.append(helper.make_node("Mul", [gradient, "update.rate"], [change]))
        graph.node.append(helper.make_node("Sub", [name, change], [after]))
        graph.output.append(helper.make_tensor_value_info(after, TensorProto.FLOAT, None))
    return model

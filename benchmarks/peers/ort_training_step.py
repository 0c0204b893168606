"""onnxruntime-training: its artifacts, module and optimizer, from the model in training form."""

from __future__ import annotations

import tempfile
from pathlib import Path

import onnx
import onnxruntime as ort
from onnxruntime.training import artifacts, onnxblock
from onnxruntime.training.api import CheckpointState, Module, Optimizer

from benchmarks.job import CannotError, Job
from benchmarks.peers.appended_loss import parameters

OPTIMIZERS = {"sgd": onnxblock.optim.SGD, "adamw": lambda: onnxblock.optim.AdamW(eps=1e-8, weight_decay=0.01)}


class Peer:
    versions = f"onnxruntime-training {ort.__version__}"

    def __init__(self, job: Job) -> None:
        if not job.path("training.onnx").exists():
            raise CannotError("PyTorch cannot export it at opset 17")
        model = with_all_outputs(onnx.load(job.path("training.onnx")))
        with tempfile.TemporaryDirectory() as folder:
            artifacts.generate_artifacts(
                model,
                requires_grad=parameters(model),
                loss=artifacts.LossType.CrossEntropyLoss,
                optimizer=OPTIMIZERS[job.optimizer](),
                artifact_directory=folder,
            )
            options = ort.SessionOptions()
            options.intra_op_num_threads = job.threads
            self.state = CheckpointState.load_checkpoint(Path(folder) / "checkpoint")
            self.module = Module(Path(folder) / "training_model.onnx", self.state, session_options=options)
            self.optimizer = Optimizer(Path(folder) / "optimizer_model.onnx", self.module)
        self.optimizer.set_learning_rate(job.learning_rate)
        self.module.train()
        batch = job.batch()
        self.inputs = batch["x"], batch["target"]

    def step(self) -> float:
        loss = self.module(*self.inputs)
        self.optimizer.step()
        self.module.lazy_reset_grad()
        return float(loss)


def with_all_outputs(model: onnx.ModelProto) -> onnx.ModelProto:
    """Add the outputs mean and inverse deviation to LayerNormalization, whose gradient fails without them."""
    for node in model.graph.node:
        if node.op_type == "LayerNormalization":
            node.output.extend(f"{node.output[0]}.{i}" for i in range(len(node.output), 3))
    return model

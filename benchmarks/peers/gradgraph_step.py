"""gradgraph: ``gg.build`` on the exported model, ``gg.Trainer`` on stock onnxruntime."""

from __future__ import annotations

import onnxruntime

import gradgraph as gg
from benchmarks.worker import Job
from gradgraph.runtime.session import RuntimeOptions


class Peer:
    versions = f"onnxruntime {onnxruntime.__version__}"

    def __init__(self, job: Job, options: RuntimeOptions | None = None) -> None:
        self.job = job
        optimizer = {"sgd": gg.optim.sgd, "adamw": gg.optim.adamw}[job.optimizer](job.learning_rate)
        self.definition = gg.build(str(job.path("model.onnx")), "cross_entropy", optimizer, metrics=())
        self.trainer = self.open(RuntimeOptions(threads=job.threads))
        self.batch = job.batch()

    def open(self, options: RuntimeOptions) -> gg.Trainer:
        return gg.Trainer(self.definition, device=self.job.device, options=options)  # type: ignore[arg-type]

    def step(self) -> float:
        return float(self.trainer.step(self.batch)["loss"])

"""gradgraph: ``gg.build`` on the exported model, ``gg.Trainer`` on stock onnxruntime.

"lean" also updates small state tensors in place, and recomputes attention probabilities, if there are any.
"""

from __future__ import annotations

import gc
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import onnxruntime

import gradgraph as gg
from benchmarks import profiling
from benchmarks.job import Job
from benchmarks.workloads import ALL
from gradgraph.runtime.execution.session import CPU, CUDA, Provider, RuntimeOptions


@dataclass(frozen=True)
class Profiled(RuntimeOptions):
    """Options of sessions that write their profile to a file when they are closed."""

    prefix: str = ""

    def session_options(self) -> onnxruntime.SessionOptions:
        options = super().session_options()
        options.enable_profiling = True
        options.profile_file_prefix = self.prefix
        return options


def built(job: Job) -> gg.Step:
    optimizer = gg.optim.by_name(job.optimizer, lr=job.learning_rate)
    again = "attention" if job.mode == "lean" and ALL[job.workload].attends else None
    return gg.build(str(job.path("model.onnx")), ALL[job.workload].loss, optimizer, metrics=(), recompute=again)


class Peer:
    versions = f"onnxruntime {onnxruntime.__version__}"

    def __init__(self, job: Job) -> None:
        self.job = job
        self.definition = built(job)
        self.trainer = self.open(
            RuntimeOptions(threads=job.threads, in_place=job.mode == "lean" or "auto", native_kernels=False)
        )
        self.batch: dict[str, Any] = dict(job.batch())
        if job.device == "cuda":  # avoids a copy in each step
            self.batch = {n: onnxruntime.OrtValue.ortvalue_from_numpy(a, "cuda", 0) for n, a in self.batch.items()}

    def open(self, options: RuntimeOptions) -> gg.Trainer:
        cuda: Provider = (CUDA, {"use_tf32": str(int(self.job.tf32))})
        return gg.Trainer(self.definition, [cuda, CPU] if self.job.device == "cuda" else [CPU], options=options)

    def step(self) -> float:
        return float(self.trainer.step(self.batch)["loss"])

    def profile(self, steps: int) -> dict[str, Any]:
        """Return the fields of ``profiling.Summary`` for ``steps`` steps after the first."""
        with tempfile.TemporaryDirectory() as folder:
            options = Profiled(threads=self.job.threads, native_kernels=False, prefix=f"{folder}/profile")
            self.trainer = self.open(options)
            for _ in range(steps + 1):
                self.step()
            del self.trainer
            gc.collect()
            # the other file is of init.onnx, which ran once
            largest = max(Path(folder).iterdir(), key=lambda path: path.stat().st_size)
            return asdict(profiling.summary(profiling.read(largest), steps))

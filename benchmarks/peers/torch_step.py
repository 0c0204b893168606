"""PyTorch, eager, compiled, or "medium" (less exact products): the usual loop with a fused optimizer."""

from __future__ import annotations

import torch

from benchmarks import networks
from benchmarks.job import Job
from benchmarks.workloads import ALL

OPTIMIZERS = {"sgd": torch.optim.SGD, "adamw": torch.optim.AdamW}
LOSSES = {"cross_entropy": torch.nn.functional.cross_entropy, "mse": torch.nn.functional.mse_loss}


class Peer:
    versions = f"torch {torch.__version__}"

    def __init__(self, job: Job) -> None:
        torch.set_num_threads(job.threads)
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = job.tf32
        if job.mode == "medium":
            torch.set_float32_matmul_precision("medium")
        device = torch.device(job.device)
        network = networks.make(job.workload).to(device)
        self.optimizer = OPTIMIZERS[job.optimizer](network.parameters(), lr=job.learning_rate, fused=True)
        workload, batch = ALL[job.workload], job.batch()
        self.inputs = [torch.from_numpy(batch[name]).to(device) for name in workload.inputs]
        self.target = torch.from_numpy(batch["target"]).to(device)
        self.measure = LOSSES[workload.loss]
        self.loss = torch.compile(self.loss_of) if job.mode == "compile" else self.loss_of
        self.network = network

    def loss_of(self, target: torch.Tensor, *inputs: torch.Tensor) -> torch.Tensor:
        return self.measure(self.network(*inputs), target)

    def step(self) -> float:
        self.optimizer.zero_grad()
        loss = self.loss(self.target, *self.inputs)
        loss.backward()
        self.optimizer.step()
        return float(loss.detach())

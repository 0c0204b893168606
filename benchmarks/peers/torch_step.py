"""PyTorch, eager, compiled, or "medium", with less exact products: the usual loop, the optimizer's fused kernels."""

from __future__ import annotations

import torch

from benchmarks import networks
from benchmarks.job import Job

OPTIMIZERS = {"sgd": torch.optim.SGD, "adamw": torch.optim.AdamW}


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
        self.x, self.target = (torch.from_numpy(job.batch()[name]).to(device) for name in ("x", "target"))
        self.loss = torch.compile(self.loss_of) if job.mode == "compile" else self.loss_of
        self.network = network

    def loss_of(self, x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.cross_entropy(self.network(x), target)

    def step(self) -> float:
        self.optimizer.zero_grad()
        loss = self.loss(self.x, self.target)
        loss.backward()
        self.optimizer.step()
        return float(loss.detach())

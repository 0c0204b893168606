"""A peer's task, and a peer as its worker sees it."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np

from benchmarks.workloads import LEARNING_RATES

CLOCK = "BENCHMARK_CLOCK"  # an environment variable; "processor": of all threads of a process, whatever others do


def now() -> float:
    """Seconds by the clock that steps and floors are timed with."""
    return time.process_time() if os.environ.get(CLOCK) == "processor" else time.perf_counter()


@dataclass(frozen=True)
class Job:
    """A task: the network to train, and how.

    Attributes:
        workload: a name in ``benchmarks.workloads.WORKLOADS``.
        folder: what ``benchmarks.prepare`` made of it.
        optimizer: "sgd" or "adamw", with PyTorch's defaults beside the learning rate.
        device: "cpu" or "cuda".
        tf32: may products on a CUDA device round their factors to 10 bits? (onnxruntime does by default, PyTorch in
            convolutions only, so that the losses would differ.)
        mode: which of a module's ways to train ("eager" or "compile" of PyTorch).
    """

    workload: str
    folder: str
    optimizer: str = "sgd"
    threads: int = 2
    device: str = "cpu"
    tf32: bool = False
    mode: str = ""

    @property
    def learning_rate(self) -> float:
        return LEARNING_RATES[self.optimizer]

    def path(self, name: str) -> Path:
        return Path(self.folder) / name

    def batch(self) -> dict[str, np.ndarray]:
        with np.load(self.path("batch.npz")) as arrays:
            return dict(arrays)


class Peer(Protocol):
    """A way to train; making one is its build time."""

    versions: str

    def __init__(self, job: Job) -> None: ...

    def step(self) -> float:
        """Train on the batch once; the loss before the update."""
        ...


class CannotError(Exception):
    """The peer cannot train this; the message is the reason, in one line."""

"""The job of a benchmarked library, and its interface."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np

from benchmarks.workloads import LEARNING_RATES

CLOCK = "BENCHMARK_CLOCK"  # an environment variable; "processor": processor time of all threads


def now() -> float:
    """Return seconds by the clock for steps and floors: wall time, or processor time if ``CLOCK`` is set."""
    return time.process_time() if os.environ.get(CLOCK) == "processor" else time.perf_counter()


@dataclass(frozen=True)
class Job:
    """A network to train, and the settings.

    Attributes:
        workload: a name in ``benchmarks.workloads.WORKLOADS``.
        folder: the folder that ``benchmarks.prepare`` wrote.
        optimizer: "sgd" or "adamw", with PyTorch's defaults except for the learning rate.
        device: "cpu" or "cuda".
        tf32: whether products on a CUDA device may round their factors to 10 bits. (By default, onnxruntime does, and
            PyTorch only in convolutions, so that losses would differ.)
        mode: a variant of the library, such as "eager" or "compile" for PyTorch.
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
    """A benchmarked library with a network to train; the constructor builds the step."""

    versions: str

    def __init__(self, job: Job) -> None: ...

    def step(self) -> float:
        """Train on the batch once; return the loss before the update."""
        ...


class CannotError(Exception):
    """Raised if a library cannot train the workload; the message is the reason, in one line."""

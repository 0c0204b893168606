"""Results of measurements, figures derived from them, and their JSON file."""

from __future__ import annotations

import json
import os
import platform
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.measure import Row
from benchmarks.roster import OURS, TORCH, YARDSTICK_FLOPS
from benchmarks.workloads import ALL

DOCS = Path(__file__).parent.parent / "docs" / "how-it-works"
RESULTS = DOCS / "performance.json"
FLOORS = DOCS / "floors.json"
PASSES = 3  # a step has the operations of about three forward passes: forward, and gradients of values and weights


@dataclass(frozen=True)
class Result:
    """The measurement of one workload.

    Attributes:
        setup: the settings: optimizer, threads, dynamic, rounds, date, machine.
        facts: operations of a forward pass, number of parameters.
        rows: the results of each library and yardstick ("matmul", "floor").
    """

    workload: str
    setup: dict[str, Any]
    facts: dict[str, Any]
    rows: dict[str, Row]

    @property
    def key(self) -> tuple[Any, ...]:
        """The identity of a result in the file: a later result with an equal key replaces it."""
        return self.workload, self.setup["optimizer"], self.setup["dynamic"], self.setup["device"], *self.place

    @property
    def place(self) -> tuple[str, int]:
        """The machine and the number of threads; only times with equal values are comparable."""
        return self.setup["machine"], self.setup["threads"]

    def step(self, peer: str) -> float | None:
        """Return the median seconds of a step, or None without a measurement."""
        return self.rows.get(peer, {}).get("step")

    @property
    def torch(self) -> float | None:
        """The step time of the faster of PyTorch eager and compiled, in seconds."""
        return min((s for s in map(self.step, TORCH) if s is not None), default=None)

    def ratio(self, other: float | None) -> float | None:
        """Return gradgraph's step time over ``other``."""
        ours = self.step(OURS)
        return None if ours is None or other is None else ours / other

    @property
    def gflops(self) -> float | None:
        seconds = self.step("matmul")
        return None if seconds is None else YARDSTICK_FLOPS / seconds / 1e9

    @property
    def floor(self) -> float | None:
        """The seconds of the step's products and convolutions alone, and of a pass over the memory that it must touch.

        If not measured, the seconds of its operations at the speed of a large matrix product.
        """
        if (measured := self.step("floor")) is not None:
            return measured
        return None if self.gflops is None else PASSES * self.facts["flops"] / (self.gflops * 1e9)

    def memory(self, peer: str) -> float | None:
        """Return the peak resident MB of training beyond the library's imports."""
        used = self.rows.get(peer, {}).get("above_libraries")
        return None if used is None else used / 1e6

    @property
    def torch_memory(self) -> float | None:
        """The memory of the smaller of PyTorch eager and compiled, in MB."""
        return min((m for m in map(self.memory, TORCH) if m is not None), default=None)

    def session(self, peer: str) -> float | None:
        """Return the start-up seconds at the first step: session creation or compilation."""
        row = self.rows.get(peer, {})
        return max(0.0, row["first_step"] - row["step"]) if "step" in row else None

    @property
    def title(self) -> str:
        return f"{ALL[self.workload].title}{self.optimizer}"

    @property
    def name(self) -> str:
        return f"{self.workload}{self.optimizer}"

    @property
    def optimizer(self) -> str:
        """The suffix of titles for the optimizer; empty for SGD."""
        return {"sgd": "", "adamw": ", AdamW"}[self.setup["optimizer"]]


# --- the file ------------------------------------------------------------------------------------------------


def load(path: Path) -> list[Result]:
    return [Result(**entry) for entry in json.loads(path.read_text())["results"]] if path.exists() else []


def save(path: Path, results: list[Result]) -> list[Result]:
    """Write new results to the file, in place of older ones with equal keys; return all results in table order."""
    merged = {r.key: r for r in [*load(path), *results]}
    order = list(ALL)
    listed = sorted(merged.values(), key=lambda r: (*map(str, r.key[2:]), r.optimizer, order.index(r.workload)))
    path.write_text(json.dumps({"results": [vars(r) for r in listed]}, indent=1) + "\n")
    return listed


def machine() -> str:
    """Return the processor, the number of usable cores and the system, as text."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return f"{_processor()}, {cores} cores, {platform.system()}"


def _processor() -> str:
    """Return the model name, family and model numbers, since virtual machines hide the marketing name."""
    fields: dict[str, str] = {}
    info = Path("/proc/cpuinfo")
    for line in info.read_text().splitlines() if info.exists() else []:
        name, _, value = line.partition(":")
        fields.setdefault(name.strip(), value.strip())
    if "model name" not in fields:
        return platform.processor() or platform.machine()
    return f"{fields['model name']} (family {fields.get('cpu family', '?')}, model {fields.get('model', '?')})"

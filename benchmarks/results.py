"""Results of measurements: figures derived from them, and the JSON file that keeps them."""

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
PASSES = 3  # a step is about three forward passes of arithmetic: forward, gradients of values, gradients of weights


@dataclass(frozen=True)
class Result:
    """One workload, measured.

    Attributes:
        setup: how: optimizer, threads, dynamic, rounds, date, machine, versions.
        facts: flops of a forward pass, number of parameters.
        rows: of each peer and yardstick ("matmul", "floor").
    """

    workload: str
    setup: dict[str, Any]
    facts: dict[str, Any]
    rows: dict[str, Row]

    @property
    def key(self) -> tuple[Any, ...]:
        """A later result with the same key replaces this one."""
        return self.workload, self.setup["optimizer"], self.setup["dynamic"], self.setup["device"], *self.place

    @property
    def place(self) -> tuple[str, int]:
        """The machine and the number of threads: times measured elsewhere cannot be compared with these."""
        return self.setup["machine"], self.setup["threads"]

    def step(self, peer: str) -> float | None:
        """Median seconds of a step; None where the peer cannot."""
        return self.rows.get(peer, {}).get("step")

    @property
    def torch(self) -> float | None:
        """The faster of PyTorch eager and compiled."""
        return min((s for s in map(self.step, TORCH) if s is not None), default=None)

    def ratio(self, other: float | None) -> float | None:
        """Our time over another."""
        ours = self.step(OURS)
        return None if ours is None or other is None else ours / other

    @property
    def gflops(self) -> float | None:
        seconds = self.step("matmul")
        return None if seconds is None else YARDSTICK_FLOPS / seconds / 1e9

    @property
    def floor(self) -> float | None:
        """Seconds of what the step cannot avoid: its products and convolutions alone, and the memory that it touches.

        Where that was not measured, the seconds of its arithmetic at the speed of a large matrix product.
        """
        if (measured := self.step("floor")) is not None:
            return measured
        return None if self.gflops is None else PASSES * self.facts["flops"] / (self.gflops * 1e9)

    def memory(self, peer: str) -> float | None:
        """Peak resident MB of training above what the peer's libraries take once imported."""
        used = self.rows.get(peer, {}).get("above_libraries")
        return None if used is None else used / 1e6

    @property
    def torch_memory(self) -> float | None:
        """The smaller of PyTorch eager and compiled."""
        return min((m for m in map(self.memory, TORCH) if m is not None), default=None)

    def session(self, peer: str) -> float | None:
        """Seconds of what happens once, at the first step: session creation or compilation."""
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
        """The optimizer in titles: SGD is the usual one."""
        return {"sgd": "", "adamw": ", AdamW"}[self.setup["optimizer"]]

    @property
    def aim(self) -> float | None:
        """Aims are of steps with SGD."""
        return ALL[self.workload].aim if self.setup["optimizer"] == "sgd" else None


# --- the file ------------------------------------------------------------------------------------------------


def load(path: Path) -> list[Result]:
    return [Result(**entry) for entry in json.loads(path.read_text())["results"]] if path.exists() else []


def save(path: Path, results: list[Result]) -> list[Result]:
    """Put new results in the place of older ones of the same key; the whole list, in the order of the table."""
    merged = {r.key: r for r in [*load(path), *results]}
    order = list(ALL)
    listed = sorted(merged.values(), key=lambda r: (*map(str, r.key[2:]), r.optimizer, order.index(r.workload)))
    path.write_text(json.dumps({"results": [vars(r) for r in listed]}, indent=1) + "\n")
    return listed


def machine() -> str:
    """The processor and what the process may use of it."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return f"{_processor()}, {cores} cores, {platform.system()}"


def _processor() -> str:
    """Model name, and family and model numbers, since virtual machines hide the marketing name."""
    fields: dict[str, str] = {}
    info = Path("/proc/cpuinfo")
    for line in info.read_text().splitlines() if info.exists() else []:
        name, _, value = line.partition(":")
        fields.setdefault(name.strip(), value.strip())
    if "model name" not in fields:
        return platform.processor() or platform.machine()
    return f"{fields['model name']} (family {fields.get('cpu family', '?')}, model {fields.get('model', '?')})"

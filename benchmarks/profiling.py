"""Time of a step by operator, from the events of onnxruntime's profiler."""

from __future__ import annotations

import bisect
import json
import re
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import gradgraph.rules.families  # noqa: F401 (fills the table of named operators)
from gradgraph.rules.named_operators import OPERATORS

Event = dict[str, Any]
SHOWN = 25


@dataclass(frozen=True)
class Kernel:
    """One execution of a node; ``seconds`` excludes nodes inside it, such as the body of a Scan."""

    node: str
    operator: str
    provider: str
    seconds: float
    run: int = 0


def read(path: Path) -> list[Event]:
    events: list[Event] = json.loads(path.read_text())
    return events


def kernels(events: Iterable[Event], runs: int) -> list[Kernel]:
    """Return the kernels of the last ``runs`` runs of the session."""
    listed = list(events)
    starts = sorted(e["ts"] for e in listed if e["name"] == "model_run")
    if len(starts) < runs:
        raise ValueError(f"the profile holds {len(starts)} runs, fewer than the {runs} asked for")
    of_runs = [e for e in listed if _is_kernel(e) and e["ts"] >= starts[-runs]]
    return list(_own_times(of_runs, starts[-runs:]))


def _is_kernel(event: Event) -> bool:
    return event.get("cat") == "Node" and event["name"].endswith("_kernel_time")


def _own_times(events: Iterable[Event], starts: list[int]) -> Iterator[Kernel]:
    """Yield kernels with their own times: the time of events nested in an event of the same thread is subtracted."""
    ordered = sorted(events, key=lambda e: (e["tid"], e["ts"], -e["dur"]))
    inside = [0] * len(ordered)
    open_events: list[int] = []
    for i, event in enumerate(ordered):
        while open_events and not _encloses(ordered[open_events[-1]], event):
            open_events.pop()
        if open_events:
            inside[open_events[-1]] += event["dur"]
        open_events.append(i)
    for event, within in zip(ordered, inside, strict=True):
        name, about = event["name"].removesuffix("_kernel_time"), event["args"]
        of, seconds = bisect.bisect(starts, event["ts"]) - 1, (event["dur"] - within) * 1e-6
        yield Kernel(name, about.get("op_name", "?"), about.get("provider", "?"), seconds, of)


def _encloses(outer: Event, inner: Event) -> bool:
    end: float = outer["ts"] + outer["dur"]
    return outer["tid"] == inner["tid"] and bool(inner["ts"] < end)


def scope(node: str) -> str:
    """Return the named operator that contains a node, or the part of the step: loss, grad, update or forward."""
    named = max((name for name in OPERATORS if name in node), key=len, default=None)
    if named is not None:
        return named
    first = node.split("/")[0]
    return first if "/" in node and first in ("loss", "grad", "update") else "forward"


# operators by class; `class_of` checks the part of the step first
CLASSES = {
    "products": ("MatMul", "Gemm", "FusedMatMul", "FusedGemm", "MatMulInteger"),
    "convolutions": ("Conv", "FusedConv", "ConvTranspose", "DepthwiseConv"),
    "attention": ("Attention", "PackedAttention", "Softmax", "SoftmaxGrad"),
    "normalisation": ("LayerNormalization", "BatchNormalization", "UnscaledBatchNormalization", "GroupNormalization"),
    "recurrence": ("LSTM", "GRU", "RNN", "Scan", "Loop"),
    "data moved": (
        *("Transpose", "Permute", "Reshape", "Gather", "GatherElements", "GatherND", "ScatterElements", "ScatterND"),
        *("Concat", "Slice", "Split", "Pad", "Tile", "Expand", "Cast", "Identity", "ReorderInput", "ReorderOutput"),
        *("Squeeze", "Unsqueeze", "Flatten", "Resize", "DepthToSpace", "SpaceToDepth", "MemcpyToHost"),
        "MemcpyFromHost",
    ),
    "pools and sums": ("MaxPool", "AveragePool", "GlobalAveragePool", "MaxUnpool", "MaxPoolGrad", "CumSum"),
}
ELSE = "element by element"
EXPORTED_CONVOLUTION = "node_conv"  # as PyTorch names it; its products are named after it
UPDATE = "update"


def class_of(kernel: Kernel) -> str:
    """Return the class of a kernel, such as "products", "convolutions" or "data moved"."""
    if kernel.operator in CLASSES["products"] and EXPORTED_CONVOLUTION in kernel.node:
        return "convolutions"
    return class_of_part(kernel.operator, scope(kernel.node))


def class_of_part(operator: str, part: str) -> str:
    """Return the class of an operator in a part of the step, as returned by ``scope``."""
    if operator in CLASSES["products"]:  # including fused operators
        return "convolutions" if part.startswith("Conv") else "products"
    if part in ("update", "AdamUpdate", "MomentumUpdate") or operator in ("AdamUpdate", "MomentumUpdate"):
        return UPDATE
    if "Normalization" in part:
        return "normalisation"
    if operator.startswith("Reduce"):
        return "pools and sums"
    base = re.sub(r"(Grad|GradInput|GradWeight)$", "", operator)
    return next((name for name, operators in CLASSES.items() if {operator, base} & set(operators)), ELSE)


@dataclass(frozen=True)
class Summary:
    """Seconds of a step.

    Attributes:
        total: the total of all kernels.
        kernels: the number of kernels per step; kernels in the body of a loop count each time.
        providers: the nodes that each execution provider runs.
        parts: for each title, rows of name and seconds, the largest first.
    """

    total: float
    kernels: int
    providers: dict[str, list[str]]
    parts: dict[str, list[tuple[str, float]]]

    def __str__(self) -> str:
        placed = ", ".join(f"{len(nodes)} nodes on {provider}" for provider, nodes in self.providers.items())
        lines = [f"{self.total * 1e3:.2f} ms a step in {self.kernels} kernels ({placed})"]
        for title, rows in self.parts.items():
            lines += ["", f"by {title}"]
            lines += [f"{s * 1e3:10.3f} ms {100 * s / self.total:6.1f} %  {name}" for name, s in rows]
        return "\n".join(lines)


KEYS: dict[str, Callable[[Kernel], str]] = {
    "class": class_of,
    "operator": lambda k: k.operator,
    "scope": lambda k: scope(k.node),
    "operator in scope": lambda k: f"{k.operator} in {scope(k.node)}",
    "node": lambda k: f"{k.operator} {k.node}",
}


def summary(events: Iterable[Event], runs: int) -> Summary:
    """Return a summary of the last ``runs`` runs."""
    each = kernels(events, runs)
    found = _typical(each, runs)
    parts = {title: _largest(found, key) for title, key in KEYS.items()}
    providers: dict[str, list[str]] = defaultdict(list)
    for provider, node in dict.fromkeys((k.provider, k.node) for k in found):
        providers[provider].append(node)
    return Summary(sum(k.seconds for k in found), len(each) // runs, dict(providers), parts)


def _typical(each: list[Kernel], runs: int) -> list[Kernel]:
    """Return one kernel per node, with the median of its seconds per run, which other processes hardly affect."""
    seconds: dict[Kernel, list[float]] = defaultdict(lambda: [0.0] * runs)
    for kernel in each:
        seconds[replace(kernel, run=0, seconds=0.0)][kernel.run] += kernel.seconds
    return [replace(kernel, seconds=statistics.median(spent)) for kernel, spent in seconds.items()]


def _largest(found: list[Kernel], key: Callable[[Kernel], str]) -> list[tuple[str, float]]:
    totals: dict[str, float] = defaultdict(float)
    for kernel in found:
        totals[key(kernel)] += kernel.seconds
    return sorted(totals.items(), key=lambda row: -row[1])[:SHOWN]

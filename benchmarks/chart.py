"""``performance.svg``: the time of a step relative to PyTorch on one machine, a row for each workload."""

from __future__ import annotations

from pathlib import Path

import matplotlib

from benchmarks.results import Result
from benchmarks.roster import OURS, PEERS

matplotlib.use("svg")
matplotlib.rcParams["svg.hashsalt"] = "gradgraph"  # the same results give the same file
from matplotlib import pyplot  # noqa: E402 (after the choice of a backend)
from matplotlib.axes import Axes  # noqa: E402

COLOURS = {
    "gradgraph": "#d62728",
    "gradgraph-native": "#8c1a1b",
    "torch": "#444444",
    "torch-compile": "#999999",
    "ort-training": "#1f77b4",
    "onnxsim": "#2ca02c",
    "onnx-ad": "#9467bd",
    "jax": "#ff7f0e",
}
TICKS = (0.25, 0.5, 1, 2, 4, 8, 16)


def draw(results: list[Result], path: Path) -> None:
    """One dot for each peer that can, and a mark for the aim."""
    rows = [r for r in results if r.torch is not None]
    figure, axes = pyplot.subplots(figsize=(9, 1.2 + 0.5 * len(rows)), layout="constrained")
    for peer in sorted(PEERS, key=lambda name: name == OURS):  # ours on top
        points = [(s / r.torch, i) for i, r in enumerate(rows) if r.torch and (s := r.step(peer)) is not None]
        size = 90 if peer == OURS else 40
        axes.scatter(
            *zip(*points, strict=True) if points else ([], []), s=size, color=COLOURS[peer], label=peer, zorder=3
        )
    aims = [(r.aim, i) for i, r in enumerate(rows) if r.aim is not None]
    axes.scatter(
        *zip(*aims, strict=True) if aims else ([], []),
        marker="|",
        s=300,
        color=COLOURS[OURS],
        label="aim of gradgraph",
        zorder=2,
    )
    _dress(axes, [r.name for r in rows])
    axes.set_title(", ".join(sorted({r.setup["machine"] for r in rows})), loc="left", fontsize="medium")
    figure.savefig(path, metadata=dict.fromkeys(["Creator", "Date", "Format", "Type"]))  # none: equal runs, equal files
    pyplot.close(figure)


def _dress(axes: Axes, names: list[str]) -> None:
    axes.set_xscale("log", base=2)
    axes.set_xticks(TICKS, [f"{t:g}" for t in TICKS])
    axes.set_yticks(range(len(names)), names)
    axes.set_ylim(len(names) - 0.5, -0.5)  # the first row on top
    axes.axvline(1, color="#444444", linewidth=0.8)
    axes.grid(axis="x", color="#dddddd")
    axes.set_xlabel("time of a training step / the faster of PyTorch eager and compiled (less is better)")
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.18), ncols=4, frameon=False)
    axes.spines[["top", "right", "left"]].set_visible(False)

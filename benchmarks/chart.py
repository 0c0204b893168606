"""Charts: ``performance.svg``, step times relative to PyTorch, and ``floors.svg``, relative to the floor."""

from __future__ import annotations

from pathlib import Path

import matplotlib

from benchmarks.floor_section import LIMIT, over_floor
from benchmarks.profiling import CLASSES
from benchmarks.results import Result
from benchmarks.roster import NATIVE, OURS, PEERS

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
    """Draw a dot for the relative time of each library on each workload."""
    rows = [r for r in results if r.torch is not None]
    figure, axes = pyplot.subplots(figsize=(9, 1.2 + 0.5 * len(rows)), layout="constrained")
    for peer in sorted(PEERS, key=lambda name: name == OURS):  # gradgraph on top
        points = [(s / r.torch, i) for i, r in enumerate(rows) if r.torch and (s := r.step(peer)) is not None]
        size = 90 if peer == OURS else 40
        axes.scatter(
            *zip(*points, strict=True) if points else ([], []), s=size, color=COLOURS[peer], label=peer, zorder=3
        )
    _dress(axes, [r.name for r in rows])
    axes.set_title(", ".join(sorted({r.setup["machine"] for r in rows})), loc="left", fontsize="medium")
    figure.savefig(path, metadata=dict.fromkeys(["Creator", "Date", "Format", "Type"]))  # none: equal runs, equal files
    pyplot.close(figure)


def draw_floors(results: list[Result], path: Path) -> None:
    """Draw a bar, by operator class, for each step time over the floor, with and without native kernels."""
    bars = [(r, peer) for r in results for peer in (OURS, NATIVE) if "classes" in r.rows.get(peer, {})]
    figure, axes = pyplot.subplots(figsize=(9, 1.2 + 0.35 * len(bars)), layout="constrained")
    names = sorted({name for r, peer in bars for name in r.rows[peer]["classes"]})
    colours = pyplot.colormaps["tab10"]
    left = [0.0] * len(bars)
    for name in [*(n for n in CLASSES if n in names), *(n for n in names if n not in CLASSES)]:
        widths = [r.rows[peer]["classes"].get(name, 0.0) * (over_floor(r, peer) or 0.0) for r, peer in bars]
        axes.barh(range(len(bars)), widths, 0.8, left, label=name, color=colours(names.index(name) % 10))
        left = [a + b for a, b in zip(left, widths, strict=True)]
    axes.axvline(1, color="black", linewidth=1)
    axes.axvline(LIMIT, color="black", linewidth=0.8, linestyle=":")
    axes.set_yticks(range(len(bars)), [f"{r.name}, native" if peer == NATIVE else r.name for r, peer in bars])
    axes.set_ylim(len(bars) - 0.5, -0.5)
    axes.set_xlabel(f"time of a training step / its floor (dotted: {LIMIT})")
    axes.legend(loc="upper center", bbox_to_anchor=(0.4, -0.12), ncols=4, frameon=False)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.set_title(", ".join(sorted({r.setup["machine"] for r in results})), loc="left", fontsize="medium")
    figure.savefig(path, metadata=dict.fromkeys(["Creator", "Date", "Format", "Type"]))
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

"""What each rank keeps of the optimizer's state, and the peak of its memory, with state shared out and without.

    python -m benchmarks.sharded_memory [--ranks 1 2 4] [--width 1024] [--layers 8]

Needs the extra ``mpi``. A multilayer perceptron with AdamW takes a few steps; bytes are exact, the peak is that of the
process above what it had before its trainer was made. ``difference`` is the largest one of weights after the steps from
those of as many ranks that do not share, in parts of the largest weight.
"""

from __future__ import annotations

import argparse
import json
import resource
from pathlib import Path
from typing import Any

import numpy as np

import gradgraph as gg
from benchmarks.rank_jobs import told_by_ranks
from gradgraph.frontend import nn

ROOT = Path(__file__).parents[1]
MIB = 1 << 20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--job", choices=["whole", "shared"], help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.job:
        work(given.job == "shared", given.width, given.layers)
        return
    print("| ranks | state | slots a rank (MiB) | all state a rank (MiB) | peak (MiB) | difference |")
    print("|---|---|---|---|---|---|")
    for ranks in given.ranks:
        before = None
        for kind in ("whole", "shared"):
            found = job(ranks, kind, given.width, given.layers)
            weights = dict(np.load(found["file"]))
            before = weights if before is None else before
            slots, held, peak = (max(row[i] for row in found["rows"]) / MIB for i in range(3))
            largest = max(float(np.abs(w).max()) for w in weights.values())
            apart = max(float(np.abs(w - before[n]).max()) for n, w in weights.items()) / largest
            print(f"| {ranks} | {kind} | {slots:.1f} | {held:.1f} | {peak:.0f} | {apart:.1e} |", flush=True)


def job(ranks: int, kind: str, width: int, layers: int) -> dict[str, Any]:
    words = ("--job", kind, "--width", str(width), "--layers", str(layers))
    found: dict[str, Any] = told_by_ranks(ranks, "benchmarks.sharded_memory", *words)
    return found


def work(shares: bool, width: int, layers: int) -> None:
    parallel = gg.DataParallel(shard_state=shares)
    parts: list[nn.Module] = []
    for _ in range(layers):
        parts += [nn.Linear(width, width), nn.ReLU()]
    net = nn.Sequential(*parts, nn.Linear(width, 10))
    step = gg.build(gg.frontend.export(net, {"x": ("batch", width)}), "cross_entropy", "adamw")
    x = np.random.default_rng(0).normal(size=(64, width)).astype(np.float32)
    begin = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    trainer = gg.Trainer(step, device="cpu", options=gg.RuntimeOptions(threads=1), parallel=parallel)
    trainer.fit({"x": x, "target": np.arange(64) % 10}, 3, 16, progress=False)
    peak = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - begin) << 10
    here = {name: trainer.state.specs[name] for name in trainer.state.here}
    slots = sum(s.nbytes for s in here.values() if s.kind == "optimizer")
    rows = parallel.team().gathered((slots, sum(s.nbytes for s in here.values()), peak))
    if parallel.is_first:
        file = ROOT / "build" / "benchmarks" / "sharded_memory.npz"
        file.parent.mkdir(parents=True, exist_ok=True)
        np.savez(file, **trainer.parameters)
        print(json.dumps({"rows": rows, "file": str(file)}))


if __name__ == "__main__":
    main()

"""The scaling of data parallelism: a model of time per step, fitted to measurements of 1, 2 and 4 ranks.

    python -m benchmarks.scaling [--steps 10] [--save]

Requires the extras ``bench`` and ``mpi``. Each rank has one thread. ``--save`` writes scaling.md, .json and .svg in
docs/how-it-works; ``--page`` writes page and drawing from the existing .json. The machine's load is recorded: repeat
the run if it was busy. The page explains the model.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.rank_jobs import told_by_ranks
from benchmarks.scaling_model import REPEATS, Message

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "docs" / "how-it-works"
RANKS = (1, 2, 4)
WORKLOADS = ("mlp", "gpt")
SIZES = (4 << 10, 64 << 10, 1 << 20, 4 << 20, 16 << 20)  # bytes of messages


# --- measuring -------------------------------------------------------------------------------------------


def measured(steps: int) -> dict[str, Any]:
    """Return the figures of the page: messages and steps on this machine, with its load."""
    from benchmarks import parallel

    load = os.getloadavg()[0]
    messages = [message for ranks in RANKS[1:] for message in _messages(ranks)]
    found: dict[str, Any] = {}
    for name in WORKLOADS:
        parallel.prepare(name)
        found[name] = {"bytes": _bytes_of(name), **{str(r): parallel.job(name, r, steps, "whole") for r in RANKS}}
    return {
        "cores": os.cpu_count(),
        "load": [round(load, 2), round(os.getloadavg()[0], 2)],
        "messages": [asdict(message) for message in messages],
        "steps": found,
    }


def _bytes_of(name: str) -> int:
    import onnx

    from benchmarks.parallel import folder_of

    stored = onnx.load(folder_of(name) / "model.onnx").graph.initializer
    return sum(4 * math.prod(t.dims) for t in stored if t.data_type == onnx.TensorProto.FLOAT)


def _messages(ranks: int) -> list[Message]:
    return [Message(**row) for row in told_by_ranks(ranks, "benchmarks.scaling", "--job")]


def _job() -> None:
    """Time all-reduces in one of the ranks: the slowest rank in the fastest of many; the first rank prints JSON."""
    from mpi4py import MPI

    world, rows = MPI.COMM_WORLD, []
    for size in SIZES:
        bucket = np.ones(size // 4, np.float32)
        taken = []
        for _ in range(REPEATS):
            world.Barrier()
            begin = time.perf_counter()
            world.Allreduce(MPI.IN_PLACE, bucket)
            taken.append(world.allreduce(time.perf_counter() - begin, MPI.MAX))
            bucket[:] = 1
        rows.append({"ranks": world.size, "size": size, "seconds": min(taken)})
    if world.rank == 0:
        print(json.dumps(rows))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--save", action="store_true", help="measure, and write page, figures and drawing")
    parser.add_argument("--page", action="store_true", help="write page and drawing from the figures that are there")
    parser.add_argument("--job", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.job:
        _job()
        return
    from benchmarks.scaling_page import drawing, page

    figures = FOLDER / "scaling.json"
    told = json.loads(figures.read_text("utf-8")) if given.page else measured(given.steps)
    if given.save:
        figures.write_text(json.dumps(told, indent=1) + "\n", "utf-8")
    if given.save or given.page:
        (FOLDER / "scaling.md").write_text(page(told), "utf-8")
        (FOLDER / "scaling.svg").write_text(drawing(), "utf-8")
    else:
        print(page(told))


if __name__ == "__main__":
    main()

"""Samples per second of one rank and of several, with one thread each, and the parts of the step time.

    python -m benchmarks.parallel --overlap
    python -m benchmarks.parallel [resnet18 gpt] [--ranks 1 2] [--ways whole shared float16] [--rounds 3] [--steps 10]

Requires the extras ``bench`` and ``mpi``. Each rank has a batch of the workload's size, so two ranks do twice the work.
Jobs of one and of more ranks take turns; medians over the rounds are printed. Ratios are meaningful only on an idle
machine with a core for each rank. ``computing`` is the time in onnxruntime, ``message`` the time until all ranks have
added up, and ``ours`` the rest. A way of communication is ``whole`` gradients, ``shared`` optimizer state, ``joint``
norms (``sync_batch_norm``), or the name of a compression. ``processor`` is the processor time of the first rank, which
is more reliable on a busy machine. ``--overlap`` instead times a message that is sent while ranks compute.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

import gradgraph as gg
from benchmarks.rank_jobs import told_by_ranks
from benchmarks.workloads import LEARNING_RATES, WORKLOADS

ROOT = Path(__file__).parents[1]
WARM = 3  # steps
OPTIMIZER = "sgd"
WAYS: dict[str, dict[str, Any]] = {"whole": {}, "shared": {"shard_state": True}, "joint": {"sync_batch_norm": True}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", default=["resnet18", "gpt"], help=f"among {', '.join(WORKLOADS)}")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--ways", nargs="+", default=["whole", "shared", "bfloat16", "power_sgd(rank=4)"])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--job", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--overlap", action="store_true", help="time a message that is on its way while ranks compute")
    arguments = parser.parse_args()
    if unknown := [name for name in arguments.names if name not in WORKLOADS]:
        parser.error(f"there is no workload {unknown[0]}; take one of {', '.join(WORKLOADS)}")
    if importlib.util.find_spec("mpi4py") is None:
        sys.exit("mpi4py is not installed; pip install -e '.[mpi]'")
    if arguments.overlap:
        print(*(overlapped() if arguments.job else overlap_table()), sep="\n")
        return
    if arguments.job:
        work(arguments.names[0], arguments.steps, arguments.ways[0])
        return
    print("| workload | ranks | way | samples/s | x one rank | ms a step | processor | computing | message | ours |")
    print("|---|---|---|---|---|---|---|---|---|---|")
    jobs = [(ranks, way) for ranks in arguments.ranks for way in (arguments.ways if ranks > 1 else ["whole"])]
    for name in arguments.names:
        prepare(name)
        found: dict[tuple[int, str], list[dict[str, float]]] = {each: [] for each in jobs}
        for _ in range(arguments.rounds):
            for ranks, way in jobs:
                found[ranks, way].append(job(name, ranks, arguments.steps, way))
        base = statistics.median(each["step"] for each in found[jobs[0]]) / jobs[0][0]
        for ranks, way in jobs:
            mine = found[ranks, way]
            middle = {part: statistics.median(each[part] for each in mine) for part in mine[0]}
            ours = middle["step"] - middle["computing"] - middle["message"]
            samples = WORKLOADS[name].x.shape[0] * ranks / middle["step"]
            times = " | ".join(f"{middle[part] * 1e3:.1f}" for part in ("step", "processor", "computing", "message"))
            print(f"| {WORKLOADS[name].title} | {ranks} | {way} | {samples:.1f} | {base * ranks / middle['step']:.2f} "
                  f"| {times} | {ours * 1e3:.2f} ({ours / middle['step']:.1%}) |", flush=True)  # fmt: skip


def folder_of(name: str) -> Path:
    return ROOT / "build" / "benchmarks" / name


def prepare(name: str) -> None:
    if not (folder_of(name) / "model.onnx").exists():
        subprocess.run([sys.executable, "-m", "benchmarks.prepare", name, str(folder_of(name))], check=True, cwd=ROOT)


def job(name: str, ranks: int, steps: int, way: str) -> dict[str, float]:
    """Return the seconds of a step and of its parts, on the first rank."""
    words = (name, "--job", "--steps", str(steps), "--ways", way)
    found: dict[str, float] = told_by_ranks(ranks, "benchmarks.parallel", *words)
    return found


def work(name: str, steps: int, way: str) -> None:
    """Time steps in one of the ranks; the first rank prints medians as JSON."""
    ways = WAYS.get(way, {"compress": way})
    parallel = gg.DataParallel(check_every=0, **ways)
    step = gg.build(
        folder_of(name) / "model.onnx", WORKLOADS[name].loss, f"{OPTIMIZER}(lr={LEARNING_RATES[OPTIMIZER]})"
    )
    options = gg.RuntimeOptions(threads=1, spinning=False)
    trainer = gg.Trainer(step, device="cpu", options=options, parallel=parallel)
    batch = dict(np.load(folder_of(name) / "batch.npz"))
    trainer.step(batch)
    inside = trainer._session
    session: Any = inside.part.for_usual()
    clock = Clock()
    sessions = [session]
    if parallel.ranks > 1:
        sessions += getattr(session._gradient, "sessions", [session._gradient])
    for each in sessions:
        each.session.run_with_iobinding = clock.timed("computing", each.session.run_with_iobinding)
    team: Any = inside.team
    if parallel.ranks > 1:
        team.usual = batch["target"].size * parallel.ranks  # as `fit` sets it
        team._wait = clock.timed("message", team._wait)
    taken = []
    for i in range(WARM + steps):
        clock.seconds = {"computing": 0.0, "message": 0.0}
        begin, worked = time.perf_counter(), time.process_time()
        trainer.step(batch)
        if i >= WARM:
            worked = time.process_time() - worked
            taken.append({"step": time.perf_counter() - begin, "processor": worked, **clock.seconds})
    if parallel.is_first:
        print(json.dumps({part: statistics.median(each[part] for each in taken) for part in taken[0]}))


BYTES, PASSES = 47 << 20, 60  # the message has the size of ResNet-18's gradients


def overlap_table() -> list[str]:
    """Return a table of milliseconds of a message and of computation on two ranks, the fastest of all rounds."""
    found: dict[str, float] = told_by_ranks(2, "benchmarks.parallel", "--overlap", "--job")
    rows = [f"| {what} | {seconds * 1e3:.0f} |" for what, seconds in found.items()]
    return [f"| two ranks, {BYTES >> 20} MiB | ms |", "|---|---|", *rows]


def overlapped(rounds: int = 9) -> list[str]:
    """Time a message and computation, separately and overlapped, in one of the ranks; the first returns JSON."""
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    bucket, numbers = np.ones(BYTES // 4, np.float32), np.ones(1 << 22, np.float32)

    def compute(request: Any = None, polls: bool = False) -> None:
        for _ in range(PASSES):
            np.sqrt(numbers, out=numbers)
            if polls:
                request.Test()
        if request is not None:
            request.Wait()

    ways: dict[str, Callable[[], Any]] = {
        "the message": lambda: world.Allreduce(MPI.IN_PLACE, bucket),
        "computing": compute,
        "the message begun before computing, awaited after": lambda: compute(world.Iallreduce(MPI.IN_PLACE, bucket)),
        "likewise, and MPI is asked 60 times in between": lambda: compute(world.Iallreduce(MPI.IN_PLACE, bucket), True),
    }
    least = dict.fromkeys(ways, float("inf"))
    for _ in range(rounds):
        for what, way in ways.items():
            bucket[:] = numbers[:] = 1
            world.Barrier()
            begin = time.perf_counter()
            way()
            least[what] = min(least[what], world.allreduce(time.perf_counter() - begin, MPI.MAX))
    return [json.dumps(least)] if world.rank == 0 else []


class Clock:
    """A sum of the seconds that calls take, by part."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    def timed(self, part: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*arguments: Any) -> Any:
            begin = time.perf_counter()
            try:
                return call(*arguments)
            finally:
                self.seconds[part] = self.seconds.get(part, 0.0) + time.perf_counter() - begin

        return timed


if __name__ == "__main__":
    main()

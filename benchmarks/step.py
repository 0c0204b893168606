"""Times a whole training step (forward, backward, SGD) against PyTorch eager, interleaved in one run.

    python benchmarks/step.py [workload ...] [--rounds 60]

Both use the same weights, batch and two threads; the losses of the first steps are compared before anything is timed.
Prints medians and their ratio; only ratios within one run mean anything.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable

# torch is faster with an allocator that keeps its memory: the stronger peer is the one to measure against
TUNED = {"MALLOC_MMAP_THRESHOLD_": "1000000000", "MALLOC_TRIM_THRESHOLD_": "2000000000", "MALLOC_TOP_PAD_": "200000000"}
THREADS = 2


def restart_with_tuned_allocator() -> None:
    """Glibc reads these variables when the process starts."""
    if any(os.environ.get(k) != v for k, v in TUNED.items()):
        import sys

        os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, **TUNED, "OMP_NUM_THREADS": str(THREADS)})


def runners(name: str) -> tuple[Callable[[], float], Callable[[], float]]:
    """One training step each, of gradgraph and of torch."""
    import numpy as np
    import torch
    from models import WORKLOADS

    import gradgraph as gg
    from gradgraph.runtime.session import RuntimeOptions

    torch.set_num_threads(THREADS)
    workload = WORKLOADS[name]
    network, twin = workload.networks()
    x, labels = workload.batch(np.random.default_rng(0))
    step = gg.build(gg.frontend.export(network, workload.inputs), "cross_entropy", gg.optim.sgd(0.01), metrics=())
    trainer = gg.Trainer(step, device="cpu", options=RuntimeOptions(threads=THREADS))
    optimizer = torch.optim.SGD(twin.parameters(), lr=0.01)
    tensors = torch.tensor(x), torch.tensor(labels)

    def ours() -> float:
        return float(trainer.step({"x": x, "target": labels})["loss"])

    def theirs() -> float:
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(twin(tensors[0]), tensors[1])
        loss.backward()
        optimizer.step()
        return float(loss.detach())

    for i in range(3):
        a, b = ours(), theirs()
        if abs(a - b) > 1e-3 * abs(b):
            raise SystemExit(f"{name}: the losses of step {i} differ ({a} against {b}); a ratio would mean nothing")
    return ours, theirs


def interleaved(functions: tuple[Callable[[], float], ...], rounds: int) -> list[float]:
    """Median milliseconds of each."""
    times: list[list[float]] = [[] for _ in functions]
    for _ in range(rounds):
        for function, record in zip(functions, times, strict=True):
            start = time.perf_counter()
            function()
            record.append((time.perf_counter() - start) * 1e3)
    return [statistics.median(t) for t in times]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("workloads", nargs="*", help="all by default")
    parser.add_argument("--rounds", type=int, default=60)
    arguments = parser.parse_args()
    from models import WORKLOADS

    unknown = set(arguments.workloads) - set(WORKLOADS)
    if unknown:
        parser.error(f"no workload {', '.join(sorted(unknown))}; there is {', '.join(WORKLOADS)}")
    print(f"{'training step, ' + str(THREADS) + ' threads':40}{'gradgraph ms':>14}{'torch ms':>12}{'ratio':>8}")
    for name in arguments.workloads or WORKLOADS:
        ours, theirs = interleaved(runners(name), arguments.rounds)
        print(f"{WORKLOADS[name].title:40}{ours:14.2f}{theirs:12.2f}{ours / theirs:8.2f}", flush=True)


if __name__ == "__main__":
    restart_with_tuned_allocator()
    main()

"""How long it takes to open a step for the first time, and again: processor time, each in a process of its own.

    python -m benchmarks.opening_time                        networks of build_time.py
    python -m benchmarks.opening_time resnet50 bert.onnx     one of these, and a model of yours

"session" is what depends on decisions that are kept: lowering, and making onnxruntime's session. "first step" is all
from ``gg.Trainer(folder)`` to the end of the first step, less what a later step takes; it includes memory that is
touched for the first time, which nothing can spare. The cache is a folder of the benchmark's own.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

NETWORKS = ("mlp", "resnet50", "repvit", "gpt2")
ROWS = 2


def build(name: str, folder: Path) -> None:
    import gradgraph as gg
    from benchmarks.build_time import GRAPHS

    model: Any = name if name.endswith(".onnx") else GRAPHS[name][1]()
    gg.build(model, "cross_entropy", gg.optim.adamw(1e-4)).save(folder)


def size_of(dim: int | str | None) -> int:
    """The size of an axis: ROWS of each that has a name, and of a product such as ``8*batch`` what it gives."""
    if isinstance(dim, int):
        return dim
    return math.prod(int(part) if part.isdigit() else ROWS for part in (dim or "").split("*"))


def batch_of(manifest: Any) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    specs = {**{s.name: s for s in manifest.inputs}, **{s.name: s for s in manifest.targets}}
    shapes = {n: tuple(map(size_of, s.shape)) for n, s in specs.items()}
    return {
        n: rng.normal(size=shapes[n]).astype(s.dtype) if s.dtype.startswith("float") else np.zeros(shapes[n], s.dtype)
        for n, s in specs.items()
    }


def measure(folder: Path, threads: int) -> tuple[float, float]:
    """Seconds for the session, and those before and in the first step."""
    import gradgraph as gg

    begin = time.process_time()
    trainer = gg.Trainer(folder, device="cpu", options=gg.RuntimeOptions(threads=threads))
    batch = batch_of(trainer.definition.manifest)
    executor = trainer._executor
    assert executor.opened.state
    executor.expect({name: array.shape for name, array in batch.items()})
    opening = time.process_time()
    executor.part.training.for_usual()
    session = time.process_time() - opening
    trainer.step(batch)
    first = time.process_time() - begin
    later = []
    for _ in range(2):
        start = time.process_time()
        trainer.step(batch)
        later.append(time.process_time() - start)
    return session, first - statistics.median(later)


def row(name: str, rounds: int, threads: int) -> list[float]:
    """Medians: session and first step for the first time, and again."""
    found = []
    with tempfile.TemporaryDirectory() as place:
        step = Path(place) / "step"
        build(name, step)
        worker = [sys.executable, "-m", "benchmarks.opening_time", str(step), "--measure", "--threads", str(threads)]
        for i in range(rounds):
            environment = {**os.environ, "XDG_CACHE_HOME": str(Path(place) / f"cache{i}"), "GRADGRAPH_OPENINGS": ""}
            pair = [subprocess.run(worker, env=environment, stdout=subprocess.PIPE, text=True, check=True).stdout
                    for _ in range(2)]  # fmt: skip
            found.append([number for text in pair for number in json.loads(text)])
    return [statistics.median(column) for column in zip(*found, strict=True)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("networks", nargs="*", default=NETWORKS)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--measure", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.measure:
        print(json.dumps(measure(Path(given.networks[0]), given.threads)))
        return
    titles = ("session", "again", "ratio", "first step", "again")
    print(f"{'':28}{''.join(f'{title:>12}' for title in titles)}")
    for name in given.networks:
        session, first, session_again, first_again = row(name, given.rounds, given.threads)
        cells = (session, session_again, session_again / session, first, first_again)
        print(f"{Path(name).stem:28}{''.join(f'{cell:12.2f}' for cell in cells)}", flush=True)


if __name__ == "__main__":
    main()

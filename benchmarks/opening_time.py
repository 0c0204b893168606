"""How long it takes to open a step for the first time, and again: processor time, each in a process of its own.

    python -m benchmarks.opening_time                        networks of build_time.py, and adapters
    python -m benchmarks.opening_time resnet50 bert.onnx     one of these, and a model of yours

"session" is what depends on decisions that are kept: lowering, and making onnxruntime's session; "ms/node" is that for
each node of the model. "first step" is all from ``gg.Trainer(folder)`` to the end of the first step, less what a later
step takes ("step"); it includes memory that is touched for the first time, which nothing can spare. "lora" are adapters
on a language model of 0.2 GB in 4 bits. The cache is a folder of the benchmark's own.
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
import onnx

from benchmarks.large_models import LENGTH, language_model

NETWORKS = ("mlp", "resnet50", "repvit", "gpt2", "lora")
ROWS = 2
SIZES = {"tokens": ROWS * LENGTH}  # of axes that have another name than that of the rows


def build(name: str, folder: Path) -> int:
    """Save the step of a network; return the nodes of its model."""
    import gradgraph as gg
    from benchmarks.build_time import GRAPHS

    model: Any = name
    if name == "lora":
        path, model = folder.with_name("llm.onnx"), folder.with_name("adapted.onnx")
        language_model(path, 0.2)
        gg.lora(path, target="layers.*.q*", rank=8, out=model)
    elif not name.endswith(".onnx"):
        model = GRAPHS[name][1]()
    gg.build(model, "cross_entropy", gg.optim.adamw(1e-4)).save(folder)
    held = onnx.load(model, load_external_data=False) if isinstance(model, str | Path) else model
    return len(held.graph.node)


def size_of(dim: int | str | None) -> int:
    """The size of an axis: ROWS of each that has a name, and of a product such as ``8*batch`` what it gives."""
    if isinstance(dim, int):
        return dim
    return math.prod(int(part) if part.isdigit() else SIZES.get(part, ROWS) for part in (dim or "").split("*"))


def batch_of(manifest: Any) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    specs = {**{s.name: s for s in manifest.inputs}, **{s.name: s for s in manifest.targets}}
    shapes = {n: tuple(map(size_of, s.shape)) for n, s in specs.items()}
    return {
        n: rng.normal(size=shapes[n]).astype(s.dtype) if s.dtype.startswith("float") else np.zeros(shapes[n], s.dtype)
        for n, s in specs.items()
    }


def measure(folder: Path, threads: int) -> tuple[float, float, float]:
    """Seconds for the session, those before and in the first step, and those of a later step."""
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
    step = statistics.median(later)
    return session, first - step, step


def row(name: str, rounds: int, threads: int) -> tuple[int, list[float]]:
    """Nodes, and medians: session, first step and later step for the first time, and again."""
    found = []
    with tempfile.TemporaryDirectory() as place:
        step = Path(place) / "step"
        nodes = build(name, step)
        worker = [sys.executable, "-m", "benchmarks.opening_time", str(step), "--measure", "--threads", str(threads)]
        for i in range(rounds):
            environment = {**os.environ, "XDG_CACHE_HOME": str(Path(place) / f"cache{i}"), "GRADGRAPH_OPENINGS": ""}
            pair = [subprocess.run(worker, env=environment, stdout=subprocess.PIPE, text=True, check=True).stdout
                    for _ in range(2)]  # fmt: skip
            found.append([number for text in pair for number in json.loads(text)])
    return nodes, [statistics.median(column) for column in zip(*found, strict=True)]


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
    titles = ("session", "ms/node", "again", "ratio", "first step", "again", "step")
    print(f"{'':20}{''.join(f'{title:>12}' for title in titles)}")
    for name in given.networks:
        nodes, (session, first, step, session_again, first_again, _) = row(name, given.rounds, given.threads)
        cells = (session, 1e3 * session / nodes, session_again, session_again / session, first, first_again, step)
        print(f"{Path(name).stem:20}{''.join(f'{cell:12.2f}' for cell in cells)}", flush=True)


if __name__ == "__main__":
    main()

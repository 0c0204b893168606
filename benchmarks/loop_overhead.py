"""What the loop costs on top of onnxruntime: the bare bound call, ``Trainer.step`` and ``Trainer.fit``, per step.

    python benchmarks/loop_overhead.py [--rounds 12] [--chunk 60]

The three run the same session on the same state, in turns. The bare call reads batches that lie bound already, one
after the other. ``step`` gets new arrays each time, as in a real loop: it checks and binds them, and reads the loss.
``fit`` shuffles: beside that it gathers the rows of each batch, adds up the losses and, in each of its epochs of 16
batches, draws an order and adds a row to the history. Prints medians over the rounds; only ratios within one run mean
anything.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np

import gradgraph as gg
from gradgraph.runtime.session import RuntimeOptions, to_ortvalue

nn = gg.frontend.nn
MODELS: dict[str, tuple[str, tuple[int, ...], int, int]] = {  # title, layer widths, classes, batch
    "tiny": ("tiny: 4-8-3, batch 8", (4, 8), 3, 8),
    "mlp": ("MLP 784-512-512-10, batch 128", (784, 512, 512), 10, 128),
}


def make_trainer(widths: tuple[int, ...], classes: int, threads: int) -> gg.Trainer:
    layers: list[Any] = []
    for a, b in itertools.pairwise(widths):
        layers += [nn.Linear(a, b), nn.ReLU()]
    model = gg.frontend.export(nn.Sequential(*layers, nn.Linear(widths[-1], classes)), {"x": ("batch", widths[0])})
    step = gg.build(model, "cross_entropy", gg.optim.sgd(0.001))
    return gg.Trainer(step, device="cpu", options=RuntimeOptions(threads=threads))


def per_step(run: Callable[[int], None], steps: int) -> float:
    """Microseconds per step of a function that does ``steps`` of them."""
    start = time.perf_counter()
    run(steps)
    return (time.perf_counter() - start) * 1e6 / steps


def bindings(trainer: gg.Trainer, batches: list[dict[str, np.ndarray]]) -> list[Any]:
    """One binding for each batch and each set of state buffers: what a loop written by hand would prepare."""
    session, state, manifest = trainer._train.of(batches[0]).session, trainer.state, trainer.manifest
    made = []
    for i, batch in enumerate(batches):
        binding = session.io_binding()
        before, after = state.values(i % 2), state.values(1 - i % 2)
        for name, array in {**batch, "learning_rate": np.array(0.001, np.float32)}.items():
            binding.bind_ortvalue_input(name, to_ortvalue(array))
        for spec in manifest.state:
            binding.bind_ortvalue_input(spec.name, before[spec.name])
            binding.bind_ortvalue_output(spec.next, after[spec.name])
        for name in (manifest.loss_output, *manifest.metrics):
            binding.bind_ortvalue_output(name, to_ortvalue(np.zeros((), np.float32)))
        made.append(binding)
    return made


def ways(trainer: gg.Trainer, data: dict[str, np.ndarray], batch: int) -> dict[str, Callable[[int], None]]:
    """The functions to compare, each over the same batches."""
    batches = [{k: v[i : i + batch] for k, v in data.items()} for i in range(0, len(data["x"]), batch)]
    trainer.step(batches[0])
    prepared, session = bindings(trainer, batches), trainer._train.of(batches[0]).session

    def bare(steps: int) -> None:
        for _, binding in zip(range(steps), itertools.cycle(prepared), strict=False):
            session.run_with_iobinding(binding)

    def step(steps: int) -> None:
        for _, given in zip(range(steps), itertools.cycle(batches), strict=False):
            trainer.step(given)

    def fit(steps: int) -> None:
        trainer.fit(data, epochs=steps // len(batches), batch_size=batch, progress=False)

    return {"bound call": bare, "Trainer.step": step, "Trainer.fit": fit}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--chunk", type=int, default=64, help="steps in turn, a multiple of 16")
    parser.add_argument("--threads", type=int, default=2)
    arguments = parser.parse_args()
    random = np.random.default_rng(0)
    for title, widths, classes, batch in MODELS.values():
        trainer = make_trainer(widths, classes, arguments.threads)
        rows = 16 * batch
        data = {
            "x": random.normal(size=(rows, widths[0])).astype(np.float32),
            "target": random.integers(0, classes, rows),
        }
        functions = ways(trainer, data, batch)
        times: dict[str, list[float]] = {name: [] for name in functions}
        for _ in range(arguments.rounds + 1):
            for name, function in functions.items():
                times[name].append(per_step(function, arguments.chunk))
        found = {name: statistics.median(t[1:]) for name, t in times.items()}
        bare = found["bound call"]
        print(title)
        for name, value in found.items():
            print(f"  {name:14}{value:10.1f} us  {value - bare:+8.1f} us  {100 * (value / bare - 1):+7.1f} %")


if __name__ == "__main__":
    main()

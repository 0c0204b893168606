"""What the loop costs on top of onnxruntime: the bare bound call, ``Trainer.step`` and ``Trainer.fit``, per step.

    python benchmarks/loop_overhead.py [--models mlp] [--rounds 24] [--chunk 128]

The bare call and ``step`` run the same session on the same state; ``fit`` has a trainer of its own, as it has in a
program. The bare call reads batches that lie bound already, one after the other. ``step`` gets new arrays each time, as
in a real loop: it checks and binds them, and reads the loss. ``fit`` shuffles: beside that it gathers the rows of each
batch, adds up the losses and, in each of its epochs of 16 batches, draws an order and adds a row to the history.

They take turns, each after a pause in which the threads of the one before come to rest, and some steps to warm up.
Prints medians over the rounds of times, and of differences and ratios to the bare call of the same round.
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
    "wide": ("MLP 784-1024-1024-10, batch 128", (784, 1024, 1024), 10, 128),
    "large": ("MLP 784-2048-2048-10, batch 256", (784, 2048, 2048), 10, 256),
}
EPOCH = 16  # batches
PAUSE = 0.03  # seconds: longer than threads of onnxruntime wait for work


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


def ways(widths: tuple[int, ...], classes: int, batch: int, threads: int) -> dict[str, Callable[[int], None]]:
    """The functions to compare, each over the same batches."""
    random = np.random.default_rng(0)
    rows = EPOCH * batch
    data = {
        "x": random.normal(size=(rows, widths[0])).astype(np.float32),
        "target": random.integers(0, classes, rows),
    }
    batches = [{k: v[i : i + batch] for k, v in data.items()} for i in range(0, rows, batch)]
    trainer, fitting = (make_trainer(widths, classes, threads) for _ in range(2))
    trainer.step(batches[0])
    prepared, session = bindings(trainer, batches), trainer._train.of(batches[0]).session

    def bare(steps: int) -> None:
        for _, binding in zip(range(steps), itertools.cycle(prepared), strict=False):
            session.run_with_iobinding(binding)

    def step(steps: int) -> None:
        for _, given in zip(range(steps), itertools.cycle(batches), strict=False):
            trainer.step(given)

    def fit(steps: int) -> None:
        fitting.fit(data, epochs=steps // EPOCH, batch_size=batch, progress=False)

    return {"bound call": bare, "Trainer.step": step, "Trainer.fit": fit}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=["tiny", "mlp"])
    parser.add_argument("--rounds", type=int, default=24)
    parser.add_argument("--chunk", type=int, default=8 * EPOCH, help=f"steps in turn, a multiple of {EPOCH}")
    parser.add_argument("--threads", type=int, default=2)
    arguments = parser.parse_args()
    for title, widths, classes, batch in (MODELS[name] for name in arguments.models):
        functions = ways(widths, classes, batch, arguments.threads)
        times: dict[str, list[float]] = {name: [] for name in functions}
        for _ in range(arguments.rounds):
            for name, function in functions.items():
                time.sleep(PAUSE)
                function(EPOCH)
                times[name].append(per_step(function, arguments.chunk))
        print(title)
        bare = times["bound call"]
        for name, found in times.items():
            more = statistics.median(a - b for a, b in zip(found, bare, strict=True))
            ratio = statistics.median(a / b for a, b in zip(found, bare, strict=True))
            print(f"  {name:14}{statistics.median(found):10.1f} us  {more:+8.1f} us  {100 * (ratio - 1):+7.1f} %")


if __name__ == "__main__":
    main()

"""The cost of optimizers and of what goes around them: the time of a step, divided by that of a step of plain SGD.

    python -m benchmarks.optimizer_cost [--rounds 40] [--batch 128]

The network is an MLP 784-512-512-10. All take turns, a few steps each; printed are medians of the ratio to plain SGD of
the same turn. An optimizer's share is largest where, as here, a weight is used few times a step.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np

import gradgraph as gg
from gradgraph import optim
from gradgraph.optim.recipes import RECIPES

nn = gg.frontend.nn
STEPS = 4  # of each in a turn


def ways() -> dict[str, tuple[optim.Optimizer, dict[str, Any], dict[str, float]]]:
    """Name: the optimizer, what else a step is built with, and what it is fed."""
    adamw = optim.adamw(1e-4)
    found: dict[str, tuple[optim.Optimizer, dict[str, Any], dict[str, float]]] = {"sgd": (optim.sgd(1e-4), {}, {})}
    for name, make in RECIPES.items():
        groups = {"*.bias": optim.adamw(1e-4)} if name == "muon" else None
        found[name] = make(1e-4, groups=groups), {}, {}
    found["sgd, momentum"] = optim.sgd(1e-4, momentum=0.9), {}, {}
    found["adamw, no decay of biases"] = optim.adamw(1e-4, no_decay="norm_and_bias"), {}, {}
    found["adamw, ema"] = adamw, {"ema": 0.999}, {}
    found["adamw, lookahead"] = optim.lookahead(adamw), {}, {}
    found["adamw, sam"] = optim.sam(adamw), {}, {}
    found["adamw, norm clipped"] = optim.chain(optim.clip_by_global_norm(1.0), adamw), {}, {}
    found["adamw, units clipped"] = optim.chain(optim.clip_by_unit_norm(), adamw), {}, {}
    found["adamw, accumulating: update"] = adamw, {"accumulate": True}, {}
    found["adamw, accumulating: no update"] = adamw, {"accumulate": True}, {"update": 0.0}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--batch", type=int, default=128)
    arguments = parser.parse_args()
    network = nn.Sequential(nn.Linear(784, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10))
    model = gg.frontend.export(network, {"x": (arguments.batch, 784)})
    rng = np.random.default_rng(0)
    batch = {"x": rng.normal(size=(arguments.batch, 784)).astype(np.float32), "target": np.arange(arguments.batch) % 10}
    steps: dict[str, Callable[[], float]] = {}
    for name, (optimizer, built, fed) in ways().items():
        trainer = gg.Trainer(gg.build(model, "cross_entropy", optimizer, **built), device="cpu")
        steps[name] = lambda trainer=trainer, fed=fed: timed(trainer, batch, fed)  # type: ignore[misc]
    ratios: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(arguments.rounds):
        times = {name: step() for name, step in steps.items()}
        for name, seconds in times.items():
            ratios[name].append(seconds / times["sgd"])
    for name, found in ratios.items():
        print(f"{name:34}{statistics.median(found):6.2f}")


def timed(trainer: gg.Trainer, batch: dict[str, Any], fed: dict[str, float]) -> float:
    """Seconds for one of ``STEPS`` steps, after one that is not counted."""
    trainer.step(batch, **fed)
    begin = time.perf_counter()
    for _ in range(STEPS):
        trainer.step(batch, **fed)
    return (time.perf_counter() - begin) / STEPS


if __name__ == "__main__":
    main()

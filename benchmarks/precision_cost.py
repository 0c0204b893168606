"""The cost of mixed precision on this processor: the time of a step, divided by that of the same step in float32.

    python -m benchmarks.precision_cost [--rounds 20]

All take turns, a few steps each; printed are medians of the ratio to float32 of the same turn. Networks: an MLP
784-512-512-10 with a batch of 128, a convolutional network for images of 28x28 with a batch of 32, a block of a
Transformer of 8 x 64 tokens with 128 numbers each.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import onnx

import gradgraph as gg
from benchmarks.optimizer_cost import timed
from gradgraph.passes.autocast import PRECISIONS

nn = gg.frontend.nn


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block = nn.TransformerEncoderLayer(128, 4, 512, dropout=0.0, batch_first=True)
        self.head = nn.Linear(128, 10)

    def forward(self, x: Any) -> Any:
        return self.head(self.block(x).mean(1))


def models() -> dict[str, tuple[onnx.ModelProto, tuple[int, ...]]]:
    """Name: the model, and the size of what it reads."""
    mlp = nn.Sequential(nn.Linear(784, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10))
    cnn = nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.Flatten(), nn.Linear(32 * 14 * 14, 10),
    )  # fmt: skip
    sizes: dict[str, tuple[Any, tuple[int, ...]]] = {
        "MLP": (mlp, (128, 784)),
        "convolutional": (cnn, (32, 1, 28, 28)),
        "Transformer": (Block(), (8, 64, 128)),
    }
    return {name: (gg.frontend.export(network, {"x": size}), size) for name, (network, size) in sizes.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=20)
    rounds = parser.parse_args().rounds
    for name, (model, size) in models().items():
        rng = np.random.default_rng(0)
        batch = {"x": rng.normal(size=size).astype(np.float32), "target": np.arange(size[0]) % 10}
        steps: dict[str, Callable[[], float]] = {}
        for precision in PRECISIONS:
            trainer = gg.Trainer(gg.build(model, "cross_entropy", "adamw", precision=precision), device="cpu")
            steps[precision] = partial(timed, trainer, batch, {})
        times = [{precision: step() for precision, step in steps.items()} for _ in range(rounds)]
        for precision in list(PRECISIONS)[1:]:
            ratio = statistics.median(t[precision] / t["float32"] for t in times)
            print(f"{name:15}{precision:10}{ratio:6.2f}")


if __name__ == "__main__":
    main()

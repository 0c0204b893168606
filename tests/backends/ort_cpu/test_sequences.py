"""Convolutions of sequences, computed as convolutions of images: the portable numbers, and chains in blocked layout."""

from __future__ import annotations

import itertools
from collections import Counter
from typing import Any

import numpy as np
import pytest

import gradgraph as gg
from gradgraph.backends.backend import Backend
from gradgraph.backends.engine import for_machine
from gradgraph.backends.ort_cpu import ORT_CPU
from gradgraph.backends.portable import PORTABLE
from gradgraph.frontend import Module, export, manual_seed, nn
from gradgraph.frontend import functional as F
from gradgraph.machine.hardware import nchwc_block
from tests.kit.lowered_networks import feeds_of
from tests.kit.running import run

BLOCK = nchwc_block()
pytestmark = pytest.mark.skipif(not BLOCK, reason="this processor has no blocked layout")
CLASSES, LENGTH = 4, 72
SMOOTH = (nn.Tanh, nn.SiLU, nn.GELU, nn.Softplus)  # rounding crosses no kink


class Residual(Module):
    """A random convolution, a norm or none, an activation, and a sum with the input if the shapes agree."""

    def __init__(self, rng: np.random.Generator, channels: int, width: int) -> None:
        super().__init__()
        taps, dilation = int(rng.integers(1, 6)), int(rng.integers(1, 5))
        reach = (taps - 1) * dilation
        group = int(rng.choice([1, 1, 1, channels])) if channels == width else 1
        before = int(rng.integers(0, reach + 1))
        self.pad = (before, reach - before)
        stride = int(rng.choice([1, 1, 1, 2]))
        bias = bool(rng.integers(2))
        self.conv = nn.Conv1d(channels, width, taps, stride, dilation=dilation, groups=group, bias=bias)
        self.norm = nn.BatchNorm1d(width) if rng.random() < 0.4 else nn.Identity()
        self.activation = rng.choice(SMOOTH)()
        self.short = stride == 1 and channels == width

    def forward(self, x: Any) -> Any:
        y = self.activation(self.norm(self.conv(F.pad(x, self.pad))))
        return y + x * 0.5 if self.short else y


def network(rng: np.random.Generator) -> tuple[Module, int]:
    """Return a network, and its number of input channels."""
    widths = [int(rng.choice([3, BLOCK, 2 * BLOCK]))]
    widths += [int(rng.choice([5, BLOCK, 2 * BLOCK, 2 * BLOCK])) for _ in range(int(rng.integers(1, 4)))]
    blocks = [Residual(rng, a, b) for a, b in itertools.pairwise(widths)]
    return nn.Sequential(*blocks, nn.AdaptiveAvgPool1d(1), nn.Flatten(), nn.Linear(widths[-1], CLASSES)), widths[0]


def moved(step: gg.Step, backend: Backend, batch: dict[str, np.ndarray], dims: dict[str, int]) -> dict[str, np.ndarray]:
    """Return the loss, and what one step of gradient descent with a rate of 1 adds to the state."""
    model = for_machine(step.train, backend, dims)
    state = gg.Trainer(step).state_dict()
    found = run(model, {**feeds_of(model, batch, state), "learning_rate": np.array(1, np.float32)})
    return {n: found[f"{n}.next"] - v for n, v in state.items()} | {"loss": found["loss"]}


def drawn(rng: np.random.Generator, rows: int, channels: int) -> dict[str, np.ndarray]:
    x = rng.normal(size=(rows, channels, LENGTH)).astype(np.float32)
    return {"x": x, "target": rng.integers(0, CLASSES, rows)}


@pytest.mark.sweep(0.2)
@pytest.mark.parametrize("seed", range(30))
def test_random_networks(seed: int) -> None:
    rng = np.random.default_rng(seed)
    manual_seed(seed)
    model, channels = network(rng)
    rows = int(rng.choice([2, 9]))
    batch = drawn(rng, rows, channels)
    size = "batch" if rng.random() < 0.3 else rows
    step = gg.build(export(model, {"x": (size, channels, LENGTH)}), "cross_entropy", gg.optim.sgd(lr=1.0), metrics=())
    dims = {"batch": rows} if size == "batch" and rng.random() < 0.5 else {}
    expected, found = (moved(step, backend, batch, dims) for backend in (PORTABLE, ORT_CPU))
    whole = float(np.sqrt(sum(np.linalg.norm(v) ** 2 for v in expected.values())))
    for name, value in expected.items():
        assert np.linalg.norm(found[name] - value) <= 1e-3 * np.linalg.norm(value) + 1e-5 * whole, name


def causal(width: int) -> Module:
    class Causal(Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Conv1d(width, width, 3, dilation=4)
            self.second = nn.Conv1d(width, width, 3, dilation=4)

        def forward(self, x: Any) -> Any:
            y = F.relu(self.first(F.pad(x, (8, 0))))
            return F.relu(F.relu(self.second(F.pad(y, (8, 0)))) + x)

    head = (nn.AdaptiveAvgPool1d(1), nn.Flatten(), nn.Linear(width, CLASSES))
    return nn.Sequential(nn.Conv1d(width, width, 5, padding=2), Causal(), *head)


def test_causal_layers_are_computed_in_blocks() -> None:
    step = gg.build(export(causal(BLOCK), {"x": (8, BLOCK, LENGTH)}), "cross_entropy", gg.optim.sgd(lr=1.0), metrics=())
    model = for_machine(step.train, ORT_CPU)
    counts = Counter((n.domain, n.op_type) for n in model.graph.node)
    assert counts["com.microsoft.nchwc", "Conv"] >= 5  # three forward, two backward
    assert not counts["", "Conv"] + counts["", "Slice"]

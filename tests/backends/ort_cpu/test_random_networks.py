"""Random convolutional networks: a step in this machine's form moves every weight as the portable file does.

Activations are smooth, so that no rounding tips a kink. Some gradients are differences of much larger numbers (those of
weights whose scale a norm takes out again), so a part of the whole step is allowed beside a part of each tensor; and
where the form is nearly as close to the step in float64 as the portable file, that is no fault of the form.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import gradgraph as gg
from gradgraph.frontend import Module, export, manual_seed, nn
from gradgraph.frontend import functional as F
from gradgraph.runtime.execution.session import RuntimeOptions
from gradgraph.verify.reference import Oracle, in_float64

CANCELLING = (1243, 2172, 3035)  # channels are nearly multiples of one, and most of a gradient cancels
SEEDS = (*range(40), *CANCELLING)
CLASSES = 5
SMOOTH = (nn.SiLU, nn.GELU, nn.Tanh, nn.Sigmoid, nn.Softplus, nn.ELU)


class Network(Module):
    """Layers drawn one after the other; each reads the last value or an earlier one."""

    def __init__(self, rng: np.random.Generator, channels: int, size: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList()
        self.steps: list[Callable[[list[Any]], Any]] = []
        self.shapes = [(channels, size)]  # channels and pixels a side of every value
        for kind in rng.choice(list(KINDS), rng.integers(4, 11)):
            KINDS[kind](self, rng)
        self.head = nn.Linear(self.shapes[-1][0], CLASSES)

    def add(self, channels: int, size: int, step: Callable[[list[Any]], Any]) -> None:
        self.steps.append(step)
        self.shapes.append((channels, size))

    def layer(self, module: Module, channels: int, size: int, at: int = -1) -> None:
        """A module that reads the value ``at``."""
        place = len(self.shapes) + at if at < 0 else at
        self.layers.append(module)
        self.add(channels, size, lambda values: module(values[place]))

    def forward(self, x: Any) -> Any:
        values = [x]
        for step in self.steps:
            values.append(step(values))
        return self.head(F.adaptive_avg_pool2d(values[-1], 1).flatten(1))


def convolution(net: Network, rng: np.random.Generator) -> None:
    at = int(rng.integers(max(0, len(net.shapes) - 2), len(net.shapes)))
    c, size = net.shapes[at]
    m, k, stride = int(rng.choice([8, 16, 24, 32, 48])), int(rng.choice([1, 2, 3, 5])), int(rng.choice([1, 1, 2]))
    pad = k // 2
    net.layer(nn.Conv2d(c, m, k, stride, pad, bias=bool(rng.random() < 0.5)), m, (size + 2 * pad - k) // stride + 1, at)


def expansion(net: Network, rng: np.random.Generator) -> None:
    c, size = net.shapes[-1]
    m = c * int(rng.choice([2, 4, 6])) if c <= 24 else 32
    net.layer(nn.Conv2d(c, m, 1, bias=bool(rng.random() < 0.3)), m, size)
    net.layer(nn.BatchNorm2d(m), m, size)


def depthwise(net: Network, rng: np.random.Generator) -> None:
    (c, size), stride = net.shapes[-1], int(rng.choice([1, 2]))
    net.layer(nn.Conv2d(c, c, 3, stride, 1, groups=c, bias=False), c, (size - 1) // stride + 1)
    net.layer(nn.BatchNorm2d(c), c, net.shapes[-1][1])


def norm(net: Network, rng: np.random.Generator) -> None:
    c, size = net.shapes[-1]
    module = nn.BatchNorm2d(c)
    for _ in range(int(rng.choice([1, 1, 2]))):  # the same one twice
        net.layer(module, c, size)


def activation(net: Network, rng: np.random.Generator) -> None:
    net.layer(rng.choice(SMOOTH)(), *net.shapes[-1])


def pool(net: Network, rng: np.random.Generator) -> None:
    c, size = net.shapes[-1]
    k, stride, pad = [(2, 2, 0), (3, 2, 1), (3, 1, 1), (2, 1, 0)][rng.integers(4)]
    if size >= k:
        net.layer(nn.AvgPool2d(k, stride, pad), c, (size + 2 * pad - k) // stride + 1)


def addition(net: Network, rng: np.random.Generator) -> None:
    last, shape = len(net.shapes) - 1, net.shapes[-1]
    other = int(rng.choice([i for i, s in enumerate(net.shapes) if s == shape]))
    net.add(*shape, lambda values: values[last] + values[other])


def concatenation(net: Network, rng: np.random.Generator) -> None:
    last, (c, size) = len(net.shapes) - 1, net.shapes[-1]
    other = int(rng.choice([i for i, s in enumerate(net.shapes) if s[1] == size]))
    if c + net.shapes[other][0] <= 128:
        net.add(c + net.shapes[other][0], size, lambda values: F.cat([values[last], values[other]], 1))


def gate(net: Network, rng: np.random.Generator) -> None:
    last = len(net.shapes) - 1
    net.add(*net.shapes[-1], lambda values: values[last] * F.sigmoid(F.adaptive_avg_pool2d(values[last], 1)))


def padding(net: Network, rng: np.random.Generator) -> None:
    last, (c, size) = len(net.shapes) - 1, net.shapes[-1]
    net.add(c, size + 3, lambda values: F.pad(values[last], (1, 2, 2, 1)))


def enlargement(net: Network, rng: np.random.Generator) -> None:
    last, (c, size) = len(net.shapes) - 1, net.shapes[-1]
    if size <= 12:
        net.add(c, 2 * size, lambda values: F.interpolate(values[last], scale_factor=2))


def half(net: Network, rng: np.random.Generator) -> None:
    last, (c, size) = len(net.shapes) - 1, net.shapes[-1]
    if c % 2 == 0:
        net.add(c // 2, size, lambda values: values[last][:, : c // 2])


KINDS: dict[str, Callable[[Network, np.random.Generator], None]] = {
    f"{kind.__name__} {i}": kind
    for kind, share in [
        (convolution, 4), (expansion, 3), (depthwise, 2), (norm, 2), (activation, 4), (pool, 2), (addition, 2),
        (concatenation, 1), (gate, 1), (padding, 1), (enlargement, 1), (half, 1),
    ]
    for i in range(share)
}  # fmt: skip


def moved(step: gg.Step, batch: dict[str, np.ndarray]) -> tuple[float, dict[str, np.ndarray]]:
    """The loss, and how far one step of gradient descent with a rate of 1 moves the state."""
    trainer = gg.Trainer(step, device="cpu", options=RuntimeOptions(threads=1))
    before = trainer.state_dict()
    loss = float(trainer.step(batch)["loss"])
    after = trainer.state_dict()
    return loss, {name: after[name].astype(np.float64) - before[name] for name in before}


def moved_in_float64(step: gg.Step, batch: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """How far the same step moves the state without rounding."""
    state = gg.Trainer(step, device="cpu").state_dict()
    rate = {"learning_rate": np.float64(1.0)}
    feeds = {k: v.astype(np.float64) if v.dtype == np.float32 else v for k, v in {**state, **batch, **rate}.items()}
    after = Oracle(in_float64(step.train))({i.name: feeds[i.name] for i in step.train.graph.input})
    return {name: after[f"{name}.next"] - feeds[name] for name in state}


@pytest.mark.sweep(0.03)
@pytest.mark.parametrize("seed", SEEDS)
def test_the_machine_s_form_moves_weights_alike(seed: int) -> None:
    rng = np.random.default_rng(seed)
    manual_seed(seed)
    channels, size, images = (int(rng.choice(those)) for those in ([1, 3, 16, 32], [6, 9, 12, 16, 28], [2, 8]))
    rows = images if rng.random() < 0.7 else "batch"
    model = export(Network(rng, channels, size), {"x": (rows, channels, size, size)})
    batch = {
        "x": rng.normal(rng.choice([0, 1]), 1, (images, channels, size, size)).astype(np.float32),
        "target": rng.integers(0, CLASSES, images),
    }
    portable, own = (
        gg.build(model, "cross_entropy", gg.optim.sgd(lr=1.0), metrics=(), backend=backend)
        for backend in ("portable", "auto")
    )
    (loss, expected), (found_loss, found) = moved(portable, batch), moved(own, batch)
    assert found_loss == pytest.approx(loss, rel=1e-5)
    whole = np.sqrt(sum(np.linalg.norm(v) ** 2 for v in expected.values()))
    far = [n for n, v in expected.items() if np.linalg.norm(found[n] - v) > 1e-3 * np.linalg.norm(v) + 1e-5 * whole]
    exact = moved_in_float64(portable, batch) if far else {}
    for name in far:
        portable_error = np.linalg.norm(expected[name] - exact[name])
        assert np.linalg.norm(found[name] - exact[name]) <= max(2 * portable_error, 1e-5 * whole), name

"""The rate that find_lr suggests trains about as well as the best of a grid, for many models, optimizers and data."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import gradgraph as gg
from gradgraph.errors import DivergedError
from gradgraph.frontend import export, nn
from gradgraph.runtime.execution.session import RuntimeOptions

datasets = pytest.importorskip("sklearn.datasets", reason="its tables are the data")
GRID = [float(f"{rate:.3g}") for rate in np.geomspace(1e-5, 1.0, 11)]
Network, Data = Callable[[], Any], Callable[[], dict[str, Any]]


def table(name: str, scale: float = 1.0, image: bool = False) -> Data:
    def load() -> dict[str, Any]:
        found = getattr(datasets, f"load_{name}")()
        order = np.random.default_rng(0).permutation(len(found.target))
        x = (found.data[order] * scale).astype(np.float32)
        y = found.target[order]
        y = y if y.dtype.kind == "i" else y.astype(np.float32)[:, None]
        return {"x": x.reshape(-1, 1, 8, 8) if image else x, "target": y}

    return load


def sine() -> dict[str, Any]:
    x = np.linspace(-3, 3, 1000, dtype=np.float32)[:, None]
    return {"x": x, "target": np.sin(3 * x)}


def mlp(*sizes: int) -> Network:
    def make() -> Any:
        gg.frontend.manual_seed(0)
        layers = [layer for a, b in itertools.pairwise(sizes) for layer in (nn.Linear(a, b), nn.ReLU())][:-1]
        return export(nn.Sequential(*layers), {"x": ("batch", sizes[0])})

    return make


def cnn() -> Any:
    gg.frontend.manual_seed(0)
    layers = (nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(128, 10))
    return export(nn.Sequential(*layers), {"x": ("batch", 1, 8, 8)})


def momentum(rate: Any) -> Any:
    return gg.optim.sgd(rate, momentum=0.9)


CASES: dict[str, tuple[Network, str, Callable[[Any], Any], Data, int]] = {
    "raw wine, AdamW": (mlp(13, 32, 3), "cross_entropy", gg.optim.adamw, table("wine"), 40),
    "raw cancer, AdamW": (mlp(30, 32, 2), "cross_entropy", gg.optim.adamw, table("breast_cancer"), 20),
    "digits, AdamW": (mlp(64, 64, 64, 10), "cross_entropy", gg.optim.adamw, table("digits", 1 / 16), 8),
    "digits, SGD": (mlp(64, 64, 64, 10), "cross_entropy", gg.optim.sgd, table("digits", 1 / 16), 8),
    "digits, momentum": (mlp(64, 64, 64, 10), "cross_entropy", momentum, table("digits", 1 / 16), 8),
    "digits, RMSprop": (mlp(64, 64, 64, 10), "cross_entropy", gg.optim.rmsprop, table("digits", 1 / 16), 8),
    "digits, CNN, Adam": (cnn, "cross_entropy", gg.optim.adam, table("digits", 1 / 16, image=True), 6),
    "digits, CNN, momentum": (cnn, "cross_entropy", momentum, table("digits", 1 / 16, image=True), 6),
    "diabetes, AdamW": (mlp(10, 32, 1), "mse", gg.optim.adamw, table("diabetes", 20.0), 20),
    "diabetes, SGD": (mlp(10, 32, 1), "mse", gg.optim.sgd, table("diabetes", 20.0), 20),
    "sine, deep, Adam": (mlp(1, 32, 32, 32, 1), "mse", gg.optim.adam, sine, 20),
}


def trainer(name: str, rate: Any = 1e-3) -> gg.Trainer:
    model, loss, optimizer, _, _ = CASES[name]
    step = gg.build(model(), loss=loss, optimizer=optimizer(rate))
    return gg.Trainer(step, device="cpu", options=RuntimeOptions(threads=1))


def final(name: str, rate: float) -> float:
    """The mean loss of the last three epochs at a constant rate."""
    data, epochs = CASES[name][3](), CASES[name][4]
    try:
        history = trainer(name).fit(data, epochs=epochs, learning_rate=rate, progress=False)
    except DivergedError:
        return float("inf")
    return float(np.mean(history["loss"][-3:]))


@pytest.mark.sweep(0)
@pytest.mark.slow
def test_it_is_about_as_good_as_the_best_of_a_grid() -> None:
    ratios = {}
    for name in CASES:
        found = trainer(name).find_lr(CASES[name][3]()).suggestion
        assert found is not None, name
        ratios[name] = final(name, found) / min(final(name, rate) for rate in GRID)
    close = [name for name, ratio in ratios.items() if ratio <= 1.1]
    assert len(close) > len(ratios) / 2 and max(ratios.values()) < 1.75, ratios


def test_on_a_raw_table() -> None:
    """What falls fastest there is not what trains."""
    name = "raw wine, AdamW"
    found = trainer(name).find_lr(CASES[name][3]()).suggestion
    assert found is not None and 2e-3 < found < 0.05


def test_a_schedule_in_the_graph_gives_the_same_as_a_rate_that_is_fed() -> None:
    name = "digits, momentum"
    data = CASES[name][3]()
    schedules = [gg.optim.cosine(0.1, 99), gg.optim.warmup(9, gg.optim.linear(0.3, 50))]
    curves = [trainer(name, rate).find_lr(data, steps=30) for rate in (0.01, *schedules)]
    assert curves[0] == curves[1] == curves[2]


def test_data_that_can_be_read_once_only_get_a_third_of_the_steepest() -> None:
    name = "digits, momentum"
    data = CASES[name][3]()
    batches = ({n: v[i : i + 16] for n, v in data.items()} for i in range(0, 1600, 16))
    curve = trainer(name).find_lr(batches)
    assert not curve.tried and curve.steepest is not None and curve.suggestion is not None
    assert curve.steepest / 4 < curve.suggestion < curve.steepest / 3 + 1e-9

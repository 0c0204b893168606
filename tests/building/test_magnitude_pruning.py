"""Magnitude pruning: the schedule, which weights go, and that zeros stay zeros whatever trains beside them."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

import gradgraph as gg
from gradgraph import frontend, optim
from gradgraph.errors import ArgumentError, BuildError, UnknownNameError
from gradgraph.frontend import nn

RNG = np.random.default_rng(0)
X, Y = RNG.normal(size=(32, 8)).astype(np.float32), RNG.normal(size=(32, 4)).astype(np.float32)
DATA = {"x": X, "target": Y}
MATRICES = {"0.weight": 128, "2.weight": 64}


@functools.cache
def network() -> onnx.ModelProto:
    return frontend.export(nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4)), {"x": ("n", 8)})


def trainer(optimizer: optim.Optimizer, **options: Any) -> gg.Trainer:
    return gg.Trainer(gg.build(network(), "mse", optimizer, **options), device="cpu")


def zeros(state: dict[str, np.ndarray]) -> dict[str, int]:
    return {n: int((state[n] == 0).sum()) for n in MATRICES}


def test_the_part_of_zeros_follows_the_cubic_schedule() -> None:
    run = trainer(optim.magnitude_pruning(optim.sgd(0.1, momentum=0.9), 0.8, begin=2, end=10, every=3))
    part = 0.0
    for t in range(14):
        before = run.state_dict()
        run.step(DATA)
        if 2 <= t <= 10 and ((t - 2) % 3 == 0 or t == 10):
            part = 0.8 * (1 - (1 - (t - 2) / 8) ** 3)
        state = run.state_dict()
        assert zeros(state) == {n: round(part * count) for n, count in MATRICES.items()}
        for name in MATRICES:
            np.testing.assert_array_equal(state[f"{name}.mask"] == 0, state[name] == 0)
            assert not (state[name] != 0)[before[name] == 0].any()  # what was pruned stays pruned
    assert (state["0.bias"] != 0).all()


@pytest.mark.parametrize("scope", ["layer", "global"])
def test_the_smallest_go_as_in_pytorch(scope: str) -> None:
    torch = pytest.importorskip("torch", reason="torch.nn.utils.prune chooses the same")
    from torch.nn.utils import prune

    run = trainer(optim.magnitude_pruning(optim.sgd(0.1), 0.7, end=0, scope=scope))
    plain = trainer(optim.sgd(0.1))
    run.step(DATA), plain.step(DATA)
    layers = []
    for name in MATRICES:
        layer = torch.nn.Linear(1, 1)
        layer.weight = torch.nn.Parameter(torch.tensor(plain.state_dict()[name]))
        layers.append((layer, "weight"))
    if scope == "global":
        prune.global_unstructured(layers, prune.L1Unstructured, amount=0.7)
    else:
        for layer, name in layers:
            prune.l1_unstructured(layer, name, amount=0.7)
    for (layer, _), name in zip(layers, MATRICES, strict=True):
        np.testing.assert_array_equal(run.state_dict()[name], layer.weight.detach().numpy())


@pytest.mark.parametrize(
    ("layer", "axis"),
    [(nn.Linear(8, 4), 1), (nn.Conv2d(8, 4, 3, padding=1), 1)],
    ids=["linear", "conv"],
)
def test_n_of_m_along_the_inputs(layer: nn.Module, axis: int) -> None:
    shape = ("n", 8) if isinstance(layer, nn.Linear) else ("n", 8, 3, 3)
    model = frontend.export(nn.Sequential(layer), {"x": shape})
    weight = {t.name: onnx.numpy_helper.to_array(t) for t in model.graph.initializer}["0.weight"]
    step = gg.build(model, "mse", optim.magnitude_pruning(optim.sgd(0.0), "2:4"))
    run = gg.Trainer(step, device="cpu")
    x = RNG.normal(size=(2, *shape[1:])).astype(np.float32)
    run.step({"x": x, "target": np.zeros_like(run.predict(x))})
    found = np.moveaxis(run.state_dict()["0.weight"], axis, -1).reshape(-1, 4)
    groups = np.moveaxis(weight, axis, -1).reshape(-1, 4)
    largest = np.sort(np.abs(groups), -1)[:, 2:3]
    np.testing.assert_array_equal(found, np.where(np.abs(groups) >= largest, groups, 0))


BESIDE: dict[str, tuple[optim.Optimizer, dict[str, Any]]] = {
    "adamw and ema": (optim.adamw(1e-2), {"ema": 0.9}),
    "groups": (optim.adamw(1e-2, groups={"2.*": {"lr": 1e-3}}), {}),
    "sam": (optim.sam(optim.sgd(0.1, momentum=0.9)), {}),
    "lookahead": (optim.lookahead(optim.adamw(1e-2), 3), {}),
    "accumulation": (optim.adamw(1e-2), {"accumulate": True}),
    "schedule-free": (optim.schedule_free_adamw(1e-2), {}),
    "lamb": (optim.lamb(1e-2), {"grad_norm": True}),
}


@pytest.mark.sweep(0.2)
@pytest.mark.parametrize("name", BESIDE)
def test_zeros_stay_and_a_run_is_resumed_to_the_bit(name: str, tmp_path: Path) -> None:
    inner, options = BESIDE[name]
    chosen = optim.magnitude_pruning(inner, 0.75, begin=1, end=6, every=2)
    fit: dict[str, Any] = {"epochs": 8, "batch_size": 16, "shuffle": False, "progress": False}
    if "accumulate" in options:
        fit["accumulate"] = 2
    run = trainer(chosen, **options)
    run.fit(DATA, **{**fit, "epochs": 2})
    run.save(tmp_path / "run.ckpt")
    run.fit(DATA, **fit)
    other = gg.Trainer.resume(gg.build(network(), "mse", chosen, **options), tmp_path / "run.ckpt", device="cpu")
    other.fit(DATA, **{**fit, "epochs": 10})
    a, b = run.state_dict(), other.state_dict()
    assert a.keys() == b.keys() and all((a[n] == b[n]).all() for n in a)
    for source in (a, {t.name: onnx.numpy_helper.to_array(t) for t in run.export().graph.initializer}):
        assert zeros(source) == {n: round(0.75 * count) for n, count in MATRICES.items()}
    assert run.evaluate(DATA)["loss"] < 1.2


def test_float16_weights_and_scaled_losses() -> None:
    run = trainer(optim.magnitude_pruning(optim.adamw(1e-2), 0.5, end=0), precision="float16")
    run.step(DATA)
    assert zeros(run.state_dict()) == {n: count // 2 for n, count in MATRICES.items()}


def test_a_target_is_pruned_alone() -> None:
    run = trainer(optim.magnitude_pruning(optim.sgd(0.1), 0.5, end=0, target=["2.*", "0.bias"]))
    run.step(DATA)
    state = run.state_dict()
    assert zeros(state) == {"0.weight": 0, "2.weight": 32}
    assert (state["0.bias"] == 0).sum() == 8 and "2.bias.mask" not in state


def build(**given: Any) -> None:
    trainer(optim.magnitude_pruning(optim.sgd(0.1), **given))


@pytest.mark.parametrize(
    ("given", "error", "says"),
    [
        ({"sparsity": 1.0}, ArgumentError, "a share above 0 and below 1"),
        ({"sparsity": "4:2"}, BuildError, "N must be less than M"),
        ({"sparsity": "2:4", "scope": "global"}, BuildError, "applies to each layer separately"),
        ({"scope": "model"}, BuildError, "scope must be 'layer' or 'global'"),
        ({"every": 0}, BuildError, "every must be at least 1"),
        ({"target": "head.*"}, UnknownNameError, "the pruning target 'head.*' matches no trained weight"),
        ({"sparsity": "2:3"}, BuildError, "no weight has an input axis divisible by 3"),
        ({"sparsity": "2:3", "target": "0.weight"}, BuildError, "'0.weight' has no input axis divisible by 3"),
    ],
)
def test_what_is_refused(given: dict[str, Any], error: type[Exception], says: str) -> None:
    with pytest.raises(error) as raised:
        build(**given)
    assert says in str(raised.value)

"""Whole training and evaluation steps in this machine's form: the numbers of the portable file, step after step.

Networks are small, but wide enough that the tables choose their special forms; the batch is fixed or open.
"""

from __future__ import annotations

import numpy as np
import onnx
import pytest

import gradgraph as gg
from gradgraph.backends.engine import for_machine
from gradgraph.backends.ort_cpu import ORT_CPU, cheap_recomputation
from gradgraph.backends.ort_cpu import linear_forms as linear
from gradgraph.backends.ort_cpu import movement_forms as movement
from gradgraph.backends.ort_cpu.recurrent import shared_states as recurrent
from tests.kit.lowered_networks import NETWORKS, batches, feeds_of, step
from tests.kit.running import run


@pytest.fixture(autouse=True)
def lower_small_layers_too(monkeypatch: pytest.MonkeyPatch) -> None:
    least_of = {recurrent: ["LEAST_WORK"], linear: ["MANY_BIASED"], movement: ["FEWEST_MOVED"]}
    for module, names in (least_of | {cheap_recomputation: ["LEAST", "LEAST_OF_ALL"]}).items():
        for name in names:
            monkeypatch.setattr(module, name, 1)
    monkeypatch.setattr(movement, "SHORTEST_ROW", 8)


@pytest.mark.sweep(0.2)
@pytest.mark.parametrize("rows", [8, "n"], ids=["fixed", "open"])
@pytest.mark.parametrize("name", NETWORKS)
def test_lowered_steps_train_alike(name: str, rows: int | str) -> None:
    built = step(name, rows, gg.optim.sgd(0.05, momentum=0.9))
    sizes = {} if rows == 8 else {"n": 8}
    lowered = for_machine(built.train, ORT_CPU, sizes)
    states = [run(built.init), run(built.init)]
    for batch in batches(name, 8, 3):
        for i, model in enumerate((built.train, lowered)):
            results = run(model, feeds_of(model, batch, states[i]))
            states[i] = {s.name: results[s.next] for s in built.manifest.state} | {"loss": results["loss"]}
        for key, value in states[0].items():
            scale = max(1.0, float(np.abs(value).max(initial=0.0)))
            np.testing.assert_allclose(states[1][key], value, rtol=1e-3, atol=1e-4 * scale, err_msg=f"{name}: {key}")


@pytest.mark.parametrize("name", NETWORKS)
def test_lowered_evaluation_is_alike_at_every_size(name: str) -> None:
    built = step(name, "n", gg.optim.sgd(0.05))
    lowered = for_machine(built.eval, ORT_CPU)
    state = run(built.init)
    for rows in (1, 5):
        (batch,) = batches(name, rows, 1)
        given = feeds_of(built.eval, batch, state)
        for a, b in zip(run(built.eval, given).values(), run(lowered, given).values(), strict=True):
            np.testing.assert_allclose(b, a, rtol=1e-4, atol=1e-4)


# --- updates of weights -------------------------------------------------------------------------------------------

UPDATES = {
    "sgd": gg.optim.sgd(0.05),
    "momentum": gg.optim.sgd(0.05, momentum=0.9, weight_decay=0.01),
    "adam": gg.optim.adam(0.01),
    "adamw": gg.optim.adamw(0.01, betas=(0.8, 0.99)),
    "clipped": gg.optim.chain(gg.optim.clip_by_global_norm(0.1), gg.optim.adamw(0.01)),
}


def wide_step(optimizer: gg.optim.Optimizer) -> gg.Step:
    """Of two layers, the first large enough that its update is a matter of passes."""
    nn = gg.frontend.nn
    gg.frontend.manual_seed(0)
    net = nn.Sequential(nn.Linear(200, 200), nn.ReLU(), nn.Linear(200, 4))
    return gg.build(gg.frontend.export(net, {"x": (8, 200)}), "cross_entropy", optimizer)


@pytest.mark.parametrize("name", UPDATES)
def test_lowered_updates_are_alike(name: str) -> None:
    built, rng = wide_step(UPDATES[name]), np.random.default_rng(0)
    lowered = for_machine(built.train, ORT_CPU)
    states = [run(built.init), run(built.init)]
    for _ in range(5):
        batch = {"x": rng.normal(size=(8, 200)).astype(np.float32), "target": rng.integers(0, 4, 8)}
        for i, model in enumerate((built.train, lowered)):
            results = run(model, feeds_of(model, batch, states[i]))
            states[i] = {s.name: results[s.next] for s in built.manifest.state} | {"loss": results["loss"]}
    for key, value in states[0].items():
        scale = float(np.abs(value).max(initial=0.0))
        np.testing.assert_allclose(states[1][key], value, rtol=1e-4, atol=1e-5 * scale, err_msg=key)


def products(optimizer: gg.optim.Optimizer) -> list[onnx.NodeProto]:
    return [n for n in for_machine(wide_step(optimizer).train, ORT_CPU).graph.node if n.op_type == "Gemm"]


def test_large_weights_are_added_apart_from_the_product() -> None:
    """Of the three summands of Gemms two are biases, the third the small weight, which is still added by its Gemm."""
    summands = {n.input[2] for n in products(UPDATES["sgd"]) if len(n.input) == 3}
    assert summands == {"0.bias", "2.bias", "2.weight"}
    plain_momentum = gg.optim.sgd(0.05, momentum=0.9)
    assert {n.input[2] for n in products(plain_momentum) if len(n.input) == 3} == {"0.bias", "2.bias"}


def test_adam_takes_its_factor_from_the_product() -> None:
    """Unless somebody else reads the gradient: then there is still one product for it."""
    alphas = [a.f for n in products(UPDATES["adam"]) for a in n.attribute if a.name == "alpha" and a.f != 1.0]
    assert alphas == pytest.approx([0.1, 0.1])
    assert len(products(UPDATES["clipped"])) == len(products(UPDATES["adam"]))

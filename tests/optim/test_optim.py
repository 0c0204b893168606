"""Optimizers and schedules: their trajectories against NumPy formulas, and against torch.optim."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import helper

import gradgraph as gg
from gradgraph import optim
from gradgraph.optim.recipes import RECIPES
from gradgraph.verify.reference import Oracle
from tests.kit.optim_cases import OPTIMIZERS
from tests.kit.running import Loop

STEPS = 6
W = np.array([[0.5, -1.0, 2.0], [1.5, 0.25, -0.75]], np.float32)
X = np.random.default_rng(1).normal(size=(STEPS, 4, 2)).astype(np.float32)
T = np.random.default_rng(2).normal(size=(STEPS, 4, 3)).astype(np.float32)


def linear_model() -> onnx.ModelProto:
    graph = helper.make_graph(
        [helper.make_node("MatMul", ["x", "w"], ["y"])],
        "linear",
        [helper.make_tensor_value_info("x", 1, ["batch", 2])],
        [helper.make_tensor_value_info("y", 1, ["batch", 3])],
        [onnx.numpy_helper.from_array(W, "w")],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)


def trajectory(optimizer: optim.Optimizer, **rates: float) -> np.ndarray:
    """The weights after each step."""
    loop = Loop(gg.build(linear_model(), "mse", optimizer))
    weights = []
    for x, t in zip(X, T, strict=True):
        loop({"x": x, "target": t}, **rates)
        weights.append(loop.state["w"])
    return np.array(weights)


def by_hand(update: Callable[[int, np.ndarray, np.ndarray, dict[str, Any]], np.ndarray]) -> np.ndarray:
    """The same in float64: ``update(t, gradient, weights, memory)`` gives the change."""
    w, memory, weights = W.astype(np.float64), {}, []
    for t, (x, target) in enumerate(zip(X.astype(np.float64), T, strict=True), start=1):
        gradient = 2 * x.T @ (x @ w - target) / target.size
        w = w + update(t, gradient, w, memory)
        weights.append(w)
    return np.array(weights)


def sgd_by_hand(t: int, g: np.ndarray, w: np.ndarray, memory: dict[str, Any]) -> np.ndarray:
    g = g + 0.1 * w
    memory["m"] = 0.9 * memory["m"] + g if t > 1 else g
    return -0.05 * (g + 0.9 * memory["m"])


def adam_by_hand(t: int, g: np.ndarray, w: np.ndarray, memory: dict[str, Any]) -> np.ndarray:
    m = memory["m"] = 0.9 * memory.get("m", 0) + 0.1 * g
    v = memory["v"] = 0.999 * memory.get("v", 0) + 0.001 * g * g
    return -0.05 * (m / (1 - 0.9**t) / (np.sqrt(v / (1 - 0.999**t)) + 1e-8) + 0.01 * w)


def test_sgd_follows_its_formula() -> None:
    chosen = optim.sgd(0.05, momentum=0.9, weight_decay=0.1, nesterov=True)
    np.testing.assert_allclose(trajectory(chosen), by_hand(sgd_by_hand), rtol=2e-5, atol=1e-6)


def test_adamw_follows_its_formula() -> None:
    np.testing.assert_allclose(trajectory(optim.adamw(0.05)), by_hand(adam_by_hand), rtol=2e-5, atol=1e-6)


def test_learning_rate_is_fed_per_call() -> None:
    assert np.array_equal(trajectory(optim.sgd(0.5), learning_rate=0.0), np.array([W] * STEPS))
    assert np.array_equal(trajectory(optim.sgd(0.5)), trajectory(optim.sgd(0.1), learning_rate=0.5))


def test_two_learning_rates_in_a_chain_are_refused() -> None:
    """Both would be the one input ``learning_rate``, and the second number would count for nothing."""
    with pytest.raises(gg.errors.BuildError, match=r"'learning_rate': 0\.1 and 0\.5"):
        gg.build(linear_model(), "mse", optim.chain(optim.sgd(0.1), optim.scale_by_learning_rate(0.5)))
    fixed = optim.chain(optim.sgd(0.1), optim.scale_by_learning_rate(optim.constant(-0.5)))
    assert np.allclose(trajectory(fixed), trajectory(optim.sgd(0.05)), rtol=1e-5)


def test_global_norm_is_clipped() -> None:
    moved = trajectory(optim.chain(optim.clip_by_global_norm(1e-3), optim.sgd(1.0)))
    steps = np.diff(np.concatenate([W[None], moved]), axis=0)
    np.testing.assert_allclose(np.sqrt((steps**2).sum((1, 2))), 1e-3, rtol=2e-3)


def test_a_global_norm_whose_square_float16_cannot_hold_is_clipped() -> None:
    step = gg.build(
        narrow_model(), "mse", optim.chain(optim.clip_by_global_norm(1.0), optim.sgd(1.0)), backend="portable"
    )
    batch = {"x": np.full((4, 2), 30, np.float16), "target": np.full((4, 3), -60, np.float16)}
    feeds = {**batch, "w": W.astype(np.float16), "learning_rate": np.float32(1.0)}
    moved = Oracle(step.train)(feeds)["w.next"] - W  # onnxruntime on the CPU would compute in float32 anyway
    assert np.linalg.norm(moved) == pytest.approx(1.0, rel=1e-2)


def test_values_are_clipped() -> None:
    moved = trajectory(optim.chain(optim.clip_by_value(1e-3), optim.sgd(1.0)))
    assert np.abs(np.diff(moved, axis=0)).max() <= 1e-3 * (1 + 1e-3)


def test_a_scheduled_step_asks_for_no_learning_rate() -> None:
    step = gg.build(linear_model(), "mse", optim.sgd(optim.cosine(0.1, 10)))
    assert step.manifest.hyperparameters == {}
    assert [s.name for s in step.manifest.state] == ["w", "step"]


def test_slots_start_as_zeros_that_cost_no_bytes() -> None:
    step = gg.build(linear_model(), "mse", "adamw")
    assert [i.name for i in step.init.graph.initializer if i.dims and math.prod(i.dims) == W.size] == ["w"]
    assert not Loop(step).state["w.exp_avg"].any()


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: optim.sgd(-1.0), "lr must not be negative"),
        (lambda: optim.sgd(0.1, nesterov=True), "Nesterov momentum requires a momentum"),
        (lambda: optim.adam(betas=(0.9, 1.0)), "betas must be two numbers"),
        (lambda: optim.by_name("adamww"), "did you mean 'adamw'"),
        (lambda: optim.by_name("sgd", momentun=0.9), "did you mean 'momentum'"),
    ],
)
def test_bad_arguments_are_named(make: Callable[[], Any], says: str) -> None:
    with pytest.raises(gg.errors.BuildError, match=says):
        make()


def narrow_model() -> onnx.ModelProto:
    """The same in float16."""
    narrow = linear_model()
    for value in (*narrow.graph.input, *narrow.graph.output):
        value.type.tensor_type.elem_type = onnx.TensorProto.FLOAT16
    narrow.graph.initializer[0].CopyFrom(onnx.numpy_helper.from_array(W.astype(np.float16), "w"))
    return narrow


NEEDS_RANGE = sorted(set(RECIPES) - {case.recipe for case in OPTIMIZERS.values() if case.fits_float16})


@pytest.mark.parametrize("name", NEEDS_RANGE)
def test_float16_weights_are_refused_where_squares_underflow(name: str) -> None:
    narrow = narrow_model()
    with pytest.raises(gg.errors.BuildError, match="squares gradients, and squares underflow for float16 weights"):
        gg.build(narrow, "mse", name)
    assert gg.build(narrow, "mse", "sgd").manifest.trainable == ("w",)


@pytest.mark.parametrize("name", ["sgd", "adam", "adamw", "nadam", "rmsprop", "adafactor", "lamb", "muon"])
def test_master_weights_follow_the_float32_model(name: str) -> None:
    arguments = {"momentum": 0.9, "weight_decay": 0.1} if name == "sgd" else {"weight_decay": 0.1}
    optimizer = optim.chain(optim.clip_by_global_norm(1.0), optim.by_name(name, lr=0.01, **arguments))
    step = gg.build(narrow_model(), "mse", optim.master_weights(optimizer))
    assert {s.name: s.dtype for s in step.manifest.state if s.kind == "parameter"} == {"w": "float16"}
    assert all(s.dtype == "float32" for s in step.manifest.state if s.kind == "optimizer")
    loop, expected = Loop(step), trajectory(optimizer)
    assert np.array_equal(loop.state["w.master"], W)
    for x, t, weights in zip(X, T, expected, strict=True):
        loop({"x": x.astype(np.float16), "target": t.astype(np.float16)})
        assert np.array_equal(loop.state["w"], loop.state["w.master"].astype(np.float16))
        np.testing.assert_allclose(
            loop.state["w.master"], weights, atol=2e-4
        )  # a step is 0.01; gradients have 3 digits


def test_master_weights_add_up_what_float16_rounds_away() -> None:
    batch = {"x": np.ones((4, 2), np.float16), "target": np.full((4, 3), 9, np.float16)}
    plain, master = (
        Loop(gg.build(narrow_model(), "mse", o)) for o in (optim.sgd(1e-5), optim.master_weights(optim.sgd(1e-5)))
    )
    for _ in range(50):
        plain(batch)
        master(batch)
    still = W.astype(np.float16) == plain.state["w"]
    assert still.sum() >= 4 and (master.state["w.master"] > W).all() and (master.state["w"][still] > W[still]).any()


def test_master_weights_change_nothing_in_float32() -> None:
    plain, wrapped = (gg.build(linear_model(), "mse", o) for o in (optim.adam(), optim.master_weights(optim.adam())))
    assert plain.manifest.state == wrapped.manifest.state
    assert plain.train.graph == wrapped.train.graph
    assert wrapped.manifest.optimizer["arguments"]["optimizer"]["name"] == "adam"


@pytest.mark.parametrize(
    "optimizer",
    [optim.ema(optim.sgd()), optim.master_weights(optim.ema(optim.sgd())), optim.schedule_free_sgd(),
     optim.ema(optim.master_weights(optim.adam())), optim.master_weights(optim.schedule_free_adamw())],
)  # fmt: skip
def test_averages_of_float16_weights_are_refused(optimizer: optim.Optimizer) -> None:
    with pytest.raises(gg.errors.BuildError, match="'w' is float16, whose precision is too low for a moving average"):
        gg.build(narrow_model(), "mse", optimizer)


def test_a_chain_keeps_master_weights() -> None:
    chained = optim.chain(optim.clip_by_value(1.0), optim.master_weights(optim.adam()))
    assert "w.master" in [s.name for s in gg.build(narrow_model(), "mse", chained).manifest.state]


def test_a_transform_of_your_own() -> None:
    """Sign descent in three lines, as the documentation says."""
    sign = optim.stateless("sign", lambda op, g, p: op.Sign(g))
    moved = trajectory(optim.chain(sign, optim.scale_by_learning_rate(0.5)))
    assert np.allclose(np.abs(np.diff(moved, axis=0)), 0.5)

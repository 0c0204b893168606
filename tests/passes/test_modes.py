"""Training mode and evaluation mode: statistics, masks, and what a frozen backbone keeps."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper
from onnx.reference import ReferenceEvaluator

import gradgraph as gg
from gradgraph.frontend import nn
from tests.kit.running import Loop, run

RNG = np.random.default_rng(0)
node = helper.make_node


def network(training_mode: int = 0, ratio: float = 0.5) -> onnx.ModelProto:
    """Dropout(BatchNormalization(x)·w), with the mask as a second output."""
    weights = {
        "scale": np.array([1.0, 2.0], np.float32),
        "bias": np.array([0.5, -0.5], np.float32),
        "mean": np.array([0.1, 0.2], np.float32),
        "var": np.array([1.5, 0.5], np.float32),
        "w": np.ones((2, 40), np.float32),
        "ratio": np.array(ratio, np.float32),
    }
    outputs = ["n", "mean_out", "var_out"] if training_mode else ["n"]
    nodes = [
        node(
            "BatchNormalization",
            ["x", "scale", "bias", "mean", "var"],
            outputs,
            momentum=0.8,
            training_mode=training_mode,
        ),
        node("MatMul", ["n", "w"], ["h"]),
        node("Dropout", ["h", "ratio"], ["y", "mask"]),
    ]
    graph = helper.make_graph(
        nodes,
        "modes",
        [helper.make_tensor_value_info("x", 1, ["batch", 2])],
        [helper.make_tensor_value_info("y", 1, ["batch", 40]), helper.make_tensor_value_info("mask", 9, ["batch", 40])],
        [numpy_helper.from_array(v, k) for k, v in weights.items()],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)


X = RNG.normal(size=(6, 2)).astype(np.float32)
FEEDS = {"x": X, "target": np.zeros((6, 40), np.float32)}


@pytest.mark.parametrize("training_mode", [0, 1])
def test_running_statistics_follow_the_batch(training_mode: int) -> None:
    loop = Loop(gg.build(network(training_mode), "mse", gg.optim.sgd(0.0)))
    assert {s.name: s.kind for s in loop.step.manifest.state if s.kind == "statistic"} == {
        "mean": "statistic",
        "var": "statistic",
    }
    loop(FEEDS)
    np.testing.assert_allclose(loop.state["mean"], 0.8 * np.array([0.1, 0.2]) + 0.2 * X.mean(0), rtol=1e-5)
    np.testing.assert_allclose(loop.state["var"], 0.8 * np.array([1.5, 0.5]) + 0.2 * X.var(0), rtol=1e-5)


@pytest.mark.parametrize("training_mode", [0, 1])
def test_evaluation_uses_running_statistics_and_no_mask(training_mode: int) -> None:
    loop = Loop(gg.build(network(training_mode), "mse", "sgd"))
    results = loop.evaluate(FEEDS)
    normal = (X - [0.1, 0.2]) / np.sqrt(np.array([1.5, 0.5]) + 1e-5) * [1, 2] + [0.5, -0.5]
    np.testing.assert_allclose(results["y"], np.repeat(normal.sum(1, keepdims=True), 40, 1), rtol=1e-4, atol=1e-5)
    assert results["mask"].all()


class Twice(nn.Module):
    """One layer, applied before and behind another one."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.BatchNorm1d(3), nn.Linear(3, 3)

    def forward(self, x: Any) -> Any:
        return self.norm(self.linear(self.norm(x)) * 3.0 + 1.0)


def test_a_layer_that_is_applied_twice() -> None:
    """Its statistics are updated twice, and onnxruntime does not merge what its two nodes overwrite."""
    gg.frontend.manual_seed(0)
    step = gg.build(gg.frontend.export(Twice(), {"x": (8, 3)}), "mse", gg.optim.sgd(0.1))
    x, target = np.random.default_rng(0).normal(size=(2, 8, 3)).astype(np.float32)
    state = run(step.init)
    feeds = {"x": x, "target": target, "learning_rate": np.array(0.1, np.float32), **state}
    expected = ReferenceEvaluator(step.train).run(None, feeds)
    found = run(step.train, feeds)
    for value, output in zip(expected, step.train.graph.output, strict=True):
        np.testing.assert_allclose(found[output.name], value, rtol=1e-4, atol=1e-6, err_msg=output.name)
    between = (x - x.mean(0)) / np.sqrt(x.var(0) + 1e-5) @ state["linear.weight"].T + state["linear.bias"]
    mean = x.mean(0) * 0.1 * 0.9 + (between * 3.0 + 1.0).mean(0) * 0.1
    np.testing.assert_allclose(found["norm.running_mean.next"], mean, rtol=1e-4)


@pytest.mark.parametrize("training_mode", [0, 1])
def test_a_frozen_layer_keeps_its_statistics(training_mode: int) -> None:
    step = gg.build(network(training_mode, 0.0), "mse", "sgd", freeze=["scale", "bias"])
    assert [s.name for s in step.manifest.state if s.kind == "statistic"] == []
    assert {"scale", "bias", "mean", "var"} <= set(step.manifest.frozen)
    loop = Loop(step)
    expected = loop.evaluate(FEEDS)["loss"]
    np.testing.assert_allclose(loop(FEEDS)["loss"], expected, rtol=1e-5)


def test_statistics_that_the_graph_computes_are_no_state() -> None:
    """As PyTorch exports BatchNorm1d(track_running_stats=False): training and evaluation are one form."""
    model = onnx.parser.parse_model("""
    <ir_version: 10, opset_import: ["" : 21]>
    net (float[batch, 2] x) => (float[batch, 2] y)
    <int64[1] rows = {0}, float[2] scale = {1, 2}, float[2] bias = {0, 1}> {
        mean = ReduceMean <keepdims = 0> (x, rows)
        centred = Sub (x, mean)
        squares = Mul (centred, centred)
        var = ReduceMean <keepdims = 0> (squares, rows)
        y = BatchNormalization (x, scale, bias, mean, var)
    }""")
    loop = Loop(gg.build(model, "mse", gg.optim.sgd(0.0)))
    assert {s.kind for s in loop.step.manifest.state} == {"parameter"}
    feeds = {"x": X, "target": np.zeros((6, 2), np.float32)}
    expected = ((X - X.mean(0)) / np.sqrt(X.var(0) + 1e-5) * [1, 2] + [0, 1]) ** 2
    np.testing.assert_allclose(loop(feeds)["loss"], expected.mean(), rtol=1e-5)
    np.testing.assert_allclose(loop.evaluate(feeds)["loss"], expected.mean(), rtol=1e-5)


def in_a_body(kind: str) -> onnx.ModelProto:
    """Loop of two rounds whose body holds one Dropout or BatchNormalization."""
    inner = {
        "Dropout": node("Dropout", ["h", "ratio"], ["g"], name="drop"),
        "BatchNormalization": node("BatchNormalization", ["h", "scale", "bias", "mean", "var"], ["g"], name="norm"),
    }[kind]
    info = helper.make_tensor_value_info
    body = helper.make_graph(
        [node("MatMul", ["state", "w"], ["h"]), inner, node("Identity", ["go"], ["on"])],
        "body",
        [info("i", 7, []), info("go", 9, []), info("state", 1, ["batch", 2])],
        [info("on", 9, []), info("g", 1, ["batch", 2])],
    )
    weights = {
        **{k: np.ones(2, np.float32) for k in ("scale", "bias", "mean", "var")},
        "w": np.eye(2, dtype=np.float32),
        "ratio": np.array(0.5, np.float32),
        "rounds": np.array(2),
        "yes": np.array(True),
    }
    graph = helper.make_graph(
        [node("Loop", ["rounds", "yes", "x"], ["y"], body=body)],
        "loop",
        [info("x", 1, ["batch", 2])],
        [info("y", 1, ["batch", 2])],
        [numpy_helper.from_array(v, k) for k, v in weights.items()],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)


@pytest.mark.parametrize(("kind", "says"), [("Dropout", "node 'drop'"), ("BatchNormalization", "node 'norm'")])
def test_what_cannot_be_put_in_training_mode_is_refused(kind: str, says: str) -> None:
    with pytest.raises(gg.errors.BuildError, match=rf"{says} \({kind}\) is in the body"):
        gg.build(in_a_body(kind), "mse", "sgd")


def test_statistics_are_never_trained() -> None:
    assert set(gg.build(network(), "mse", "sgd").manifest.trainable) == {"scale", "bias", "w"}
    with pytest.raises(gg.errors.BuildError, match="'mean' is a running statistic"):
        gg.build(network(), "mse", "sgd", train="mean")


def masks(seed: int, steps: int = 3, ratio: float = 0.5) -> np.ndarray:
    """Where the outputs of a training step are zero: read off the gradient of w, whose column j sees mask j only."""
    step = gg.build(network(ratio=ratio), "mse", gg.optim.sgd(1.0), seed=seed, train="w")
    loop = Loop(step)
    found = []
    for _ in range(steps):
        before = loop.state["w"]
        loop({"x": X[:1], "target": np.full((1, 40), 9.0, np.float32)})
        found.append((loop.state["w"] != before).all(0))
    return np.array(found)


def test_masks_depend_on_seed_and_step_alone() -> None:
    first, again, other = masks(1), masks(1), masks(2)
    np.testing.assert_array_equal(first, again)
    assert (first != other).any()
    assert (first[0] != first[1]).any()


def test_masks_keep_the_share_they_should() -> None:
    assert masks(3, steps=50, ratio=0.25).mean() == pytest.approx(0.75, abs=0.03)  # 2,000 draws: three deviations
    assert masks(3, ratio=0.0).all()


def test_dropout_keeps_the_expectation() -> None:
    """Kept values are divided by 1 − ratio, as the gradient of a linear function shows."""
    step = gg.build(network(ratio=0.75), "l1", gg.optim.sgd(1.0), train="w", freeze=["scale", "bias"])
    loop = Loop(step)
    before = loop.state["w"]
    loop({"x": np.ones((1, 2), np.float32), "target": np.full((1, 40), 1e6, np.float32)})
    moved = (loop.state["w"] - before)[0]
    normal = (1 - 0.1) / np.sqrt(1.5 + 1e-5) + 0.5
    np.testing.assert_allclose(moved[moved != 0], normal * 4 / 40, rtol=1e-4)


def test_run_time_state_is_listed_only_where_needed() -> None:
    assert [s.name for s in gg.build(network(ratio=0.0), "mse", "sgd", train="w").manifest.state] == ["w"]
    assert "rng" in run(gg.build(network(), "mse", "sgd", train="w").init)

"""Training through QuantizeLinear and DequantizeLinear, on request."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest

import gradgraph as gg
from gradgraph.errors import DifferentiationError
from gradgraph.extend import straight_through
from gradgraph.rules.registry import NO_GRADIENT, RULES

X = np.array([[0.3, -1.26, 9.0, 0.74], [-0.5, 40.0, -40.0, 0.1], [2.5, 0.26, -7.0, 1.0]], np.float32)
PER_AXIS = np.array([0.1, 0.25, 0.5], np.float32)
BLOCKED = np.array([[0.1, 0.2], [0.3, 0.4], [0.25, 0.5]], np.float32)
CASES: list[tuple[Any, Any, dict[str, int]]] = [
    (np.float32(0.25), None, {}),
    (np.float32(0.25), np.int8(3), {}),
    (np.float32(0.25), np.uint8(128), {}),
    (np.array([0.25], np.float32), np.array([7], np.int16), {}),
    (PER_AXIS, np.array([0, 5, -9], np.int8), {"axis": 0}),
    (BLOCKED, None, {"axis": -1, "block_size": 2}),
    (BLOCKED, np.array([[1, 2], [3, 4], [5, 6]], np.uint8), {"axis": 1, "block_size": 2}),
]


@pytest.fixture
def passing() -> Iterator[None]:
    straight_through()
    yield
    straight_through(False)


def model(scale: Any, zero: Any, attrs: dict[str, int], known: bool = True) -> onnx.ModelProto:
    constants = {"scale": scale} | ({} if zero is None else {"zero": zero})
    rest = ["scale"] + ["zero"] * (zero is not None)
    nodes = [
        onnx.helper.make_node("QuantizeLinear", ["x", *rest], ["q"], **attrs),
        onnx.helper.make_node("DequantizeLinear", ["q", *rest], ["y"], **attrs),
    ]
    tensor = onnx.helper.make_tensor_value_info
    graph = onnx.helper.make_graph(
        nodes,
        "quantized",
        [tensor("x", onnx.TensorProto.FLOAT, X.shape if known else ["n", "m"])],
        [tensor("y", onnx.TensorProto.FLOAT, None)],
        [onnx.numpy_helper.from_array(np.asarray(v), k) for k, v in constants.items()],
    )
    return onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 21)], ir_version=10)


def run(m: onnx.ModelProto, feeds: dict[str, np.ndarray]) -> list[np.ndarray]:
    options = ort.SessionOptions()
    options.log_severity_level = 3
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL  # it would drop the pair
    session = ort.InferenceSession(m.SerializeToString(), options, providers=["CPUExecutionProvider"])
    return [np.asarray(v) for v in session.run(None, feeds)]


def spread(v: Any, attrs: dict[str, int]) -> np.ndarray:
    if "block_size" in attrs:
        return np.repeat(v, 2, 1)
    return np.reshape(v, (-1, 1)) if "axis" in attrs else np.asarray(v)


@pytest.mark.parametrize("known", [True, False], ids=["known", "unknown"])
@pytest.mark.parametrize(("scale", "zero", "attrs"), CASES)
def test_values_stay_and_gradients_pass(
    passing: None, scale: Any, zero: Any, attrs: dict[str, int], known: bool
) -> None:
    m = model(scale, zero, attrs, known)
    gradient = gg.vjp(m, wrt=["x", "scale"])
    assert {"QuantizeLinear", "DequantizeLinear"}.isdisjoint(n.op_type for n in gradient.graph.node)
    dy = np.random.default_rng(0).uniform(-1, 1, X.shape).astype(np.float32)
    y, dx, d_scale = run(gradient, {"x": X, "y.cotangent": dy})
    np.testing.assert_array_equal(y, run(m, {"x": X})[0])

    s, z = spread(scale, attrs), 0.0 if zero is None else spread(zero, attrs).astype(np.float32)
    limits = np.iinfo(np.uint8 if zero is None else np.asarray(zero).dtype)
    whole = np.round(X / s) + z
    inside = (whole >= limits.min) & (whole <= limits.max)
    np.testing.assert_allclose(dx, dy * inside, rtol=1e-6, atol=1e-7)
    terms = dy * (np.clip(whole, limits.min, limits.max) - z - inside * X / s)
    parts = terms.reshape(3, 2, 2).sum(2) if "block_size" in attrs else terms.sum(1) if "axis" in attrs else terms.sum()
    np.testing.assert_allclose(d_scale, np.reshape(parts, np.shape(scale)), rtol=1e-4, atol=1e-5)


def test_scales_that_may_part_are_not_taken_for_one(passing: None) -> None:
    m = model(np.float32(0.25), None, {})
    m.graph.initializer.append(onnx.numpy_helper.from_array(np.array(0.25, np.float32), "other"))
    m.graph.node[1].input[1] = "other"
    with pytest.raises(DifferentiationError, match="QuantizeLinear"):
        gg.vjp(m, wrt=["x", "other"])


def test_without_it_rounding_ends_the_path() -> None:
    straight_through()
    straight_through(False)
    assert ("", "Round") in NO_GRADIENT
    assert ("", "Round") not in RULES
    with pytest.raises(DifferentiationError, match=r"QuantizeLinear.*straight_through"):
        gg.vjp(model(np.float32(0.25), None, {}), wrt=["x"])


# --- training quantized networks -----------------------------------------------------------------------------


def quantized_network() -> onnx.ModelProto:
    """A layer of 8-bit weights, with a scale for each unit, and 8-bit activations."""
    rng = np.random.default_rng(0)
    node = onnx.helper.make_node
    nodes = [
        node("QuantizeLinear", ["x", "x_scale", "x_zero"], ["x_q"]),
        node("DequantizeLinear", ["x_q", "x_scale", "x_zero"], ["x_dq"]),
        node("QuantizeLinear", ["w", "w_scale", "w_zero"], ["w_q"], axis=0),
        node("DequantizeLinear", ["w_q", "w_scale", "w_zero"], ["w_dq"], axis=0),
        node("Gemm", ["x_dq", "w_dq", "b"], ["h"], transB=1),
        node("Relu", ["h"], ["r"]),
        node("QuantizeLinear", ["r", "r_scale", "r_zero"], ["r_q"]),
        node("DequantizeLinear", ["r_q", "r_scale", "r_zero"], ["r_dq"]),
        node("MatMul", ["r_dq", "v"], ["y"]),
    ]
    constants = {
        "x_scale": np.float32(0.02),
        "x_zero": np.uint8(128),
        "w": rng.uniform(-0.5, 0.5, (8, 4)).astype(np.float32),
        "w_scale": np.full(8, 0.004, np.float32),
        "w_zero": np.zeros(8, np.int8),
        "b": np.zeros(8, np.float32),
        "r_scale": np.float32(0.005),
        "r_zero": np.uint8(0),
        "v": rng.uniform(-0.5, 0.5, (8, 2)).astype(np.float32),
    }
    tensor = onnx.helper.make_tensor_value_info
    graph = onnx.helper.make_graph(
        nodes,
        "network",
        [tensor("x", onnx.TensorProto.FLOAT, ["n", 4])],
        [tensor("y", onnx.TensorProto.FLOAT, ["n", 2])],
        [onnx.numpy_helper.from_array(np.asarray(v), k) for k, v in constants.items()],
    )
    return onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 21)], ir_version=10)


def test_a_quantized_network_learns_and_stays_quantized(passing: None) -> None:
    """Weights and scales train through rounding; what is evaluated and exported has every pair, with new scales."""
    m = quantized_network()
    trained = {"x_scale", "w", "w_scale", "b", "r_scale", "v"}  # scales are no weights unless they are named
    step = gg.build(m, loss="mse", optimizer=gg.optim.adam(0.01), train=sorted(trained))
    assert set(step.manifest.trainable) == trained
    assert "QuantizeLinear" not in {n.op_type for n in step.train.graph.node}

    x = np.random.default_rng(1).uniform(-1, 1, (64, 4)).astype(np.float32)
    batch = {"x": x, "target": np.stack([x[:, 0] * x[:, 1], np.abs(x[:, 2])], 1)}
    trainer = gg.Trainer(step)
    losses = [float(trainer.step(batch)["loss"]) for _ in range(150)]
    assert losses[-1] < 0.2 * losses[0]

    exported = trainer.export()
    assert [n.op_type for n in exported.graph.node] == [n.op_type for n in m.graph.node]
    before, after = ({t.name: onnx.numpy_helper.to_array(t) for t in g.graph.initializer} for g in (m, exported))
    assert {k for k in after if not np.array_equal(before[k], after[k])} == trained
    y = run(exported, {"x": x})[0]  # the numbers that the next training step starts from
    np.testing.assert_allclose(np.mean((y - batch["target"]) ** 2), float(trainer.step(batch)["loss"]), rtol=1e-5)


def test_without_straight_through_only_what_lies_behind_trains() -> None:
    """Nor what is learned of a scale by way of the rounding: that of DequantizeLinear only."""
    assert set(gg.build(quantized_network(), loss="mse").manifest.trainable) == {"v"}
    named = gg.build(quantized_network(), loss="mse", train=["r_scale", "v"])
    assert set(named.manifest.trainable) == {"r_scale", "v"}

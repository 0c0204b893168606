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
from gradgraph.registry import NO_GRADIENT, RULES

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
        gg.vjp(m, wrt=["x"])


def test_without_it_rounding_ends_the_path() -> None:
    straight_through()
    straight_through(False)
    assert ("", "Round") in NO_GRADIENT
    assert ("", "Round") not in RULES
    with pytest.raises(DifferentiationError, match=r"QuantizeLinear.*straight_through"):
        gg.vjp(model(np.float32(0.25), None, {}), wrt=["x"])

"""Dropout in onnxruntime, whose masks nobody can predict: the gradient uses the mask of the same forward pass."""

from __future__ import annotations

import numpy as np
import onnx
import pytest

import gradgraph as gg
from tests.kit.running import run

X = np.random.default_rng(0).uniform(0.5, 2.0, (40, 25)).astype(np.float32)
FLOAT, BOOL = onnx.TensorProto.FLOAT, onnx.TensorProto.BOOL


def dropout(outputs: int, fed: bool, ratio: float, training: bool) -> tuple[onnx.ModelProto, dict[str, np.ndarray]]:
    """Dropout with ``outputs`` outputs, ratio and mode fed or constant."""
    options = {"ratio": np.array(ratio, np.float32), "training": np.array(training)}
    node = onnx.helper.make_node("Dropout", ["x", *options], ["y", "mask"][:outputs], seed=3)
    inputs = [onnx.helper.make_tensor_value_info("x", FLOAT, ["N", 25])]
    if fed:
        inputs += [onnx.helper.make_tensor_value_info(n, t, []) for n, t in zip(options, (FLOAT, BOOL), strict=True)]
    constants = [] if fed else [onnx.numpy_helper.from_array(a, n) for n, a in options.items()]
    y = onnx.helper.make_tensor_value_info("y", FLOAT, ["N", 25])
    graph = onnx.helper.make_graph([node], "dropout", inputs, [y], constants)
    model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 21)], ir_version=10)
    return model, {"x": X, **(options if fed else {})}


@pytest.mark.parametrize("outputs", [1, 2])
@pytest.mark.parametrize("fed", [False, True])
@pytest.mark.parametrize(("ratio", "training"), [(0.3, True), (0.0, True), (0.3, False)])
def test_the_gradient_is_that_of_the_mask_that_was_drawn(outputs: int, fed: bool, ratio: float, training: bool) -> None:
    model, feeds = dropout(outputs, fed, ratio, training)
    got = run(gg.vjp(model, wrt=["x"]), {**feeds, "y.cotangent": 2 * np.ones_like(X)})
    np.testing.assert_allclose(got["x.grad"], 2 * got["y"] / X, rtol=1e-6)
    assert (got["y"] == 0).any() == (training and ratio > 0)


def test_the_model_itself_is_not_changed() -> None:
    model, _ = dropout(1, False, 0.3, True)
    before = model.SerializeToString()
    gg.vjp(model, wrt=["x"])
    assert model.SerializeToString() == before

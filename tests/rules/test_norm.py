"""Normalization in single precision, far from zero: what a gradient taken from the uncentred x would lose."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest

import gradgraph as gg
from gradgraph.verify.reference import Oracle, in_float64
from tests.kit.few_values import CASES, MOST, errors
from tests.kit.running import run

OFFSET = 300.0  # Σ dy·x − mean·Σ dy would lose two digits and more
X = np.random.default_rng(0).normal(OFFSET, 1.0, (8, 4, 6, 6)).astype(np.float32)
VECTORS = [np.random.default_rng(i).uniform(0.5, 2.0, 4).astype(np.float32) for i in range(4)]

# the bound: a mean that is computed has an error of its own, about OFFSET · 1e-7; one that is given has none
FAR: list[tuple[str, list[np.ndarray], int, dict[str, Any], float]] = [
    ("BatchNormalization", VECTORS, 3, {"training_mode": 1}, 5e-5),
    ("BatchNormalization", [*VECTORS[:2], VECTORS[2] + np.float32(OFFSET), VECTORS[3]], 1, {}, 1e-6),
    ("InstanceNormalization", VECTORS[:2], 1, {}, 5e-5),
    ("GroupNormalization", VECTORS[:2], 1, {"num_groups": 2}, 5e-5),
    ("LayerNormalization", [np.tile(v[:, None, None], (1, 6, 6)) for v in VECTORS[:2]], 1, {"axis": 1}, 5e-5),
]


@pytest.mark.parametrize(("op_type", "parameters", "outputs", "attributes", "bound"), FAR)
def test_a_large_mean_costs_few_digits(
    op_type: str, parameters: list[np.ndarray], outputs: int, attributes: dict[str, Any], bound: float
) -> None:
    arrays = {f"x{i}": a for i, a in enumerate([X, *parameters])}
    node = onnx.helper.make_node(op_type, list(arrays), ["y", "mean", "var"][:outputs], **attributes)
    inputs = [onnx.helper.make_tensor_value_info(n, onnx.TensorProto.FLOAT, a.shape) for n, a in arrays.items()]
    y = onnx.helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, X.shape)
    graph = onnx.helper.make_graph([node], op_type, inputs, [y])
    model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 21)], ir_version=10)
    gradient = gg.vjp(model, outputs=["y"], wrt=["x0", "x1", "x2"])
    feeds = {**arrays, "y.cotangent": np.random.default_rng(1).uniform(-1, 1, X.shape).astype(np.float32)}
    expected = Oracle(in_float64(gradient))({k: v.astype(np.float64) for k, v in feeds.items()})
    got = run(gradient, feeds)
    for name in ("y", "x0.grad", "x1.grad", "x2.grad"):
        error = np.abs(got[name] - expected[name]).max() / np.abs(expected[name]).max()
        assert error < (5e-5 if name == "y" else bound), (name, error)


@pytest.mark.parametrize("target", ["portable", "ort-cpu"])
@pytest.mark.parametrize(("op_type", "shape", "attributes"), CASES)
def test_of_few_numbers_gradients_keep_their_digits(
    op_type: str, shape: tuple[int, ...], attributes: dict[str, Any], target: str
) -> None:
    assert max(errors(op_type, shape, attributes, target).values()) < MOST

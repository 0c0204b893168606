"""Quantisation to int8 beside nodes that move numbers, which onnxruntime's optimizer breaks from opset 21 on."""

from __future__ import annotations

import numpy as np
import onnx
import onnx.parser
import pytest

import gradgraph as gg
from gradgraph.backends.backend import Backend
from gradgraph.backends.engine import for_machine
from gradgraph.backends.ort_cpu import ORT_CPU
from gradgraph.backends.portable import PORTABLE
from tests.kit.running import run

PAIR = "q = QuantizeLinear({x}, s{z}) d = DequantizeLinear(q, s{z})"
MOVING = ["Reshape({0}, sizes)", "Transpose({0})", "Unsqueeze({0}, front)", "Flatten({0})"]


def quantized(before: str, behind: str, zero: str = ", z", opset: int = 17) -> onnx.ModelProto:
    moved = f"m = {before.format('x')}" if before else "m = Identity(x)"
    return onnx.parser.parse_model(
        f"""<ir_version: 8, opset_import: ["": {opset}]> g (float[2, 3, 4] x) => (float y)
        <float s = {{0.1}}, int8 z = {{3}}, float w = {{0.5}}, int64[2] sizes = {{2, 12}}, int64[1] front = {{0}}>
        {{ {moved} {PAIR.format(x="m", z=zero)} r = {behind.format("d")} u = Sin(r) p = Mul(u, w) e = Exp(p)
           y = ReduceSum <keepdims = 0> (e) }}"""
    )


X = np.random.default_rng(0).normal(size=(2, 3, 4)).astype(np.float32) * 20


@pytest.mark.parametrize("behind", ["Sin({0})", *MOVING])
@pytest.mark.parametrize("before", ["", *MOVING])
def test_int8_beside_what_moves_numbers(before: str, behind: str) -> None:
    model = quantized(before, behind)
    found = run(gg.value_and_grad(model, output="y", wrt=["w"]), {"x": X})
    np.testing.assert_allclose(found["y"], run(model, {"x": X})["y"], rtol=1e-6)


def test_only_what_would_break_is_rewritten() -> None:
    def types(model: onnx.ModelProto) -> set[int]:
        gradient = gg.value_and_grad(model, output="y", wrt=["w"])
        zeros = {n.input[2] for n in gradient.graph.node if n.op_type == "QuantizeLinear"}
        return {t.data_type for t in gradient.graph.initializer if t.name in zeros}

    assert types(quantized("", "Sin({0})")) == {onnx.TensorProto.INT8}
    assert types(quantized("", MOVING[0])) == {onnx.TensorProto.UINT8}


@pytest.mark.parametrize("backend", [PORTABLE, ORT_CPU])
def test_a_static_network_with_pointwise_convolutions_trains(backend: Backend) -> None:
    """What a 1x1 convolution is lowered to reshapes what was quantised."""
    rng = np.random.default_rng(0)
    pair = "{0}q = QuantizeLinear({0}, s, z) {0}d = DequantizeLinear({0}q, s, z)"
    model = onnx.parser.parse_model(
        f"""<ir_version: 8, opset_import: ["": 17]> g (float[2, 16, 16, 16] x) => (float[2, 5] y)
        <float s = {{0.05}}, int8 z = {{0}}>
        {{ {pair.format("x")} wd = DequantizeLinear(weight, s, z) a = Conv <kernel_shape = [1, 1]> (xd, wd)
           b = Relu(a) {pair.format("b")} c = GlobalAveragePool(bd) f = Flatten(c) y = MatMul(f, head) }}"""
    )
    weight, head = rng.integers(-9, 9, (64, 16, 1, 1)).astype(np.int8), rng.normal(size=(64, 5)).astype(np.float32)
    model.graph.initializer.extend([onnx.numpy_helper.from_array(weight, "weight")])
    model.graph.initializer.extend([onnx.numpy_helper.from_array(head, "head")])
    step = gg.build(model, "cross_entropy", gg.optim.sgd(0.1))
    feeds = {"x": rng.normal(size=(2, 16, 16, 16)).astype(np.float32), "target": np.array([1, 4])}
    state = {**run(step.init), "learning_rate": np.array(0.1, np.float32)}
    found = run(for_machine(step.train, backend), {**feeds, **state})
    scores = run(model, {"x": feeds["x"]})["y"]
    expected = np.log(np.exp(scores).sum(1)) - scores[[0, 1], feeds["target"]]
    np.testing.assert_allclose(found["loss"], expected.mean(), rtol=1e-5)

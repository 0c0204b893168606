"""On onnxruntime's CPU provider, weights of 4 and 8 bits are multiplied as they are stored."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper, numpy_helper

import gradgraph as gg
from gradgraph.backends import BACKENDS
from gradgraph.backends.engine import for_machine

K, N = 128, 24


def network(bits: int, block: int, points: bool, times: int = 1) -> onnx.ModelProto:
    """A trained layer, and behind it products with one packed weight."""
    rng = np.random.default_rng(bits + block)
    blocks = K // block
    draw = lambda *sizes: rng.integers(0, 256, sizes, np.uint8)  # noqa: E731
    weights = {
        "w": rng.normal(size=(5, K)).astype(np.float32),
        "packed": draw(N, blocks, block * bits // 8),
        "scales": rng.uniform(0.01, 0.1, (N * blocks)).astype(np.float32),
        **({"points": draw(N * -(-blocks * bits // 8))} if points else {}),
    }
    names = ["packed", "scales", *(["points"] if points else [])]
    sizes = {"K": K, "N": N, "bits": bits, "block_size": block}
    nodes = [helper.make_node("MatMul", ["x", "w"], ["h"])]
    nodes += [
        helper.make_node("MatMulNBits", ["h", *names], [f"y{i}"], domain="com.microsoft", **sizes) for i in range(times)
    ]
    nodes.append(helper.make_node("Sum", [f"y{i}" for i in range(times)], ["y"]))
    value = helper.make_tensor_value_info
    graph = helper.make_graph(nodes, "g", [value("x", TensorProto.FLOAT, ["rows", 5])],
                              [value("y", TensorProto.FLOAT, ["rows", N])],
                              [numpy_helper.from_array(a, n) for n, a in weights.items()])  # fmt: skip
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=10)


def kinds(model: onnx.ModelProto) -> list[str]:
    return [n.op_type for n in model.graph.node]


@pytest.mark.parametrize(
    ("given", "taken"),
    [
        ({"bits": 4, "block": 32, "points": False}, True),
        ({"bits": 4, "block": 32, "points": True}, True),
        ({"bits": 4, "block": 16, "points": True, "times": 2}, True),
        ({"bits": 8, "block": 32, "points": False}, True),
        ({"bits": 8, "block": 64, "points": True}, True),
        ({"bits": 4, "block": 128, "points": False}, True),
        ({"bits": 4, "block": 128, "points": True}, False),  # a zero point takes half a byte of a row of its own
    ],
    ids=str,
)
def test_they_are_read_as_they_are_stored(given: dict[str, Any], taken: bool) -> None:
    model = network(**given)
    step = gg.build(model, "mse", gg.optim.sgd(0.1), train="w")
    for saved in (step.train, step.eval):
        lowered = for_machine(saved, BACKENDS["ort-cpu"], {"rows": 3})
        assert ("MatMulNBits" in kinds(lowered)) is taken and "MatMulNBits" not in kinds(saved)
    assert ("DequantizeLinear" in kinds(lowered)) is not taken
    x = np.random.default_rng(0).normal(size=(3, 5)).astype(np.float32)
    expected = ort.InferenceSession(model.SerializeToString()).run(None, {"x": x})[0]
    trainer = gg.Trainer(step, device="cpu")
    np.testing.assert_allclose(trainer.predict(x), expected, rtol=1e-4, atol=1e-4)
    data = {"x": x, "target": np.zeros((3, N), np.float32)}
    assert float(trainer.step(data)["loss"]) == pytest.approx(np.square(expected).mean(), rel=1e-4)
    w = next(numpy_helper.to_array(t) for t in model.graph.initializer if t.name == "w")
    plain = gg.build(model, "mse", gg.optim.sgd(0.1), train="w", backend="portable")
    session = ort.InferenceSession(plain.resolved("train").SerializeToString())
    found = session.run(["w.next"], {**data, "w": w, "learning_rate": np.array(0.1, np.float32)})[0]
    np.testing.assert_allclose(trainer.state_dict()["w"], found, rtol=1e-4, atol=1e-6)

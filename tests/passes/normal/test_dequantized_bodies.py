"""Weights of 8 bits in bodies of If and Loop: onnxruntime fuses their products, but finds no outer integers."""

from __future__ import annotations

import numpy as np
import onnx
import onnx.parser
import onnx.reference
import onnx_ir as ir
import onnxruntime as ort
import pytest
from onnx import numpy_helper

import gradgraph as gg
from gradgraph.runtime.execution.predictor import Predictor

K = 32
RNG = np.random.default_rng(0)
WEIGHTS = {"q": RNG.integers(-128, 128, (K, K), np.int8), "s": RNG.uniform(0.001, 0.01, K).astype(np.float32)}
BODIES = {
    "If": """c = Greater (sum, zero) y = If (c) <
        then_branch = t () => (float[n, 32] a) { d = DequantizeLinear (q, s) a = MatMul (h, d) },
        else_branch = e () => (float[n, 32] b) { b = Neg (h) }>""",
    "If in If": """c = Greater (sum, zero) y = If (c) <
        then_branch = t () => (float[n, 32] a) { a = If (c) <
            then_branch = u () => (float[n, 32] f) { d = DequantizeLinear (q, s) f = MatMul (h, d) },
            else_branch = v () => (float[n, 32] g) { g = Neg (h) }> },
        else_branch = e () => (float[n, 32] b) { b = Neg (h) }>""",
    "Loop": """y = Loop (three, yes, h) <body = l (int64 i, bool go, float[n, 32] k) => (bool on, float[n, 32] a) {
        on = Identity (go) d = DequantizeLinear (q, s) m = Gemm (k, d) a = Tanh (m) }>""",
}


def network(kind: str, inside: bool) -> onnx.ModelProto:
    """A trained layer, and behind it a body with a stored weight, whose initializers are ``inside`` it or outside."""
    model = onnx.parser.parse_model(f"""<ir_version: 10, opset_import: ["" : 21]> g (float[n, 4] x) => (float[n, 32] y)
        <float zero = {{-1e9}}, int64 three = {{3}}, bool yes = {{1}}>
        {{ h = MatMul (x, w) sum = ReduceSum <keepdims = 0> (h) {BODIES[kind]} }}""")
    body = model.graph
    while inside and (bodies := [a.g for n in body.node for a in n.attribute if a.type == onnx.AttributeProto.GRAPH]):
        body = bodies[0]
    body.initializer.extend(numpy_helper.from_array(a, n) for n, a in WEIGHTS.items())
    model.graph.initializer.append(numpy_helper.from_array(RNG.normal(size=(4, K)).astype(np.float32), "w"))
    return model


@pytest.mark.sweep(0.34)
@pytest.mark.parametrize("inside", [True, False])
@pytest.mark.parametrize("kind", BODIES)
def test_weights_in_bodies_train_and_are_exported(kind: str, inside: bool) -> None:
    model, x = network(kind, inside), RNG.normal(size=(3, 4)).astype(np.float32)
    (expected,) = onnx.reference.ReferenceEvaluator(model).run(None, {"x": x})
    for packs in (True, False):
        found = Predictor(ir.from_proto(model), device="cpu", packs=packs)({"x": x})
        np.testing.assert_allclose(found["y"], expected, rtol=1e-4, atol=1e-5)
    trainer = gg.Trainer(gg.build(model, "mse", gg.optim.sgd(0.1), train="w"), device="cpu")
    np.testing.assert_allclose(trainer.predict(x), expected, rtol=1e-4, atol=1e-5)
    batch = {"x": x, "target": np.zeros((3, K), np.float32)}
    assert float(trainer.step(batch)["loss"]) == pytest.approx(np.square(expected).mean(), rel=1e-4)
    exported = trainer.export()
    options = ort.SessionOptions()  # of onnxruntime's own choice, except that it must not round x to 8 bits
    options.add_session_config_entry("session.qdq_matmulnbits_accuracy_level", "1")
    (y,) = ort.InferenceSession(exported.SerializeToString(), options).run(None, {"x": x})
    np.testing.assert_allclose(y, trainer.predict(x), rtol=1e-4, atol=1e-5)

"""Gradients with respect to inner values, alone and together with inputs that they are computed from."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest

import gradgraph as gg
from gradgraph.errors import DifferentiationError, UnknownNameError
from gradgraph.frontend import Module, export
from tests.kit.running import run

RNG = np.random.default_rng(0)
W = RNG.normal(size=(4, 3)).astype(np.float32)
X = RNG.normal(size=(2, 4)).astype(np.float32)


def chain() -> onnx.ModelProto:
    """H = x·w, a = tanh(h), s = Σ a² + Σ h, where h is read twice."""
    return onnx.parser.parse_model(
        '<ir_version: 10, opset_import: ["" : 21]> g (float[n,4] x) => (float s, float[n,3] a, int64[n,3] c) {'
        "h = MatMul(x, w) a = Tanh(h) q = Mul(a, a) c = Cast<to = 7>(h) t = Sum(q, h) s = ReduceSum<keepdims = 0>(t) }"
    )


def model() -> onnx.ModelProto:
    m = chain()
    m.graph.initializer.append(onnx.numpy_helper.from_array(W, "w"))
    return m


H = X @ W
A = np.tanh(H)
DA = 2 * A
DH = DA * (1 - A * A) + 1


def test_inner_values_and_what_they_are_computed_from() -> None:
    result = run(gg.value_and_grad(model(), output="s", wrt=["x", "h", "a"]), {"x": X})
    np.testing.assert_allclose(result["a.grad"], DA, rtol=1e-5)
    np.testing.assert_allclose(result["h.grad"], DH, rtol=1e-5)
    np.testing.assert_allclose(result["x.grad"], DH @ W.T, rtol=1e-5)
    alone = run(gg.value_and_grad(model(), output="s", wrt="h"), {"x": X})
    np.testing.assert_array_equal(alone["h.grad"], result["h.grad"])


def test_the_output_itself_may_be_an_inner_value() -> None:
    seed = RNG.normal(size=(2, 3)).astype(np.float32)
    result = run(gg.vjp(model(), outputs="a", wrt=["a", "x"]), {"x": X, "a.cotangent": seed})
    np.testing.assert_array_equal(result["a.grad"], seed)
    np.testing.assert_allclose(result["x.grad"], seed * (1 - A * A) @ W.T, rtol=1e-5, atol=1e-6)


def test_tangents_add_to_those_that_arrive() -> None:
    tx, th = (RNG.normal(size=s).astype(np.float32) for s in ((2, 4), (2, 3)))
    both = gg.jvp(model(), outputs="a", wrt=["x", "h"])
    result = run(both, {"x": X, "x.tangent": tx, "h.tangent": th})
    np.testing.assert_allclose(result["a.tangent"], (tx @ W + th) * (1 - A * A), rtol=1e-5, atol=1e-6)


def test_second_derivatives() -> None:
    second = 2 * (1 - A * A) * (1 - A * A) - 4 * A * A * (1 - A * A)
    t = RNG.normal(size=(2, 3)).astype(np.float32)
    hvp = run(gg.hvp(model(), output="s", wrt="h"), {"x": X, "h.tangent": t})["h.hvp"]
    np.testing.assert_allclose(hvp, second * t, rtol=1e-4, atol=1e-5)
    hessian = run(gg.hessian(model(), output="s", wrt="h"), {"x": X})["h.hessian"].reshape(6, 6)
    np.testing.assert_allclose(hessian, np.diag(second.ravel()), rtol=1e-4, atol=1e-5)
    jacobian = run(gg.jacobian(model(), output="a", wrt="h"), {"x": X})["h.jacobian"].reshape(6, 6)
    np.testing.assert_allclose(jacobian, np.diag((1 - A * A).ravel()), rtol=1e-5, atol=1e-6)


def test_a_glob_prefers_inputs_and_initializers() -> None:
    names = [o.name for o in gg.value_and_grad(model(), output="s", wrt="*").graph.output]
    assert names == ["s", "x.grad", "w.grad"]
    names = [o.name for o in gg.value_and_grad(model(), output="s", wrt="[hq]").graph.output]
    assert names == ["s", "h.grad", "q.grad"]


@pytest.mark.parametrize(
    ("wrt", "error", "words"),
    [
        ("nothing", UnknownNameError, "no input, initializer or inner value matches 'nothing'"),
        ("c", DifferentiationError, "'c' has dtype int64"),
        ("s", DifferentiationError, ""),
    ],
)
def test_errors(wrt: str, error: Any, words: str) -> None:
    if wrt == "s":  # the target itself has the gradient one
        assert run(gg.value_and_grad(model(), output="s", wrt="s"), {"x": X})["s.grad"] == 1
        return
    with pytest.raises(error, match=words):
        gg.value_and_grad(model(), output="s", wrt=wrt)


def test_samples_have_inputs_only() -> None:
    with pytest.raises(UnknownNameError, match="no input or initializer matches 'h'"):
        gg.per_sample_gradients(model(), output="s", wrt="h")
    with pytest.raises(UnknownNameError, match="no input or initializer matches 'h'"):
        gg.check_gradients(model(), {"x": X}, output="s", wrt="h")


class Energies(Module):
    """One number for each sample, in which two inputs meet."""

    def forward(self, x: Any, z: Any) -> Any:
        return (x.tanh() * x).sum(1) * z[:, 0] + (z * z * z).sum(1)


def test_hessians_of_each_sample() -> None:
    energies = export(Energies(), {"x": ("batch", 3), "z": ("batch", 2)}, "e")
    x, z = (RNG.normal(size=(4, d)).astype(np.float32) for d in (3, 2))
    feeds = {"x": x, "z": z}
    result = run(gg.hessian(energies, output="e", wrt=["x", "z"], per_sample=True), feeds)
    assert result["x.hessian"].shape == (4, 3, 3) and result["x.z.hessian"].shape == (4, 3, 2)
    whole = run(gg.hessian(_summed(energies), output="total", wrt=["x", "z"]), feeds)
    for name in ("x.hessian", "x.z.hessian", "z.x.hessian", "z.hessian"):
        blocks = np.stack([whole[name][i, :, i] for i in range(4)])
        np.testing.assert_allclose(result[name], blocks, rtol=1e-5, atol=1e-6)


def _summed(m: onnx.ModelProto) -> onnx.ModelProto:
    m = onnx.ModelProto.FromString(m.SerializeToString())
    m.graph.node.append(onnx.helper.make_node("ReduceSum", ["e"], ["total"], keepdims=0))
    m.graph.output.append(onnx.helper.make_tensor_value_info("total", onnx.TensorProto.FLOAT, []))
    return m


def test_a_hessian_per_sample_needs_one_number_for_each() -> None:
    with pytest.raises(DifferentiationError, match="needs one number for each sample"):
        gg.hessian(model(), output="a", wrt="x", per_sample=True)
    with pytest.raises(DifferentiationError, match="needs one number for each sample"):
        gg.hessian(model(), output="s", wrt="x", per_sample=True)
    energies = export(Energies(), {"x": ("batch", 3), "z": ("batch", 2)}, "e")
    mixed = onnx.ModelProto.FromString(energies.SerializeToString())
    mixed.graph.node.append(onnx.helper.make_node("Softmax", ["e"], ["shares"], axis=0))
    mixed.graph.output.append(onnx.helper.make_tensor_value_info("shares", onnx.TensorProto.FLOAT, ["batch"]))
    with pytest.raises(DifferentiationError, match="sample"):
        gg.hessian(mixed, output="shares", wrt="x", per_sample=True)

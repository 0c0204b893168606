"""Hessian-vector products: against finite differences of the gradient and against PyTorch; names, symmetry, errors."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

import gradgraph as gg
from gradgraph.errors import DifferentiationError
from gradgraph.verify.reference import Oracle, in_float64
from tests.kit.running import run

RNG = np.random.default_rng(0)
node = helper.make_node
Arrays = Mapping[str, np.ndarray]


def real(*shape: int) -> np.ndarray:
    return np.asarray(RNG.normal(size=shape), np.float32)


def scalar_model(
    nodes: list[onnx.NodeProto], weights: Arrays, inputs: Mapping[str, tuple[int, list[Any]]]
) -> onnx.ModelProto:
    graph = helper.make_graph(
        nodes,
        "test",
        [helper.make_tensor_value_info(k, *v) for k, v in inputs.items()],
        [helper.make_tensor_value_info("loss", TensorProto.FLOAT, [])],
        [numpy_helper.from_array(v, k) for k, v in weights.items()],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)


# --- networks ------------------------------------------------------------------------------------------


def perceptron() -> tuple[onnx.ModelProto, dict[str, np.ndarray], Callable[..., Any]]:
    """A two-layer classifier with a symbolic batch; its parameters; the same in PyTorch."""
    weights = {"w1": real(5, 4), "b1": real(5), "w2": real(3, 5), "b2": real(3)}
    nodes = [
        node("Gemm", ["x", "w1", "b1"], ["a"], transB=1),
        node("Tanh", ["a"], ["h"]),
        node("Gemm", ["h", "w2", "b2"], ["logits"], transB=1),
        node("SoftmaxCrossEntropyLoss", ["logits", "target"], ["loss"]),
    ]

    def in_torch(x: Any, target: Any, w1: Any, b1: Any, w2: Any, b2: Any) -> Any:
        from torch.nn import functional as F

        return F.cross_entropy(F.linear(F.tanh(F.linear(x, w1, b1)), w2, b2), target)

    inputs = {"x": (TensorProto.FLOAT, ["n", 4]), "target": (TensorProto.INT64, ["n"])}
    return scalar_model(nodes, weights, inputs), weights, in_torch


def convolutional() -> tuple[onnx.ModelProto, dict[str, np.ndarray], Callable[..., Any]]:
    """Convolution, batch normalization by the batch's own statistics, pooling, a linear layer."""
    weights = {"k": real(4, 2, 3, 3), "kb": real(4), "scale": real(4), "shift": real(4), "w": real(3, 36), "b": real(3)}
    constants = {"mean": np.zeros(4, np.float32), "var": np.ones(4, np.float32)}
    nodes = [
        node("Conv", ["x", "k", "kb"], ["c"], pads=[1, 1, 1, 1]),
        node("BatchNormalization", ["c", "scale", "shift", "mean", "var"], ["n", "m", "v"], training_mode=1),
        node("Softplus", ["n"], ["s"]),
        node("MaxPool", ["s"], ["p"], kernel_shape=[2, 2], strides=[2, 2]),
        node("Flatten", ["p"], ["f"]),
        node("Gemm", ["f", "w", "b"], ["logits"], transB=1),
        node("SoftmaxCrossEntropyLoss", ["logits", "target"], ["loss"]),
    ]

    def in_torch(x: Any, target: Any, k: Any, kb: Any, scale: Any, shift: Any, w: Any, b: Any) -> Any:
        from torch.nn import functional as F

        n = F.batch_norm(F.conv2d(x, k, kb, padding=1), None, None, scale, shift, training=True)
        return F.cross_entropy(F.linear(F.max_pool2d(F.softplus(n), 2).flatten(1), w, b), target)

    inputs = {"x": (TensorProto.FLOAT, ["n", 2, 6, 6]), "target": (TensorProto.INT64, ["n"])}
    return scalar_model(nodes, weights | constants, inputs), weights, in_torch


def recurrent() -> tuple[onnx.ModelProto, dict[str, np.ndarray], Callable[..., Any]]:
    weights = {"w": real(1, 12, 2), "r": real(1, 12, 3)}
    nodes = [
        node("LSTM", ["x", "w", "r"], ["", "h"], hidden_size=3),
        node("ReduceL2", ["h"], ["loss"], keepdims=0),
    ]
    return scalar_model(nodes, weights, {"x": (TensorProto.FLOAT, ["t", 2, 2])}), weights, lambda *_: None


NETWORKS = {"perceptron": perceptron, "convolutional": convolutional, "recurrent": recurrent}
BATCHES = {"perceptron": real(6, 4), "convolutional": real(6, 2, 6, 6), "recurrent": real(5, 2, 2)}


def batch(name: str) -> dict[str, np.ndarray]:
    x = BATCHES[name]
    return {"x": x} if name == "recurrent" else {"x": x, "target": np.arange(6) % 3}


def wide(arrays: Arrays) -> dict[str, np.ndarray]:
    return {k: v.astype(np.float64) if v.dtype == np.float32 else v for k, v in arrays.items()}


# --- numbers -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NETWORKS)
def test_finite_differences_of_the_gradient(name: str) -> None:
    model, weights, _ = NETWORKS[name]()
    wrt = [*weights, "x"]
    direction = {k: RNG.normal(size=v.shape) for k, v in {**weights, **batch(name)}.items() if k in wrt}
    feeds = wide(batch(name))
    product = Oracle(in_float64(gg.hvp(model, wrt=wrt)))({**feeds, **{f"{k}.tangent": v for k, v in direction.items()}})

    def gradient(step: float) -> dict[str, np.ndarray]:
        moved = onnx.ModelProto()
        moved.CopyFrom(in_float64(model))
        for tensor in moved.graph.initializer:
            if tensor.name in weights:
                there = numpy_helper.to_array(tensor) + step * direction[tensor.name]
                tensor.CopyFrom(numpy_helper.from_array(there, tensor.name))
        return Oracle(gg.value_and_grad(moved, wrt=wrt))({**feeds, "x": feeds["x"] + step * direction["x"]})

    ahead, behind = gradient(1e-5), gradient(-1e-5)
    for k in wrt:
        numeric = (ahead[f"{k}.grad"] - behind[f"{k}.grad"]) / 2e-5
        np.testing.assert_allclose(product[f"{k}.hvp"], numeric, rtol=1e-5, atol=1e-7)


@pytest.mark.torch
@pytest.mark.parametrize("name", ["perceptron", "convolutional"])
def test_pytorch_gives_the_same(name: str) -> None:
    torch = pytest.importorskip("torch", reason="compares with PyTorch")
    model, weights, in_torch = NETWORKS[name]()
    direction = {k: real(*v.shape) for k, v in weights.items()}
    feeds = batch(name)
    tensors = {k: torch.tensor(v) for k, v in wide(feeds).items()}

    def loss(*ws: Any) -> Any:
        return in_torch(**tensors, **dict(zip(weights, ws, strict=True)))

    at = tuple(torch.tensor(v, dtype=torch.float64) for v in weights.values())
    along = tuple(torch.tensor(v, dtype=torch.float64) for v in direction.values())
    value, expected = torch.autograd.functional.hvp(loss, at, along)
    found = run(gg.hvp(model, wrt=list(weights)), {**feeds, **{f"{k}.tangent": v for k, v in direction.items()}})
    np.testing.assert_allclose(found["loss"], value.numpy(), rtol=1e-5)
    largest = max(float(e.abs().max()) for e in expected)  # a bias before batch normalization has the gradient zero
    for k, e in zip(weights, expected, strict=True):
        np.testing.assert_allclose(found[f"{k}.hvp"], e.numpy(), rtol=1e-4, atol=1e-5 * largest)


def test_the_hessian_is_symmetric() -> None:
    model, weights, _ = perceptron()
    product = gg.hvp(model)
    u, v = ({f"{k}.tangent": real(*w.shape) for k, w in weights.items()} for _ in range(2))
    hu, hv = (run(product, {**batch("perceptron"), **t}) for t in (u, v))
    left = sum(float((v[f"{k}.tangent"] * hu[f"{k}.hvp"]).sum()) for k in weights)
    right = sum(float((u[f"{k}.tangent"] * hv[f"{k}.hvp"]).sum()) for k in weights)
    assert left == pytest.approx(right, rel=1e-4)


@pytest.mark.parametrize("op_type", ["BatchNormalization", "InstanceNormalization"])
@pytest.mark.parametrize("name", ["scale", "offset"])
def test_by_one_parameter_of_a_norm_of_open_batches(op_type: str, name: str) -> None:
    """The gradient by the other is not computed, so no shape may be read off it."""
    weights = {"scale": real(4) + 2, "offset": real(4)}
    if op_type == "BatchNormalization":
        weights |= {"mean": real(4), "var": real(4) ** 2 + 1}
    nodes = [
        node(op_type, ["x", *weights], ["y"]),
        node("Softplus", ["y"], ["e"]),
        node("ReduceSum", ["e"], ["loss"], keepdims=0),
    ]
    at, along = weights.pop(name).astype(np.float64), RNG.normal(size=4)
    model = scalar_model(nodes, weights, {"x": (TensorProto.FLOAT, ["batch", 4, 2]), name: (TensorProto.FLOAT, [4])})
    feeds = wide({"x": real(3, 4, 2)})
    gradient = Oracle(in_float64(gg.value_and_grad(model, wrt=name)))
    ahead, behind = (gradient({**feeds, name: at + h * along})[f"{name}.grad"] for h in (1e-4, -1e-4))
    product = Oracle(in_float64(gg.hvp(model, wrt=name)))
    found = product({**feeds, name: at, f"{name}.tangent": along})[f"{name}.hvp"]
    np.testing.assert_allclose(found, (ahead - behind) / 2e-4, rtol=1e-5, atol=1e-6)


# --- names, composition, errors ------------------------------------------------------------------------


def quartic() -> onnx.ModelProto:
    """Loss Σ x⁴ + Σ 3·z, of inputs x and z."""
    constants = {"four": np.array(4.0, np.float32), "three": np.array(3.0, np.float32)}
    nodes = [
        node("Pow", ["x", "four"], ["p"]),
        node("Mul", ["z", "three"], ["q"]),
        node("Add", ["p", "q"], ["sum"]),
        node("ReduceSum", ["sum"], ["loss"], keepdims=0),
    ]
    return scalar_model(nodes, constants, {k: (TensorProto.FLOAT, [3]) for k in "xz"})


AT = {"x": np.array([1.0, -2.0, 0.5], np.float32), "z": np.ones(3, np.float32)}
ALONG = {"x.tangent": np.array([1.0, 0.5, -1.0], np.float32), "z.tangent": np.ones(3, np.float32)}


def test_names_shapes_and_numbers() -> None:
    m = gg.hvp(quartic(), wrt=["x", "z"])
    assert [i.name for i in m.graph.input] == ["x", "z", "x.tangent", "z.tangent"]
    assert [o.name for o in m.graph.output] == ["loss", "x.hvp", "z.hvp"]
    onnx.checker.check_model(m, full_check=True)
    result = run(m, {**AT, **ALONG})
    np.testing.assert_allclose(result["x.hvp"], 12 * AT["x"] ** 2 * ALONG["x.tangent"], rtol=1e-6)
    np.testing.assert_array_equal(result["z.hvp"], np.zeros(3))  # the gradient by z is constant


def test_beside_the_gradient() -> None:
    m = gg.hvp(gg.value_and_grad(quartic(), wrt="x"), output="loss", wrt="x")
    assert [o.name for o in m.graph.output] == ["loss", "x.grad", "x.hvp"]
    result = run(m, {**AT, "x.tangent": ALONG["x.tangent"]})
    np.testing.assert_allclose(result["x.grad"], 4 * AT["x"] ** 3, rtol=1e-6)
    np.testing.assert_allclose(result["x.hvp"], 12 * AT["x"] ** 2 * ALONG["x.tangent"], rtol=1e-6)


def test_third_derivatives() -> None:
    """The gradient of ⟨t, H·t⟩ by x is 24 x·t²."""
    second = gg.vjp(gg.hvp(quartic(), wrt="x"), outputs="x.hvp", wrt="x")
    t = ALONG["x.tangent"]
    result = run(second, {**AT, "x.tangent": t, "x.hvp.cotangent": t})
    np.testing.assert_allclose(result["x.grad"], 24 * AT["x"] * t**2, rtol=1e-6)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"output": "sum", "wrt": "x"}, "needs a scalar"),
        ({"output": "p", "wrt": "x"}, "needs a scalar"),
    ],
)
def test_errors(options: dict[str, Any], words: str) -> None:
    with pytest.raises(DifferentiationError, match=words):
        gg.hvp(quartic(), **options)


def test_a_name_that_the_output_does_not_depend_on() -> None:
    model = quartic()
    model.graph.input.append(helper.make_tensor_value_info("u", TensorProto.FLOAT, [2]))
    with pytest.raises(DifferentiationError, match="does not depend on 'u'"):
        gg.hvp(model, wrt=["x", "u"])
    m = gg.hvp(model, wrt=["x", "u"], allow_unused=True)
    result = run(m, {**AT, "u": np.ones(2, np.float32), "u.tangent": np.ones(2, np.float32), "x.tangent": AT["z"]})
    np.testing.assert_array_equal(result["u.hvp"], np.zeros(2))

"""Jacobians, Hessians and gradients of each sample against PyTorch's, in float64."""

from __future__ import annotations

import io
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import onnx
import pytest

import gradgraph as gg
from gradgraph.verify.reference import Oracle, in_float64
from tests.kit.running import run

torch = pytest.importorskip("torch", reason="compares with PyTorch")
pytestmark = pytest.mark.torch

EPS = float(np.float32(1e-5))  # the number that the file holds


class Convolutional(torch.nn.Module):
    """Convolutions with a norm over groups and one with stored statistics."""

    shape = (4, 2, 6, 6)

    def __init__(self) -> None:
        super().__init__()
        self.a, self.group = torch.nn.Conv2d(2, 4, 3, padding=1), torch.nn.GroupNorm(2, 4, EPS)
        self.b, self.batch = torch.nn.Conv2d(4, 2, 3, stride=2), torch.nn.BatchNorm2d(2, EPS)
        self.head = torch.nn.Linear(8, 3)

    def forward(self, x: Any) -> Any:
        x = torch.nn.functional.silu(self.group(self.a(x)))
        return self.head(torch.tanh(self.batch(self.b(x))).flatten(1))


class Transformer(torch.nn.Module):
    """Samples are merged with time and with heads, of width 1, so that the file holds their scale exactly."""

    shape = (3, 4, 4)

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.TransformerEncoderLayer(4, 4, 6, 0.0, "relu", EPS, batch_first=True)
        self.head = torch.nn.Linear(4, 3)

    def forward(self, x: Any) -> Any:
        return self.head(self.layer(x).mean(1)).softmax(-1)


class Recurrent(torch.nn.Module):
    shape = (3, 5, 2)

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.head = torch.nn.LSTM(2, 3, batch_first=True), torch.nn.Linear(3, 3)

    def forward(self, x: Any) -> Any:
        return self.head(self.cell(x)[0][:, -1])


NETWORKS = (Convolutional, Transformer, Recurrent)


class WithLoss(torch.nn.Module):
    def __init__(self, net: Any) -> None:
        super().__init__()
        self.net = net

    def forward(self, x: Any, t: Any) -> Any:
        y = self.net(x)
        return y, torch.nn.functional.cross_entropy(y, t)


@pytest.fixture(scope="module", params=NETWORKS, ids=lambda network: network.__name__)
def network(request: pytest.FixtureRequest) -> tuple[onnx.ModelProto, Any, dict[str, Any]]:
    """The network with a loss as a file, the same in PyTorch, and a batch in float64."""
    torch.manual_seed(0)
    module = WithLoss(request.param()).eval()
    with torch.no_grad():
        for values in (*module.parameters(), *module.buffers()):
            if values.is_floating_point():
                values.copy_(torch.rand(values.shape) + 0.1)  # no two alike: exporters make one of equal ones
    x, t = torch.randn(request.param.shape), torch.arange(request.param.shape[0]) % 3
    file, rows = io.BytesIO(), {0: "samples"}
    names: dict[str, Any] = {"input_names": ["x", "t"], "output_names": ["y", "loss"]}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # this exporter is the old one, which is quick
        torch.onnx.export(module, (x, t), file, **names, dynamic_axes=dict.fromkeys("xt", rows), dynamo=False)
    return onnx.load_from_string(file.getvalue()), module.double(), {"x": x.double(), "t": t}


def function_of(module: Any, batch: dict[str, Any], wrt: list[str], output: int) -> tuple[Callable[..., Any], Any]:
    """An output as a function of some weights and inputs, and where it is taken."""
    values = {**{k: v.detach() for k, v in module.named_parameters()}, **batch}

    def function(*at: Any) -> Any:
        given = {**values, **dict(zip(wrt, at, strict=True))}
        weights = {k: v for k, v in given.items() if k not in batch}
        return torch.func.functional_call(module, weights, tuple(given[k] for k in batch))[output]

    return function, tuple(values[k] for k in wrt)


def computed(model: onnx.ModelProto, batch: dict[str, Any]) -> dict[str, np.ndarray]:
    """The outputs in float64; onnxruntime gives the same in float32."""
    onnx.checker.check_model(model, full_check=True)
    feeds = {k: v.numpy() for k, v in batch.items()}
    found = Oracle(in_float64(model))(feeds)
    narrow = run(model, {k: v.astype(np.float32) if v.dtype == np.float64 else v for k, v in feeds.items()})
    for name, value in found.items():
        np.testing.assert_allclose(narrow[name], value, rtol=1e-3, atol=1e-5)
    return found


def weights_of(model: onnx.ModelProto, module: Any, most: int) -> list[str]:
    stored = {t.name for t in model.graph.initializer}
    return [name for name, w in module.named_parameters() if name in stored and w.numel() <= most]


@pytest.mark.parametrize("mode", ["reverse", "forward"])
def test_jacobian(network: Any, mode: Any) -> None:
    model, module, batch = network
    wrt = [weights_of(model, module, most=18)[0], "x"]
    function, at = function_of(module, batch, wrt, 0)
    expected = torch.autograd.functional.jacobian(function, at)
    found = computed(gg.jacobian(model, output="y", wrt=wrt, mode=mode), batch)
    for name, block in zip(wrt, expected, strict=True):
        np.testing.assert_allclose(found[f"{name}.jacobian"], block.numpy(), rtol=1e-9, atol=1e-10)
    own = computed(gg.jacobian(model, output="y", wrt="x", mode=mode, per_sample=True), batch)["x.jacobian"]
    each = range(len(batch["x"]))
    np.testing.assert_allclose(own, expected[1].numpy()[each, :, each], rtol=1e-9, atol=1e-10)


def test_hessian(network: Any) -> None:
    model, module, batch = network
    wrt = weights_of(model, module, most=18)[-2:]
    function, at = function_of(module, batch, wrt, 1)
    expected = torch.autograd.functional.hessian(function, at)
    found = computed(gg.hessian(model, output="loss", wrt=wrt), batch)
    for i, a in enumerate(wrt):
        for k, b in enumerate(wrt):
            block = found[f"{a}.hessian" if i == k else f"{a}.{b}.hessian"]
            np.testing.assert_allclose(block, expected[i][k].numpy(), rtol=1e-9, atol=1e-10)


def test_hessian_of_each_sample() -> None:
    model = onnx.parser.parse_model("""<ir_version: 10, opset_import: ["" : 21]>
        g (double[n, 3] x, double[n, 2] z) => (double[n] e) {
        a = MatMul(x, w) t = Tanh(a) m = Mul(t, z) s = Exp(m) axes = Constant<value_ints = [1]>()
        e = ReduceSum<keepdims = 0>(s, axes) }""")
    w = np.random.default_rng(0).normal(size=(3, 2))
    model.graph.initializer.append(onnx.numpy_helper.from_array(w, "w"))
    x, z = torch.randn(4, 3, dtype=torch.float64), torch.randn(4, 2, dtype=torch.float64)
    energy = lambda x, z: ((x @ torch.from_numpy(w)).tanh() * z).exp().sum()  # noqa: E731
    expected = [torch.autograd.functional.hessian(energy, rows) for rows in zip(x, z, strict=True)]
    found = run(gg.hessian(model, wrt=["x", "z"], per_sample=True), {"x": x.numpy(), "z": z.numpy()})
    for i, a in enumerate("xz"):
        for k, b in enumerate("xz"):
            block = found[f"{a}.hessian" if a == b else f"{a}.{b}.hessian"]
            np.testing.assert_allclose(block, [own[i][k].numpy() for own in expected], rtol=1e-9, atol=1e-12)


def test_gradients_of_each_sample(network: Any) -> None:
    model, module, batch = network
    wrt = [*weights_of(model, module, most=1000), "x"]
    found = computed(gg.per_sample_gradients(model, output="loss", wrt=wrt), batch)
    for i in range(len(batch["x"])):
        function, at = function_of(module, {k: v[i : i + 1] for k, v in batch.items()}, wrt, 1)
        at = tuple(v.requires_grad_() for v in at)
        loss = function(*at)
        np.testing.assert_allclose(found["loss.per_sample"][i], loss.item(), rtol=1e-9)
        for name, gradient in zip(wrt, torch.autograd.grad(loss, at), strict=True):
            row = found[f"{name}.per_sample_grad"][i]
            np.testing.assert_allclose(row, gradient.numpy().reshape(row.shape), rtol=1e-9, atol=1e-10)

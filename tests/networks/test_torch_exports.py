"""Models exported from PyTorch, by ``from_torch`` and by its own exporters: gradients and losses are PyTorch's own."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

import gradgraph as gg
from gradgraph import optim
from tests.kit.running import Loop, run

torch = pytest.importorskip("torch", reason="compares with PyTorch")
pytestmark = [pytest.mark.torch, pytest.mark.slow]


class Residual(torch.nn.Module):
    """Two convolutions with batch normalisation around a shortcut; the second is depthwise."""

    def __init__(self, channels: int, width: int) -> None:
        super().__init__()
        self.expand = torch.nn.Conv2d(channels, width, 3, stride=2, padding=1, bias=False)
        self.norm1 = torch.nn.BatchNorm2d(width)
        self.depthwise = torch.nn.Conv2d(width, width, 3, padding=1, groups=width)
        self.norm2 = torch.nn.BatchNorm2d(width)
        self.shortcut = torch.nn.Conv2d(channels, width, 1, stride=2)

    def forward(self, x: Any) -> Any:
        y = torch.nn.functional.silu(self.norm1(self.expand(x)))
        return torch.relu(self.norm2(self.depthwise(y)) + self.shortcut(x))


class ConvNet(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = torch.nn.Conv2d(3, 8, 5, padding=2)
        self.pool = torch.nn.MaxPool2d(3, 2, 1)
        self.blocks = torch.nn.Sequential(Residual(8, 16), Residual(16, 24))
        self.drop = torch.nn.Dropout(0.0)
        self.head = torch.nn.Linear(24, 5)

    def forward(self, x: Any) -> Any:
        x = self.blocks(self.pool(torch.nn.functional.gelu(self.stem(x))))
        return self.head(self.drop(x.mean((2, 3))))


class Classifier(torch.nn.Module):
    """A transformer encoder over tokens, with learned positions and mean pooling."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = torch.nn.Embedding(40, 32)
        self.positions = torch.nn.Parameter(torch.randn(1, 12, 32) * 0.1)
        layer = torch.nn.TransformerEncoderLayer(32, 4, 64, 0.0, "gelu", batch_first=True, norm_first=True)
        self.encoder = torch.nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = torch.nn.Linear(32, 5)

    def forward(self, x: Any) -> Any:
        return self.head(self.encoder(self.tokens(x) + self.positions).mean(1))


def images(rng: np.random.Generator, n: int) -> np.ndarray:
    return rng.normal(size=(n, 3, 20, 20)).astype(np.float32)


def tokens(rng: np.random.Generator, n: int) -> np.ndarray:
    return rng.integers(0, 40, (n, 12))


NETWORKS: dict[str, tuple[Callable[[], Any], Callable[[np.random.Generator, int], np.ndarray]]] = {
    "convolutional": (ConvNet, images),
    "transformer": (Classifier, tokens),
}


@pytest.fixture(scope="module", params=NETWORKS)
def network(request: pytest.FixtureRequest) -> tuple[Any, Any, Any]:
    """The PyTorch module, its export, and what draws its inputs."""
    make, draw = NETWORKS[request.param]
    torch.manual_seed(0)
    module = make().eval()
    example = torch.tensor(draw(np.random.default_rng(0), 2))
    return module, gg.frontend.from_torch(module, (example,), input_names=["x"]), draw


def test_every_parameter_keeps_its_name(network: tuple[Any, Any, Any]) -> None:
    module, model, _ = network
    step = gg.build(model, "cross_entropy", "sgd")
    assert set(step.manifest.trainable) == {name for name, _ in module.named_parameters()}


@pytest.mark.parametrize("batch", [1, 3])
def test_gradients_agree(network: tuple[Any, Any, Any], batch: int) -> None:
    module, model, draw = network
    module = module.eval()
    x = draw(np.random.default_rng(1), batch)
    names = [name for name, _ in module.named_parameters()]
    output = model.graph.output[0].name
    cotangent = np.random.default_rng(2).normal(size=(batch, 5)).astype(np.float32)
    ours = run(gg.vjp(model, wrt=names), {"x": x, f"{output}.cotangent": cotangent})
    module.zero_grad()
    module(torch.tensor(x)).backward(torch.tensor(cotangent))
    for name, parameter in module.named_parameters():
        expected = parameter.grad.numpy()
        error = np.linalg.norm(ours[f"{name}.grad"] - expected) / max(np.linalg.norm(expected), 1e-6)
        assert error < 1e-4, name


def test_losses_follow_torch_at_changing_batch_sizes(network: tuple[Any, Any, Any]) -> None:
    module, model, draw = network
    module = module.train()
    loop = Loop(gg.build(model, "cross_entropy", optim.adamw(2e-3)))
    optimizer = torch.optim.AdamW(module.parameters(), lr=2e-3, weight_decay=1e-2)
    rng = np.random.default_rng(3)
    for size in (8, 8, 5, 8, 3, 8):
        x, labels = draw(rng, size), rng.integers(0, 5, size)
        optimizer.zero_grad()
        expected = torch.nn.functional.cross_entropy(module(torch.tensor(x)), torch.tensor(labels))
        expected.backward()
        optimizer.step()
        np.testing.assert_allclose(loop({"x": x, "target": labels})["loss"], expected.detach().numpy(), rtol=1e-4)


# --- files that PyTorch's own exporters write --------------------------------------------------------------


class Rotary(torch.nn.Module):
    """Attention with rotated queries and keys; the frequencies are a buffer, the tables of cosines are folded."""

    shape = (2, 6, 16)

    def __init__(self) -> None:
        super().__init__()
        self.split, self.join = torch.nn.Linear(16, 48), torch.nn.Linear(16, 16, bias=False)
        self.register_buffer("inv_freq", 100.0 ** -torch.arange(0, 1, 0.5))

    def forward(self, x: Any) -> Any:
        angles = (torch.arange(6)[:, None] * self.inv_freq).repeat(1, 2)

        def turned(t: Any) -> Any:
            return t * angles.cos() + torch.cat([-t[..., 2:], t[..., :2]], -1) * angles.sin()

        q, k, v = (t.unflatten(-1, (4, 4)).transpose(1, 2) for t in self.split(x).chunk(3, -1))
        scores = turned(q) @ turned(k).transpose(-1, -2) / math.sqrt(4)
        scores = scores.masked_fill(torch.ones(6, 6).triu(1) > 0, -torch.inf)
        return self.join((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))


class Graph(torch.nn.Module):
    """Attention over the edges of a graph: gathers, a maximum and sums by scattering."""

    shape = (6, 4)

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.weight = torch.nn.Linear(4, 8), torch.nn.Parameter(torch.randn(16))
        self.register_buffer("edges", torch.randint(0, 6, (2, 20)))

    def forward(self, x: Any) -> Any:
        h, (source, sink) = self.linear(x), self.edges
        logits = torch.nn.functional.leaky_relu(torch.cat([h[source], h[sink]], 1) @ self.weight, 0.2)
        largest = torch.full((6,), -1e9, dtype=x.dtype).scatter_reduce(0, sink, logits, "amax")
        weights = (logits - largest[sink]).exp()
        total = torch.zeros(6, dtype=x.dtype).scatter_add(0, sink, weights)
        parts = h[source] * (weights / total[sink])[:, None]
        return torch.zeros_like(h).scatter_add(0, sink[:, None].expand(-1, 8), parts)


class Hourglass(torch.nn.Module):
    """Down and up again: strides, a transposed convolution, bilinear resizing, norms of instances and groups."""

    shape = (2, 3, 12, 12)

    def __init__(self) -> None:
        super().__init__()
        self.down = torch.nn.Sequential(torch.nn.ReflectionPad2d(1), torch.nn.Conv2d(3, 8, 3, 2), torch.nn.GELU())
        self.norm = torch.nn.InstanceNorm2d(8, affine=True)
        self.up, self.groups = torch.nn.ConvTranspose2d(8, 8, 3, 2, 1, 1), torch.nn.GroupNorm(1, 11)
        self.head = torch.nn.Conv2d(11, 2, 1)

    def forward(self, x: Any) -> Any:
        y = torch.nn.functional.avg_pool2d(self.norm(self.down(x)), 2)
        y = torch.nn.functional.interpolate(y, scale_factor=2, mode="bilinear", align_corners=False)
        return self.head(self.groups(torch.cat([self.up(y), x], 1)))


class Tagger(torch.nn.Module):
    """Two layers of LSTM in both directions, from a learnt state."""

    shape = (3, 5, 4)

    def __init__(self) -> None:
        super().__init__()
        self.lstm = torch.nn.LSTM(4, 6, 2, batch_first=True, bidirectional=True)
        self.state, self.head = torch.nn.Parameter(torch.randn(2, 4, 3, 6)), torch.nn.Linear(12, 5)

    def forward(self, x: Any) -> Any:
        return self.head(self.lstm(x, tuple(self.state))[0]).log_softmax(-1)


EXPORTERS: dict[str, dict[str, Any]] = {
    "TorchScript": {"dynamo": False, "opset_version": 17},
    "dynamo": {"dynamo": True, "verbose": False},
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("exporter", EXPORTERS)
@pytest.mark.parametrize("make", [Rotary, Graph, Hourglass, Tagger])
def test_files_of_the_exporters(make: Any, exporter: str, tmp_path: Path) -> None:
    """The input, and the parameters that the file has kept, get PyTorch's gradients; no table is trained."""
    torch.manual_seed(0)
    module, x, path = make().eval(), torch.randn(*make.shape), tmp_path / "model.onnx"
    torch.onnx.export(module, (x,), str(path), input_names=["x"], **EXPORTERS[exporter])
    model = onnx.load(path)
    kept = {t.name: tuple(t.dims) for t in model.graph.initializer}
    names = [n for n, p in module.named_parameters() if kept.get(n) == p.shape]
    if exporter == "dynamo":  # the other one does not say where what it folded comes from
        trained = [o.type.tensor_type.shape.dim for o in gg.vjp(model).graph.output[1:]]
        sizes = [math.prod(d.dim_value for d in dims) for dims in trained]
        assert sum(sizes) == sum(p.numel() for p in module.parameters())
    output = model.graph.output[0].name
    cotangent = torch.randn(module(x).shape)
    ours = run(gg.vjp(model, wrt=["x", *names]), {"x": x.numpy(), f"{output}.cotangent": cotangent.numpy()})
    module, x = module.double(), x.double().requires_grad_()
    module(x).backward(cotangent.double())
    wanted = {"x": x.grad, **{n: p.grad for n, p in module.named_parameters() if n in names}}
    assert len(wanted) > 1
    for name, expected in wanted.items():
        error = np.linalg.norm(ours[f"{name}.grad"] - expected.numpy()) / np.linalg.norm(expected.numpy())
        assert error < 1e-5, name

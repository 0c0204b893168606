"""Models exported from PyTorch with a dynamic batch: gradients and training losses are PyTorch's own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from running import Loop, run

import gradgraph as gg
from gradgraph import optim

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

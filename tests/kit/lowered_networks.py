"""Small networks of each kind for which lowering has forms, with steps and data."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import onnx

import gradgraph as gg
from gradgraph.frontend import Input, Module, nn
from gradgraph.frontend import functional as F


def block(c: int, k: int, **how: Any) -> Module:
    return nn.Sequential(nn.Conv2d(c, k, 3, bias=False, **how), nn.BatchNorm2d(k), nn.ReLU())


class Residual(Module):
    """A stem, two residual blocks with and without a stride, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 16, 7, stride=2, padding=3), nn.MaxPool2d(3, 2, 1))
        self.a, self.b = block(16, 16, padding=1), block(16, 32, padding=1, stride=2)
        self.short = nn.Conv2d(16, 32, 1, stride=2)
        self.head = nn.Linear(32, 4)

    def forward(self, x: Any) -> Any:
        x = self.stem(x)
        x = F.relu(x + self.a(x))
        x = F.relu(self.short(x) + self.b(x))
        return self.head(F.adaptive_avg_pool2d(x, 1).flatten(1))


class Separable(Module):
    """Inverted residuals: 1x1, depthwise with and without a stride, 1x1."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(3, 16, 3, stride=2, padding=1), nn.ReLU6(), nn.Conv2d(16, 48, 1, bias=False), nn.BatchNorm2d(48),
            nn.ReLU6(), nn.Conv2d(48, 48, 3, padding=1, groups=48), nn.Hardswish(),
            nn.Conv2d(48, 48, 3, stride=2, padding=1, groups=48), nn.SiLU(), nn.Conv2d(48, 24, 1), nn.AvgPool2d(2),
        )  # fmt: skip
        self.head = nn.Linear(24 * 16, 4)

    def forward(self, x: Any) -> Any:
        return self.head(self.layers(x).flatten(1))


class UNet(Module):
    """A small U-Net: downsampling, upsampling by a transposed convolution, and a skip connection by concatenation."""

    def __init__(self) -> None:
        super().__init__()
        self.down, self.deep = block(3, 16, padding=1), block(16, 32, padding=1)
        self.up = nn.ConvTranspose2d(32, 16, 2, stride=2)
        self.across, self.head = block(32, 16, padding=1), nn.Conv2d(16, 4, 1)

    def forward(self, x: Any) -> Any:
        kept = self.down(x)
        deep = self.deep(F.max_pool2d(kept, 2))
        return self.head(self.across(F.concat([self.up(deep), kept], 1)))


class Transformer(Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, 32)
        self.layers = nn.TransformerEncoder(nn.TransformerEncoderLayer(32, 4, 64, 0.0, "gelu", batch_first=True), 2)
        self.head = nn.Linear(32, 50)

    def forward(self, ids: Any) -> Any:
        return self.head(self.layers(self.embed(ids))).reshape(-1, 50)


class Recurrent(Module):
    def __init__(self, kind: type[Module]) -> None:
        super().__init__()
        self.layers, self.head = kind(12, 16, num_layers=2, batch_first=True), nn.Linear(16, 4)

    def forward(self, x: Any) -> Any:
        return self.head(self.layers(x)[0][:, -1])


IMAGE, SEQUENCE = (3, 32, 32), (9, 12)
# network, sizes of a sample, sizes of its labels
NETWORKS: Mapping[str, tuple[Callable[[], Module], tuple[int, ...], tuple[int, ...]]] = {
    "residual": (Residual, IMAGE, ()),
    "separable": (Separable, IMAGE, ()),
    "u-net": (UNet, IMAGE, (32, 32)),
    "transformer": (Transformer, (11,), (11,)),
    "lstm": (lambda: Recurrent(nn.LSTM), SEQUENCE, ()),
    "gru": (lambda: Recurrent(nn.GRU), SEQUENCE, ()),
    "mlp": (lambda: nn.Sequential(nn.Linear(12, 32), nn.GELU(), nn.LayerNorm(32), nn.Linear(32, 4)), (12,), ()),
}


def batches(name: str, rows: int, count: int) -> list[dict[str, np.ndarray]]:
    rng = np.random.default_rng(0)
    _, sample, label = NETWORKS[name]
    if name == "transformer":
        shapes = [(rng.integers(0, 50, (rows, *sample)), rng.integers(0, 50, rows * 11)) for _ in range(count)]
        return [{"x": x, "target": y} for x, y in shapes]
    return [
        {"x": rng.normal(size=(rows, *sample)).astype(np.float32), "target": rng.integers(0, 4, (rows, *label))}
        for _ in range(count)
    ]


def exported(name: str, rows: int | str) -> onnx.ModelProto:
    make, sample, _ = NETWORKS[name]
    gg.frontend.manual_seed(0)  # a fixed seed, as a value near the kink of a Relu might be rounded to its other side
    spec = Input((rows, *sample), "int64") if name == "transformer" else (rows, *sample)
    return gg.frontend.export(make(), {"x": spec})


def step(name: str, rows: int | str, optimizer: gg.optim.Optimizer) -> gg.Step:
    return gg.build(exported(name, rows), "cross_entropy", optimizer)


def feeds_of(model: onnx.ModelProto, batch: Mapping[str, np.ndarray], state: Mapping[str, Any]) -> dict[str, Any]:
    rates = {"learning_rate": np.array(0.05, np.float32)}
    return {v.name: {**rates, **batch, **state}[v.name] for v in model.graph.input}

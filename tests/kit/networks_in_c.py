"""The networks and optimizers that are trained in C beside onnxruntime."""

from __future__ import annotations

import functools
from typing import Any

import onnx

import gradgraph as gg
from gradgraph.frontend import Input, export, manual_seed, nn
from gradgraph.step.step import Step
from tests.kit.trained_c import CLASSES

BATCH = 3


class LastState(nn.Module):
    def __init__(self, layer: Any) -> None:
        super().__init__()
        self.layer, self.head = layer(5, 6, batch_first=True), nn.Linear(6, CLASSES)

    def forward(self, x: Any) -> Any:
        return self.head(self.layer(x)[0][:, -1])


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(9, 8)
        self.block = nn.TransformerEncoderLayer(8, 2, 12, dropout=0.0, batch_first=True, activation="gelu")
        self.head = nn.Linear(8, CLASSES)

    def forward(self, x: Any) -> Any:
        return self.head(self.block(self.tokens(x)).mean(1))


class Residual(nn.Module):
    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.Sequential(*layers)

    def forward(self, x: Any) -> Any:
        return x + self.layers(x)


class ChannelsLast(nn.Module):
    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.Sequential(*layers)

    def forward(self, x: Any) -> Any:
        return self.layers(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


def separable(before: int, after: int, stride: int = 1) -> list[nn.Module]:
    depthwise = nn.Conv2d(before, before, 3, stride, 1, groups=before, bias=False)
    pointwise = nn.Conv2d(before, after, 1, bias=False)
    return [depthwise, nn.BatchNorm2d(before), nn.ReLU6(), pointwise, nn.BatchNorm2d(after), nn.ReLU()]


def head(channels: int) -> list[nn.Module]:
    return [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, CLASSES)]


def _networks() -> dict[str, tuple[nn.Module, Any]]:
    """Return networks with their inputs, without a batch axis of another size than BATCH."""
    images = (BATCH, 2, 8, 8)
    block = Residual(
        nn.Conv2d(4, 4, 7, padding=3, groups=4),
        ChannelsLast(nn.LayerNorm(4), nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 4)),
    )
    residual = Residual(nn.Conv2d(4, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4), nn.ReLU())
    return {
        "mlp": (nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, CLASSES)), (BATCH, 6)),
        "cnn": (nn.Sequential(nn.Conv2d(2, 4, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(4, 4, 3, 2),
                              nn.Tanh(), nn.Flatten(), nn.Linear(4, CLASSES)), images),
        "mobile": (nn.Sequential(nn.Conv2d(2, 4, 3, 2, 1), *separable(4, 4), *separable(4, 6, 2), *head(6)), images),
        "convnext": (nn.Sequential(nn.Conv2d(2, 4, 2, 2), block, *head(4)), images),
        "transformer": (Encoder(), Input((BATCH, 5), "int64")),
        "lstm": (LastState(nn.LSTM), (BATCH, 4, 5)),
        "gru": (LastState(nn.GRU), (BATCH, 4, 5)),
        "resnet": (nn.Sequential(nn.Conv2d(2, 4, 3, padding=1), nn.MaxPool2d(3, 2, 1), residual, *head(4)), images),
        "autoencoder": (nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 6)), (BATCH, 6)),
        "dscnn": (nn.Sequential(nn.Conv2d(2, 4, (4, 2), 2, (1, 0)), nn.BatchNorm2d(4), nn.ReLU(), nn.Dropout(0.2),
                                *separable(4, 4), nn.AvgPool2d(2), nn.Flatten(), nn.Linear(16, CLASSES)), images),
    }  # fmt: skip


NETWORKS = ("mlp", "cnn", "mobile", "convnext", "transformer", "lstm", "gru", "resnet", "autoencoder", "dscnn")
OPTIMIZERS = {
    "sgd": lambda: gg.optim.sgd(0.05),
    "momentum": lambda: gg.optim.sgd(0.05, momentum=0.9, nesterov=True),
    "adamw": lambda: gg.optim.adamw(gg.optim.warmup(5, gg.optim.cosine(1e-3, 20))),
    "clip": lambda: gg.optim.chain(gg.optim.clip_by_global_norm(1.0), gg.optim.lion(1e-3)),
    "schedule_free": lambda: gg.optim.schedule_free_adamw(1e-3),
}


@functools.cache
def network(name: str) -> onnx.ModelProto:
    manual_seed(0)
    net, shape = _networks()[name]
    return export(net, {"x": shape}, outputs=["y"])


def step_of(name: str, optimizer: str = "sgd") -> Step:
    return gg.build(network(name), "mse" if name == "autoencoder" else "cross_entropy", OPTIMIZERS[optimizer]())

"""The models that are timed, each twice: written with gradgraph.frontend and with PyTorch, with the same weights."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

import gradgraph as gg
from gradgraph.frontend import nn as gnn

Nn = Any  # gradgraph.frontend.nn or torch.nn: the same code builds both


@dataclass(frozen=True)
class Workload:
    """One row of the table.

    Args:
        title: what is trained, with its sizes.
        make: builds the network from ``gradgraph.frontend.nn`` or ``torch.nn``.
        inputs: the frontend's input specification.
        batch: draws a batch: the input and the labels.
        axis: of the classes.
    """

    title: str
    make: Callable[[Nn], Any]
    inputs: dict[str, Any]
    batch: Callable[[np.random.Generator], tuple[np.ndarray, np.ndarray]]

    def networks(self) -> tuple[Any, torch.nn.Module]:
        gg.frontend.manual_seed(0)
        ours, theirs = self.make(gnn), self.make(torch.nn)
        state = {k: torch.tensor(v) for k, v in ours.state_dict().items()}
        theirs.load_state_dict(state, strict=False)
        return ours, theirs


def mlp(nn: Nn) -> Any:
    return nn.Sequential(nn.Linear(784, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10))


def cnn(nn: Nn) -> Any:
    return nn.Sequential(
        nn.Conv2d(1, 32, 5, padding=2),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(32, 64, 5, padding=2),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(64 * 7 * 7, 128),
        nn.ReLU(),
        nn.Linear(128, 10),
    )


def residual(nn: Nn) -> Any:
    """Convolutions with batch normalisation, as in a ResNet's first stage."""

    def block(channels: int, width: int, stride: int) -> list[Any]:
        return [nn.Conv2d(channels, width, 3, stride=stride, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU()]

    return nn.Sequential(
        *block(3, 32, 1),
        *block(32, 32, 1),
        *block(32, 64, 2),
        *block(64, 64, 1),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(64, 10),
    )


def transformer(nn: Nn) -> Any:
    layers = [nn.TransformerEncoderLayer(128, 4, 512, dropout=0.0, batch_first=True, norm_first=True) for _ in range(2)]
    return nn.Sequential(nn.Embedding(1000, 128), *layers, nn.Flatten(0, 1), nn.Linear(128, 1000))


def _images(n: int, *shape: int) -> Callable[[np.random.Generator], tuple[np.ndarray, np.ndarray]]:
    return lambda rng: (rng.normal(size=(n, *shape)).astype(np.float32), rng.integers(0, 10, n))


def _tokens(n: int, length: int) -> Callable[[np.random.Generator], tuple[np.ndarray, np.ndarray]]:
    return lambda rng: (rng.integers(0, 1000, (n, length)), rng.integers(0, 1000, n * length))


WORKLOADS = {
    "mlp": Workload("MLP 784-512-512-10, batch 128", mlp, {"x": ("batch", 784)}, _images(128, 784)),
    "cnn": Workload("CNN 2 x conv5x5, batch 64", cnn, {"x": ("batch", 1, 28, 28)}, _images(64, 1, 28, 28)),
    "residual": Workload(
        "4 x conv3x3+BN, 32 px, batch 32", residual, {"x": ("batch", 3, 32, 32)}, _images(32, 3, 32, 32)
    ),
    "transformer": Workload(
        "2 encoder layers D128, T64, batch 16",
        transformer,
        {"x": gg.frontend.Input(("batch", 64), "int64")},
        _tokens(16, 64),
    ),
}

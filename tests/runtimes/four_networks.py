"""The four networks of the matrix of runtimes, and what they are trained on.

Small, but with what networks are made of: products and momentum; convolutions, BatchNormalization, MaxPool and Dropout
under AdamW; a recurrent layer under Adam; attention, LayerNormalization and Dropout under AdamW.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx

import gradgraph as gg
from gradgraph.frontend import Input, export, manual_seed, nn
from gradgraph.optim import Optimizer
from gradgraph.step.step import Step

STEPS = 20
BATCH = 16
CLASSES = 5
VOCABULARY, TIME = 11, 6

Shape = tuple[int | str, ...]
Batch = dict[str, np.ndarray]


class Mlp(nn.Module):
    """Three linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 16), nn.Tanh(), nn.Linear(16, CLASSES))

    def forward(self, x: Any) -> Any:
        return self.layers(x)


class Cnn(nn.Module):
    """Two convolutions with batch statistics, pools of two kinds, dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Conv2d(1, 6, 3, padding=1), nn.BatchNorm2d(6), nn.ReLU(), nn.MaxPool2d(2))
        self.second = nn.Sequential(nn.Conv2d(6, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU())
        self.pool = nn.MaxPool2d(3, stride=2, padding=1)
        self.drop = nn.Dropout(0.25)
        self.head = nn.Linear(8 * 2 * 2, CLASSES)

    def forward(self, x: Any) -> Any:
        x = self.pool(self.second(self.first(x)))
        return self.head(self.drop(x.reshape(x.shape[0], -1)))


class Lstm(nn.Module):
    """Words to a class by the last state of an LSTM."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, 6)
        self.lstm = nn.LSTM(6, 8, batch_first=True)
        self.head = nn.Linear(8, CLASSES)

    def forward(self, x: Any) -> Any:
        _, (h, _) = self.lstm(self.embed(x))
        return self.head(h[0])


class Transformer(nn.Module):
    """Two layers of self-attention with dropout, and the mean over time."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, 16)
        self.positions = nn.Parameter(np.zeros((TIME, 16)))
        layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.1, activation="gelu", batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2)
        self.head = nn.Linear(16, CLASSES)

    def forward(self, x: Any) -> Any:
        return self.head(self.encoder(self.embed(x) + self.positions).mean(1))


@dataclass(frozen=True)
class Network:
    """One of the four.

    Attributes:
        about: what is in it, in a few words.
        made: the module.
        size: of a sample; of words if ``reads_words``, else of numbers.
        optimizer: what trains it.
    """

    about: str
    made: Callable[[], nn.Module]
    size: tuple[int, ...]
    reads_words: bool
    optimizer: Callable[[], Optimizer]

    def model(self, fixed: bool) -> onnx.ModelProto:
        """The network in a file, for batches of any size or of ``BATCH``."""
        manual_seed(0)
        shape: Shape = (BATCH if fixed else "batch", *self.size)
        return export(self.made(), {"x": Input(shape, "int64") if self.reads_words else shape}, outputs=["logits"])

    def step(self, backend: str, fixed: bool, **options: Any) -> Step:
        """Built for a backend, with further ``options`` of ``gg.build``."""
        given = {"optimizer": self.optimizer(), "seed": 7, **options}
        return gg.build(self.model(fixed), "cross_entropy", backend=backend, **given)

    def batches(self, fixed: bool) -> list[Batch]:
        """Twenty of them that can be learned; of open sizes, some are smaller than others."""
        rng = np.random.default_rng(5)
        return [self._batch(rng, BATCH if fixed or i % 5 else BATCH - 5) for i in range(STEPS)]

    def _batch(self, rng: np.random.Generator, count: int) -> Batch:
        target = rng.integers(0, CLASSES, count)
        if self.reads_words:
            x = rng.integers(0, VOCABULARY - CLASSES, (count, *self.size)) + target[:, None]
        else:
            x = (rng.normal(size=(count, *self.size)) + target.reshape(-1, *[1] * len(self.size)) / 2).astype(
                np.float32
            )
        return {"x": x, "target": target}


NETWORKS = {
    "MLP": Network("linear layers, SGD with momentum", Mlp, (8,), False, lambda: gg.optim.sgd(0.1, momentum=0.9)),
    "CNN": Network("BatchNorm, MaxPool, Dropout, AdamW", Cnn, (1, 8, 8), False, lambda: gg.optim.adamw(5e-3)),
    "LSTM": Network("embedding, LSTM, Adam", Lstm, (TIME,), True, lambda: gg.optim.adam(3e-2)),
    "transformer": Network("attention, Dropout, AdamW", Transformer, (TIME,), True, lambda: gg.optim.adamw(5e-3)),
}

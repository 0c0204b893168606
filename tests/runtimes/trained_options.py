"""The second axis of the matrix of runtimes: options of ``gg.build``, and networks with what the four have not.

Each case is one network of fixed sizes. It is trained as ``feeding.py`` does, by init.onnx and train.onnx (and
gradient.onnx and apply.onnx, where there are such), and then evaluated by eval.onnx.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import gradgraph as gg
from gradgraph.frontend import functional as F
from gradgraph.frontend import nn
from gradgraph.step.step import Step
from tests.runtimes.four_networks import CLASSES, NETWORKS, Batch, Network


class Depthwise(nn.Module):
    """A convolution for each channel of its own, one of several filters each, one in groups, one that is dilated."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(1, 4, 3, padding=1),
            nn.Conv2d(4, 4, 3, padding=1, groups=4), nn.ReLU(),
            nn.Conv2d(4, 8, 3, stride=2, padding=1, groups=4), nn.ReLU(),
            nn.Conv2d(8, 6, 3, padding=2, dilation=2, groups=2), nn.ReLU(),
        )  # fmt: skip
        self.head = nn.Linear(6, CLASSES)

    def forward(self, x: Any) -> Any:
        return self.head(self.layers(x).mean((2, 3)))


class Drawn(nn.Module):
    """Draws a code around a mean, as a variational autoencoder does, also in evaluation."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Linear(8, 12)
        self.head = nn.Linear(6, CLASSES)

    def forward(self, x: Any) -> Any:
        mean, log_variance = self.encoder(x).chunk(2, 1)
        return self.head(mean + (log_variance / 2).exp() * F.randn_like(mean))


def _adamw() -> Any:
    return gg.optim.adamw(1e-2)


def _clipped() -> Any:
    return gg.optim.chain(
        gg.optim.clip_by_global_norm(0.5), gg.optim.adamw(gg.optim.warmup(5, gg.optim.cosine(1e-2, 20)))
    )


@dataclass(frozen=True)
class Case:
    """One network with options.

    Attributes:
        network: what is trained.
        options: of ``gg.build``, made anew for each step.
        draws: eval.onnx draws random numbers, which are others in each runtime.
        atol: within which losses are equal.
    """

    network: Network
    options: Callable[[], Mapping[str, Any]] = dict
    draws: bool = False
    atol: float = 1e-4

    def step(self, backend: str) -> Step:
        return self.network.step(backend, True, **self.options())

    def batches(self) -> list[Batch]:
        return self.network.batches(True)


_MLP = NETWORKS["MLP"]
CASES = {
    "ema": Case(_MLP, lambda: {"ema": 0.9}),
    "grad_norm": Case(_MLP, lambda: {"grad_norm": True}),
    "separate": Case(_MLP, lambda: {"optimizer": _adamw(), "separate": True}),
    "clip and schedule": Case(_MLP, lambda: {"optimizer": _clipped()}),
    "accumulate": Case(_MLP, lambda: {"optimizer": _adamw(), "accumulate": True}),
    "schedule_free": Case(_MLP, lambda: {"optimizer": gg.optim.schedule_free_adamw(1e-2)}),
    "lookahead": Case(_MLP, lambda: {"optimizer": gg.optim.lookahead(_adamw(), 3)}),
    "sam": Case(_MLP, lambda: {"optimizer": gg.optim.sam(_adamw())}),
    "pruning": Case(_MLP, lambda: {"optimizer": gg.optim.magnitude_pruning(_adamw(), 0.5, begin=2, end=12, every=2)}),
    "frozen": Case(_MLP, lambda: {"freeze": "layers.0.*"}),
    "float16": Case(_MLP, lambda: {"precision": gg.Precision("float16", init_scale=256.0)}, atol=2e-3),
    "depthwise": Case(Network("grouped convolutions", Depthwise, (1, 8, 8), False, _adamw)),
    "LSTM": Case(NETWORKS["LSTM"]),
    "drawn": Case(Network("random codes", Drawn, (8,), False, _adamw), draws=True),
}

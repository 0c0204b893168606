"""Models with several named steps, their data, and the comparison of their trainers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import onnx

import gradgraph as gg
from gradgraph import frontend
from gradgraph.frontend import functional as F
from gradgraph.frontend import nn
from gradgraph.step.step import Step

Tensors = Mapping[str, Any]


class Gan(nn.Module):
    """Noise is drawn in the graph; the discriminator drops."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 2))
        self.discriminator = nn.Sequential(nn.Linear(2, 8), nn.LeakyReLU(0.2), nn.Dropout(0.2), nn.Linear(8, 1))

    def forward(self, image: Any) -> dict[str, Any]:
        fake = self.generator(F.randn(image.shape[0], 3))
        return {"fake": fake, "real_score": self.discriminator(image), "fake_score": self.discriminator(fake)}


def telling_apart(out: Tensors, batch: Tensors) -> dict[str, Any]:
    return {"real": F.softplus(-out["real_score"]).mean(), "made": F.softplus(out["fake_score"]).mean()}


def deceiving(out: Tensors, batch: Tensors) -> Any:
    return F.softplus(-out["fake_score"]).mean()


def steps_of_gan(**more: Any) -> dict[str, gg.StepOptions]:
    return {
        "discriminator": gg.StepOptions(telling_apart, gg.optim.adam(2e-3), train="discriminator.*", **more),
        "generator": gg.StepOptions(
            deceiving, gg.optim.adam(gg.optim.cosine(1e-3, 50)), train="generator.*", ema=0.9, grad_norm=True
        ),
    }


def gan_step() -> Step:
    frontend.manual_seed(0)
    return gg.build(frontend.export(Gan(), {"image": ("rows", 2)}), steps=steps_of_gan(), seed=4)


class Net(nn.Module):
    """A trunk with two heads."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.a, self.b = nn.Linear(3, 5), nn.Linear(5, 2), nn.Linear(5, 2)

    def forward(self, x: Any) -> dict[str, Any]:
        features = self.trunk(x).tanh()
        return {"left": self.a(features), "right": self.b(features)}


def two_heads() -> onnx.ModelProto:
    frontend.manual_seed(1)
    return frontend.export(Net(), {"x": ("rows", 3)})


IMAGES = {"image": np.random.default_rng(0).normal(1, 1, (70, 2)).astype(np.float32)}
LABELLED = {"x": np.random.default_rng(1).normal(size=(40, 3)).astype(np.float32), "target": np.arange(40) % 2}


def same(a: gg.Trainer, b: gg.Trainer) -> None:
    first, second = a.state_dict(), b.state_dict()
    assert all(np.array_equal(value, second[name]) for name, value in first.items())


# --- the folder ------------------------------------------------------------------------------------------------

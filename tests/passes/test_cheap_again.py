"""Cheap functions of what is kept are computed again: the same bits, less memory, and only where it is worth it."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import onnx
import onnx.parser
import pytest
from lowered_networks import feeds_of
from running import run

import gradgraph as gg
from gradgraph.backends.engine import for_machine
from gradgraph.backends.ort_cpu import ORT_CPU, cheap_again
from gradgraph.frontend import export, nn
from gradgraph.frontend import functional as F
from gradgraph.runtime.execution.memory import walked

X = np.random.default_rng(0).standard_normal((2, 8, 6, 6)).astype(np.float32)


class GroupNorm(nn.Module):
    """As exporters of PyTorch write it: groups are rows of an InstanceNormalization."""

    def __init__(self) -> None:
        super().__init__()
        self.ones, self.scale, self.bias = nn.GroupNorm(4, 8), nn.Parameter(np.ones(8)), nn.Parameter(np.zeros(8))
        self.rows = nn.InstanceNorm1d(4, affine=False)

    def forward(self, x: Any) -> Any:
        rows = self.rows(x.reshape(2, 4, -1)).reshape(2, 8, 6, 6)
        return rows * self.scale.reshape(8, 1, 1) + self.bias.reshape(8, 1, 1)


def blocks(norm: Any, activation: Any, layers: int = 3) -> onnx.ModelProto:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.conv = norm(), nn.Conv2d(8, 8, 3, padding=1)

        def forward(self, x: Any) -> Any:
            return x + self.conv(activation(self.norm(x)))

    return export(nn.Sequential(nn.Conv2d(8, 8, 1), *(Block() for _ in range(layers))), {"x": X.shape})


def by_layers() -> onnx.ModelProto:
    layers = (nn.Sequential(nn.LayerNorm(6), nn.Linear(6, 24), nn.GELU(), nn.Linear(24, 6)) for _ in range(3))
    return export(nn.Sequential(*layers), {"x": X.shape})


NETWORKS = {
    "group norm, SiLU": (lambda: blocks(lambda: nn.GroupNorm(4, 8), F.silu), {"InstanceNormalization", "Sigmoid"}),
    "as exporters write it": (lambda: blocks(GroupNorm, F.silu), {"InstanceNormalization", "Sigmoid"}),
    "layer norm, GELU": (by_layers, {"LayerNormalization"}),
}


def lowered(step: gg.Step, monkeypatch: pytest.MonkeyPatch, least: float) -> onnx.ModelProto:
    monkeypatch.setattr(cheap_again, "LEAST", 1)
    monkeypatch.setattr(cheap_again, "LEAST_OF_ALL", least)
    return for_machine(step.train, ORT_CPU)


def copies(model: onnx.ModelProto) -> Counter[str]:
    """The operators that are computed again."""
    names = (n for n in model.graph.node if n.name.startswith("again/") and not n.name.startswith("again/turn"))
    return Counter(node.op_type for node in names if "After" not in node.name)


@pytest.mark.parametrize("name", NETWORKS)
def test_less_is_kept_and_bits_stay(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    make, expected = NETWORKS[name]
    step = gg.build(make(), "mse", gg.optim.sgd(0.05))
    every, few = lowered(step, monkeypatch, np.inf), lowered(step, monkeypatch, 1)
    assert not copies(every) and expected <= set(copies(few))
    activations = [walked(model).peak["activations"] for model in (every, few)]
    assert activations[1] < 0.8 * activations[0]
    state = run(step.init)
    feeds = feeds_of(step.train, {"x": X, "target": X}, state)
    for name, value in run(every, feeds).items():
        np.testing.assert_array_equal(run(few, feeds)[name], value, err_msg=name)

"""Adversarial training beside a loop in PyTorch: the same weights and running statistics after several steps."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx_ir as ir
import pytest

import gradgraph as gg
from gradgraph import frontend
from gradgraph.autodiff.projected_steps import Ball
from gradgraph.frontend import Module, export
from gradgraph.frontend import functional as ours
from gradgraph.frontend import nn as layers
from gradgraph.graph.builder import Builder
from gradgraph.passes.randomness import RandomSource
from tests.kit.running import run

torch = pytest.importorskip("torch", reason="compares with PyTorch")
pytestmark = pytest.mark.torch

from torch import nn  # noqa: E402
from torch.nn import functional as F  # noqa: E402

STEPS, RATE = 4, 0.2
RNG = np.random.default_rng(0)
X = RNG.normal(size=(STEPS, 6, 2, 5, 5)).astype(np.float32)
LABELS = RNG.integers(0, 3, (STEPS, 6))


class Ours(Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = layers.Conv2d(2, 4, 3, padding=1), layers.BatchNorm2d(4)
        self.head = layers.Linear(100, 3)

    def forward(self, x: Any) -> Any:
        return self.head(ours.relu(self.norm(self.conv(x))).flatten(1))


class BiasedNorm(nn.BatchNorm2d):
    """Keeps the biased variance, as ONNX defines it."""

    def forward(self, x: Any) -> Any:
        if not self.training:
            return super().forward(x)
        with torch.no_grad():
            self.running_mean.lerp_(x.mean((0, 2, 3)), self.momentum)
            self.running_var.lerp_(x.var((0, 2, 3), unbiased=False), self.momentum)
        return F.batch_norm(x, None, None, self.weight, self.bias, True, 0.0, self.eps)


class Theirs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.head = nn.Conv2d(2, 4, 3, padding=1), BiasedNorm(4), nn.Linear(100, 3)

    def forward(self, x: Any) -> Any:
        return self.head(self.norm(self.conv(x)).relu().flatten(1))


def drawn(attack: gg.PGD, rng: np.ndarray, x: np.ndarray) -> np.ndarray:
    """The random start that the step draws in the state ``rng``, from the generator alone."""
    op = Builder()
    state, value = (ir.Value(name=n, type=ir.TensorType(t), shape=ir.Shape(s)) for n, t, s in
                    (("rng", ir.DataType.INT64, [3]), ("x", ir.DataType.FLOAT, ["batch", *x.shape[1:]])))  # fmt: skip
    ball = Ball(attack.norm, attack.epsilon, per_sample=True)
    y = ball.draw(op, RandomSource(op.wrap(state)), op.wrap(value)).value
    graph = ir.Graph([state, value], [y], nodes=[], opset_imports={"": 21})
    op.finish(graph)
    return run(ir.to_proto(ir.Model(graph, ir_version=10)), {"rng": rng, "x": x})[y.name or ""]


def attacked(net: Any, attack: gg.PGD, x: Any, labels: Any, noise: Any) -> Any:
    """The inputs after a plain loop."""
    low, high = attack.bounds or (None, None)
    size = 2.5 * attack.epsilon / attack.n if attack.step is None else attack.step

    def length(change: Any) -> Any:
        return change.flatten(1).norm(dim=1)[:, None, None, None]

    def inside(point: Any) -> Any:
        change = point - x
        if attack.norm == "linf":
            change = change.clamp(-attack.epsilon, attack.epsilon)
        else:
            change = change * (attack.epsilon / length(change).clamp_min(1e-30)).clamp(max=1)
        return (x + change).clamp(low, high) if attack.bounds else x + change

    point = inside(x + noise) if noise is not None else x
    for _ in range(attack.n):
        point = point.detach().requires_grad_()
        (slope,) = torch.autograd.grad(F.cross_entropy(net(point), labels), point)
        point = inside(point + size * (slope.sign() if attack.norm == "linf" else slope / length(slope)))
    return point.detach()


@pytest.mark.parametrize("clean", [0.0, 0.3])
@pytest.mark.parametrize(
    "attack",
    [
        {"epsilon": 0.1, "n": 1, "step": 0.1},
        {"epsilon": 0.2, "n": 4, "bounds": (-1.5, 1.5)},
        {"epsilon": 0.2, "n": 3, "random_start": True},
        {"epsilon": 1.5, "n": 3, "norm": "l2"},
        {"epsilon": 1.5, "n": 3, "norm": "l2", "random_start": True, "bounds": (-2, 2)},
    ],
    ids=lambda given: "-".join(map(str, given)),
)
def test_weights_after_some_steps(attack: dict[str, Any], clean: float) -> None:
    """The attack uses the running statistics, the update those of the batch; the moved batch updates them first."""
    frontend.manual_seed(0)
    file, given = export(Ours(), {"x": ("batch", 2, 5, 5)}, "y"), gg.PGD(**attack, clean=clean)
    trainer = gg.Trainer(gg.build(file, "cross_entropy", gg.optim.sgd(RATE), adversarial=given), device="cpu", seed=7)
    net, start = Theirs(), trainer.state_dict()
    net.load_state_dict({k: torch.from_numpy(np.array(v)) for k, v in start.items() if k in net.state_dict()},
                        strict=False)  # fmt: skip
    optimizer = torch.optim.SGD(net.parameters(), RATE)
    for i in range(STEPS):
        x, labels = torch.from_numpy(X[i]), torch.from_numpy(LABELS[i])
        noise = torch.from_numpy(drawn(given, trainer.state_dict()["rng"], X[i])) if given.random_start else None
        moved = attacked(net.eval(), given, x, labels, noise)
        net.train()
        loss = F.cross_entropy(net(moved), labels)
        total = loss if not clean else (1 - clean) * loss + clean * F.cross_entropy(net(x), labels)
        optimizer.zero_grad()
        total.backward()
        optimizer.step()
        found = trainer.step({"x": X[i], "target": LABELS[i]})
        np.testing.assert_allclose(found["loss"], loss.item(), rtol=1e-4)
    for name, value in net.state_dict().items():
        if name in start:
            np.testing.assert_allclose(trainer.state_dict()[name], value.numpy(), atol=2e-5, err_msg=name)
            moves = np.abs(start[name] - value.numpy()).max() > 1e-4
            assert moves or name == "conv.bias", name  # which BatchNormalization cancels

"""Mixed precision against ``torch.autocast`` and ``torch.amp.GradScaler`` on the CPU: losses, and sequences of scales.

Two implementations round at other places (PyTorch once in a fused kernel, and BatchNormalization's result; we once an
operator), so numbers of the low precision agree to some of its units, and what they train drifts apart by as much.
``ROUNDING`` is four units in the last place of 1, of losses around 1; seen are less than two.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import gradgraph as gg
from gradgraph import optim
from gradgraph.frontend import from_torch

torch = pytest.importorskip("torch", reason="compares with PyTorch")
pytestmark = pytest.mark.torch

ROUNDING = {"float16": 4 * 2.0**-10, "bfloat16": 4 * 2.0**-7}
STEPS = 50


def perceptron() -> Any:
    nn = torch.nn
    return nn.Sequential(nn.Linear(12, 32), nn.GELU(), nn.LayerNorm(32), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 4))


def convolutional() -> Any:
    nn = torch.nn
    return nn.Sequential(
        nn.Unflatten(1, (3, 2, 2)), nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.SiLU(),
        nn.Conv2d(8, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(8, 4),
    )  # fmt: skip


def transformer() -> Any:
    nn = torch.nn

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(3, 16)
            self.norm = nn.LayerNorm(16)
            self.qkv, self.out, self.head = nn.Linear(16, 48), nn.Linear(16, 16), nn.Linear(16, 4)

        def forward(self, x: Any) -> Any:
            h = self.inner(x.reshape(-1, 4, 3))
            q, k, v = self.qkv(self.norm(h)).chunk(3, -1)
            weights = torch.softmax(q @ k.transpose(-1, -2) / 4.0, -1)
            return self.head((h + self.out(weights @ v)).mean(1))

    return Net()


MODELS: dict[str, Callable[[], Any]] = {f.__name__: f for f in (perceptron, convolutional, transformer)}


def module_of(name: str) -> Any:
    torch.manual_seed(0)
    return MODELS[name]()


@functools.cache
def exported(name: str) -> Any:
    return from_torch(module_of(name), torch.zeros(24, 12), input_names=["x"], output_names=["logits"])


def batch_of(i: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(i % 8)
    x = rng.normal(size=(24, 12)).astype(np.float32)
    return x, (x[:, :4] + 0.3 * rng.normal(size=(24, 4))).argmax(1)


def trained_by_torch(module: Any, dtype: Any, settings: dict[str, Any]) -> tuple[list[float], list[float]]:
    """Losses, and the scale behind each step."""
    theirs = torch.optim.AdamW(module.parameters(), lr=3e-3)
    scaler = torch.amp.GradScaler("cpu", enabled=dtype == torch.float16, **settings)
    losses, scales = [], []
    for i in range(STEPS):
        x, labels = map(torch.tensor, batch_of(i))
        with torch.autocast("cpu", dtype=dtype):
            loss = torch.nn.functional.cross_entropy(module(x), labels)
        theirs.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(theirs)
        scaler.update()
        losses.append(loss.item())
        scales.append(scaler.get_scale())
    return losses, scales


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("name", MODELS)
def test_losses_are_those_of_autocast(name: str, dtype: str) -> None:
    module, model = module_of(name), exported(name)
    step = gg.build(model, "cross_entropy", optim.adamw(3e-3), precision=dtype)
    trainer = gg.Trainer(step, device="cpu")
    expected, _ = trained_by_torch(module, getattr(torch, dtype), {})
    found = [float(trainer.step(batch_of(i))["loss"]) for i in range(STEPS)]
    assert expected[-1] < 0.9 * expected[0]
    np.testing.assert_allclose(found, expected, atol=ROUNDING[dtype])


@pytest.mark.parametrize("name", ["perceptron"])
def test_scales_are_those_of_grad_scaler(name: str) -> None:
    """From one at which gradients overflow, up and down again: a step is skipped where GradScaler skips it."""
    settings = {"init_scale": 2.0**24, "growth_interval": 4, "growth_factor": 4.0, "backoff_factor": 0.5}
    module, model = module_of(name), exported(name)
    step = gg.build(model, "cross_entropy", optim.adamw(3e-3), precision=gg.Precision("float16", **settings))
    trainer = gg.Trainer(step, device="cpu")
    losses, expected = trained_by_torch(module, torch.float16, settings)
    found, scales = [], []
    for i in range(STEPS):
        found.append(float(trainer.step(batch_of(i))["loss"]))
        scales.append(float(trainer.state_dict()["loss_scale"]))
    assert scales == expected and len(set(scales)) > 3
    skipped = sum(after < before for before, after in zip([2.0**24, *scales], scales, strict=False))
    assert trainer.state_dict()["skipped_steps"] == skipped > 4
    assert trainer.state_dict()["step"] == STEPS - skipped
    np.testing.assert_allclose(found, losses, atol=ROUNDING["float16"])

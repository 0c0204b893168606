"""How many digits the gradients of small convolutional networks keep, beside those of PyTorch in float32.

The statistic. Errors are differences to PyTorch in float64, in norm over a tensor, as shares of that norm. One draw
tells little: where a norm takes out nearly all of a gradient, the rounding of two networks differs by a factor of ten
either way, and where a number lies beside the kink of a ReLU6, rounding decides the side. So weights and images are
drawn often; tensor by tensor, geometric means over the middle half of the draws are compared. A floor of 2 ulp is added
to errors, below which nobody can tell roundings apart. Tensors whose exact gradient is zero (the bias in front of a
norm) have no digits and are left out.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

import gradgraph as gg
from gradgraph.runtime.execution.session import RuntimeOptions
from tests.networks.small_vision import CLASSES, NETWORKS

DRAWS = 24
MOMENTUM = ".momentum_buffer"
IMAGES, SIZE = 2, 32
FLOOR = 2.0**-22
MOST = 2.0  # times the error of PyTorch in float32

Gradients = dict[str, np.ndarray]


def times_torch_s(network: str, forms: Sequence[tuple[str, bool]]) -> list[dict[str, float]]:
    """For each form, a backend and whether kernels are native: how far from exact, as a multiple of PyTorch's float32.

    The errors are those of the gradient of each tensor that is trained, by its name.
    """
    torch.manual_seed(0)
    module = NETWORKS[network]()
    model = gg.frontend.from_torch(module, torch.zeros(IMAGES, 3, SIZE, SIZE), input_names=["x"])
    trainers = [_trainer(model, backend, native) for backend, native in forms]
    draws = [_errors(module, trainers, seed) for seed in range(DRAWS)]
    names = [n for n in draws[0] if all(n in draw for draw in draws)]
    logs = np.sort(np.log(np.array([[draw[n] for n in names] for draw in draws]) + FLOOR), axis=0)
    torch_s, *ours = np.exp(logs[DRAWS // 4 : -(DRAWS // 4)].mean(0)).T
    return [dict(zip(names, own / torch_s, strict=True)) for own in ours]


def _trainer(model: Any, backend: str, native: bool) -> gg.Trainer:
    step = gg.build(model, "cross_entropy", gg.optim.sgd(1.0, momentum=0.9), metrics=(), backend=backend)
    return gg.Trainer(step, device="cpu", options=RuntimeOptions(threads=1, native_kernels=native))


def _errors(module: Any, trainers: Sequence[gg.Trainer], seed: int) -> dict[str, list[float]]:
    """Of one draw, by tensor: PyTorch's error, then that of each trainer."""
    rng = np.random.default_rng(seed)
    for name, p in module.named_parameters():
        p.data = torch.from_numpy(_drawn(rng, name, tuple(p.shape)))
    x = rng.normal(size=(IMAGES, 3, SIZE, SIZE)).astype(np.float32)
    t = rng.integers(0, CLASSES, IMAGES)
    exact, single = (_in_torch(module, x, t, dtype) for dtype in (torch.float64, torch.float32))
    weights = {n: p.detach().numpy() for n, p in module.named_parameters()}
    found = [single, *(_gradients(trainer, weights, {"x": x, "target": t}) for trainer in trainers)]
    whole = max(np.abs(v).max() for v in exact.values())
    with_digits = {n: v for n, v in exact.items() if np.abs(v).max() > 1e-9 * whole}
    return {n: [_distance(of[n], v) for of in found] for n, v in with_digits.items()}


def _gradients(trainer: gg.Trainer, weights: Gradients, batch: Gradients) -> Gradients:
    """The momentum after a first step."""
    start = {n: np.zeros_like(v) for n, v in trainer.state_dict().items() if n.endswith(MOMENTUM)}
    trainer.load_state_dict({**trainer.state_dict(), **start, **weights})
    trainer.step(batch)
    after = trainer.state_dict()
    return {n: after[n + MOMENTUM] for n in weights}


def _drawn(rng: np.random.Generator, name: str, shape: tuple[int, ...]) -> np.ndarray:
    if len(shape) > 1:
        drawn = rng.normal(size=shape) * np.sqrt(2 / np.prod(shape[1:]))
    else:
        drawn = rng.uniform(0.5, 1.5, shape) if name.endswith("weight") else rng.normal(size=shape) * 0.1
    return drawn.astype(np.float32)


def _in_torch(module: Any, x: np.ndarray, t: np.ndarray, dtype: torch.dtype) -> Gradients:
    own = copy.deepcopy(module).to(dtype).train()
    F.cross_entropy(own(torch.from_numpy(x).to(dtype)), torch.from_numpy(t)).backward()
    return {n: p.grad.numpy() for n, p in own.named_parameters()}


def _distance(found: np.ndarray, exact: np.ndarray) -> float:
    return float(np.linalg.norm(found.astype(np.float64) - exact) / np.linalg.norm(exact))

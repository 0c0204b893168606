"""A physics-informed network: it learns the solution of the heat equation from the equation alone.

``u(x, t)`` is the temperature of a rod that starts as ``sin(πx)`` and is kept at 0 at both ends. The network has start
and ends built in; its loss is how far ``∂u/∂t`` is from ``D · ∂²u/∂x²`` at random points. Both derivatives are taken in
the loss function, and the step differentiates through them.

    python examples/heat_equation.py [--plot heat_equation.svg]
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
import pictures

import gradgraph as gg
from gradgraph import frontend
from gradgraph.frontend import nn

DIFFUSIVITY = 0.1
Tensors = Mapping[str, frontend.Tensor]


class Temperature(nn.Module):
    """Of points ``[rows, 2]``: place and time, both in [0, 1]."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(2, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 1))

    def forward(self, point: frontend.Tensor) -> frontend.Tensor:
        place, time = point[:, :1], point[:, 1:]
        return (math.pi * place).sin() + time * place * (1 - place) * self.body(point)


def residual(out: Tensors, batch: Tensors) -> frontend.Tensor:
    point = batch["point"]
    slope = frontend.grad(out["temperature"].sum(), point)
    curvature = frontend.grad(slope[:, :1].sum(), point)[:, :1]
    return (slope[:, 1:] - DIFFUSIVITY * curvature).square().mean()


def exact(point: np.ndarray) -> np.ndarray:
    place, time = point[:, :1], point[:, 1:]
    return np.sin(np.pi * place) * np.exp(-DIFFUSIVITY * np.pi**2 * time)


def draw(path: str, found: np.ndarray, errors: np.ndarray) -> None:
    """The temperature of the rod, and how far it is off."""
    with pictures.panels(path, 1, 2, height=2.8, sharey=True) as axes:
        for place, values, title, cmap in zip(axes, (found, errors), ("temperature", "its error"), ("inferno", "PuOr"),
                                              strict=True):  # fmt: skip
            reach = {"vmin": -abs(values).max(), "vmax": abs(values).max()} if cmap == "PuOr" else {}
            image = place.imshow(values, origin="lower", extent=(0, 1, 0, 1), aspect="auto", cmap=cmap, **reach)
            place.figure.colorbar(image)
            place.set(title=title, xlabel="place")
        axes[0].set_ylabel("time")


def main(steps: int = 1000, plot: str | None = None) -> None:
    frontend.manual_seed(0)
    model = frontend.export(Temperature(), {"point": ("rows", 2)}, outputs=["temperature"])
    step = gg.build(model, residual, gg.optim.adam(gg.optim.cosine(5e-3, steps)))
    trainer, rng = gg.Trainer(step), np.random.default_rng(0)
    for i in range(steps):
        loss = trainer.step({"point": rng.uniform(size=(256, 2)).astype(np.float32)})["loss"]
        if i % 200 == 0 or i == steps - 1:
            print(f"step {i:4d}  residual {float(loss):.6f}")
    grid = np.stack(np.meshgrid(*[np.linspace(0, 1, 33)] * 2), -1).reshape(-1, 2).astype(np.float32)
    found = np.asarray(trainer.predict({"point": grid}))
    error = np.abs(found - exact(grid)).max()
    print(f"the largest error of a temperature is {error:.4f}")
    if plot is not None:
        draw(plot, found.reshape(33, 33), (found - exact(grid)).reshape(33, 33))
    print("they agree" if error < 0.01 else "they DISAGREE")


if __name__ == "__main__":
    pictures.begin(main)

"""A critic with a gradient penalty (WGAN-GP), whose loss contains a gradient of the critic itself.

The loss is ``mean D(fake) - mean D(real) + 10 · mean (|∇D(mixed)| - 1)²``. The gradient inside is ``frontend.grad``,
and the step differentiates through it.

    python examples/gradient_penalty.py [--plot gradient_penalty.svg]
"""

from __future__ import annotations

import numpy as np
import onnx
import onnxruntime as ort
import pictures

import gradgraph as gg
from gradgraph import frontend
from gradgraph.frontend import nn

ROWS = 64  # of each kind
RNG = np.random.default_rng(0)


class Critic(nn.Module):
    """Its loss on points in the plane that are real, fake and mixed, in this order, and the length of its gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(2, 32), nn.Softplus(), nn.Linear(32, 32), nn.Softplus(), nn.Linear(32, 1))

    def forward(self, x: frontend.Tensor) -> dict[str, frontend.Tensor]:
        scores = self.net(x)
        slopes = frontend.grad(scores.sum(), x)[2 * ROWS :]  # of the sum: each row has that of its own score
        length = ((slopes**2).sum(dim=1) + 1e-12).sqrt()
        distance = scores[:ROWS].mean() - scores[ROWS : 2 * ROWS].mean()
        return {"loss": 10.0 * ((length - 1.0) ** 2).mean() - distance, "length": length.mean()}


def points() -> np.ndarray:
    """Real ones on a circle, fake ones around the origin, and mixtures of the two."""
    angle = RNG.uniform(0, 2 * np.pi, (ROWS, 1))
    real, fake = np.hstack([np.cos(angle), np.sin(angle)]), RNG.normal(size=(ROWS, 2)) * 0.3
    share = RNG.uniform(size=(ROWS, 1))
    return np.vstack([real, fake, share * real + (1 - share) * fake]).astype(np.float32)


def slopes_of_the_loss(model: onnx.ModelProto) -> tuple[float, float]:
    """Along a random direction: by the gradient of the loss, and by a finite difference."""
    gradient = gg.value_and_grad(model, output="loss", wrt="x")
    session = ort.InferenceSession(gradient.SerializeToString(), providers=["CPUExecutionProvider"])
    x, direction, step = points(), RNG.normal(size=(3 * ROWS, 2)).astype(np.float32), 1e-2

    def loss(at: np.ndarray) -> float:
        return float(session.run(["loss"], {"x": at})[0])

    numeric = (loss(x + step * direction) - loss(x - step * direction)) / (2 * step)
    _, slope = session.run(None, {"x": x})
    return float((slope * direction).sum()), numeric


def draw(path: str, critic: Critic, lengths: list[float]) -> None:
    """The length of the gradient, step after step, and what the critic thinks of each place in the plane."""
    with pictures.panels(path, 1, 2, height=3.0, width_ratios=[1.4, 1]) as (line, plane):
        line.axhline(1, color="lightgray", linewidth=1)
        line.plot(10 * np.arange(len(lengths)), lengths)
        line.set(xlabel="step", ylabel="mean length of the gradient", ylim=(0, None))
        grid = np.stack(np.meshgrid(*[np.linspace(-1.6, 1.6, 48)] * 2)).astype(np.float32)
        model = frontend.export(critic.net, {"x": ("rows", 2)})  # what scores the points, as a model of its own
        session = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
        (found,) = session.run(None, {"x": grid.reshape(2, -1).T})
        scores = plane.imshow(np.reshape(found, (48, 48)), origin="lower", extent=(-1.6, 1.6) * 2, cmap="viridis")
        line.figure.colorbar(scores, label="score")
        there = points()
        plane.plot(*there[:ROWS].T, ".", color="white", markersize=4)
        plane.plot(*there[ROWS : 2 * ROWS].T, ".", color="tab:red", markersize=4)
        plane.set(aspect="equal", title="real (white), fake (red)")


def main(steps: int = 200, plot: str | None = None) -> None:
    frontend.manual_seed(0)
    critic = Critic()
    model = frontend.export(critic, {"x": (3 * ROWS, 2)})
    analytic, numeric = slopes_of_the_loss(model)
    print(f"the slope of the penalised loss is {analytic:.5f}, by finite differences {numeric:.5f}")
    print("they agree" if np.isclose(analytic, numeric, rtol=1e-2) else "they DISAGREE")

    step = gg.build(model, loss=None, output="loss", optimizer=gg.optim.adam(1e-2, betas=(0.5, 0.9)))
    trainer, lengths = gg.Trainer(step), []
    for i in range(steps):
        loss = trainer.step({"x": points()})["loss"]
        if i % 10 == 0 or i == steps - 1:
            lengths.append(float(trainer.predict({"x": points()})["length"]))
        if i % 50 == 0 or i == steps - 1:
            print(f"step {i:3d}  loss {float(loss):7.3f}  length of the gradient {lengths[-1]:.3f}")
    if plot is not None:
        weights = trainer.parameters
        critic.load_state_dict({name: weights[name] for name, _ in critic.named_parameters()})
        draw(plot, critic, lengths)


if __name__ == "__main__":
    pictures.begin(main)

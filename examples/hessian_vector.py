"""The largest eigenvalue of a network's Hessian, by power iteration on Hessian-vector products.

The sharpness of a minimum, the largest stable learning rate (2 / eigenvalue), second-order optimizers: all need H·v
and never H itself. ``gg.hvp`` gives an ordinary ONNX model that computes it.

    python examples/hessian_vector.py [--plot hessian_vector.svg]
"""

from __future__ import annotations

import numpy as np
import onnxruntime as ort
import pictures

import gradgraph as gg
from gradgraph import frontend
from gradgraph.frontend import functional, nn


class Classifier(nn.Module):
    """Two layers and the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))

    def forward(self, x: frontend.Tensor, target: frontend.Tensor) -> frontend.Tensor:
        return functional.cross_entropy(self.net(x), target)


class Hessian:
    """H·v at the network's weights on one batch, for vectors that hold all weights one after the other."""

    def __init__(self, batch: dict[str, np.ndarray]) -> None:
        frontend.manual_seed(0)
        model = frontend.export(Classifier(), {"x": ("batch", 4), "target": frontend.Input(("batch",), "int64")})
        self.session = ort.InferenceSession(gg.hvp(model).SerializeToString(), providers=["CPUExecutionProvider"])
        self.batch = batch
        self.shapes = {i.name: i.shape for i in self.session.get_inputs() if i.name.endswith(".tangent")}
        self.size = sum(int(np.prod(shape)) for shape in self.shapes.values())

    def __matmul__(self, v: np.ndarray) -> np.ndarray:
        parts = np.split(v.astype(np.float32), np.cumsum([np.prod(s) for s in self.shapes.values()])[:-1])
        tangents = {name: part.reshape(shape) for (name, shape), part in zip(self.shapes.items(), parts, strict=True)}
        products = [name.replace(".tangent", ".hvp") for name in self.shapes]
        return np.concatenate([p.ravel() for p in self.session.run(products, {**self.batch, **tangents})])


def largest_eigenvalue(hessian: Hessian, steps: int = 200) -> list[float]:
    """What power iteration takes the eigenvalue of largest magnitude for, after each step."""
    v, estimates = np.random.default_rng(0).normal(size=hessian.size), []
    for _ in range(steps):
        v /= np.linalg.norm(v)
        product = hessian @ v
        estimates.append(float(v @ product))
        v = product
    return estimates


def draw(path: str, estimates: list[float], eigenvalues: np.ndarray) -> None:
    """All eigenvalues, and how the iteration finds the largest."""
    with pictures.panels(path, 1, 2, height=2.4) as (line, every):
        line.axhline(eigenvalues[np.abs(eigenvalues).argmax()], color="lightgray", linewidth=1)
        line.plot(estimates[:50])
        line.set(xlabel="step of the iteration", ylabel="eigenvalue")
        every.bar(range(len(eigenvalues)), eigenvalues[::-1])
        every.set(xlabel="all 51 directions", ylabel="eigenvalue")


def main(plot: str | None = None) -> None:
    rng = np.random.default_rng(1)
    hessian = Hessian({"x": rng.normal(size=(32, 4)).astype(np.float32), "target": rng.integers(0, 3, 32)})
    estimates = largest_eigenvalue(hessian)
    found = estimates[-1]
    columns = np.stack([hessian @ e for e in np.eye(hessian.size)])  # small enough to write down whole
    eigenvalues = np.linalg.eigvalsh((columns + columns.T) / 2)
    expected = eigenvalues[np.abs(eigenvalues).argmax()]
    print(
        f"{hessian.size} weights; largest eigenvalue by power iteration {found:.6f}, of the whole matrix {expected:.6f}"
    )
    if plot is not None:
        draw(plot, estimates, eigenvalues)
    print("they agree" if np.isclose(found, expected, rtol=1e-3) else "they DISAGREE")


if __name__ == "__main__":
    pictures.begin(main)

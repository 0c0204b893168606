"""Energy and forces: a network learns the energy of small molecules, and the forces as its gradient.

The molecules are three atoms with a Morse potential between each two. A force is minus the gradient of the energy by
the positions, so a network that gives the energy gives the forces, too: ``frontend.grad``. Trained on both it learns
from far fewer molecules, as each energy is one number and each set of forces is nine.

    python examples/molecule_forces.py [--plot molecule_forces.svg]
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pictures

import gradgraph as gg
from gradgraph import frontend
from gradgraph.frontend import nn

ATOMS = 3
PAIRS = np.array([(i, j) for i in range(ATOMS) for j in range(i)])
Tensors = Mapping[str, frontend.Tensor]
Arrays = dict[str, np.ndarray]


class Potential(nn.Module):
    """The energy of positions ``[rows, atoms, 3]``, made of the distances: turned or moved, a molecule has the same."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(len(PAIRS), 64), nn.SiLU(), nn.Linear(64, 64), nn.SiLU(), nn.Linear(64, 1))

    def forward(self, positions: frontend.Tensor) -> dict[str, frontend.Tensor]:
        apart = positions[:, PAIRS[:, 0]] - positions[:, PAIRS[:, 1]]
        energy = self.body(apart.square().sum(2).sqrt())
        return {"energy": energy, "forces": -frontend.grad(energy.sum(), positions)}


def molecules(count: int, rng: np.random.Generator) -> Arrays:
    """Positions, energies and forces: Morse potentials between all pairs."""
    rest = np.array([[0.0, 0.0, 0.0], [1.0, 0.0, 0.0], [0.4, 0.9, 0.0]])
    positions = rest + rng.normal(scale=0.15, size=(count, ATOMS, 3))
    energy, forces = np.zeros((count, 1)), np.zeros_like(positions)
    for i, j in PAIRS:
        apart = positions[:, i] - positions[:, j]
        distance = np.linalg.norm(apart, axis=1, keepdims=True)
        decay = np.exp(-2.0 * (distance - 1.0))
        energy += (1 - decay) ** 2
        along = apart / distance * (2 * (1 - decay) * 2.0 * decay)
        forces[:, i] -= along
        forces[:, j] += along
    given = {"positions": positions, "energy_target": energy, "forces_target": forces}
    return {name: values.astype(np.float32) for name, values in given.items()}


def draw(path: str, true: np.ndarray, found: dict[str, np.ndarray]) -> None:
    """What the networks take forces for, over what these are."""
    with pictures.panels(path, 1, len(found), height=3.2, sharex=True, sharey=True) as axes:
        for place, (what, forces) in zip(axes, found.items(), strict=True):
            place.axline((0, 0), slope=1, color="lightgray", linewidth=1)
            place.plot(true.ravel()[:600], forces.ravel()[:600], ".", markersize=3, rasterized=True)
            place.set(title=f"trained on {what}", xlabel="force", xlim=(-5, 5), ylim=(-5, 5))
        axes[0].set_ylabel("force of the network")


def main(epochs: int = 300, plot: str | None = None) -> None:
    rng = np.random.default_rng(0)
    train, held_out = molecules(200, rng), molecules(1000, rng)
    frontend.manual_seed(0)
    model = frontend.export(Potential(), {"positions": ("rows", ATOMS, 3)})
    errors, found = [], {}
    for what, weight in {"energies": 0.0, "both": 1.0}.items():
        optimizer = gg.optim.adam(gg.optim.cosine(3e-3, epochs * 10))
        loss = {"energy": "mse", "forces": ("mse", weight)}
        trainer = gg.Trainer(gg.build(model, loss, optimizer, metrics={"energy": "mae", "forces": "mae"}))
        trainer.fit(train, epochs=epochs, batch_size=20, progress=False)
        scores = trainer.evaluate(held_out)
        errors.append(scores["forces_mae"])
        found[what] = trainer.predict({"positions": held_out["positions"]})["forces"]
        print(f"trained on {what}: MAE {scores['energy_mae']:.4f} of energies, {scores['forces_mae']:.4f} of forces")
    if plot is not None:
        draw(plot, held_out["forces_target"], found)
    print("training on forces helps" if errors[1] < errors[0] / 2 else "training on forces does NOT help")


if __name__ == "__main__":
    pictures.begin(main)

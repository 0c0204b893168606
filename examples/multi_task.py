"""Two tasks, one network: which digit is it, and how much ink is in it?

The tasks share a trunk and have a head each. A dict gives each output its loss and its weight; each is a column of the
history, and so is each metric. Needs scikit-learn, for its 1,797 images of 8 by 8.

    python examples/multi_task.py [--plot multi_task.svg]
"""

from __future__ import annotations

import numpy as np
import pictures
from sklearn.datasets import load_digits

import gradgraph as gg
from gradgraph import frontend
from gradgraph.frontend import nn


class TwoHeads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Sequential(
            nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(),
            nn.Flatten(), nn.Linear(32 * 4 * 4, 64), nn.ReLU(), nn.Dropout(0.2),
        )  # fmt: skip
        self.digit, self.ink = nn.Linear(64, 10), nn.Linear(64, 1)

    def forward(self, image: frontend.Tensor) -> dict[str, frontend.Tensor]:
        features = self.trunk(image)
        return {"digit": self.digit(features), "ink": self.ink(features)}


def draw(path: str, data: dict[str, np.ndarray], found: dict[str, np.ndarray]) -> None:
    """Ink found over ink there, and the digits that are mistaken."""
    wrong = found["digit"].argmax(1) != data["digit_target"]
    ink, ink_found = data["ink_target"][:, 0], found["ink"][:, 0]
    with pictures.panels(path, height=3.6) as (axes,):
        axes.axline((0, 0), slope=1, color="lightgray", linewidth=1)
        axes.plot(ink[~wrong], ink_found[~wrong], ".", markersize=4, label="digit right")
        axes.plot(ink[wrong], ink_found[wrong], "x", color="tab:red", markersize=5, label="digit mistaken")
        axes.set(xlabel="ink in the image", ylabel="ink that the network finds")
        axes.legend()


def main(epochs: int = 20, plot: str | None = None) -> None:
    digits = load_digits()
    image = (digits.images[:, None] / 16).astype(np.float32)
    ink = image.mean((2, 3))
    everything = {"image": image, "digit_target": digits.target, "ink_target": (ink - ink.mean()) / ink.std()}
    train, held_out = ({name: a[rows] for name, a in everything.items()} for rows in (slice(1500), slice(1500, None)))

    frontend.manual_seed(0)
    model = frontend.export(TwoHeads(), {"image": ("rows", 1, 8, 8)})
    step = gg.build(
        model,
        {"digit": "cross_entropy", "ink": ("huber", 2.0)},
        gg.optim.adamw(2e-3),
        metrics={"digit": ["accuracy", "f1"], "ink": ["mae", "r2"]},
    )
    trainer = gg.Trainer(step)
    trainer.fit(train, epochs=epochs, batch_size=64, validation=held_out, progress=False,
                monitor="val_digit_accuracy", patience=5)  # fmt: skip
    scores = trainer.evaluate(held_out)
    if plot is not None:
        draw(plot, held_out, trainer.predict({"image": held_out["image"]}))
    print(f"of {len(ink) - 1500} other images: {scores['digit_accuracy']:.1%} of digits right "
          f"(F1 {scores['digit_f1']:.3f}), R² of the ink {scores['ink_r2']:.3f}")  # fmt: skip


if __name__ == "__main__":
    pictures.begin(main)

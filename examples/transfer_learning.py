"""Transfer learning: a network that knows the digits 0 to 5 learns 6 to 9 from ten images of each.

What is known comes as an .onnx file (trained here first, so that nothing need be downloaded). ``frontend.from_onnx``
makes a module of it, cut where the images have become features; it gets a head of its own. The head is trained while
the trunk is frozen, then all of it, the lower layers more slowly. For comparison the same network learns from scratch.
Needs scikit-learn, for its 1,797 images of 8 by 8.

    python examples/transfer_learning.py [--plot transfer_learning.svg]
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pictures
from sklearn.datasets import load_digits

import gradgraph as gg
from gradgraph import frontend
from gradgraph.frontend import nn

KNOWN, FEW = 6, 20  # digits below KNOWN are known; of the others there are FEW images each
WIDTH = 64  # of the features
INPUTS = {"image": ("rows", 1, 16, 16)}
Arrays = dict[str, np.ndarray]


class Whole(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for channels, width in ((1, 16), (16, 32), (32, 64)):
            layers += [nn.Conv2d(channels, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU(), nn.MaxPool2d(2)]
        self.features = nn.Sequential(*layers)
        self.head = nn.Linear(WIDTH, KNOWN)

    def forward(self, image: frontend.Tensor) -> dict[str, frontend.Tensor]:
        features = self.features(image).amax((2, 3))
        return {"digit": self.head(features), "features": features}


class Other(nn.Module):
    """The trunk of a model from a file, and a new head."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.trunk = frontend.from_onnx(path, outputs="features")
        self.head = nn.Linear(WIDTH, 10 - KNOWN)

    def forward(self, image: frontend.Tensor) -> frontend.Tensor:
        return self.head(self.trunk(image))


def placed(digits: np.ndarray, labels: np.ndarray, count: int, rng: np.random.Generator) -> Arrays:
    """``count`` images of 16 by 16, each with one of the digits somewhere, and noise."""
    rows, places = rng.integers(0, len(digits), count), rng.integers(0, 9, (count, 2))
    x = rng.normal(scale=0.3, size=(count, 1, 16, 16))
    for image, row, (top, left) in zip(x, rows, places, strict=True):
        image[0, top : top + 8, left : left + 8] += digits[row]
    return {"image": x.astype(np.float32), "target": labels[rows]}


def images(count: int) -> tuple[Arrays, Arrays, Arrays]:
    """Those of the known digits; a few of the others to learn from, and more of them to be asked about."""
    x, label = load_digits().images / 16, load_digits().target
    known, rng = label < KNOWN, np.random.default_rng(0)
    first = np.concatenate([np.flatnonzero(label == digit)[:FEW] for digit in range(KNOWN, 10)])
    later = np.setdiff1d(np.flatnonzero(~known), first)
    few = placed(x[first], label[first] - KNOWN, 4 * FEW, rng)
    return placed(x[known], label[known], count, rng), few, placed(x[later], label[later] - KNOWN, 1000, rng)


def trained(model: onnx.ModelProto, data: Arrays, epochs: int, rate: float, **options: Any) -> gg.Trainer:
    layer_decay = options.pop("layer_decay", None)
    step = gg.build(model, "cross_entropy", gg.optim.adamw(rate, layer_decay=layer_decay), output="digit", **options)
    trainer = gg.Trainer(step)
    trainer.fit(data, epochs=epochs, batch_size=40, progress=False)
    return trainer


def draw(path: str, data: Arrays, trainer: gg.Trainer, found: dict[str, float]) -> None:
    """Ten images and what they are taken for; how many are right after each way of training."""
    guesses = trainer.predict({"image": data["image"][:10]}).argmax(1) + KNOWN
    with pictures.panels(path, 2, 6, height=2.6, width_ratios=[1] * 5 + [3.2]) as axes:
        for place, image, guess, true in zip(
            axes[:, :5].flat, data["image"], guesses, data["target"] + KNOWN, strict=False
        ):
            pictures.show(place, image[0], f"a {guess}" if guess == true else f"a {guess}? no, {true}")
        for place in axes[:, 5]:
            place.remove()
        bars = axes[0, 0].figure.add_subplot(axes[0, 5].get_gridspec()[:, 5])
        bars.barh(list(found), [100 * share for share in found.values()], color=["tab:gray", "tab:blue", "tab:green"])
        bars.invert_yaxis()
        bars.set_xlabel("right, in %")


def main(epochs: int = 60, count: int = 4000, plot: str | None = None) -> None:
    frontend.manual_seed(0)
    known, few, rest = images(count)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "digits.onnx"
        trained(frontend.export(Whole(), INPUTS), known, epochs // 6, 1e-3).export(path)
        model = frontend.export(Other(path), INPUTS, outputs=["digit"])

    head = trained(model, few, epochs, 1e-2, freeze="trunk.*")
    whole = trained(head.export(), few, epochs, 1e-3, layer_decay=0.5)
    frontend.manual_seed(1)
    fresh = trained(frontend.export(Whole(), INPUTS), few, 2 * epochs, 1e-3)

    found = [trainer.evaluate(rest)["accuracy"] for trainer in (fresh, head, whole)]
    print(
        f"accuracy on {len(rest['target'])} images, after {FEW} of each of 4 new digits: {found[0]:.1%} from scratch,"
    )
    print(f"{found[1]:.1%} with a new head on the frozen trunk, {found[2]:.1%} after training all layers")
    if plot is not None:
        draw(plot, rest, whole, dict(zip(("from scratch", "new head", "lower layers, too"), found, strict=True)))
    print("the pretrained trunk helps" if found[0] < found[1] < found[2] else "the pretrained trunk does NOT help")


if __name__ == "__main__":
    pictures.begin(main)

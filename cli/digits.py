"""Data, network and pictures of the demo: scikit-learn's handwritten digits, and a small CNN that classifies them."""

from __future__ import annotations

import importlib.util
import io
from pathlib import Path
from typing import Any, cast

import numpy as np

from gradgraph import frontend
from gradgraph.data.shuffling import permutation
from gradgraph.errors import RuntimeUnavailableError
from gradgraph.files.atomic import write_atomically
from gradgraph.frontend import Tensor, nn

Arrays = dict[str, np.ndarray[Any, Any]]

SPLIT_SEED = 0
GRID = (3, 8)


class DigitNet(nn.Module):
    """Two convolutions and two linear layers for images of 8 × 8 pixels."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, 16, 3, padding=1),
            nn.BatchNorm2d(16),
            nn.ReLU(),
            nn.Conv2d(16, 32, 3, padding=1),
            nn.BatchNorm2d(32),
            nn.ReLU(),
            nn.MaxPool2d(2),
        )
        self.head = nn.Sequential(
            nn.Flatten(),
            nn.Dropout(0.3),
            nn.Linear(32 * 4 * 4, 64),
            nn.ReLU(),
            nn.Linear(64, 10),
        )

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(self.features(x))
        return logits


def network(seed: int) -> Any:
    """Return the untrained network as an ONNX model with a dynamic batch."""
    frontend.manual_seed(seed)
    return frontend.export(DigitNet(), {"x": ("batch", 1, 8, 8)}, outputs=["logits"])


def check_packages() -> None:
    """Raise RuntimeUnavailableError if a package that the demo needs is missing."""
    missing = [name for module, name in _PACKAGES.items() if importlib.util.find_spec(module) is None]
    if missing:
        raise RuntimeUnavailableError(f"the demo requires {' and '.join(missing)}; pip install {' '.join(missing)}")


_PACKAGES = {"sklearn": "scikit-learn", "matplotlib": "matplotlib"}


def split() -> tuple[Arrays, Arrays]:
    """Return training and held-out data, four fifths and one fifth of 1,797 images in [0, 1], with their digits."""
    from sklearn.datasets import load_digits

    digits = cast("Any", load_digits())
    x = (digits.images[:, None] / 16.0).astype(np.float32)
    target = digits.target.astype(np.int64)
    order = permutation(SPLIT_SEED, 0, len(x))
    held_out, rest = order[: len(x) // 5], order[len(x) // 5 :]
    return {"x": x[rest], "target": target[rest]}, {"x": x[held_out], "target": target[held_out]}


def save_arrays(path: Path, arrays: Arrays) -> None:
    data = io.BytesIO()
    np.savez(data, **arrays)  # type: ignore[arg-type]
    write_atomically(path, data.getvalue())


def draw_predictions(path: Path, images: np.ndarray[Any, Any], untrained: Any, trained: Any, labels: Any) -> None:
    """Write a picture of a grid of digits, titled by their predictions: untrained → trained model.

    Mistakes of the trained model come first.
    """
    from matplotlib.figure import Figure

    rows, columns = GRID
    figure = Figure(figsize=(columns, 1.3 * rows), layout="constrained")
    order = np.argsort(trained == labels, kind="stable")[: rows * columns]
    for axes, i in zip(figure.subplots(rows, columns).flat, order, strict=True):
        axes.imshow(images[i, 0], cmap="gray_r")
        axes.set_axis_off()
        right = trained[i] == labels[i]
        axes.set_title(f"{untrained[i]} → {trained[i]}", fontsize=14, color="black" if right else "red")
    image = io.BytesIO()
    figure.savefig(image, format="png", dpi=80)
    write_atomically(path, image.getvalue())

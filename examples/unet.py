"""A U-Net: which pixels of a noisy image belong to a disc, and which to a square?

Each image has a disc and a square, drawn over bright and dark noise. The network sees it at three sizes and gives two
scores for each pixel. Its loss is the sum of two, binary cross entropy and Dice, and the metric is the intersection
over the union of what is found and what is there.

    python examples/unet.py [--plot unet.svg]
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pictures

import gradgraph as gg
from gradgraph import frontend
from gradgraph.frontend import functional as F
from gradgraph.frontend import nn

SIZE, WIDTH = 32, 8
Tensors = Mapping[str, frontend.Tensor]


def block(inside: int, outside: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(inside, outside, 3, padding=1, bias=False), nn.BatchNorm2d(outside), nn.ReLU(),
        nn.Conv2d(outside, outside, 3, padding=1, bias=False), nn.BatchNorm2d(outside), nn.ReLU(),
    )  # fmt: skip


class UNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.down = nn.ModuleList([block(1, WIDTH), block(WIDTH, 2 * WIDTH), block(2 * WIDTH, 4 * WIDTH)])
        self.lift = nn.ModuleList([nn.ConvTranspose2d(2 * n, n, 2, stride=2) for n in (2 * WIDTH, WIDTH)])
        self.up = nn.ModuleList([block(2 * n, n) for n in (2 * WIDTH, WIDTH)])
        self.head = nn.Conv2d(WIDTH, 2, 1)

    def forward(self, image: frontend.Tensor) -> frontend.Tensor:
        fine = self.down[0](image)
        middle = self.down[1](F.max_pool2d(fine, 2))
        x = self.down[2](F.max_pool2d(middle, 2))
        for lift, up, beside in zip(self.lift, self.up, (middle, fine), strict=True):
            x = up(F.cat([beside, lift(x)], 1))
        return self.head(x)


def shapes(count: int, rng: np.random.Generator) -> dict[str, np.ndarray]:
    """Images ``[count, 1, 32, 32]``, and for each pixel whether it is of the disc, and of the square."""
    y, x = np.mgrid[:SIZE, :SIZE]
    middle = rng.uniform(6, SIZE - 6, (4, count, 1, 1))
    radius = rng.uniform(3, 7, (2, count, 1, 1))
    disc = (y - middle[0]) ** 2 + (x - middle[1]) ** 2 < radius[0] ** 2
    square = np.maximum(abs(y - middle[2]), abs(x - middle[3])) < radius[1]
    bright = rng.uniform(0.5, 1.0, (count, 1, 1)) * (disc | square)
    image = bright + rng.normal(scale=0.3, size=bright.shape)
    target = np.stack([disc, square & ~disc], 1)
    return {"image": image[:, None].astype(np.float32), "scores_target": target.astype(np.float32)}


def iou(shape: int) -> Callable[[Tensors, Tensors], Any]:
    """The metric of one of the two shapes."""
    metric = gg.metrics.iou(average="binary")
    return lambda out, batch: metric(out["scores"][:, shape], batch["scores_target"][:, shape])


def draw(path: str, images: np.ndarray, found: np.ndarray, there: np.ndarray) -> None:
    """Rows: images, what is found, what is there; discs are red and squares are blue."""

    def coloured(mask: np.ndarray) -> np.ndarray:
        return np.stack([mask[:, 0], np.zeros_like(mask[:, 0]), mask[:, 1]], -1).astype(np.float32)

    grey = np.repeat(images[:, 0, :, :, None].clip(-1, 2) / 3 + 1 / 3, 3, -1)
    titles = ["image"] * len(images) + ["found"] * len(images) + ["there"] * len(images)
    pictures.gallery(path, [*grey, *coloured(found), *coloured(there)], titles, columns=len(images))


def main(epochs: int = 15, count: int = 600, plot: str | None = None) -> None:
    rng = np.random.default_rng(0)
    train, held_out = shapes(count, rng), shapes(200, rng)
    frontend.manual_seed(0)
    model = frontend.export(UNet(), {"image": ("rows", 1, SIZE, SIZE)}, outputs=["scores"])
    rate = gg.optim.one_cycle(1e-2, epochs * count // 20)
    loss = {"scores": ["bce_with_logits", "dice"]}  # of each pixel, and of the shapes as wholes
    step = gg.build(model, loss, gg.optim.adamw(rate), metrics={"disc_iou": iou(0), "square_iou": iou(1)})
    trainer = gg.Trainer(step)
    trainer.fit(train, epochs=epochs, batch_size=20, progress=False)
    scores = trainer.evaluate(held_out, batch_size=50)
    print(f"of 200 images: IoU {scores['disc_iou']:.3f} of discs, {scores['square_iou']:.3f} of squares; "
          f"bce {scores['scores_bce_with_logits']:.4f}, dice {scores['scores_dice']:.4f}")  # fmt: skip
    if plot is not None:
        found = trainer.predict({"image": held_out["image"][:6]}) > 0
        draw(plot, held_out["image"][:6], found, held_out["scores_target"][:6])


if __name__ == "__main__":
    pictures.begin(main)

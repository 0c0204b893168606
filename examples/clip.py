"""CLIP-style training: an image and what is said of it should lie close together, others far apart.

Two networks, towers, make vectors of images and of texts. The contrastive loss asks each image of a batch which text
is its own, and each text which image. Nobody names classes; afterwards the network finds for an image the words "a
large red disc" among all that could be said.

    python examples/clip.py [--plot clip.svg]
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping

import numpy as np
import onnxruntime as ort
import pictures

import gradgraph as gg
from gradgraph import frontend
from gradgraph.frontend import functional as F
from gradgraph.frontend import nn

SIZES = {"small": 3.0, "large": 6.0}
COLOURS = {
    "red": (1, 0, 0),
    "green": (0, 1, 0),
    "blue": (0, 0, 1),
    "white": (1, 1, 1),
    "yellow": (1, 1, 0),
    "pink": (1, 0, 1),
}
SHAPES = ("disc", "square", "cross", "ring")
TEXTS = list(itertools.product(SIZES, COLOURS, SHAPES))
Tensors = Mapping[str, frontend.Tensor]
WORDS = [*SIZES, *COLOURS, *SHAPES]


class Towers(nn.Module):
    def __init__(self, width: int = 32) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for inside, outside in ((3, 16), (16, 32), (32, 64)):
            layers += [nn.Conv2d(inside, outside, 3, padding=1), nn.BatchNorm2d(outside), nn.ReLU(), nn.MaxPool2d(2)]
        self.image = nn.Sequential(*layers)
        self.image_out = nn.Linear(64, width)
        self.words = nn.Embedding(len(WORDS), 32)
        self.text = nn.GRU(32, 64, batch_first=True)
        self.text_out = nn.Linear(64, width)
        self.log_scale = nn.Parameter(np.log(10.0))

    def forward(self, image: frontend.Tensor, text: frontend.Tensor) -> dict[str, frontend.Tensor]:
        _, last = self.text(self.words(text))
        return {
            "image_vector": F.normalize(self.image_out(self.image(image).amax((2, 3)))),
            "text_vector": F.normalize(self.text_out(last[0])),
            "scale": self.log_scale.exp(),
        }


def codes(words: tuple[str, ...]) -> list[int]:
    return [WORDS.index(word) for word in words]


def drawn(said: tuple[str, str, str], rng: np.random.Generator) -> np.ndarray:
    """A picture of 16 by 16 of what is said, somewhere, in noise."""
    size, colour, shape = SIZES[said[0]], COLOURS[said[1]], said[2]
    y, x = np.mgrid[:16, :16] - rng.uniform(6, 10, (2, 1, 1))
    ring = np.hypot(x, y)
    inside = {"disc": ring < size, "square": np.maximum(abs(x), abs(y)) < size * 0.85, "ring": abs(ring - size + 1) < 1,
              "cross": (np.minimum(abs(x), abs(y)) < 1) & (np.maximum(abs(x), abs(y)) < size)}[shape]  # fmt: skip
    return np.multiply.outer(colour, inside) + rng.normal(scale=0.2, size=(3, 16, 16))


def pairs(count: int, rng: np.random.Generator) -> dict[str, np.ndarray]:
    said = [TEXTS[i] for i in rng.integers(0, len(TEXTS), count)]
    images = np.stack([drawn(words, rng) for words in said]).astype(np.float32)
    return {"image": images, "text": np.array([codes(words) for words in said])}


def contrast(out: Tensors, batch: Tensors) -> frontend.Tensor:
    return F.clip_loss(out["image_vector"], out["text_vector"], out["scale"])


def tower(trainer: gg.Trainer, output: str) -> ort.InferenceSession:
    """One of the two as a model of its own: with the input that it needs."""
    model = trainer.export(outputs=[output])
    return ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])


def draw(path: str, shown: np.ndarray, said: list[str], true: list[str]) -> None:
    """Images, what is said of them, and what should have been."""
    colours = (shown.transpose(0, 2, 3, 1) * 0.7 + 0.15).clip(0, 1)
    titles = [s if s == t else f"{s}\n(is: {t})" for s, t in zip(said, true, strict=True)]
    pictures.gallery(path, list(colours), titles, columns=6)


def main(epochs: int = 10, count: int = 2000, plot: str | None = None) -> None:
    rng = np.random.default_rng(0)
    train, held_out = pairs(count, rng), pairs(300, rng)
    frontend.manual_seed(0)
    inputs = {"image": ("rows", 3, 16, 16), "text": frontend.Input(("rows", "words"), "int64")}
    trainer = gg.Trainer(gg.build(frontend.export(Towers(), inputs), contrast, gg.optim.adamw(3e-3)))
    trainer.fit(train, epochs=epochs, batch_size=50, drop_last=True, progress=False)

    (images,) = tower(trainer, "image_vector").run(None, {"image": held_out["image"]})
    (texts,) = tower(trainer, "text_vector").run(None, {"text": np.array([codes(words) for words in TEXTS])})
    found = (images @ texts.T).argmax(1)
    right = np.mean([codes(TEXTS[i]) == list(words) for i, words in zip(found, held_out["text"], strict=True)])
    for i, words in list(zip(found, held_out["text"], strict=True))[:4]:
        print(f"shown a {' '.join(WORDS[code] for code in words)}, it says: a {' '.join(TEXTS[i])}")
    if plot is not None:
        true = [" ".join(WORDS[code] for code in words) for words in held_out["text"][:12]]
        draw(plot, held_out["image"][:12], [" ".join(TEXTS[i]) for i in found[:12]], true)
    print(f"of {len(TEXTS)} descriptions it finds the right one for {right:.0%} of 300 images")


if __name__ == "__main__":
    pictures.begin(main)

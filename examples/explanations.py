"""Three explanations of predictions: the pixels of a digit, the words of a review, the columns of a table.

``gg.explain`` returns a model that computes the attributions; this program trains three small networks, explains one
prediction of each, and checks that deleting what the method ranks highest changes the prediction faster than deleting
in a random order.

    python examples/explanations.py [--plot explanations.svg]
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pictures

import gradgraph as gg
from gradgraph import frontend
from gradgraph.attributions.attribution_markup import NEGATIVE, POSITIVE, heat_map, limit_of
from gradgraph.attributions.explained import Explained, Explainer, explain_samples
from gradgraph.frontend import nn

GOOD, BAD, NOT = ["good", "great", "fine", "lovely"], ["bad", "awful", "dull", "poor"], ["not", "never"]
OTHERS = ["the", "film", "was", "and", "plot", "very", "music", "I", "thought", "story"]
WORDS = ["", *GOOD, *BAD, *NOT, *OTHERS]
LENGTH = 9


class Digits(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, 12, 3, padding=1), nn.ReLU(), nn.Conv2d(12, 16, 3, padding=1), nn.ReLU()
        )
        self.head = nn.Sequential(nn.MaxPool2d(2), nn.Flatten(), nn.Linear(256, 10))

    def forward(self, image: frontend.Tensor) -> frontend.Tensor:
        return self.head(self.features(image))


class Reviews(nn.Module):
    """Embeddings, a convolution over neighbouring words, and the largest value over the text."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.conv = nn.Embedding(len(WORDS), 12), nn.Conv1d(12, 24, 3, padding=1)
        self.head = nn.Linear(24, 2)

    def forward(self, words: frontend.Tensor) -> frontend.Tensor:
        return self.head(self.conv(self.embedding(words).transpose(1, 2)).relu().amax(2))


def digits() -> dict[str, np.ndarray]:
    from sklearn.datasets import load_digits

    found: Any = load_digits()
    return {"image": (found.images[:, None] / 16).astype(np.float32), "target": found.target.astype(np.int64)}


def wines() -> tuple[dict[str, np.ndarray], list[str], np.ndarray, list[str]]:
    """Standardised columns and the class of 178 wines, with the names and values of the columns."""
    from sklearn.datasets import load_wine

    found: Any = load_wine()
    x = ((found.data - found.data.mean(0)) / found.data.std(0)).astype(np.float32)
    return {"x": x, "target": found.target.astype(np.int64)}, list(found.feature_names), found.data, ["A", "B", "C"]


def reviews(count: int, seed: int) -> dict[str, np.ndarray]:
    """Texts with one judgement, which "not" or "never" right before it reverses."""
    rng = np.random.default_rng(seed)
    texts, labels = np.zeros((count, LENGTH), np.int64), np.zeros(count, np.int64)
    for i in range(count):
        said = list(rng.choice(OTHERS, rng.integers(4, LENGTH - 1)))
        praises, negated = rng.random() < 0.5, rng.random() < 0.5
        judgement = [str(rng.choice(GOOD if praises else BAD))]
        at = int(rng.integers(0, len(said) + 1))
        said[at:at] = [str(rng.choice(NOT)), *judgement] if negated else judgement
        texts[i, : len(said)] = [WORDS.index(word) for word in said[:LENGTH]]
        labels[i] = int(praises != negated)
    return {"words": texts, "target": labels}


def trained(net: nn.Module, inputs: dict[str, Any], data: dict[str, np.ndarray], epochs: int, **names: Any) -> Any:
    """Return the trained model, with a record of its data."""
    step = gg.build(
        frontend.export(net, inputs, outputs=["logits"]), loss="cross_entropy", optimizer=gg.optim.adam(3e-3)
    )
    trainer = gg.Trainer(step, seed=0, device="cpu")
    trainer.fit(data, epochs=epochs, batch_size=32, progress=False)
    trainer.names = gg.DataNames(**names)
    return trainer.exported()


def explained(model: Any, inputs: dict[str, np.ndarray]) -> Explained:
    described = [{"index": i, "file": "", "text": ""} for i in range(len(next(iter(inputs.values()))))]
    return explain_samples(Explainer(model, "integrated-gradients", {"n": 32}, None, "cpu"), inputs, described)


def draw(path: str, digit: Explained, review: Explained, wine: Explained, values: np.ndarray) -> None:
    """A heat map on a digit, coloured words, and bars of columns."""
    with pictures.panels(path, 1, 4, height=2.5, width_ratios=[1, 1, 1.5, 1.9]) as (picture, map_, words, bars):
        pixels = np.rint((1 - digit.inputs["image"][0].transpose(1, 2, 0).repeat(3, 2)) * 255).astype(np.uint8)
        pictures.show(picture, pixels, "a digit")
        shares = digit.sums["image"][0].reshape(8, 8)
        sure = digit.samples[0].probability or 0
        pictures.show(map_, heat_map(pixels, shares, limit_of(shares)), f"why {digit.samples[0].called}? ({sure:.0%})")
        tokens = [WORDS[i] for i in review.inputs["words"][0] if i]
        limit = limit_of(review.sums["words"][0])
        for i, (word, value) in enumerate(zip(tokens, review.sums["words"][0], strict=False)):
            colour = np.array(POSITIVE if value >= 0 else NEGATIVE) / 255
            words.text(
                0.5,
                1 - (i + 0.5) / len(tokens),
                word,
                ha="center",
                va="center",
                fontsize=10,
                bbox={"facecolor": (*colour, 0.7 * min(abs(value) / limit, 1)), "edgecolor": "none", "pad": 2},
            )
        words.set_title(f"why {review.samples[0].called}?", fontsize=8)
        words.set_axis_off()
        best = np.argsort(-np.abs(wine.sums["x"][0]))[:6][::-1]
        colours = [np.array(POSITIVE if wine.sums["x"][0][i] >= 0 else NEGATIVE) / 255 for i in best]
        bars.barh([f"{wine.units['x'].names[i]} = {values[i]:g}" for i in best], wine.sums["x"][0][best], color=colours)
        bars.axvline(0, color="gray", linewidth=0.8)
        bars.tick_params(axis="y", labelsize=6.5)
        bars.set_title(f"why wine {wine.samples[0].called}?", fontsize=8)


def main(plot: str | None = None, epochs: int = 12) -> None:
    frontend.manual_seed(0)
    of_digits, (of_wines, columns, values, kinds), of_reviews = digits(), wines(), reviews(1500, 0)
    names = [str(i) for i in range(10)]
    models = {
        "image": trained(Digits(), {"image": ("batch", 1, 8, 8)}, of_digits, epochs, classes={"target": names}),
        "words": trained(Reviews(), {"words": frontend.Input(("batch", LENGTH), "int64")}, of_reviews, epochs,
                         classes={"target": ["bad", "good"]}),
        "x": trained(nn.Sequential(nn.Linear(13, 16), nn.ReLU(), nn.Linear(16, 3)), {"x": ("batch", 13)}, of_wines,
                     3 * epochs, classes={"target": kinds}, columns={"x": columns}),
    }  # fmt: skip
    of_text = np.array([[WORDS.index(w) for w in ["I", "thought", "the", "film", "was", "not", "bad", "", ""]]])
    inputs = {"image": of_digits["image"][8:16], "words": np.concatenate([of_text, reviews(7, 1)["words"]]),
              "x": of_wines["x"][60:68]}  # fmt: skip
    found = {name: explained(model, {name: inputs[name]}) for name, model in models.items()}
    better = True
    for name, one in found.items():
        assert one.checks is not None
        by_attribution, at_random = one.checks.curves["deletion"].areas
        print(f"{name}: area below the deletion curve {by_attribution:.3f}, in random order {at_random:.3f}")
        better &= by_attribution < at_random
        for warning in one.checks.warnings:
            print(f"  {warning}")
    if plot is not None:
        draw(plot, found["image"], found["words"], found["x"], values[60])
    print("attributions point at what matters" if better else "attributions do NOT point at what matters")


if __name__ == "__main__":
    pictures.begin(main)

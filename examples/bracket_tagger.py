"""A tagger of sequences of different lengths: it says of each bracket in a text whether it has a partner.

That depends on both sides of a bracket, so the network reads the text in both directions. ``gg.Padded`` makes batches
of texts of different lengths: padding costs nothing, since the loss and the accuracy leave out the tag −100, and the
LSTM ends each text at its length.

    python examples/bracket_tagger.py [--plot bracket_tagger.svg]
"""

from __future__ import annotations

import numpy as np
import pictures

import gradgraph as gg
from gradgraph import frontend
from gradgraph.frontend import nn

LETTERS = "ab()[]"
OTHER, MATCHED, ALONE = range(3)
PARTNER = {")": "(", "]": "["}
PADDING = -100


class Tagger(nn.Module):
    def __init__(self, width: int = 48) -> None:
        super().__init__()
        self.embedding = nn.Embedding(len(LETTERS) + 1, 16)
        self.lstm = nn.LSTM(16, width, batch_first=True, bidirectional=True)
        self.tag = nn.Linear(2 * width, 3)

    def forward(self, ids: frontend.Tensor, lengths: frontend.Tensor) -> frontend.Tensor:
        y, _ = self.lstm(self.embedding(ids), lengths=lengths)
        return self.tag(y)


def tags_of(text: str) -> list[int]:
    """Of each letter; a bracket that closes another kind than the last open one stands alone."""
    tags, opened = [OTHER if letter in "ab" else ALONE for letter in text], []
    for i, letter in enumerate(text):
        if letter in PARTNER.values():
            opened.append(i)
        elif letter in PARTNER and opened and text[opened[-1]] == PARTNER[letter]:
            tags[i] = tags[opened.pop()] = MATCHED
    return tags


def texts(count: int, seed: int) -> list[str]:
    rng = np.random.default_rng(seed)
    return ["".join(rng.choice(list(LETTERS), rng.integers(2, 13))) for _ in range(count)]


def padded(of: list[str]) -> gg.Padded:
    samples = [{"ids": [1 + LETTERS.index(letter) for letter in text], "target": tags_of(text)} for text in of]
    return gg.Padded(samples, {"ids": 0, "target": PADDING}, lengths={"ids": "lengths"})


def draw(path: str, of: list[str], scores: np.ndarray) -> None:
    """Texts whose brackets are blue where the network finds a partner, and orange where it finds none."""
    with pictures.panels(path, height=2.4) as (axes,):
        for y, (text, tags) in enumerate(zip(of, scores.argmax(-1), strict=True)):
            for x, (letter, tag, true) in enumerate(zip(text, tags, tags_of(text), strict=False)):
                axes.text(x, y, letter, color=("gray", "tab:blue", "tab:orange")[tag], family="monospace", fontsize=13,
                          ha="center", va="center", weight="bold" if tag != OTHER else "normal")  # fmt: skip
                if tag != true:
                    axes.plot(x, y + 0.5, marker="^", color="black", markersize=4)
        axes.set(xlim=(-12, 24), ylim=(len(of) - 0.4, -0.6))
        axes.set_axis_off()


def main(epochs: int = 8, count: int = 4000, plot: str | None = None) -> None:
    frontend.manual_seed(0)
    inputs = {"ids": frontend.Input(("rows", "letters"), "int64"), "lengths": frontend.Input(("rows",), "int64")}
    model = frontend.export(Tagger(), inputs, ["tags"])
    step = gg.build(model, gg.losses.cross_entropy(axis=-1), gg.optim.adam(5e-3), metrics=["accuracy"])
    trainer = gg.Trainer(step)
    held_out = texts(500, seed=1)
    trainer.fit(padded(texts(count, seed=0)), epochs=epochs, batch_size=50, progress=False)
    scores = trainer.evaluate(padded(held_out))
    tags = np.concatenate([tags_of(text) for text in held_out])
    commoner = np.bincount(tags[tags != OTHER]).max() / (tags != OTHER).sum()
    print(f"accuracy {scores['accuracy']:.3f} on new texts; {commoner:.2f} of the brackets have the commoner tag")
    if plot is not None:
        longest = sorted(held_out, key=len)[-10:]
        draw(plot, longest, trainer.predict(padded(longest)))
    text = "a(b[)]b(a)"
    tags = trainer.predict(padded([text])).argmax(-1)[0]
    print(f"{text}\n{''.join(' +-'[tag] for tag in tags)}")
    print("it does better" if scores["accuracy"] > 0.9 else "it does WORSE")


if __name__ == "__main__":
    pictures.begin(main)

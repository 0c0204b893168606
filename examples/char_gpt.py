"""A small GPT that learns to write like a text, one character after the other.

The text is this repository's own documentation, without code and tables. The network is a Transformer with causal
attention; it trains on pieces of 48 characters, and is exported as a plain model, which then writes: each character is
drawn from what the model expects next.

    python examples/char_gpt.py [--plot char_gpt.svg]
"""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import onnxruntime as ort
import pictures

import gradgraph as gg
from gradgraph import frontend
from gradgraph.frontend import nn

ROOT = Path(__file__).parent.parent
LENGTH, WIDTH = 48, 64


class GPT(nn.Module):
    def __init__(self, vocabulary: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, WIDTH)
        self.positions = nn.Embedding(LENGTH, WIDTH)
        layer = nn.TransformerEncoderLayer(
            WIDTH, 4, 4 * WIDTH, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
        )
        self.blocks = nn.TransformerEncoder(layer, 2, nn.LayerNorm(WIDTH))
        self.head = nn.Linear(WIDTH, vocabulary, bias=False)

    def forward(self, text: frontend.Tensor) -> frontend.Tensor:
        length = text.shape[1]
        x = self.embed(text) + self.positions.weight[:length]
        return self.head(self.blocks(x, nn.generate_square_subsequent_mask(length)))


def prose() -> str:
    """The pages of the documentation without code and tables."""
    pages = "\n".join(page.read_text("utf-8") for page in sorted((ROOT / "docs").rglob("*.md")))
    text = re.sub(r"(?s:```.*?```)|^\|.*$", "", pages, flags=re.MULTILINE)
    return " ".join(re.sub(r"[^A-Za-z ,.;:()'-]", "", text.replace("\n", " ")).split())


def pieces(codes: np.ndarray) -> dict[str, np.ndarray]:
    """Every piece of the text that starts at a multiple of 16, and the characters that follow each of its own."""
    starts = np.arange(0, len(codes) - LENGTH - 1, 16)
    rows = codes[starts[:, None] + np.arange(LENGTH + 1)]
    return {"text": rows[:, :-1], "target": rows[:, 1:]}


def written(session: ort.InferenceSession, start: np.ndarray, count: int, temperature: float = 0.5) -> np.ndarray:
    """``start`` and ``count`` characters more."""
    rng, text = np.random.default_rng(0), start
    for _ in range(count):
        (scores,) = session.run(None, {"text": text[None, -LENGTH:]})
        odds = np.exp((scores[0, -1] - scores[0, -1].max()) / temperature)
        text = np.append(text, rng.choice(len(odds), p=odds / odds.sum()))
    return text


def draw(path: str, letters: list[str], scores: np.ndarray, came: np.ndarray) -> None:
    """How sure the model is of each character of a piece of text, before it comes."""
    odds = np.exp(scores - scores.max(1, keepdims=True))
    odds /= odds.sum(1, keepdims=True)
    places = np.arange(len(came))
    with pictures.panels(path, height=2.0) as (axes,):
        best = odds.argmax(1)
        axes.bar(places, odds.max(1), color="lightgray", label="expected, and another one came")
        axes.bar(places, odds[places, came], color=np.where(best == came, "tab:green", "tab:orange"))
        axes.bar(0, 0, color="tab:green", label="came as expected")
        axes.bar(0, 0, color="tab:orange", label="came, and another one was expected")
        axes.set_xticks(places, ["␣" if letters[code] == " " else letters[code] for code in came])
        axes.set_ylabel("probability")
        axes.set_ylim(0, 1)
        axes.margins(x=0.01)
        axes.figure.legend(loc="outside upper center", ncols=3, fontsize=8)


def main(steps: int = 1000, count: int = 400, limit: int | None = None, plot: str | None = None) -> None:
    text = prose()
    letters = sorted(set(text))
    codes = np.searchsorted(letters, list(text)).astype(np.int64)
    held_out = len(codes) // 10
    data, unseen = pieces(codes[held_out:]), pieces(codes[:held_out])

    frontend.manual_seed(0)
    model = frontend.export(GPT(len(letters)), {"text": frontend.Input(("rows", "time"), "int64")}, outputs=["next"])
    rate = gg.optim.warmup(steps // 10, gg.optim.cosine(3e-3, steps - steps // 10))
    optimizer = gg.optim.chain(
        gg.optim.clip_by_global_norm(1.0), gg.optim.adamw(rate, weight_decay=0.1, no_decay="norm_and_bias")
    )
    step = gg.build(model, gg.losses.cross_entropy(axis=-1), optimizer, metrics=["accuracy", "perplexity"])
    trainer = gg.Trainer(step)
    trainer.fit(data, epochs=100, batch_size=32, max_steps=steps, progress=False)
    scores = trainer.evaluate(unseen, batch_size=32, limit=limit)
    print(f"{len(text):,} characters, {len(letters)} different; on unseen text, {scores['accuracy']:.0%} of the next "
          f"characters are predicted correctly (perplexity {scores['perplexity']:.2f})")  # fmt: skip
    if plot is not None:
        seen = slice(1, 2)
        draw(plot, letters, trainer.predict({"text": unseen["text"][seen]})[0], unseen["target"][seen][0])
    exported = trainer.export()
    session = ort.InferenceSession(exported.SerializeToString(), providers=["CPUExecutionProvider"])
    start = np.searchsorted(letters, list("A step ")).astype(np.int64)
    print("".join(letters[code] for code in written(session, start, count)))


if __name__ == "__main__":
    pictures.begin(main)

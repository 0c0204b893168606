"""A BERT-style classifier: an encoder reads a sentence, and the first token says what it is about.

The sentences are made up: a subject, a verb and an object with adjectives, of different lengths; the label says whether
more good things than bad ones are said of the subject, so the order of words counts. Sentences are padded to the
longest of their batch (``gg.Padded``) with a mask that attention reads. Weights have groups: a rate that falls from
layer to layer, a higher one for the head, and no decay for norms and biases; the rate warms up and then falls.

    python examples/bert_classifier.py [--plot bert_classifier.svg]
"""

from __future__ import annotations

import numpy as np
import pictures

import gradgraph as gg
from gradgraph import frontend
from gradgraph.frontend import nn

GOOD, BAD = ["kind", "bright", "calm", "brave"], ["rude", "dull", "loud", "mean"]
THINGS, VERBS = ["fox", "owl", "cat", "dog", "hen", "cow"], ["sees", "meets", "follows", "helps"]
WORDS = {word: i for i, word in enumerate(["<pad>", "<cls>", "the", "and", *GOOD, *BAD, *THINGS, *VERBS])}
WIDTH, LAYERS, LONGEST = 32, 2, 24


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(len(WORDS), WIDTH)
        self.places = nn.Embedding(LONGEST, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, activation="gelu", batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, LAYERS)

    def forward(self, ids: frontend.Tensor, mask: frontend.Tensor) -> frontend.Tensor:
        x = self.norm(self.words(ids) + self.places.weight[: ids.shape[1]])
        return self.encoder(x, src_key_padding_mask=mask == 0)


class Classifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bert = Encoder()
        self.head = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Dropout(0.1), nn.Linear(WIDTH, 2))

    def forward(self, ids: frontend.Tensor, attention_mask: frontend.Tensor) -> frontend.Tensor:
        return self.head(self.bert(ids, attention_mask)[:, 0])


class Sentences:
    """A dataset: ``len(data)`` and ``data[i]``."""

    def __init__(self, count: int, seed: int) -> None:
        self.rng = np.random.default_rng(seed)
        self.samples = [self.drawn() for _ in range(count)]

    def drawn(self) -> dict[str, np.ndarray]:
        subject, said = self.thing()
        text = ["<cls>", *subject, self.rng.choice(VERBS), *self.thing()[0]]
        return {"ids": np.array([WORDS[word] for word in text]), "target": np.int64(said > 0)}

    def thing(self) -> tuple[list[str], int]:
        good = int(self.rng.integers(0, 4))
        bad = int(self.rng.choice([n for n in range(4) if n != good]))
        said = [*self.rng.choice(GOOD, good), *self.rng.choice(BAD, bad)]
        self.rng.shuffle(said)
        return ["the", *said, self.rng.choice(THINGS)], good - bad

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, i: int) -> dict[str, np.ndarray]:
        return self.samples[i]


def draw(path: str, history: gg.History) -> None:
    """Loss and accuracy after each epoch."""
    with pictures.panels(path, 1, 2, height=2.4) as (loss, accuracy):
        for axes, column in ((loss, "loss"), (accuracy, "accuracy")):
            axes.plot(history["epoch"], history[column], marker=".", label="2,000 sentences to learn from")
            axes.plot(history["epoch"], history[f"val_{column}"], marker=".", label="500 others")
            axes.set_xlabel("epoch")
            axes.set_ylabel(column)
        loss.legend()


def main(epochs: int = 12, count: int = 2000, plot: str | None = None) -> None:
    frontend.manual_seed(0)
    inputs = {name: frontend.Input(("rows", "words"), "int64") for name in ("ids", "attention_mask")}
    model = frontend.export(Classifier(), inputs, outputs=["logits"])
    train, held_out = (
        gg.Padded(Sentences(n, seed), {"ids": 0}, mask={"ids": "attention_mask"}) for seed, n in enumerate((count, 500))
    )

    steps = epochs * -(-len(train) // 32)  # the last batch of an epoch is a smaller one
    optimizer = gg.optim.adamw(
        gg.optim.warmup(steps // 10, gg.optim.linear(2e-3, steps - steps // 10)),
        weight_decay=0.05,
        no_decay="norm_and_bias",
        layer_decay=0.8,
        groups={"head.*": {"lr_factor": 2.0}},
    )
    step = gg.build(model, "cross_entropy", optimizer, metrics=["accuracy", "f1"])
    trainer = gg.Trainer(step)
    history = trainer.fit(train, epochs=epochs, batch_size=32, validation=held_out, progress=False)
    print(f"accuracy on 500 other sentences: {history['val_accuracy'][-1]:.1%} (F1 {history['val_f1'][-1]:.3f})")
    if plot is not None:
        draw(plot, history)


if __name__ == "__main__":
    pictures.begin(main)

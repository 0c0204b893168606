"""CTC on synthetic speech: a network learns to spell what is said, without being told when each sound is.

A word is a few sounds, each a tone of its own that lasts for a while, with noise, pauses and a speed that differs. The
network reads the spectrum of 12 bands at each moment, in both directions, and gives scores for each letter and for "no
letter" (blank). The CTC loss adds up all the ways in which the moments could spell the word.

    python examples/ctc_speech.py [--plot ctc_speech.svg]
"""

from __future__ import annotations

import numpy as np
import pictures

import gradgraph as gg
from gradgraph import frontend
from gradgraph.frontend import nn

LETTERS, BANDS, LONGEST = "-aeiounmst", 12, 7  # the first one is blank
Arrays = dict[str, np.ndarray]


class Recogniser(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.before = nn.Conv1d(BANDS, 32, 5, padding=2)
        self.reads = nn.GRU(32, 32, batch_first=True, bidirectional=True)
        self.head = nn.Linear(64, len(LETTERS))

    def forward(self, sound: frontend.Tensor) -> frontend.Tensor:
        """Log-probabilities ``[rows, time, letters]`` of a sound ``[rows, time, bands]``."""
        x = self.before(sound.transpose(1, 2)).relu().transpose(1, 2)
        return self.head(self.reads(x)[0]).log_softmax(2)


def spoken(count: int, seed: int) -> Arrays:
    """Sounds ``[count, time, bands]`` padded with silence, how long they are, and the letters that are said."""
    rng = np.random.default_rng(seed)
    voices = np.random.default_rng(0).uniform(size=(len(LETTERS), BANDS)) ** 4  # the spectrum of each letter
    said = rng.integers(1, len(LETTERS), (count, LONGEST))
    lengths = rng.integers(3, LONGEST + 1, count)
    sound, times = np.zeros((count, 64, BANDS)), np.zeros(count, np.int64)
    for i in range(count):
        at = int(rng.integers(0, 3))
        for letter in said[i, : lengths[i]]:
            lasts = int(rng.integers(3, 8))
            sound[i, at : at + lasts] = voices[letter] * np.hanning(lasts + 2)[1:-1, None]
            at += lasts + int(rng.integers(0, 2))
        times[i] = min(at, 64)
    sound += rng.normal(scale=0.2, size=sound.shape)
    return {"sound": sound.astype(np.float32), "target": said, "input_lengths": times, "target_lengths": lengths}


def spelled(scores: np.ndarray, length: int) -> str:
    """The best letter of each moment; what repeats is one letter, and blanks are left out."""
    best = scores[:length].argmax(1)
    return "".join(LETTERS[b] for a, b in zip([0, *best[:-1]], best, strict=True) if b not in (0, a))


def draw(path: str, sound: np.ndarray, scores: np.ndarray, word: str) -> None:
    """A sound, and below it when the network hears which letter."""
    with pictures.panels(path, 2, 1, height=3.2, sharex=True, height_ratios=[1, 1.2]) as axes:
        (heard,), (letters,) = axes
        heard.imshow(sound.T, aspect="auto")
        heard.set_ylabel("band")
        heard.set_title(f"the sound of “{word}”, and when each letter is heard")
        odds = np.exp(scores)
        letters.plot(odds[:, 0], color="lightgray", label="blank")
        for code in sorted({LETTERS.index(letter) for letter in word}):
            (line,) = letters.plot(odds[:, code])
            letters.text(
                odds[:, code].argmax(), 1.08, LETTERS[code], color=line.get_color(), ha="center", weight="bold"
            )
        letters.set(xlabel="time", ylabel="probability", ylim=(0, 1.2))


def main(epochs: int = 8, count: int = 1000, plot: str | None = None) -> None:
    train, held_out = spoken(count, seed=1), spoken(200, seed=2)
    frontend.manual_seed(0)
    model = frontend.export(Recogniser(), {"sound": ("rows", "time", BANDS)}, outputs=["letters"])
    loss = gg.losses.ctc(batch_first=True, zero_infinity=True)
    optimizer = gg.optim.chain(gg.optim.clip_by_global_norm(5.0), gg.optim.adam(5e-3))
    trainer = gg.Trainer(gg.build(model, loss, optimizer))
    trainer.fit(train, epochs=epochs, batch_size=20, progress=False)

    scores = trainer.predict({"sound": held_out["sound"]})
    heard = [spelled(row, n) for row, n in zip(scores, held_out["input_lengths"], strict=True)]
    words = [
        "".join(LETTERS[c] for c in row[:n])
        for row, n in zip(held_out["target"], held_out["target_lengths"], strict=True)
    ]
    right = np.mean([a == b for a, b in zip(heard, words, strict=True)])
    for word, found in list(zip(words, heard, strict=True))[:5]:
        print(f"said {word:8}  heard {found}")
    if plot is not None:
        n = held_out["input_lengths"][2]
        draw(plot, held_out["sound"][2, :n], scores[2, :n], words[2])
    print(f"{right:.0%} of 200 words are heard letter for letter")


if __name__ == "__main__":
    pictures.begin(main)

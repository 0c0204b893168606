"""A language model in 4 bits, as onnxruntime-genai's model builder writes them, learns a text by adapters.

The file beside this one is a Llama of 26 thousand random weights with the operators of the large ones: MatMulNBits,
GroupQueryAttention with its cache, SkipSimplifiedLayerNormalization. It gets low-rank adapters, trains until it repeats
a text, and the adapters are merged into the model with the cache, which then writes in a plain loop of onnxruntime.
A token is a character here; a model of your own comes with its tokenizer.

    python examples/finetune_llm.py [--plot finetune_llm.svg]
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np
import pictures

import gradgraph as gg

HERE = Path(__file__).parent
TEXT = "The quick brown fox jumps over the lazy dog, and then it sleeps."
BEGIN, END, FIRST = 1, 2, 3  # tokens; FIRST is the space, and printable characters follow


def tokens(text: str) -> list[int]:
    return [BEGIN, *(ord(letter) - ord(" ") + FIRST for letter in text), END]


def letters(numbers: list[int]) -> str:
    return "".join(chr(n - FIRST + ord(" ")) for n in numbers if n >= FIRST)


def written(model: Path, prompt: list[int], most: int) -> list[int]:
    """``prompt`` and the likeliest tokens behind it: one run for the prompt, then one for each token."""
    decoder = gg.chat.Decoder(model, head_size=16)
    (answer,) = decoder.generated([prompt], {END}, gg.chat.Sampling(max_tokens=most - len(prompt)))
    return prompt + answer


def draw(path: str, losses: list[float], rounds: list[tuple[int, str]]) -> None:
    """The loss, and what the model has written after so many steps."""
    with pictures.panels(path, height=2.6) as (axes,):
        axes.semilogy(np.arange(1, len(losses) + 1), losses)
        axes.set_xlabel("step")
        axes.set_ylabel("loss of the next character")
        for line, (at, text) in enumerate(rounds):
            axes.plot(at, losses[at - 1], "o", color="tab:blue")
            axes.text(
                0.32, 0.92 - 0.09 * line, f"{at:3}: {text}", transform=axes.transAxes, fontsize=7, family="monospace"
            )


def main(
    model: Path = HERE / "tiny_llama_int4.onnx", steps: int = 200, rate: float = 5e-3, plot: str | None = None
) -> None:
    adapted = gg.lora(model, ["*attn*", "*mlp*", "lm_head"], rank=8)
    trained = gg.surgery.language_model(adapted)  # tokens in, scores out: without past, mask and positions
    step = gg.build(trained, gg.losses.cross_entropy(axis=-1), gg.optim.adam(rate))
    trainer = gg.Trainer(step)
    data = gg.surgery.next_tokens([tokens(TEXT)])
    losses: list[float] = []
    rounds = []
    pauses = [steps // 10, steps // 5, steps * 2 // 5, steps] if plot is not None else [steps]
    with tempfile.TemporaryDirectory() as folder:
        merged = Path(folder) / "merged.onnx"
        for pause in pauses:
            losses += trainer.fit(data, epochs=pause - len(losses), batch_size=1, progress=False)["loss"]
            gg.surgery.forget_sizes(gg.surgery.merge_adapters(adapted, trainer.state_dict()), out=merged)
            rounds.append((len(losses), letters(written(merged, tokens(TEXT)[:4], len(TEXT) + 4))))
    print(
        f"{len(step.manifest.trainable)} tensors were trained; the loss went from {losses[0]:.2f} to {losses[-1]:.4f}"
    )
    print(f"the merged model continues {TEXT[:3]!r}:\n{rounds[-1][1]}")
    if plot is not None:
        draw(plot, losses, rounds)


if __name__ == "__main__":
    pictures.begin(main)

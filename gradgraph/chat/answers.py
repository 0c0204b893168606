"""Text generation from a model folder, with its tokenizer, chat template, adapters and stop tokens."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, cast

from gradgraph import surgery
from gradgraph.chat.decoder import Decoder
from gradgraph.chat.model_folder import ModelFolder
from gradgraph.chat.prompts import Prompt, Prompts, Steps
from gradgraph.chat.sampling import Sampling
from gradgraph.errors import ArgumentError, listed, shown
from gradgraph.surgery.ort_adapters import SUFFIX

RUNTIMES = ("onnxruntime", "genai")
_UNFINISHED = "\ufffd"  # the replacement character that a decoder writes while the bytes of a character are incomplete


class Generator(Prompts):
    """A language model loaded for generation.

    Args:
        folder: a folder written by onnxruntime-genai's builder, optimum or ``finetune``, with its tokenizer.
        adapter: a PEFT folder; or an ``.onnx_adapter``, for a model made by ``surgery.switchable``.
        template: a file with another chat template; ``"none"`` uses prompts verbatim.
        runtime: ``"onnxruntime"``, or ``"genai"`` for onnxruntime-genai, if installed.

    Raises:
        ModelError, DataError, BuildError: something in the folder is missing or does not match.
        ArgumentError: the runtime is unknown, or onnxruntime-genai was asked to load a PEFT adapter.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        *,
        adapter: str | os.PathLike[str] | None = None,
        template: str | Path | None = None,
        runtime: str = "onnxruntime",
    ) -> None:
        if runtime not in RUNTIMES:
            raise ArgumentError(f"there is no runtime '{shown(runtime)}'; choose from {listed(RUNTIMES)}")
        super().__init__(ModelFolder.of(folder), template)
        self._decoder = _decoder_of(self.base, adapter, runtime)

    def __call__(self, prompts: Sequence[Prompt], sampling: Sampling | None = None) -> list[str]:
        """Return the answer to each prompt, without its stop token."""
        ids = [self.tokens_of(prompt) for prompt in prompts]
        found = self._decoder.generated(ids, self.stop, self.fitting(ids, sampling))
        return [self.text_of(row) for row in found]

    def stream(self, prompt: Prompt, sampling: Sampling | None = None) -> Iterator[str]:
        """Yield the answer to a prompt in pieces, as it is generated."""
        ids, told, new = self.tokens_of(prompt), "", list[int]()
        for (token,) in self._decoder.steps([ids], self.stop, self.fitting([ids], sampling)):
            if token is None or token in self.stop:
                break
            new.append(token)
            text = self.text_of(new)
            if not text.endswith(_UNFINISHED):
                yield text[len(told) :]
                told = text
        rest = self.text_of(new)[len(told) :]
        if rest:
            yield rest


def generate(
    folder: str | os.PathLike[str],
    prompt: Prompt | Sequence[str],
    *,
    adapter: str | os.PathLike[str] | None = None,
    template: str | Path | None = None,
    runtime: str = "onnxruntime",
    **sampling: Any,
) -> Any:
    """Generate a language model's answer to a prompt.

    Args:
        folder, adapter, template, runtime: as for :class:`Generator`, which loads the model once for several answers.
        prompt: a text; messages (``{"role": …, "content": …}``); or a list of texts.
        sampling: options of :class:`Sampling`, such as ``max_tokens=64, temperature=0.7``.

    Returns:
        The text of the answer; for a list of texts, a list.

    Raises:
        ModelError, DataError, BuildError, ArgumentError: as for :class:`Generator`; or an option is invalid.
    """
    chosen = Sampling().changed(sampling)
    model = Generator(folder, adapter=adapter, template=template, runtime=runtime)
    texts = [] if isinstance(prompt, str) else [one for one in prompt if isinstance(one, str)]
    if texts and len(texts) == len(prompt):
        return model(texts, chosen)
    return model([cast("Prompt", prompt)], chosen)[0]


def _decoder_of(base: ModelFolder, adapter: str | os.PathLike[str] | None, runtime: str) -> Steps:
    of_ort = adapter is not None and os.fspath(adapter).endswith(SUFFIX)
    if runtime == "genai":
        from gradgraph.chat.genai import GenaiDecoder

        if adapter is not None and not of_ort:
            raise ArgumentError(
                f"onnxruntime-genai requires the adapter as a file {SUFFIX}; use onnxruntime for PEFT folders"
            )
        return GenaiDecoder(base.path, adapter)
    if adapter is None or of_ort:
        return Decoder(base.model, adapter, base.head_size)
    with tempfile.TemporaryDirectory() as folder:
        with_adapter = Path(folder) / "model.onnx"
        surgery.forget_sizes(surgery.load_adapter(base.decoder(), adapter), out=with_adapter)
        return Decoder(with_adapter, None, base.head_size)

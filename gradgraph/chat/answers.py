"""Answers of a language model, from its folder: its tokenizer and chat template, its adapters, and where it stops."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, cast

from gradgraph import surgery
from gradgraph.chat.decoder import Decoder
from gradgraph.chat.model_folder import ModelFolder
from gradgraph.chat.sampling import Sampling
from gradgraph.chat.tokens import Encoder
from gradgraph.errors import ArgumentError, DataError, listed, shown
from gradgraph.files.untrusted.documents import json_of
from gradgraph.files.untrusted.regular import UnreadableError, regular_bytes
from gradgraph.surgery.ort_adapters import SUFFIX

RUNTIMES = ("onnxruntime", "genai")
_GENERATION = "generation_config.json"
_UNFINISHED = "\ufffd"  # what a decoder writes for a character whose bytes have not all come
Prompt = str | Sequence[Mapping[str, Any]]


class Steps(Protocol):
    """A source of the next token of each prompt, again and again; see :meth:`Decoder.steps`."""

    def steps(
        self, prompts: Sequence[Sequence[int]], stop: Collection[int] = (), sampling: Sampling | None = None
    ) -> Iterator[list[int | None]]: ...

    def generated(
        self, prompts: Sequence[Sequence[int]], stop: Collection[int] = (), sampling: Sampling | None = None
    ) -> list[list[int]]: ...


class Generator:
    """A language model that answers; it is loaded once.

    Args:
        folder: as onnxruntime-genai's builder, optimum or ``finetune`` writes it, with its tokenizer.
        adapter: a folder of PEFT; or an ``.onnx_adapter``, for a model that ``surgery.switchable`` has made.
        template: a file with another chat template; ``"none"`` takes prompts as they stand.
        runtime: ``"onnxruntime"``, or ``"genai"`` for onnxruntime-genai, where that is installed.

    Raises:
        ModelError, DataError, BuildError: something in the folder is missing, or does not fit.
        ArgumentError: there is no such runtime, or onnxruntime-genai is to run PEFT's adapters.
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
        self.base = ModelFolder.of(folder)
        self.encoder = Encoder(self.base.path, template)
        self.stop = stop_tokens(self.base, self.encoder)
        self._template = template
        self._decoder = _decoder_of(self.base, adapter, runtime)

    def tokens_of(self, prompt: Prompt) -> list[int]:
        """The tokens of a prompt; by the chat template, if there is one, a text is what the user says.

        Raises:
            DataError: messages need a template, and there is none; or the prompt fills what the model takes.
        """
        template = self.encoder.template_for("messages") if not isinstance(prompt, str) or self._has_template else None
        if template is None:
            if not isinstance(prompt, str):
                raise DataError(
                    "messages need a chat template",
                    remedy="leave template='none' out, or give a text",
                    shell="leave --template none out, or give a text",
                )
            text = prompt
        else:
            messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
            text = template.render(messages, add_generation_prompt=True)
        ((ids, _),) = self.encoder.tokenizer.spans([text], template is None)
        if template is None and ids and ids[-1] in self.stop:
            ids = ids[:-1]  # that some tokenizers put behind every text
        if self.base.context is not None and len(ids) >= self.base.context:
            raise DataError(f"the prompt has {len(ids)} tokens, and the model takes {self.base.context}; shorten it")
        return list(ids)

    @property
    def _has_template(self) -> bool:
        try:
            return self.encoder.template_for("messages") is not None
        except DataError:
            if self._template is not None:
                raise
            return False

    def __call__(self, prompts: Sequence[Prompt], sampling: Sampling | None = None) -> list[str]:
        """The answer to each prompt, without what ends it."""
        ids = [self.tokens_of(prompt) for prompt in prompts]
        found = self._decoder.generated(ids, self.stop, self._fitting(ids, sampling))
        return [self._text([t for t in row if t not in self.stop]) for row in found]

    def stream(self, prompt: Prompt, sampling: Sampling | None = None) -> Iterator[str]:
        """The answer to a prompt, piece by piece as it is written."""
        ids, told, new = self.tokens_of(prompt), "", list[int]()
        for (token,) in self._decoder.steps([ids], self.stop, self._fitting([ids], sampling)):
            if token is None or token in self.stop:
                break
            new.append(token)
            text = self._text(new)
            if not text.endswith(_UNFINISHED):
                yield text[len(told) :]
                told = text
        rest = self._text(new)[len(told) :]
        if rest:
            yield rest

    def _text(self, ids: Sequence[int]) -> str:
        return self.encoder.tokenizer.decode(ids, special=False)

    def _fitting(self, prompts: Sequence[Sequence[int]], sampling: Sampling | None) -> Sampling:
        """At most so many tokens as the model takes."""
        chosen = sampling or Sampling()
        if self.base.context is None:
            return chosen
        return chosen.at_most(self.base.context - max(map(len, prompts)))


def generate(
    folder: str | os.PathLike[str],
    prompt: Prompt | Sequence[str],
    *,
    adapter: str | os.PathLike[str] | None = None,
    template: str | Path | None = None,
    runtime: str = "onnxruntime",
    **sampling: Any,
) -> Any:
    """The answer of a language model.

    Args:
        folder, adapter, template, runtime: as for :class:`Generator`, which answers more than once.
        prompt: a text; messages (``{"role": …, "content": …}``); or a list of texts.
        sampling: options of :class:`Sampling`, such as ``max_tokens=64, temperature=0.7``.

    Returns:
        The text of the answer; of a list of texts, a list.

    Raises:
        ModelError, DataError, BuildError, ArgumentError: as for :class:`Generator`; or an option is wrong.
    """
    chosen = Sampling().changed(sampling)
    model = Generator(folder, adapter=adapter, template=template, runtime=runtime)
    texts = [] if isinstance(prompt, str) else [one for one in prompt if isinstance(one, str)]
    if texts and len(texts) == len(prompt):
        return model(texts, chosen)
    return model([cast("Prompt", prompt)], chosen)[0]


def stop_tokens(base: ModelFolder, encoder: Encoder) -> frozenset[int]:
    """The tokens that end an answer: those that ``genai_config.json`` and ``generation_config.json`` name, or else that
    of the tokenizer.
    """
    found = _numbers(base.described.get("eos_token_id"))
    file = base.path / _GENERATION
    if file.is_file():
        try:
            described = json_of(regular_bytes(file))
        except UnreadableError as error:
            raise DataError(f"'{shown(file)}' cannot be read ({error}); take it from where the model is") from None
        found |= _numbers(described.get("eos_token_id") if isinstance(described, Mapping) else None)
    return found or _numbers(encoder.end)


def _numbers(value: Any) -> frozenset[int]:
    values = value if isinstance(value, list) else [value]
    return frozenset(v for v in values if isinstance(v, int) and not isinstance(v, bool))


def _decoder_of(base: ModelFolder, adapter: str | os.PathLike[str] | None, runtime: str) -> Steps:
    of_ort = adapter is not None and os.fspath(adapter).endswith(SUFFIX)
    if runtime == "genai":
        from gradgraph.chat.genai import GenaiDecoder

        if adapter is not None and not of_ort:
            raise ArgumentError(
                f"onnxruntime-genai takes an adapter as a file {SUFFIX}; PEFT's folders go by onnxruntime"
            )
        return GenaiDecoder(base.path, adapter)
    decoder = base.described.get("decoder")
    size = decoder.get("head_size") if isinstance(decoder, Mapping) else base.described.get("head_dim")
    head_size = size if isinstance(size, int) else None
    if adapter is None or of_ort:
        return Decoder(base.model, adapter, head_size)
    with tempfile.TemporaryDirectory() as folder:
        with_adapter = Path(folder) / "model.onnx"
        surgery.forget_sizes(surgery.load_adapter(base.decoder(), adapter), out=with_adapter)
        return Decoder(with_adapter, None, head_size)

"""Conversion of prompts to tokens, and of generated tokens to text."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from gradgraph.chat.model_folder import ModelFolder
from gradgraph.chat.sampling import Sampling
from gradgraph.chat.template import MissingTemplateError
from gradgraph.chat.tokens import Encoder
from gradgraph.data.texts.tokenizer_files import table_in
from gradgraph.errors import DataError, shown
from gradgraph.files.untrusted.regular import UnreadableError, regular_text

_GENERATION = "generation_config.json"
LARGEST = 1 << 20  # bytes of a prompt file
Prompt = str | Sequence[Mapping[str, Any]]


class Steps(ABC):
    """A generator of next tokens, which may support only one prompt at a time."""

    @abstractmethod
    def steps(
        self, prompts: Sequence[Sequence[int]], stop: Collection[int] = (), sampling: Sampling | None = None
    ) -> Iterator[list[int | None]]:
        """Yield the next token of each prompt; see :meth:`Decoder.steps`."""

    def generated(
        self, prompts: Sequence[Sequence[int]], stop: Collection[int] = (), sampling: Sampling | None = None
    ) -> list[list[int]]:
        """Return the new tokens of each prompt, including the stop token."""
        return [[t for (t,) in self.steps([p], stop, sampling) if t is not None] for p in prompts]


class Prompts:
    """Prompts and answers of a model, by the tokenizer and the chat template of its folder.

    Args:
        base: the model folder.
        template: a file with another chat template; ``"none"`` uses prompts verbatim.
        now: the time that a template may insert; None for the current time.

    Attributes:
        encoder: the encoder of the folder's tokenizer and chat template.
        stop: the tokens that end an answer.

    Raises:
        DataError: a file of the folder is missing or cannot be read.
    """

    def __init__(self, base: ModelFolder, template: str | Path | None = None, now: datetime | None = None) -> None:
        self.base, self.encoder = base, Encoder(base.path, template, now)
        self.stop = stop_tokens(base, self.encoder)

    def tokens_of(self, prompt: Prompt) -> list[int]:
        """Return the tokens of a prompt; with a chat template, a text becomes a user message.

        Raises:
            DataError: the prompt is messages, but there is no template; the prompt is empty; or it has at least as
                many tokens as the context length.
        """
        template = self.encoder.template_for("messages") if not isinstance(prompt, str) or self._has_template else None
        _check_not_empty(prompt, template is not None)
        if template is None:
            if not isinstance(prompt, str):
                raise DataError(
                    "messages need a chat template",
                    remedy="omit template='none', or pass a text",
                    shell="omit --template none, or pass a text",
                )
            text = prompt
        else:
            messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
            text = template.render(messages, add_generation_prompt=True)
        (ids,) = self.encoder.tokenizer.ids([text], template is None)
        if template is None and ids and ids[-1] in self.stop:
            ids = ids[:-1]  # some tokenizers append an end token to every text
        if not ids:
            raise DataError("a prompt has no tokens; write at least a word")
        if self.base.context is not None and len(ids) >= self.base.context:
            raise DataError(
                f"the prompt has {len(ids)} tokens, but the context length is {self.base.context}; shorten it"
            )
        return list(ids)

    @property
    def _has_template(self) -> bool:
        try:
            return self.encoder.template_for("messages") is not None
        except MissingTemplateError:
            return False

    def text_of(self, ids: Sequence[int]) -> str:
        """Return the text of an answer, without its stop token."""
        return self.encoder.tokenizer.decode([t for t in ids if t not in self.stop], special=False)

    def fitting(self, prompts: Sequence[Sequence[int]], sampling: Sampling | None) -> Sampling:
        """Return the sampling options with answers limited to the remaining context length."""
        chosen = sampling or Sampling()
        if self.base.context is None:
            return chosen
        return chosen.at_most(self.base.context - max(map(len, prompts)))


def _check_not_empty(prompt: Prompt, by_template: bool) -> None:
    """Raise DataError if the prompt or its last message is empty, since a template would still add text around it."""
    last = prompt if isinstance(prompt, str) else prompt[-1].get("content") if prompt else ""
    if by_template and isinstance(last, str) and not last.strip():
        raise DataError("the prompt is empty; write at least a word")


def stop_tokens(base: ModelFolder, encoder: Encoder) -> frozenset[int]:
    """Return the tokens that end an answer.

    They are read from ``genai_config.json`` or ``config.json``, and ``generation_config.json``; without any, from the
    tokenizer.
    """
    found = _numbers(base.described.get("eos_token_id"))
    found |= _numbers(table_in(base.path, _GENERATION).get("eos_token_id"))
    return found or _numbers(encoder.end)


def _numbers(value: Any) -> frozenset[int]:
    values = value if isinstance(value, list) else [value]
    return frozenset(v for v in values if isinstance(v, int) and not isinstance(v, bool))


def prompts_in(file: Path) -> list[str]:
    """Read the prompts in a text file, one per line; raises DataError if it cannot be read or is empty."""
    try:
        lines = regular_text(file, LARGEST).splitlines()
    except UnreadableError as error:
        raise DataError(f"the prompts '{shown(file)}' cannot be read ({error}); check the file") from None
    found = [line for line in lines if line.strip()]
    if not found:
        raise DataError(f"the file '{shown(file)}' has no prompts; write one per line")
    return found

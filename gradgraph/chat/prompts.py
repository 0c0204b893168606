"""Prompts and answers of a language model: tokens of the ones, and texts of the tokens of the others."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, Protocol

from gradgraph.chat.model_folder import ModelFolder
from gradgraph.chat.sampling import Sampling
from gradgraph.chat.template import MissingTemplateError, table_in
from gradgraph.chat.tokens import Encoder
from gradgraph.errors import DataError, shown
from gradgraph.files.untrusted.regular import UnreadableError, regular_bytes

_GENERATION = "generation_config.json"
LARGEST = 1 << 20  # bytes of a file of prompts
Prompt = str | Sequence[Mapping[str, Any]]


class Steps(Protocol):
    """A source of the next token of each prompt, again and again; see :meth:`Decoder.steps`."""

    def steps(
        self, prompts: Sequence[Sequence[int]], stop: Collection[int] = (), sampling: Sampling | None = None
    ) -> Iterator[list[int | None]]: ...

    def generated(
        self, prompts: Sequence[Sequence[int]], stop: Collection[int] = (), sampling: Sampling | None = None
    ) -> list[list[int]]: ...


class OneByOne:
    """A source of tokens that takes one prompt at a time, by its ``steps``."""

    def generated(
        self: Any, prompts: Sequence[Sequence[int]], stop: Collection[int] = (), sampling: Sampling | None = None
    ) -> list[list[int]]:
        """The new tokens of each prompt; a token of ``stop`` is the last of its row."""
        return [[t for (t,) in self.steps([p], stop, sampling) if t is not None] for p in prompts]


class Prompts:
    """The prompts and the answers of a model, by the tokenizer and the chat template of its folder.

    Args:
        base: the folder.
        template: a file with another chat template; ``"none"`` takes prompts as they stand.
        now: the time that a template may write; None: that of each prompt.

    Attributes:
        base, encoder: as they are used.
        stop: the tokens that end an answer.

    Raises:
        DataError: something in the folder is missing, or cannot be read.
    """

    def __init__(self, base: ModelFolder, template: str | Path | None = None, now: datetime | None = None) -> None:
        self.base, self.encoder = base, Encoder(base.path, template, now)
        self.stop = stop_tokens(base, self.encoder)

    def tokens_of(self, prompt: Prompt) -> list[int]:
        """The tokens of a prompt; by the chat template, if there is one, a text is what the user says.

        Raises:
            DataError: messages need a template, and there is none; the prompt is empty, or fills what the model takes.
        """
        template = self.encoder.template_for("messages") if not isinstance(prompt, str) or self._has_template else None
        _check_says_something(prompt, template is not None)
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
        if not ids:
            raise DataError("a prompt has no token; write at least a word")
        if self.base.context is not None and len(ids) >= self.base.context:
            raise DataError(f"the prompt has {len(ids)} tokens, and the model takes {self.base.context}; shorten it")
        return list(ids)

    @property
    def _has_template(self) -> bool:
        try:
            return self.encoder.template_for("messages") is not None
        except MissingTemplateError:
            return False

    def text_of(self, ids: Sequence[int]) -> str:
        """The text of an answer, without what ends it."""
        return self.encoder.tokenizer.decode([t for t in ids if t not in self.stop], special=False)

    def fitting(self, prompts: Sequence[Sequence[int]], sampling: Sampling | None) -> Sampling:
        """At most so many tokens as the model takes."""
        chosen = sampling or Sampling()
        if self.base.context is None:
            return chosen
        return chosen.at_most(self.base.context - max(map(len, prompts)))


def _check_says_something(prompt: Prompt, by_template: bool) -> None:
    """Raise DataError where a template would write its own words alone: the prompt, or the last message, is empty."""
    last = prompt if isinstance(prompt, str) else prompt[-1].get("content") if prompt else ""
    if by_template and isinstance(last, str) and not last.strip():
        raise DataError("the prompt is empty; write at least a word")


def stop_tokens(base: ModelFolder, encoder: Encoder) -> frozenset[int]:
    """The tokens that end an answer: those that ``genai_config.json`` and ``generation_config.json`` name, or else that
    of the tokenizer.
    """
    found = _numbers(base.described.get("eos_token_id"))
    found |= _numbers(table_in(base.path, _GENERATION).get("eos_token_id"))
    return found or _numbers(encoder.end)


def _numbers(value: Any) -> frozenset[int]:
    values = value if isinstance(value, list) else [value]
    return frozenset(v for v in values if isinstance(v, int) and not isinstance(v, bool))


def prompts_in(file: Path) -> list[str]:
    """The prompts of a file of text, one a line; raises DataError where it has none, or cannot be read."""
    try:
        lines = regular_bytes(file, LARGEST).decode("utf-8").splitlines()
    except UnreadableError as error:
        raise DataError(f"the prompts '{shown(file)}' cannot be read ({error}); check the path") from None
    except UnicodeDecodeError:
        raise DataError(f"the prompts '{shown(file)}' are no text in UTF-8; save them as such") from None
    found = [line for line in lines if line.strip()]
    if not found:
        raise DataError(f"the file '{shown(file)}' has no prompts; write one a line")
    return found

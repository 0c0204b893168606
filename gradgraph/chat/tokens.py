"""Rows of chat data as tokens, and which of them are learnt: the assistant's, or all of a plain text."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np

from gradgraph.chat.chat_rows import VARIABLES, Rows
from gradgraph.chat.template import ChatTemplate, Rendered, special_tokens
from gradgraph.errors import DataError, shown
from gradgraph.files.untrusted.inside import is_inside
from gradgraph.runtime.data.batch import Array
from gradgraph.text.tokenizer import NAME, Tokenizer

NO_TEMPLATE = "none"
LEARNT = ("messages", "prompt", "text")  # kinds of rows that tell the next token


@dataclass(frozen=True)
class Tokens:
    """A row as tokens.

    Attributes:
        ids: their numbers: int64 [tokens].
        learnt: whether each is to be told from those before it: bool [tokens].
    """

    ids: Array
    learnt: Array

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def counted(self) -> int:
        """How many are learnt; the first one never is, as nothing stands before it."""
        return int(self.learnt[1:].sum())


class Encoder:
    """Makes tokens of rows, by the tokenizer and the chat template of a model's folder.

    Args:
        folder: with ``tokenizer.json`` and ``tokenizer_config.json``.
        template: another file of a chat template; ``"none"`` takes prompt, completion and text as they stand.
        now: the time that a template may write; None: that of each rendering.

    Attributes:
        tokenizer: of the folder.
        template: None where there is none, or none is wanted.
        end: the number of the token that ends an answer without a template; None where the folder names none.

    Raises:
        DataError: there is no tokenizer, or a template of ``template`` cannot be read.
    """

    def __init__(
        self, folder: str | os.PathLike[str], template: str | Path | None = None, now: datetime | None = None
    ) -> None:
        folder = Path(folder)
        if not is_inside(folder, NAME):
            raise DataError(
                f"the folder '{shown(folder)}' has no {NAME}; copy it there from where the model comes from, or where "
                "that has none either, let AutoTokenizer of transformers save_pretrained there"
            )
        self.folder, self.tokenizer = folder, Tokenizer(folder / NAME, inside=True)
        self._asked, self._now = template, now
        end = special_tokens(folder).get("eos_token")
        self.end = None if end is None else self.tokenizer.number_of(end)

    def template_for(self, kind: str) -> ChatTemplate | None:
        """The template by which rows of a kind become texts; None where they are texts.

        Raises:
            DataError: messages need one, and there is none.
        """
        if kind == "text" or self._asked == NO_TEMPLATE:
            return None
        return ChatTemplate.of(self.folder, self._asked, self._now)

    def __call__(self, rows: Rows) -> list[Tokens]:
        """The tokens of rows.

        Raises:
            DataError: their kind is none that tells the next token; the template refuses a row; an answer has no
                token of its own.
        """
        if rows.kind not in LEARNT:
            raise DataError(
                f"{rows.where} holds preferences, and the next token is learnt from answers alone; give messages, "
                "prompt and completion, or text"
            )
        template = self.template_for(rows.kind)
        texts = [self._text_of(rows, i, template) for i in range(len(rows))]
        found = list(self.of(texts, plain=template is None))
        for i, tokens in enumerate(found):
            if not tokens.counted:
                raise DataError(f"{rows.place(i)} has no token to be learnt; write a longer answer, or leave it out")
        return found

    def of(self, texts: Sequence[Rendered], plain: bool = False) -> Iterator[Tokens]:
        """The tokens of texts whose answers are known.

        Args:
            plain: add the tokens that the model expects around a text; a template has written them.
        """
        for text, (ids, spans) in zip(texts, self.tokenizer.spans([t.text for t in texts], plain), strict=True):
            learnt = [any(max(a, begin) < min(b, end) for begin, end in text.answers) for a, b in spans]
            if plain and self.end is not None:
                if ids and ids[-1] == self.end:
                    learnt[-1] = True
                else:
                    ids, learnt = [*ids, self.end], [*learnt, True]
            yield Tokens(np.array(ids, np.int64), np.array(learnt, bool))

    def _text_of(self, rows: Rows, i: int, template: ChatTemplate | None) -> Rendered:
        row = rows[i]
        if template is None:
            return _plain_text(rows, i)
        try:
            return _by_template(row, template)
        except DataError as error:
            raise error.at(rows.place(i)) from None

    def pieces(self, tokens: Tokens) -> list[tuple[str, bool]]:
        """The text of tokens in pieces, and whether each is learnt: for people to look at."""
        ends = [0, *(np.flatnonzero(np.diff(tokens.learnt)) + 1).tolist(), len(tokens)]
        return [
            (self.tokenizer.decode(tokens.ids[a:b].tolist()), bool(tokens.learnt[a]))
            for a, b in itertools.pairwise(ends)
        ]


def _plain_text(rows: Rows, i: int) -> Rendered:
    """A row as it stands."""
    row = rows[i]
    if rows.kind == "text":
        return Rendered(row["text"], ((0, len(row["text"])),))
    if rows.kind != "prompt" or not isinstance(row["prompt"], str):
        raise DataError(
            f"{rows.place(i)} holds messages, which a chat template makes a text of",
            remedy="leave template='none' out",
            shell="leave --template none out",
        )
    prompt = row["prompt"]
    return Rendered(prompt + row["completion"], ((len(prompt), len(prompt) + len(row["completion"])),))


def _by_template(row: Mapping[str, Any], template: ChatTemplate) -> Rendered:
    more = {"tools": row.get("tools"), **(row.get(VARIABLES) or {})}
    if "messages" in row:
        return template.with_answers(row["messages"], **more)
    prompt = _as_messages(row["prompt"], "user")
    return template.with_answers([*prompt, *_as_messages(row["completion"], "assistant")], given=len(prompt), **more)


def _as_messages(value: Any, role: str) -> list[Any]:
    return [{"role": role, "content": value}] if isinstance(value, str) else value

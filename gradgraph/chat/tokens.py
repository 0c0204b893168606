"""Rows of chat data as tokens, with a mask of the tokens to train on: the assistant's, or all of a plain text."""

from __future__ import annotations

import itertools
import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np

from gradgraph.chat.chat_rows import VARIABLES, Rows
from gradgraph.chat.template import REASONING, ChatTemplate, Rendered
from gradgraph.data.arrays.batch import Array
from gradgraph.data.texts.tokenizer import NAME, Tokenizer
from gradgraph.errors import DataError, listed, shown
from gradgraph.files.untrusted.contained_paths import is_inside
from gradgraph.surgery.language_models import IGNORED

log = logging.getLogger("gradgraph.chat")

NO_TEMPLATE = "none"
TOOLS = "tools"
TRIED = 16  # number of rows with a key that are rendered to find out whether the template uses the key
LEARNT = ("messages", "prompt", "text")  # kinds of rows for next-token prediction


@dataclass(frozen=True)
class Tokens:
    """A row as tokens.

    Attributes:
        ids: token ids: int64 [tokens].
        learnt: whether each token is trained on: bool [tokens].
    """

    ids: Array
    learnt: Array

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def counted(self) -> int:
        """The number of trained tokens, except the first one, which has no context."""
        return int(self.learnt[1:].sum())

    @property
    def labels(self) -> Array:
        """The label of each token but the last: the next token, or ignored if that is not trained on."""
        return np.where(self.learnt[1:], self.ids[1:], IGNORED)


class Encoder:
    """An encoder of rows by the tokenizer and the chat template of a model's folder.

    Args:
        folder: a folder with ``tokenizer.json`` and ``tokenizer_config.json``.
        template: a file with another chat template; ``"none"`` uses prompt, completion and text verbatim.
        now: the time that a template may insert; None for the current time.

    Attributes:
        end: the id of the token that ends an answer without a template; None if the folder defines none.

    Raises:
        DataError: the folder has no tokenizer, or a file of it cannot be read.
    """

    def __init__(
        self, folder: str | os.PathLike[str], template: str | Path | None = None, now: datetime | None = None
    ) -> None:
        folder = Path(folder)
        if not is_inside(folder, NAME):
            raise DataError(
                f"the folder '{shown(folder)}' has no {NAME}; download it, or create it with transformers: "
                "AutoTokenizer.from_pretrained(…).save_pretrained(…)"
            )
        self.folder, self.tokenizer = folder, Tokenizer(folder / NAME, inside=True)
        self._asked, self._now = template, now
        self._said = set[str]()  # keys that have been checked
        end = self.tokenizer.special_tokens.get("eos_token")
        self.end = None if end is None else self.tokenizer.number_of(end)

    def template_for(self, kind: str) -> ChatTemplate | None:
        """Return the chat template for a kind of rows; None for rows of kind ``text``, or with ``template="none"``.

        Raises:
            MissingTemplateError: the folder has no chat template.
            DataError: the template cannot be read.
        """
        if kind == "text" or self._asked == NO_TEMPLATE:
            return None
        return ChatTemplate.of(self.folder, self._asked, self._now)

    def __call__(self, rows: Rows) -> list[Tokens]:
        """Return the tokens of rows.

        Raises:
            DataError: the rows are preferences; the template rejects a row; or a row has no token to train on.
        """
        if rows.kind not in LEARNT:
            raise DataError(
                f"{rows.where} contains preferences, but this loss requires answers; provide messages, prompt and "
                "completion, or text"
            )
        template = self.template_for(rows.kind)
        if rows.kind == "text" and self._asked not in (None, NO_TEMPLATE):
            log.warning("the texts of %s are used verbatim, without the chat template '%s'", rows.where,
                        shown(self._asked))  # fmt: skip
        texts = [self._text_of(rows, i, template) for i in range(len(rows))]
        self._warn_of_unused(rows, template)
        found = list(self.of(texts, plain=template is None))
        for i, tokens in enumerate(found):
            if not tokens.counted:
                raise DataError(f"{rows.place(i)} has no token to train on; write a longer answer, or drop the row")
        return found

    def of(self, texts: Sequence[Rendered], plain: bool = False) -> Iterator[Tokens]:
        """Yield the tokens of formatted texts.

        Args:
            texts: the texts, with the spans of their answers.
            plain: whether to add special tokens around each text; false for texts from a template, which contain them.
        """
        for text, (ids, spans) in zip(texts, self.tokenizer.spans([t.text for t in texts], plain), strict=True):
            learnt = _within(spans, text.answers)
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

    def _warn_of_unused(self, rows: Rows, template: ChatTemplate | None) -> None:
        """Warn once about keys of rows and messages that the template does not use."""
        having: dict[str, list[int]] = {}
        for i, row in enumerate(rows):
            for key in _keys_of(row):
                having.setdefault(key, []).append(i)
        unused = [key for key, found in having.items() if key not in self._said
                  and (template is None or not any(_uses(template, rows[i], key) for i in found[:TRIED]))]  # fmt: skip
        self._said.update(having)
        if unused and template is not None:
            log.warning("%s does not use %s of %s; they are ignored", template.where, listed(unused, 12), rows.where)
        elif unused:
            log.warning("without a chat template, %s of %s are ignored", listed(unused, 12), rows.where)

    def pieces(self, tokens: Tokens) -> list[tuple[str, bool]]:
        """Split the text of tokens for display into pieces (text, whether it is trained on)."""
        ends = [0, *(np.flatnonzero(np.diff(tokens.learnt)) + 1).tolist(), len(tokens)]
        return [
            (self.tokenizer.decode(tokens.ids[a:b].tolist()), bool(tokens.learnt[a]))
            for a, b in itertools.pairwise(ends)
        ]


def check_number(most: int, place: str, known: int | None) -> None:
    """Raise DataError if ``most``, the largest token id at ``place``, is outside a vocabulary of ``known`` tokens."""
    if known is not None and most >= known:
        raise DataError(
            f"{place} has the token id {most:,}, but the model's vocabulary has {known:,}; remove such special tokens "
            "from the texts"
        )


def _within(spans: Sequence[tuple[int, int]], answers: Sequence[tuple[int, int]]) -> list[bool]:
    """Return whether each token is between the first and the last token with a character of an answer."""
    found = [False] * len(spans)
    for begin, end in answers:
        own = [i for i, (a, b) in enumerate(spans) if max(a, begin) < min(b, end) or begin <= a == b < end]
        if own:
            found[own[0] : own[-1] + 1] = [True] * (own[-1] + 1 - own[0])
    return found


def _plain_text(rows: Rows, i: int) -> Rendered:
    """Return a row as text without a template: its text, or its prompt directly followed by the completion."""
    row = rows[i]
    if rows.kind == "text":
        return Rendered(row["text"], ((0, len(row["text"])),))
    if rows.kind != "prompt" or not isinstance(row["prompt"], str):
        raise DataError(
            f"{rows.place(i)} contains messages, which require a chat template",
            remedy="omit template='none'",
            shell="omit --template none",
        )
    prompt = row["prompt"]
    return Rendered(prompt + row["completion"], ((len(prompt), len(prompt) + len(row["completion"])),))


def _by_template(row: Mapping[str, Any], template: ChatTemplate) -> Rendered:
    more = {"tools": row.get("tools"), **(row.get(VARIABLES) or {})}
    if "messages" in row:
        return template.with_answers(row["messages"], **more)
    prompt = _as_messages(row["prompt"], "user")
    return template.with_answers([*prompt, *_as_messages(row["completion"], "assistant")], given=len(prompt), **more)


def _messages_of(row: Mapping[str, Any]) -> list[Any]:
    if "messages" in row:
        return list(row["messages"])
    if "completion" not in row:
        return []
    return [*_as_messages(row["prompt"], "user"), *_as_messages(row["completion"], "assistant")]


def _keys_of(row: Mapping[str, Any]) -> set[str]:
    """Return the optional keys of a row and of its messages, which a template might ignore."""
    own = [name for name in (TOOLS, *(row.get(VARIABLES) or {})) if name != TOOLS or row.get(TOOLS)]
    said = [key for m in _messages_of(row) if isinstance(m, Mapping) for key in m if m[key] not in (None, [], "")]
    return {*own, *said} - {"role", "content", "weight"}


def _uses(template: ChatTemplate, row: Mapping[str, Any], key: str) -> bool:
    """Whether the template's text for ``row`` differs without ``key``."""
    texts = []
    gone = REASONING if key in REASONING else (key,)
    for names in ((), gone):
        more = {TOOLS: row.get(TOOLS), **(row.get(VARIABLES) or {})}
        messages = [{k: v for k, v in m.items() if k not in names} for m in _messages_of(row)]
        try:
            texts.append(template.render(messages, **{k: v for k, v in more.items() if k not in names}))
        except DataError:  # the template requires it
            return True
    return texts[0] != texts[1]


def _as_messages(value: Any, role: str) -> list[Any]:
    return [{"role": role, "content": value}] if isinstance(value, str) else value

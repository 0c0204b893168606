"""The maximum number of tokens of a text, by recipe and models, and the treatment of longer texts."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

from gradgraph.chat.chat_recipe import Recipe
from gradgraph.chat.chat_rows import Rows
from gradgraph.chat.model_folder import ModelFolder
from gradgraph.chat.preferences import Pair
from gradgraph.chat.tokens import Tokens
from gradgraph.errors import DataError, shown

log = logging.getLogger("gradgraph.chat")

LONGEST = 2048  # default row length in tokens


@dataclass(frozen=True)
class Limit:
    """Maximum lengths of texts.

    Attributes:
        tokens: the maximum number of tokens of a text.
        row: the maximum number of tokens of a row; a packed row may exceed the context length, its texts may not.
        most: the smallest context length of model and teacher, if known.
        taker: the name of the model whose context length is ``most``, for messages.
    """

    tokens: int
    row: int
    most: int | None = None
    taker: str = "the model"

    def may_be(self, longest: int) -> bool:
        """Whether a text of ``longest`` tokens fits in the context length; true if it is unknown."""
        return self.most is None or longest <= self.most


def limit_of(base: ModelFolder, recipe: Recipe) -> Limit:
    """Return the limits set by a model, and by its teacher if it has one.

    Raises:
        DataError: the recipe asks for rows longer than a context length.
        ModelError: the teacher does not exist.
    """
    takers = [("the model", base.context)]
    if recipe.teacher is not None:
        other = ModelFolder.of(recipe.teacher)
        takers.append((f"the teacher '{shown(other.path)}'", other.context))
    taker, most = min(takers, key=lambda each: each[1] or float("inf"))
    length = recipe.length or min(most or LONGEST, LONGEST)
    if most is None or length <= most:
        return Limit(length, length, most, taker)
    if not recipe.pack:
        raise DataError(f"length is {length:,}, but {taker} has a context length of {most:,}; lower length")
    return Limit(most, length, most, taker)


def fitted_texts(rows: Rows, samples: list[Tokens], limit: Limit, long: str) -> list[Tokens]:
    """Drop or truncate texts longer than the limit (``long`` is "drop" or "cut"), with a warning; return the rest.

    Raises:
        DataError: some texts are too long, and ``long`` is "error".
    """
    length = limit.tokens
    over = _longer(samples, length)
    if not over:
        return samples
    said = _said(samples, over, limit, rows)
    if long == "error":
        raised, in_shell = _raising(samples, limit)
        raise DataError(
            said,
            remedy=f"{raised}long='drop' to drop them, or long='cut' to train on their beginnings",
            shell=f"{in_shell}--long drop to drop them, or --long cut to train on their beginnings",
        )
    if long == "drop":
        log.warning("%s; they are dropped", said)
        return [tokens for tokens in samples if len(tokens) <= length]
    cut = [Tokens(tokens.ids[:length], tokens.learnt[:length]) for tokens in samples]
    bare = [i for i in over if not cut[i].counted]
    log.warning(
        "%s; they are truncated%s",
        said,
        f", and {len(bare)} are dropped, since no part of the answer remains" * bool(bare),
    )
    return [tokens for tokens in cut if tokens.counted]


def fitted_pairs(pairs: list[Pair], limit: Limit, long: str, rows: Rows) -> list[Pair]:
    """Return the pairs within the limit; if ``long`` is "drop", longer pairs are dropped with a warning.

    Raises:
        DataError: some pairs are too long, and ``long`` is not "drop".
    """
    over = _longer(pairs, limit.tokens)
    if not over:
        return pairs
    said = _said(pairs, over, limit, rows)
    if long != "drop":
        raised, in_shell = _raising(pairs, limit)
        raise DataError(
            f"{said}, and truncated answers cannot be compared",
            remedy=f"{raised}long='drop' to drop them",
            shell=f"{in_shell}--long drop to drop them",
        )
    log.warning("%s; they are dropped", said)
    return [pair for pair in pairs if len(pair) <= limit.tokens]


def _longer(samples: Sequence[Tokens | Pair], length: int) -> list[int]:
    return [i for i, sample in enumerate(samples) if len(sample) > length]


def _raising(samples: Sequence[Tokens | Pair], limit: Limit) -> list[str]:
    """Return the beginnings of the remedies in Python and on the command line."""
    more = limit.may_be(max(map(len, samples)))
    return [f"{f'raise {name} to this number, or ' * more}pass " for name in ("length=", "--length")]


def _said(samples: Sequence[Tokens | Pair], over: Sequence[int], limit: Limit, rows: Rows) -> str:
    """Return a sentence on how many texts are too long, and for which model."""
    longest = max(over, key=lambda i: len(samples[i]))
    longer = len(samples[longest])
    who = "" if limit.may_be(longer) else f", and {limit.taker} has a context length of {limit.most}"
    return (
        f"{len(over)} of {len(samples)} rows have more than {limit.tokens} tokens, the longest {longer} "
        f"({rows.place(longest)}){who}"
    )

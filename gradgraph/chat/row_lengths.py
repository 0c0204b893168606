"""The tokens that a text may have, by the recipe and by the models that read it, and what becomes of longer ones."""

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

LONGEST = 2048  # tokens of a row, where nobody says how many


@dataclass(frozen=True)
class Limit:
    """The lengths that texts may have.

    Attributes:
        tokens: of a text.
        row: of a row; a packed one may be longer than each of its texts.
        most: that a model takes, where that is known.
        taker: the model that takes so few.
    """

    tokens: int
    row: int
    most: int | None = None
    taker: str = "the model"

    def may_be(self, longest: int) -> bool:
        """Whether the model takes a text of so many tokens, if it is allowed."""
        return self.most is None or longest <= self.most


def limit_of(base: ModelFolder, recipe: Recipe) -> Limit:
    """The longest texts that a model takes, and its teacher if it has one.

    Raises:
        DataError: rows are to be longer than a model takes.
        ModelError: there is no teacher of that name.
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
        raise DataError(f"length is {length:,}, and {taker} takes {most:,} tokens; give at most as many")
    return Limit(most, length, most, taker)


def fitted_texts(rows: Rows, samples: list[Tokens], limit: Limit, long: str) -> list[Tokens]:
    """The texts that are not too long, with what is to become of longer ones said.

    Raises:
        DataError: some are longer, and ``long`` is "error".
    """
    length = limit.tokens
    over = _longer(samples, length)
    if not over:
        return samples
    longest = max(over, key=lambda i: len(samples[i]))
    said = _said(samples, over, longest, limit, rows)
    if long == "error":
        more = limit.may_be(len(samples[longest]))
        raise DataError(
            said,
            remedy=("give length= as many, " if more else "give ")
            + "long='drop' to leave them out, or long='cut' to learn their beginnings",
            shell=("give --length as many, " if more else "give ")
            + "--long drop to leave them out, or --long cut to learn their beginnings",
        )
    if long == "drop":
        log.warning("%s; they are left out", said)
        return [tokens for tokens in samples if len(tokens) <= length]
    cut = [Tokens(tokens.ids[:length], tokens.learnt[:length]) for tokens in samples]
    bare = [i for i in over if not cut[i].counted]
    log.warning(
        "%s; their ends are cut off%s", said, f", and {len(bare)} are left out, as no answer is left" * bool(bare)
    )
    return [tokens for tokens in cut if tokens.counted]


def fitted_pairs(pairs: list[Pair], limit: Limit, long: str, rows: Rows) -> list[Pair]:
    """The pairs that are not too long; longer ones are refused, or left out where ``long`` is "drop".

    Raises:
        DataError: some are longer.
    """
    over = _longer(pairs, limit.tokens)
    if not over:
        return pairs
    longest = max(over, key=lambda i: len(pairs[i]))
    said = _said(pairs, over, longest, limit, rows)
    if long != "drop":
        more = limit.may_be(len(pairs[longest]))
        raise DataError(
            f"{said}, and half an answer is not preferred",
            remedy=("give length= as many, or " if more else "give ") + "long='drop' to leave them out",
            shell=("give --length as many, or " if more else "give ") + "--long drop to leave them out",
        )
    log.warning("%s; they are left out", said)
    return [pair for pair in pairs if len(pair) <= limit.tokens]


def _longer(samples: Sequence[Tokens | Pair], length: int) -> list[int]:
    return [i for i, sample in enumerate(samples) if len(sample) > length]


def _said(samples: Sequence[Tokens | Pair], over: Sequence[int], longest: int, limit: Limit, rows: Rows) -> str:
    """A sentence of how many are too long, and for whom."""
    longer = len(samples[longest])
    who = "" if limit.may_be(longer) else f", and {limit.taker} takes {limit.most}"
    return (
        f"{len(over)} of {len(samples)} rows have more than {limit.tokens} tokens, the longest {longer} "
        f"({rows.place(longest)}){who}"
    )

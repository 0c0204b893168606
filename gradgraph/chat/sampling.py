"""The options of answers, each written once: Python, the shell and the page read them here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from gradgraph.chat.option_fields import changed_options, check_options, number, option, whole


@dataclass(frozen=True)
class Sampling:
    """How an answer is written; ``words`` of each field explain it."""

    max_tokens: int = option(128, "Tokens that an answer has at most.", whole(1))
    temperature: float = option(
        0.0, "What scores are divided by before a token is drawn; 0 takes the likeliest.", number(0)
    )
    top_k: int = option(0, "Draw from so many of the likeliest tokens; 0: from all.", whole(0))
    top_p: float = option(
        1.0, "Draw from the fewest likeliest tokens that have this probability together.", number(0, 1, above=True)
    )
    repetition_penalty: float = option(
        1.0, "Divide scores above 0 of tokens that are there already by it, and multiply those below.",
        number(0, above=True),
    )  # fmt: skip
    seed: int = option(0, "Of the draws; the n-th prompt draws the same whatever stands beside it.", whole(0))

    def __post_init__(self) -> None:
        check_options(self)

    def changed(self, changes: Mapping[str, Any]) -> Sampling:
        """The same with other values; raises ArgumentError where there is no such option."""
        return changed_options(self, changes, "generation")

    def at_most(self, tokens: int) -> Sampling:
        """The same, with an answer of at most so many tokens."""
        return replace(self, max_tokens=min(self.max_tokens, tokens))

"""The sampling options, declared once for Python, the command line and the docs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from gradgraph.chat.option_fields import changed_options, check_options, number, option, whole


@dataclass(frozen=True)
class Sampling:
    """The options of generating an answer; the ``words`` of each field describe it."""

    max_tokens: int = option(128, "Maximum number of tokens of an answer.", whole(1))
    temperature: float = option(0.0, "Sampling temperature; 0 always picks the most likely token.", number(0))
    top_k: int = option(0, "Sample from this many most likely tokens; 0: from all.", whole(0))
    top_p: float = option(
        1.0, "Nucleus sampling: sample from the fewest tokens with this total probability.", number(0, 1, above=True)
    )
    repetition_penalty: float = option(
        1.0, "Repetition penalty: divide positive scores of tokens already present by it, and multiply negative ones.",
        number(0, above=True),
    )  # fmt: skip
    seed: int = option(0, "Random seed; the draws of the n-th prompt do not depend on the other prompts.", whole(0))

    def __post_init__(self) -> None:
        check_options(self)

    def changed(self, changes: Mapping[str, Any]) -> Sampling:
        """Return a copy with ``changes`` (values by option) applied; raise ArgumentError for an unknown option."""
        return changed_options(self, changes, "generation")

    def at_most(self, tokens: int) -> Sampling:
        """Return a copy with at most this many tokens per answer."""
        return replace(self, max_tokens=min(self.max_tokens, tokens))

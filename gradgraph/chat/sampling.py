"""The sampling options, declared once for Python, the command line and the docs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from gradgraph.arguments import number
from gradgraph.building.option import changed_options, check_options, documented, options
from gradgraph.chat.chat_recipe import number_option, whole_option


@documented
@options
class Sampling:
    """The options of generating an answer; each a field."""

    max_tokens: int = whole_option("Maximum number of tokens of an answer.", default=128)
    temperature: float = number_option("Sampling temperature; 0 always picks the most likely token.", number(0), 0.0)
    top_k: int = whole_option("Sample from this many most likely tokens; 0: from all.", 0, 0)
    top_p: float = number_option(
        "Nucleus sampling: sample from the fewest tokens with this total probability.", number(0, 1, above=True), 1.0
    )
    repetition_penalty: float = number_option(
        "Repetition penalty: divide positive scores of tokens already present by it, and multiply negative ones.",
        number(0, above=True),
        1.0,
    )
    seed: int = whole_option("Random seed; the draws of the n-th prompt do not depend on the other prompts.", 0, 0)

    def __post_init__(self) -> None:
        check_options(self)

    def changed(self, changes: Mapping[str, Any]) -> Sampling:
        """Return a copy with ``changes`` (values by option) applied; raise ArgumentError for an unknown option."""
        return changed_options(self, changes, "generation")

    def at_most(self, tokens: int) -> Sampling:
        """Return a copy with at most this many tokens per answer."""
        return replace(self, max_tokens=min(self.max_tokens, tokens))

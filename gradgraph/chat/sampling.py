"""The sampling options, declared once for Python, the command line and the docs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from gradgraph.arguments import number, whole
from gradgraph.building.option import changed_options, check_options, documented, options, spelled


@documented
@options
class Sampling:
    """The options of generating an answer; each a field."""

    max_tokens: int = spelled("Maximum number of tokens of an answer.", "training", "whole", kind=whole(1), default=128)
    temperature: float = spelled(
        "Sampling temperature; 0 always picks the most likely token.",
        "training", "number", kind=number(0), default=0.0,
    )  # fmt: skip
    top_k: int = spelled(
        "Sample from this many most likely tokens; 0: from all.",
        "training", "whole", kind=whole(0), default=0,
    )  # fmt: skip
    top_p: float = spelled(
        "Nucleus sampling: sample from the fewest tokens with this total probability.",
        "training", "number", kind=number(0, 1, above=True), default=1.0,
    )  # fmt: skip
    repetition_penalty: float = spelled(
        "Repetition penalty: divide positive scores of tokens already present by it, and multiply negative ones.",
        "training", "number", kind=number(0, above=True), default=1.0,
    )  # fmt: skip
    seed: int = spelled(
        "Random seed; the draws of the n-th prompt do not depend on the other prompts.",
        "training", "whole", kind=whole(0), default=0,
    )  # fmt: skip

    def __post_init__(self) -> None:
        check_options(self)

    def changed(self, changes: Mapping[str, Any]) -> Sampling:
        """Return a copy with ``changes`` (values by option) applied; raise ArgumentError for an unknown option."""
        return changed_options(self, changes, "generation")

    def at_most(self, tokens: int) -> Sampling:
        """Return a copy with at most this many tokens per answer."""
        return replace(self, max_tokens=min(self.max_tokens, tokens))

"""Chat: conversations as training data of a language model, by its tokenizer and its chat template.

It knows rows of messages, templates and which tokens are learnt; it puts surgery, build and fit together, and must not
do their work.
"""

from __future__ import annotations

from gradgraph.chat.chat_rows import Rows, read
from gradgraph.chat.template import ChatTemplate, Rendered

__all__ = [
    "ChatTemplate",
    "Rendered",
    "Rows",
    "read",
]


def __dir__() -> list[str]:
    return sorted(__all__)

"""Chat: conversations as training data of a language model, by its tokenizer and its chat template.

It knows rows of messages, templates and which tokens are learnt; it puts surgery, build and fit together, and must not
do their work.
"""

from __future__ import annotations

from gradgraph.chat.chat_batches import ChatBatches
from gradgraph.chat.chat_rows import Rows, read
from gradgraph.chat.template import ChatTemplate, Rendered
from gradgraph.chat.tokens import Encoder, Tokens

__all__ = [
    "ChatBatches",
    "ChatTemplate",
    "Encoder",
    "Rendered",
    "Rows",
    "Tokens",
    "read",
]


def __dir__() -> list[str]:
    return sorted(__all__)

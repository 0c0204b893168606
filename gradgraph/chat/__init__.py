"""Chat: conversations as training data of a language model, through its tokenizer and chat template.

This package reads rows of messages, applies templates and selects the tokens to train on. It combines surgery, build
and fit, and must not repeat their work. Names are loaded on first use, so that help, which reads the options, is fast.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gradgraph.chat.answers import Generator, generate
    from gradgraph.chat.chat_batches import ChatBatches
    from gradgraph.chat.chat_recipe import Recipe
    from gradgraph.chat.chat_rows import Rows, read
    from gradgraph.chat.decoder import Decoder
    from gradgraph.chat.finetuning import finetune
    from gradgraph.chat.run_place import Finetuned
    from gradgraph.chat.sampling import Sampling
    from gradgraph.chat.template import ChatTemplate, Rendered
    from gradgraph.chat.tokens import Encoder, Tokens

_HOMES = {
    "ChatBatches": "chat_batches",
    "ChatTemplate": "template",
    "Decoder": "decoder",
    "Encoder": "tokens",
    "Finetuned": "run_place",
    "Generator": "answers",
    "Recipe": "chat_recipe",
    "Rendered": "template",
    "Rows": "chat_rows",
    "Sampling": "sampling",
    "Tokens": "tokens",
    "finetune": "finetuning",
    "generate": "answers",
    "read": "chat_rows",
}

__all__ = [
    "ChatBatches",
    "ChatTemplate",
    "Decoder",
    "Encoder",
    "Finetuned",
    "Generator",
    "Recipe",
    "Rendered",
    "Rows",
    "Sampling",
    "Tokens",
    "finetune",
    "generate",
    "read",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'gradgraph.chat' has no attribute '{name}'")
    value = getattr(import_module(f"gradgraph.chat.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)

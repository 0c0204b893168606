"""Chat: conversations as training data of a language model, through its tokenizer and chat template.

This package reads rows of messages, applies templates and selects the tokens to train on. It combines surgery, build
and fit, and must not repeat their work. Names are loaded on first use, so that help, which reads the options, is fast.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gradgraph.chat.answers import Generator as Generator
    from gradgraph.chat.answers import generate as generate
    from gradgraph.chat.chat_batches import ChatBatches as ChatBatches
    from gradgraph.chat.chat_recipe import Recipe as Recipe
    from gradgraph.chat.chat_rows import Rows as Rows
    from gradgraph.chat.chat_rows import read as read
    from gradgraph.chat.decoder import Decoder as Decoder
    from gradgraph.chat.finetuning import finetune as finetune
    from gradgraph.chat.run_place import Finetuned as Finetuned
    from gradgraph.chat.sampling import Sampling as Sampling
    from gradgraph.chat.template import ChatTemplate as ChatTemplate
    from gradgraph.chat.template import Rendered as Rendered
    from gradgraph.chat.tokens import Encoder as Encoder
    from gradgraph.chat.tokens import Tokens as Tokens

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

if not TYPE_CHECKING:
    __all__ = list(_HOMES)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'gradgraph.chat' has no attribute '{name}'")
    value = getattr(import_module(f"gradgraph.chat.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(_HOMES)

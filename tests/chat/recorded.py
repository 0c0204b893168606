"""What transformers' ``apply_chat_template`` makes of messages, for the templates in ``templates/``.

``python -m tests.chat.recorded --save`` records it, in the environment of ``make shipped-models``. The templates are
those of the models of these names (llama3, qwen2, qwen3, phi3 and gemma as the package trl has them, Apache-2.0; those
that end in ``_training`` are its own, with generation blocks).
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

TEMPLATES = Path(__file__).parent / "templates"
RECORD = TEMPLATES / "recorded.json"
TOKENS = {
    "llama3": {"bos_token": "<|begin_of_text|>", "eos_token": "<|eot_id|>"},
    "llama3_training": {"bos_token": "<|begin_of_text|>", "eos_token": "<|eot_id|>"},
    "qwen2": {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"},
    "qwen2_training": {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"},
    "qwen3": {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"},
    "phi3": {"bos_token": "<s>", "eos_token": "<|endoftext|>"},
    "gemma": {"bos_token": "<bos>", "eos_token": "<eos>"},
    "mistral": {"bos_token": "<s>", "eos_token": "</s>"},
}
_TURNS = [
    {"role": "user", "content": "What is 2 < 3 & \"4\"?\n"},
    {"role": "assistant", "content": "  True, naïve 😀  "},
    {"role": "user", "content": "Und 日本?"},
    {"role": "assistant", "content": "Tokyo"},
]  # fmt: skip
_SYSTEM = {"role": "system", "content": "You are brief."}
_TOOLS = [{"type": "function", "function": {
    "name": "add", "description": "Adds <two> numbers",
    "parameters": {"type": "object", "properties": {"a": {"type": "number"}, "b": {"type": "number"}}}}}]  # fmt: skip
_CALLS = [
    _SYSTEM,
    {"role": "user", "content": "1+2?"},
    {"role": "assistant", "content": "", "tool_calls": [
        {"type": "function", "function": {"name": "add", "arguments": {"a": 1, "b": 2}}}]},
    {"role": "tool", "content": "3"},
    {"role": "assistant", "content": "3", "reasoning": "The tool says so."},
]  # fmt: skip
CASES: dict[str, dict[str, Any]] = {
    "one turn": {"messages": _TURNS[:2]},
    "two turns": {"messages": _TURNS},
    "to be answered": {"messages": _TURNS[:3], "add_generation_prompt": True},
    "system": {"messages": [_SYSTEM, *_TURNS]},
    "tools": {"messages": _CALLS, "tools": _TOOLS},
    "no thinking": {"messages": _TURNS[:1], "add_generation_prompt": True, "enable_thinking": False},
    "out of order": {"messages": [_TURNS[0], _TURNS[0]]},
}


def by_transformers(name: str, case: dict[str, Any]) -> dict[str, Any]:
    """The text, and the answers where the template marks them; or that it refuses."""
    import jinja2
    from transformers.utils.chat_template_utils import render_jinja_template

    source = (TEMPLATES / f"{name}.jinja").read_text(encoding="utf-8")
    marked = name.endswith("_training")
    given = {**case, **TOKENS[name]}
    try:
        texts, spans = render_jinja_template([given.pop("messages")], chat_template=source,
                                             return_assistant_tokens_mask=marked, **given)  # fmt: skip
    except jinja2.exceptions.TemplateError as error:
        return {"refused": str(error)}
    return {"text": texts[0], "answers": [list(s) for s in spans[0]]} if marked else {"text": texts[0]}


def record() -> dict[str, dict[str, Any]]:
    return {name: {case: by_transformers(name, given) for case, given in CASES.items()} for name in TOKENS}


if __name__ == "__main__" and "--save" in sys.argv:
    RECORD.write_text(json.dumps(record(), ensure_ascii=False, indent=1) + "\n", encoding="utf-8")

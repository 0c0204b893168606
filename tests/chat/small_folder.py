"""A folder as onnxruntime-genai's builder writes it: the tiny Llama of examples/, with a token for each character."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
MODEL = ROOT / "examples" / "tiny_llama_int4.onnx"
WORDS = {"<pad>": 0, "<s>": 1, "</s>": 2, **{chr(ord(" ") + i): 3 + i for i in range(95)}}
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}{{ m.content }}{{ eos_token }}"
    "{% endgeneration %}{% else %}[{{ m.role[0] }}] {{ m.content }} {% endif %}{% endfor %}"
)
GENAI: dict[str, Any] = {
    "model": {"type": "llama", "vocab_size": 98, "context_length": 128, "bos_token_id": 1, "eos_token_id": 2,
              "pad_token_id": 0, "decoder": {"filename": "model.onnx", "head_size": 16, "hidden_size": 64,
                                             "num_attention_heads": 4, "num_key_value_heads": 2,
                                             "num_hidden_layers": 2, "session_options": {"provider_options": []}}},
    "search": {"max_length": 128},
}  # fmt: skip


def tokenizer(words: dict[str, int] = WORDS) -> Any:
    from tokenizers import AddedToken, Tokenizer, decoders, models

    made = Tokenizer(models.BPE(vocab=words, merges=[]))
    made.decoder = decoders.Fuse()
    made.add_special_tokens([AddedToken(word, special=True) for word in ("<pad>", "<s>", "</s>")])
    return made


def write(folder: Path, template: str | None = TEMPLATE, model: Path = MODEL) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(model, folder / "model.onnx")
    tokenizer().save(str(folder / "tokenizer.json"))
    config = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "genai_config.json").write_text(json.dumps(GENAI))
    if template is not None:
        (folder / "chat_template.jinja").write_text(template)
    return folder


def chats(count: int) -> list[dict[str, Any]]:
    """Questions and answers of different lengths."""
    said = [("user", "Say {n}."), ("assistant", "{n}!"), ("user", "More of {n}?"), ("assistant", "{n}, {n}.")]
    return [
        {"messages": [{"role": role, "content": text.format(n="ab" * (1 + i % 7) + str(i))}
                      for role, text in said[: 2 + 2 * (i % 2)]]}
        for i in range(count)
    ]  # fmt: skip

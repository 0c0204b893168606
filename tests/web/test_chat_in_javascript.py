"""examples/web/chat.js makes the tokens of rows that Python makes, and learns the same ones of them."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gradgraph.chat import ChatTemplate, read
from gradgraph.chat.tokens import Encoder
from gradgraph.errors import DataError
from tests.chat.recorded import CASES, TEMPLATES, TOKENS

tokenizers = pytest.importorskip("tokenizers", reason="the extra [texts] is not installed")
pytest.importorskip("jinja2", reason="the extra [llm] is not installed")

ROOT = Path(__file__).parents[2]
CHAT = ROOT / "examples" / "web" / "chat.js"
PACKAGES = ROOT / "examples" / "web" / "page" / "node_modules"
pytestmark = [
    pytest.mark.node,
    pytest.mark.skipif(
        shutil.which("node") is None or not (PACKAGES / "@huggingface" / "tokenizers").is_dir(),
        reason="Hugging Face's packages for JavaScript are not installed: make browser",
    ),
]
WORDS = "What is the capital of Japan? Tokyo is. You are brief, and 2 < 3 & 4. naïve 日本 user assistant system True 😀"
SPECIAL = sorted({token for tokens in TOKENS.values() for token in tokens.values()} | {
    "<|im_start|>", "<|start_header_id|>", "<|end_header_id|>", "<|user|>", "<|assistant|>", "<|system|>", "<|end|>",
    "<start_of_turn>", "<end_of_turn>", "[INST]", "[/INST]"})  # fmt: skip


def byte_level(begins: bool = False) -> Any:
    """As Llama 3, Qwen and Phi 4 have it."""
    made = tokenizers.Tokenizer(tokenizers.models.BPE())
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=420, special_tokens=SPECIAL, initial_alphabet=alphabet)
    made.train_from_iterator([WORDS] * 3, trainer)
    if begins:
        pair = ("<bos>", made.token_to_id("<bos>"))
        made.post_processor = tokenizers.processors.TemplateProcessing("<bos> $A", None, [pair])
    return made


def pieces() -> Any:
    """As Llama 2, Gemma and Mistral have it: words that begin with ▁, and bytes of what the vocabulary lacks."""
    made = tokenizers.Tokenizer(tokenizers.models.BPE(byte_fallback=True, unk_token="<unk>"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    made.decoder = tokenizers.decoders.Sequence([
        tokenizers.decoders.Replace("▁", " "), tokenizers.decoders.ByteFallback(), tokenizers.decoders.Fuse(),
        tokenizers.decoders.Strip(" ", 1, 0)])  # fmt: skip
    special = [*SPECIAL, "<unk>", *(f"<0x{byte:02X}>" for byte in range(256))]
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=500, special_tokens=special)
    made.train_from_iterator([WORDS.replace("日本", "")] * 3, trainer)
    return made


MADE = {"bytes": byte_level, "bytes with a beginning": lambda: byte_level(begins=True), "pieces": pieces}


@pytest.fixture
def ask(tmp_path: Path) -> Callable[..., list[dict[str, Any]]]:
    """What chat.js makes of jobs."""

    def asked(*jobs: dict[str, Any]) -> list[dict[str, Any]]:
        (tmp_path / "jobs.json").write_text(json.dumps(jobs))
        command = ["node", str(Path(__file__).with_name("chat.mjs")), str(CHAT), str(PACKAGES),
                   str(tmp_path / "jobs.json")]  # fmt: skip
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
        assert done.returncode == 0, done.stderr
        return [json.loads(line) for line in done.stdout.splitlines()]

    return asked


def folder_of(path: Path, tokenizer: Any, template: str | None = None) -> str:
    """A model's folder, as far as texts need it."""
    path.mkdir()
    tokenizer.save(str(path / "tokenizer.json"))
    tokens: dict[str, Any] = TOKENS[template] if template else {"eos_token": {"content": "<eos>"}}
    (path / "tokenizer_config.json").write_text(json.dumps(tokens))
    if template:
        shutil.copy(TEMPLATES / f"{template}.jinja", path / "chat_template.jinja")
    return str(path)


def tokens_of(folder: str, rows: list[dict[str, Any]], template: str | None = None) -> list[dict[str, Any]]:
    """As ``gradgraph finetune`` makes them."""
    found = Encoder(Path(folder), template)(read(rows))
    return [{"ids": tokens.ids.tolist(), "learnt": tokens.learnt.tolist()} for tokens in found]


GIVEN = [case for case in CASES.values() if case["messages"][-1]["role"] == "assistant"]
ROWS = [{"messages": [{**m, "content": change(m["content"])} for m in case["messages"]], "tools": case.get("tools")}
        for change in (str, str.strip) for case in GIVEN]  # fmt: skip
ROWS += [{"messages": [{**m, "weight": int(i > 1)} for i, m in enumerate(row["messages"])]}
         for row in ROWS if not row["tools"]]  # fmt: skip


@pytest.mark.parametrize("name", TOKENS)
def test_conversations_become_the_tokens_of_python(name: str, ask: Any, tmp_path: Path) -> None:
    jobs: list[dict[str, Any]] = []
    expected: list[Any] = []
    for kind, make in MADE.items():
        folder = folder_of(tmp_path / kind, make(), name)
        for row in ROWS:
            try:
                expected += tokens_of(folder, [row])
            except DataError:
                expected.append(None)
            jobs.append({"folder": folder, "rows": json.dumps([row]), "batches": {"length": 4096}})
    for job, wanted, got in zip(jobs, expected, ask(*jobs), strict=True):
        if name == "qwen3" and any(m["content"].endswith("  ") for m in json.loads(job["rows"])[0]["messages"]):
            assert "begins or ends with whitespace" in got["message"]
            continue
        where = f"{job['folder']} {job['rows'][:80]}"
        assert (wanted is None) == ("message" in got), f"{where}: {got}"
        if wanted is not None:
            assert got["samples"] == [wanted], where
            assert any(wanted["learnt"]) and not all(wanted["learnt"])


@pytest.mark.parametrize("name", TOKENS)
def test_a_question_ends_where_the_model_answers(name: str, ask: Any, tmp_path: Path) -> None:
    template = ChatTemplate((TEMPLATES / f"{name}.jinja").read_text(encoding="utf-8"), TOKENS[name])
    tokenizer = byte_level()
    folder = folder_of(tmp_path / "llm", tokenizer, name)
    given = {"folder": folder, "rows": '{"text": "Tokyo"}', "question": "Und 日本?"}
    wanted = template.render([{"role": "user", "content": "Und 日本?"}], add_generation_prompt=True)
    assert ask(given)[0]["question"] == tokenizer.encode(wanted, add_special_tokens=False).ids


@pytest.mark.parametrize("kind", MADE)
def test_texts_as_they_stand_become_the_tokens_of_python(kind: str, ask: Any, tmp_path: Path) -> None:
    tokenizer = MADE[kind]()
    rows = [{"prompt": "What is 2 < 3?", "completion": " True, naïve"},
            {"prompt": "Is the cap", "completion": "ital 日本"}, {"prompt": "", "completion": "Tokyo"}]  # fmt: skip
    texts = [{"text": WORDS}, {"text": "😀\n\n  日本 "}, {"text": "<bos>Tokyo"}]
    folder = folder_of(tmp_path / "plain", tokenizer)
    jobs = [{"folder": folder, "options": {"template": "none"}, "rows": "\n".join(map(json.dumps, given))}
            for given in (rows, texts)]  # fmt: skip
    prompts, plain = ask(*jobs)
    assert prompts["samples"] == tokens_of(folder, rows, "none")
    assert plain["samples"] == tokens_of(folder, texts)
    assert plain["texts"][0] == tokenizer.decode(tokenizer.encode(WORDS).ids)


def test_batches_hold_the_token_that_follows(ask: Any, tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "llm", byte_level(), "qwen2")
    rows = "\n".join(json.dumps({"prompt": "What is it?" * n, "completion": "Tokyo" * n}) for n in (1, 4, 2))
    plain, drawn, again, short = ask(*(
        {"folder": folder, "rows": rows, "batches": options}
        for options in ({"batchSize": 2}, {"batchSize": 3, "seed": 1}, {"batchSize": 3, "seed": 1}, {"length": 20})
    ))  # fmt: skip
    assert drawn == again
    assert short["message"].startswith("sample 1 has ") and short["message"].endswith("pass a larger { length }")
    samples = plain["samples"]
    for numbers, batch in zip([[0, 1], [2]], plain["batches"], strict=True):
        ids, target = (np.reshape(batch[name]["data"], batch[name]["dims"]) for name in ("input_ids", "target"))
        assert ids.shape == target.shape and ids.shape[-1] % 16 == 0
        for row, number in enumerate(numbers):
            one = samples[number]
            length = len(one["ids"])
            assert ids[row, :length].tolist() == one["ids"]
            assert (ids[row, length:] == byte_level().token_to_id("<|endoftext|>")).all()
            wanted = [i if learnt else -100 for i, learnt in zip(one["ids"][1:], one["learnt"][1:], strict=True)]
            assert target[row].tolist() == wanted + [-100] * (ids.shape[-1] - length + 1)


WRONG = {
    "": 'there are no rows; write one per line, such as {"prompt": …, "completion": …}',
    '{"text": "a"}\n{"text"': "line 2 is not valid JSON (",
    '{"question": "a"}': "line 1: it has neither 'messages', nor 'prompt' and 'completion', nor 'text'",
    '{"prompt": "a", "completion": " "}': "line 1: 'completion' is empty; write an answer, or drop the row",
    '[{"messages": [{"role": "user", "content": "a"}]}]':
        "row 1: the last message has the role 'user', but training requires an assistant's answer; add one",
    '{"messages": [{"role": "human", "content": "a"}]}':
        "line 1: message 1 has the role 'human'; there are system, developer, user, assistant, tool",
    '{"messages": [{"role": "user", "content": "a"}, {"role": "user", "content": "a"}]}':
        "line 1: message 2 of the role 'user' follows 'user'; reorder the messages",
    '{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "a", "weight": 0.5}]}':
        "line 1: message 2 has the weight 0.5; use 1 to train on an answer, and 0 to skip it",
    '{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": ""}]}':
        "line 1: message 2 is an empty answer; write an answer, or drop the row",
    '{"prompt": "a", "completion": "b"}':
        'line 1: the folder has no chat template; pass one, or template: "none" to use texts verbatim',
}  # fmt: skip


def test_wrong_rows_get_a_sentence(ask: Any, tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "plain", byte_level())
    answers = ask(*({"folder": folder, "rows": rows} for rows in WRONG))
    for wanted, got in zip(WRONG.values(), answers, strict=True):
        assert got["error"] == "GradgraphError" or got["error"] == "Error"
        assert got["message"].startswith(wanted)

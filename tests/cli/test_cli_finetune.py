"""Fine-tuning from the shell: one command, and one sentence for each thing that is wrong."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import onnx
import pytest
from command_line import Cli, mlp

from gradgraph.chat import Recipe
from gradgraph.cli.finetune import command

pytest.importorskip("tokenizers", reason="the extra [llm] is not installed")
pytest.importorskip("jinja2", reason="the extra [llm] is not installed")

from tests.chat import small_folder


def write_rows(path: Path, rows: list[Any]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.fixture
def llm(folder: Path) -> Path:
    """``llm/`` and ``chat.jsonl`` in the folder of ``cli``."""
    write_rows(folder / "chat.jsonl", small_folder.chats(20))
    return small_folder.write(folder / "llm")


def test_one_command(llm: Path, cli: Cli) -> None:
    ran = cli("finetune", "llm", "--data", "chat.jsonl", "--rank", "4", "--target", "*attn*", "--target", "lm_head",
              "--epochs", "2", "--lr", "1e-2", "-o", "tuned", "--json")  # fmt: skip
    assert ran.code == 0, ran.err
    figures = json.loads(ran.out)
    assert figures["folder"] == "tuned" and figures["perplexity"] < figures["perplexity_before"]
    assert {"model.onnx", "adapter", "adapter.onnx_adapter", "README.md", "genai_config.json", "tokenizer.json",
            "training"} <= {path.name for path in Path("tuned").iterdir()}  # fmt: skip


def test_show_marks_what_is_learnt(llm: Path, cli: Cli) -> None:
    ran = cli("finetune", "llm", "--data", "chat.jsonl", "--show", "2")
    assert ran.code == 0
    assert ran.out.splitlines() == [
        "--- 1, 1 answer", "<s>[u] Say ab0. ⟦ab0!</s>⟧",
        "--- 2, 2 answers", "<s>[u] Say abab1. ⟦abab1!</s>⟧[u] More of abab1? ⟦abab1, abab1.</s>⟧",
    ]  # fmt: skip
    document = json.loads(cli("finetune", "llm", "--data", "chat.jsonl", "--show", "1", "--json").out)
    assert document == [[{"text": "<s>[u] Say ab0. ", "learnt": False}, {"text": "ab0!</s>", "learnt": True}]]


def test_every_option_of_a_recipe_is_one_of_the_shell() -> None:
    there = {parameter.name: parameter for parameter in command.params}
    for option in fields(Recipe):
        assert there[option.name].default == option.default and there[option.name].help == option.metadata["words"]


def without_scales(llm: Path) -> None:
    model = onnx.load(llm / "model.onnx")
    node = next(n for n in model.graph.node if n.op_type == "MatMulNBits")
    kept = [w for w in model.graph.initializer if w.name != node.input[2]]
    del model.graph.initializer[:]
    model.graph.initializer.extend(kept)
    onnx.save(model, llm / "model.onnx")


def other_words(llm: Path) -> None:
    words = dict(list(small_folder.WORDS.items())[:70])
    small_folder.tokenizer(words).save(str(llm / "tokenizer.json"))


def more_words(llm: Path) -> None:
    small_folder.tokenizer({**small_folder.WORDS, "é": 98}).save(str(llm / "tokenizer.json"))
    write_rows(llm.parent / "chat.jsonl", [{"prompt": "a", "completion": "b"}, {"prompt": "a", "completion": "é"}])


def rows(*given: Any) -> Callable[[Path], None]:
    return lambda llm: write_rows(llm.parent / "chat.jsonl", list(given))


def template(text: str) -> Callable[[Path], None]:
    return lambda llm: (llm / "chat_template.jinja").write_text(text) and None


def removed(name: str) -> Callable[[Path], None]:
    return lambda llm: (llm / name).unlink()


def two_gigabytes(llm: Path) -> None:
    with (llm.parent / "chat.jsonl").open("wb") as file:
        file.truncate(2 << 30)


def full(llm: Path) -> None:
    (llm.parent / "tuned").mkdir()
    (llm.parent / "tuned" / "mine.txt").write_text("mine")


def no_language_model(llm: Path) -> None:
    onnx.save(mlp(), llm / "model.onnx")


USER, ANSWER = {"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Ho"}
CHANGES = "{% for m in messages %}{% if loop.last %}[{{ m.content }}]{% else %}{{ m.content }}{% endif %}{% endfor %}"
WRONG: dict[str, tuple[Callable[[Path], Any], list[str], str]] = {
    "no folder": (lambda llm: llm.rename("gone"), [], "there is no folder 'llm'"),
    "no model": (removed("model.onnx"), [], "names the model 'model.onnx', which is not there"),
    "no tokenizer": (removed("tokenizer.json"), [], "the folder 'llm' has no tokenizer.json"),
    "no template": (removed("chat_template.jinja"), [], "give --template FILE, or --template none"),
    "broken template": (template("{% for"), [], "is no Jinja template"),
    "changing template": (template(CHANGES), [], "changes what stands before the answer in message 2"),
    "refusing template": (template("{{ raise_exception('no') }}"), [], "line 1 of 'chat.jsonl': the chat template"),
    "no data": (removed("../chat.jsonl"), [], "the data 'chat.jsonl' is not there"),
    "2 GB": (two_gigabytes, [], "has 2.0 GiB, and the rows are held in memory"),
    "no JSON": (lambda llm: Path("chat.jsonl").write_text("{"), [], "line 1 of 'chat.jsonl' is no JSON"),
    "roles": (rows({"messages": [USER, USER, ANSWER]}), [], "message 2 of the role 'user' follows 'user'"),
    "empty answer": (rows({"messages": [USER, {**ANSWER, "content": ""}]}), [], "message 2 is an empty answer"),
    "other columns": (rows({"q": "a", "a": "b"}), [], "--column prompt=question --column completion=answer"),
    "wrong column": (lambda llm: None, ["--column", "prompt=q"], "line 1 of 'chat.jsonl' has no column 'q'"),
    "preferences": (rows({"chosen": "a", "rejected": "b"}), [], "holds preferences"),
    "messages as they stand": (lambda llm: None, ["--template", "none"], "leave --template none out"),
    "too long": (lambda llm: None, ["--length", "20"], "--long drop to leave them out"),
    "fewer words": (other_words, [], "has 70 tokens, and the model 98"),
    "more words": (more_words, [], "line 2 of 'chat.jsonl' has a token of the number 98, and the model knows 98"),
    "int4 without scales": (without_scales, [], "scales"),
    "no language model": (no_language_model, [], "no layer that can have an adapter matches"),
    "full folder": (full, [], "'tuned' is no empty folder; give another one, or --resume"),
    "nothing to go on": (lambda llm: None, ["--resume"], "'tuned' has no run to go on with"),
    "no such layer": (lambda llm: None, ["--target", "*nothing*"], "*nothing*"),
    "rank": (lambda llm: None, ["--rank", "0"], "rank is 0; it should be a whole number of at least 1"),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_inputs(case: str, llm: Path, cli: Cli) -> None:
    spoil, words, sentence = WRONG[case]
    spoil(llm)
    ran = cli("finetune", "llm", "--data", "chat.jsonl", "-o", "tuned", *words)
    said = [line for line in ran.err.splitlines() if line]
    assert ran.code != 0 and len(said) == 1, ran.err
    assert sentence in said[0] and "bug in gradgraph" not in said[0]
    assert not (Path("tuned") / "training").exists()


def test_where_to_write_is_asked_for(llm: Path, cli: Cli) -> None:
    ran = cli("finetune", "llm", "--data", "chat.jsonl")
    assert ran.code == 2 and "give -o FOLDER" in ran.err

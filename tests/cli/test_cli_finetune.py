"""Fine-tuning from the shell: one command, and one sentence for each thing that is wrong."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import onnx
import pytest

import gradgraph as gg
from gradgraph.building.option import option_of
from gradgraph.chat import Recipe
from gradgraph.cli import output
from gradgraph.cli.finetune import command
from tests.kit.command_line import Cli, mlp

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


def test_the_perplexity_of_a_requantised_model_is_told(llm: Path, cli: Cli) -> None:
    ran = cli("finetune", "llm", "--data", "chat.jsonl", "--target", "*attn*", "--max-steps", "1", "-o", "tuned",
              "--merge", "requantised")  # fmt: skip
    assert ran.code == 0, ran.err
    assert re.search(r"perplexity of held-out answers: \S+ before, \S+ after, \S+ requantised", ran.out + ran.err)


def test_show_marks_what_is_learnt(llm: Path, cli: Cli) -> None:
    ran = cli("finetune", "llm", "--data", "chat.jsonl", "--show", "2")
    assert ran.code == 0
    assert ran.out.splitlines() == [
        "--- 1, 1 answer", "<s>[u] Say ab0. ⟦ab0!</s>⟧",
        "--- 2, 2 answers", "<s>[u] Say abab1. ⟦abab1!</s>⟧[u] More of abab1? ⟦abab1, abab1.</s>⟧",
    ]  # fmt: skip
    told = "10 of 11 linear layers get adapters (4 attention, 6 MLP); not adapted: 1 head ('lm_head')"
    assert told in ran.err.replace("\n", " ")
    document = json.loads(cli("finetune", "llm", "--data", "chat.jsonl", "--show", "1", "--json").out)
    assert document == [[{"text": "<s>[u] Say ab0. ", "learnt": False}, {"text": "ab0!</s>", "learnt": True}]]


def test_show_has_both_answers_of_a_preference(llm: Path, cli: Cli) -> None:
    write_rows(Path("chat.jsonl"), [{"prompt": "a", "chosen": "b", "rejected": "c", "score": 3}])
    ran = cli("finetune", "llm", "--data", "chat.jsonl", "--loss", "dpo", "--show", "2")
    assert ran.out.splitlines() == ["--- 1, chosen", "<s>[u] a ⟦b</s>⟧", "--- 1, rejected", "<s>[u] a ⟦c</s>⟧"]
    assert "columns of 'chat.jsonl' that are ignored: 'score'" in ran.err


def test_every_option_of_a_recipe_is_one_of_the_shell() -> None:
    there = {parameter.name: parameter for parameter in command.params}
    for option in fields(Recipe):
        told = option_of(option)
        assert told is not None and there[option.name].help == told.help
        assert there[option.name].default == option.default


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


def cut_in_half(llm: Path) -> None:
    content = (llm / "model.onnx").read_bytes()
    (llm / "model.onnx").write_bytes(content[: len(content) // 2])


def other_teacher(llm: Path) -> None:
    other_words(small_folder.write(llm.parent / "large"))


USER, ANSWER = {"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Ho"}
CHANGES = "{% for m in messages %}{% if loop.last %}[{{ m.content }}]{% else %}{{ m.content }}{% endif %}{% endfor %}"
WRONG: dict[str, tuple[Callable[[Path], Any], list[str], str]] = {
    "no folder": (lambda llm: llm.rename("gone"), [], "there is no folder 'llm'"),
    "no model": (removed("model.onnx"), [], "names, 'model.onnx' in 'llm', cannot be read: it does not exist"),
    "no tokenizer": (removed("tokenizer.json"), [], "the folder 'llm' has no tokenizer.json"),
    "no template": (removed("chat_template.jinja"), [], "add --template FILE, or --template none"),
    "broken template": (template("{% for"), [], "is not a valid Jinja template"),
    "changing template": (template(CHANGES), [], "changes the text before the answer in message 2"),
    "refusing template": (template("{{ raise_exception('no') }}"), [], "line 1 of 'chat.jsonl': the chat template"),
    "no data": (removed("../chat.jsonl"), [], "the data 'chat.jsonl' does not exist"),
    "2 GB": (two_gigabytes, [], "has 2.0 GiB, but all rows are loaded into memory"),
    "no JSON": (lambda llm: Path("chat.jsonl").write_text("{"), [], "line 1 of 'chat.jsonl' is not valid JSON"),
    "roles": (rows({"messages": [USER, USER, ANSWER]}), [], "message 2 of the role 'user' follows 'user'"),
    "empty answer": (rows({"messages": [USER, {**ANSWER, "content": ""}]}), [], "message 2 is an empty answer"),
    "other columns": (rows({"q": "a", "a": "b"}), [], "--column prompt=question --column completion=answer"),
    "wrong column": (lambda llm: None, ["--column", "prompt=q"], "line 1 of 'chat.jsonl' has no column 'q'"),
    "preferences": (rows({"chosen": "a", "rejected": "b"}), [], "contains preferences"),
    "messages as they stand": (lambda llm: None, ["--template", "none"], "omit --template none"),
    "too long": (lambda llm: None, ["--length", "20"], "--long drop to drop them"),
    "fewer words": (other_words, [], "has 70 tokens, but the model has 98"),
    "more words": (more_words, [], "line 2 of 'chat.jsonl' has the token id 98, but the model's vocabulary has 98"),
    "int4 without scales": (without_scales, [], "scales"),
    "no language model": (no_language_model, [], "neither tokens nor inputs for a cache, a mask or positions"),
    "full folder": (full, [], "'tuned' is not an empty folder; pass another one, or --resume"),
    "nothing to go on": (lambda llm: None, ["--resume"], "'tuned' has no run to resume"),
    "no such layer": (lambda llm: None, ["--target", "*nothing*"], "*nothing*"),
    "truncated model": (cut_in_half, [], "llm/model.onnx"),
    "text as a model": (lambda llm: (llm / "model.onnx").write_text("text"), [], "llm/model.onnx"),
    "broken tokenizer": (lambda llm: (llm / "tokenizer.json").write_text("{"), [], "is not a valid tokenizer"),
    "no rows": (lambda llm: Path("chat.jsonl").write_text("\n"), [], "'chat.jsonl' has no rows"),
    "a file to write to": (lambda llm: Path("tuned").write_text("mine"), [], "'tuned' is not an empty folder"),
    "empty sample": (lambda llm: None, ["--template", "none", "--sample", ""], "omit --template none"),
    "long sample": (lambda llm: None, ["--sample", "a" * 200], "but the context length is 128; shorten it"),
    "nothing to measure on": (rows({"prompt": "a", "completion": "b"}), ["--patience", "1"], "no rows are held out"),
    "no UTF-8": (lambda llm: Path("chat.jsonl").write_bytes(b'{"text": "\xe9"}\n'), [], "it is not UTF-8"),
    "no samples": (lambda llm: Path("ask.txt").write_text("\n"), ["--sample-file", "ask.txt"], "has no prompts"),
    "no teacher": (lambda llm: None, ["--teacher", "large"], "there is no folder 'large'"),
    "other teacher": (other_teacher, ["--teacher", "large"], "has a different tokenizer"),
    "temperature": (lambda llm: None, ["--temperature", "2"], "temperature requires a teacher"),
    "no memory": (lambda llm: None, ["--memory", "100MB"], "the smallest plan ("),
    "memory": (lambda llm: None, ["--memory", "much"], "memory is 'much'; it should be a size in bytes"),
    "held out": (lambda llm: None, ["--held-out", "1.5"], "--held-out is 1.5; it should be a number of at least 0"),
    "share": (lambda llm: None, ["--teacher-share", "0.1"], "omit --teacher-share, or add --teacher"),
    "rank": (lambda llm: None, ["--rank", "0"], "--rank is 0; it should be a whole number of at least 1"),
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
    assert ran.code == 2 and "add -o FOLDER" in ran.err


# --- answers ------------------------------------------------------------------------------------------------------


def written(name: str, text: str) -> Callable[[Path], None]:
    return lambda llm: (llm / name).write_text(text) and None


def unknown_operator(llm: Path) -> None:
    model = onnx.load(llm / "model.onnx")
    model.graph.node[0].op_type = "Nothing"
    onnx.save(model, llm / "model.onnx")


def without_its_data(llm: Path) -> None:
    model = onnx.load(llm / "model.onnx")
    onnx.save(model, llm / "model.onnx", save_as_external_data=True, location="model.data", size_threshold=0)
    (llm / "model.data").unlink()


def folder_of_adapters(llm: Path) -> None:
    (llm.parent / "peft").mkdir()
    (llm.parent / "peft" / "adapter_config.json").write_text("{")


def nothing(llm: Path) -> None:
    """As it is."""


WRONG_TO_ASK: dict[str, tuple[Callable[[Path], Any], list[str], str]] = {
    "no folder": (lambda llm: llm.rename("gone"), [], "there is no folder 'llm'"),
    "a file": (
        lambda llm: (llm.rename("gone"), Path("llm").write_text("text")),
        [],
        "'llm' is a file, but not an .onnx",
    ),
    "text as a model": (written("model.onnx", "text"), [], "is truncated (its protobuf cannot be parsed"),
    "half a model": (cut_in_half, [], "is truncated (its protobuf cannot be parsed"),
    "no language model": (no_language_model, [], "one input of tokens [batch, length] is expected"),
    "refused by onnxruntime": (unknown_operator, [], "onnxruntime rejects the model 'llm/model.onnx'"),
    "no data beside it": (without_its_data, [], "external data 'model.data' of tensor"),
    "broken tokenizer": (written("tokenizer.json", "{"), [], "'llm/tokenizer.json' is not a valid tokenizer"),
    "broken description": (written("genai_config.json", "{"), [], "'llm/genai_config.json' cannot be read"),
    "broken template": (template("{% for"), [], "is not a valid Jinja template"),
    "no template": (removed("chat_template.jinja"), ["--system", "Be short."], "has no chat template"),
    "top-p": (nothing, ["--top-p", "2"], "--top-p is 2.0; it should be a number above 0 and at most 1"),
    "misspelt option": (nothing, ["--temprature", "1"], "--temperature"),
    "empty prompt": (nothing, ["--template", "none", "--prompt", ""], "a prompt has no token"),
    "empty prompt of a template": (nothing, ["--prompt", ""], "the prompt is empty; write at least a word"),
    "empty prompt after a system": (nothing, ["--system", "Be short.", "--prompt", " "], "the prompt is empty"),
    "long prompt": (nothing, ["--prompt", "a" * 200], "but the context length is 128; shorten it"),
    "no adapter": (nothing, ["--adapter", "none.onnx_adapter"], "written by `gradgraph finetune`"),
    "text as an adapter": (written("x.onnx_adapter", "text"), ["--adapter", "llm/x.onnx_adapter"], "cannot be read"),
    "broken adapters": (folder_of_adapters, ["--adapter", "peft"], "cannot read an adapter in 'peft'"),
}


@pytest.mark.parametrize("case", WRONG_TO_ASK)
def test_wrong_questions(case: str, llm: Path, cli: Cli) -> None:
    spoil, words, sentence = WRONG_TO_ASK[case]
    spoil(llm)
    ran = cli("generate", "llm", *([] if "--prompt" in words else ["--prompt", "Hi"]), *words)
    said = [line for line in ran.err.splitlines() if line]
    assert ran.code != 0 and len(said) == 1, ran.err
    assert sentence in said[0] and "bug in gradgraph" not in said[0]


def test_an_adapter_of_another_model(llm: Path, cli: Cli) -> None:
    """Its tensors are no inputs of a model that switches none."""
    adapted = gg.lora(llm / "model.onnx", "lm_head", rank=2)
    gg.surgery.save_adapter(adapted, "one.onnx_adapter")
    ran = cli("generate", "llm", "--prompt", "Hi", "--adapter", "one.onnx_adapter")
    assert ran.code != 0 and len(ran.err.splitlines()) == 1
    assert "has the tensor 'lm_head.lora_A', but the model has no adapter input of that name" in ran.err
    assert "the base model written by `gradgraph surgery --switchable`" in ran.err


def test_each_line_of_the_library_is_said_once(capsys: pytest.CaptureFixture[str]) -> None:
    log = logging.getLogger("gradgraph.chat")
    with output.notes(), output.printed_log(log.name):
        log.info("it trains")
        log.warning("rows are not packed")
    assert capsys.readouterr().err == "it trains\nnote: rows are not packed\n"

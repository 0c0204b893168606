"""Chat templates give the text that transformers gives, and say where the assistant speaks."""

from __future__ import annotations

import importlib.util
import json
import os
import time
from pathlib import Path
from typing import Any

import pytest

from gradgraph.chat import ChatTemplate
from gradgraph.errors import DataError
from gradgraph.files.untrusted import jinja_worker

pytest.importorskip("jinja2", reason="the extra [llm] is not installed")

from tests.chat.recorded import CASES, RECORD, TEMPLATES, TOKENS, by_transformers

RECORDED = json.loads(RECORD.read_text(encoding="utf-8"))


def template(name: str) -> ChatTemplate:
    return ChatTemplate((TEMPLATES / f"{name}.jinja").read_text(encoding="utf-8"), TOKENS[name])


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("name", TOKENS)
def test_the_text_is_that_of_transformers(name: str, case: str) -> None:
    recorded, made = RECORDED[name][case], template(name)
    if "refused" in recorded:
        with pytest.raises(DataError) as caught:
            made.render(**CASES[case])
        assert recorded["refused"] in str(caught.value)
        return
    assert made.render(**CASES[case]) == recorded["text"]
    if made.marks_answers and not CASES[case].get("add_generation_prompt"):
        found = made.with_answers(**CASES[case])
        assert [list(span) for span in found.answers] == recorded["answers"] and found.text == recorded["text"]


@pytest.mark.skipif(importlib.util.find_spec("transformers") is None, reason="transformers: make shipped-models")
@pytest.mark.parametrize("name", TOKENS)
def test_the_record_is_what_transformers_gives(name: str) -> None:
    assert {case: by_transformers(name, given) for case, given in CASES.items()} == RECORDED[name]


@pytest.mark.parametrize(
    "name, answers",
    [
        ("llama3", ["True, naïve 😀<|eot_id|>", "Tokyo<|eot_id|>"]),
        ("qwen2", ["  True, naïve 😀  <|im_end|>\n", "Tokyo<|im_end|>\n"]),
        ("phi3", ["  True, naïve 😀  <|end|>\n", "Tokyo<|end|>\n<|endoftext|>"]),
        ("mistral", ["  True, naïve 😀  </s>", "Tokyo</s>"]),
        ("gemma", ["True, naïve 😀<end_of_turn>\n", "Tokyo<end_of_turn>\n"]),
    ],
)
def test_answers_are_found_by_beginnings(name: str, answers: list[str]) -> None:
    found = template(name).with_answers(CASES["two turns"]["messages"])
    assert [found.text[begin:end] for begin, end in found.answers] == answers


def test_marks_and_beginnings_find_the_same() -> None:
    messages = CASES["system"]["messages"]
    assert template("llama3").with_answers(messages) == template("llama3_training").with_answers(messages)


def test_texts_in_parts_are_texts() -> None:
    """A template that knows no parts would write the list; one that reads them does so itself."""
    parts = [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]
    for source in ("{{ messages[0].content }}", "{{ messages[0].content + '' }}",
                   "{% for part in messages[0].content %}{{ part.text }}{% endfor %}"):  # fmt: skip
        assert ChatTemplate(source).render(parts) == "ab"


def test_some_answers_are_given() -> None:
    messages = [dict(message) for message in CASES["two turns"]["messages"]]
    for name in ("qwen3", "qwen2_training"):  # thoughts of earlier answers change there, which nobody learns then
        found = template(name).with_answers(messages, given=2)
        messages[1]["weight"] = 0
        assert template(name).with_answers(messages) == found and len(found.answers) == 1
        del messages[1]["weight"]
    once = "{% for m in messages %}{{ m.content }}{% endfor %}{% generation %}x{% endgeneration %}"
    with pytest.raises(DataError, match="marks 1 of 2 answers"):
        ChatTemplate(once).with_answers(messages, given=2)


CHANGING = "{% for m in messages %}{% if loop.last %}[{{ m.content }}]{% else %}{{ m.content }}{% endif %}{% endfor %}"
REFUSED: list[tuple[str, str, list[dict[str, Any]]]] = [
    ("{% for m in messages %}", "is not a valid Jinja template", []),
    ("{{ ''.__class__.__mro__ }}", "sandbox forbids", []),
    ("{{ namespace(__class__=1) }}", "sandbox forbids", []),
    ("{{ messages.append(1) }}", "sandbox forbids", []),
    ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "calls itself without end", []),
    ("{{ messages[0].content + 1 }}", "rejects the messages", CASES["one turn"]["messages"]),
    ("{{ messages }}", "are not characters", [{"role": "user", "content": "\ufdd0"}]),
    (CHANGING, "changes the text before the answer in message 2", CASES["two turns"]["messages"]),
]


@pytest.mark.parametrize("source, words, messages", REFUSED)
def test_what_a_template_must_not_do(source: str, words: str, messages: list[dict[str, Any]]) -> None:
    with pytest.raises(DataError) as caught:
        ChatTemplate(source).with_answers(messages)
    assert words in str(caught.value) and "\n" not in str(caught.value)


def test_the_template_of_a_folder(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="has no chat template"):
        ChatTemplate.of(tmp_path)
    config = {"chat_template": "{{ eos_token }}1", "eos_token": {"content": "</s>"}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    assert ChatTemplate.of(tmp_path).render([]) == "</s>1"
    config["chat_template"] = [{"name": "tool_use", "template": "2"}, {"name": "default", "template": "3"}]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    made = ChatTemplate.of(tmp_path)
    assert made.render([]) == "3" and made.render([], tools=[]) == made.with_answers([], tools=[]).text == "2"
    (tmp_path / "chat_template.jinja").write_text("{{ eos_token }}4")
    made = ChatTemplate.of(tmp_path)
    assert made.render([]) == made.render([], tools=[]) == "</s>4"
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_text("6{{ eos_token }}")
    made = ChatTemplate.of(tmp_path)
    assert (made.render([]), made.render([], tools=[])) == ("</s>4", "6</s>")
    (tmp_path / "additional_chat_templates").rename(tmp_path.parent / "elsewhere")
    (tmp_path / "additional_chat_templates").symlink_to(tmp_path.parent / "elsewhere")
    with pytest.raises(DataError, match="symlink out of the folder"):
        ChatTemplate.of(tmp_path)
    (tmp_path / "additional_chat_templates").unlink()
    (tmp_path / "own.jinja").write_text("5{{ eos_token }}")
    assert ChatTemplate.of(tmp_path, tmp_path / "own.jinja").render([]) == "5</s>"


GREEDY = {
    "a string times a number": ("{{ 'x' * 1500000000 }}", "memory"),
    "a number times a string": ("{{ 2000000000 * messages[0].content }}", "memory"),
    "a list times a number": ("{{ ['x'] * 1000000000 }}", "memory"),
    "doubled again and again": (
        "{% set n = namespace(x='x') %}{% for i in range(60) %}{% set n.x = n.x + n.x %}{% endfor %}{{ n.x }}",
        "memory",
    ),
    "a wide field": ("{{ '%01500000000d' % 1 }}", "memory"),
    "a wide format": ("{{ '{:>1500000000}'.format('x') }}", "memory"),
    "centred": ("{{ messages[0].content.center(1500000000) }}", "memory"),
    "a deep indent": ("{{ messages[0].content | indent(1500000000) }}{{ 'a\n' | indent(1500000000, true) }}", "memory"),
    "an indented JSON": ("{{ messages | tojson(indent=1500000000) }}", "memory"),
    "loops in loops": (
        "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
        "more than 10 s",
    ),
    "a power": ("{{ 9 ** 9 ** 9 % 7 }}{{ (messages | length + 8) ** 999999999 }}", "power of too many digits"),
    "a long text": ("{% for i in range(99999) %}{{ 'x' * 999 }}{% endfor %}", "million characters"),
    "macros in macros": ("{% macro f(n) %}{{ f(n + 1) }}{% endmacro %}{{ f(0) }}", "calls itself without end"),
    "brackets in brackets": ("{{ " + "(" * 5000 + ")" * 5000 + " }}", "calls itself without end"),
    "blocks in blocks": ("{% if true %}" * 5000 + "{% endif %}" * 5000, "calls itself without end"),
}


@pytest.mark.parametrize("name", GREEDY)
def test_a_template_takes_neither_all_memory_nor_all_time(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    source, words = GREEDY[name]
    quick = jinja_worker.Templates(seconds=3)
    monkeypatch.setattr(jinja_worker, "_ONE", quick)
    began = time.monotonic()
    try:
        with pytest.raises(DataError) as caught:
            ChatTemplate(source).with_answers(CASES["one turn"]["messages"])
        late = words == "memory" and "more than 10 s" in str(caught.value)  # on a busy machine, or not on Linux
        assert words in str(caught.value) or late
        assert time.monotonic() - began < 60
        assert ChatTemplate("{{ messages[0].role }}").render(CASES["one turn"]["messages"]) == "user"
    finally:
        quick.close()


def test_one_process_renders_all_and_is_started_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    own = jinja_worker.Templates()
    monkeypatch.setattr(jinja_worker, "_ONE", own)
    first, second = (
        ChatTemplate("1{{ messages[0].role }}"),
        ChatTemplate("2{{ eos_token }}", {"eos_token": "é\u2028😀"}),
    )
    texts = [t.render([{"role": "user", "content": "x"}]) for t in (first, second, first)]
    assert texts == ["1user", "2é\u2028😀", "1user"]
    process = own._process
    assert process is not None and own._running() is process
    process.kill()
    process.wait()
    with pytest.raises(DataError, match="ends the process"):
        first.render([{"role": "user", "content": "x"}])
    assert first.render([{"role": "user", "content": "x"}]) == "1user" and own._process is not process
    own.close()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system forks no processes")
def test_a_forked_process_has_a_renderer_of_its_own() -> None:
    made = ChatTemplate("{{ messages[0].role }}")
    child = os.fork()
    if not child:
        os._exit(0 if made.render([{"role": "tool", "content": "x"}]) == "tool" else 1)
    assert made.render([{"role": "user", "content": "x"}]) == "user"
    assert os.waitpid(child, 0)[1] == 0

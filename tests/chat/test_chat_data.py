"""Rows of chat data, from all that people have them in; and what is wrong with them, in one sentence."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from gradgraph.chat import read
from gradgraph.errors import DataError
from tests.chat import small_folder

pd = pytest.importorskip("pandas", reason="the extra [llm] is not installed")

USER, ANSWER = {"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Ho"}
CHAT = [USER, ANSWER]
CALL = {"id": "1", "type": "function", "function": {"name": "add", "arguments": {"a": [1, 2], "b": {"c": "d"}}}}
CALLED = [USER, {"role": "assistant", "content": None, "tool_calls": [CALL]}, {"role": "tool", "content": "3"}, ANSWER]
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object", "required": ["a"]}}}]
ROWS: dict[str, list[dict[str, Any]]] = {
    "messages": [
        {"messages": CHAT, "tools": None},
        {"messages": [{"role": "system", "content": "x"}, *CALLED], "tools": TOOLS},
    ],
    "prompt": [{"prompt": "NA", "completion": "1"}, {"prompt": "two\nlines", "completion": '"q"'}],
    "text": [{"text": "one"}, {"text": "null"}],
    "preference": [{"prompt": "p", "chosen": "a", "rejected": "b"}],
    "unpaired": [{"prompt": "p", "completion": "a", "label": True}],
}


class Dataset:
    """As much of a dataset of Hugging Face as others rely on."""

    def __init__(self, rows: list[dict[str, Any]]) -> None:
        self.column_names, self._rows = list(rows[0]), rows

    def __getitem__(self, name: str) -> list[Any]:
        return [row[name] for row in self._rows]


def jsonl(path: Path, rows: list[Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n\n" for row in rows), encoding="utf-8")
    return path


def source_of(way: str, rows: list[dict[str, Any]], tmp_path: Path) -> Any:
    path, frame = tmp_path / f"rows.{way}", pd.DataFrame(rows)
    match way:
        case "jsonl":
            return jsonl(path, rows)
        case "json":
            path.write_text(json.dumps(rows))
        case "parquet":
            pytest.importorskip("pyarrow", reason="the extra [llm] is not installed")
            frame.to_parquet(path)
        case "csv":
            pd.DataFrame([{k: v if isinstance(v, str | bool) else json.dumps(v) for k, v in row.items()}
                          for row in rows]).to_csv(path, index=False)  # fmt: skip
        case "frame":
            return frame
        case "dataset":
            return Dataset(rows)
        case "lists":
            return {name: list(frame[name]) for name in frame}
        case _:
            return rows
    return path


@pytest.mark.parametrize("way", ["jsonl", "json", "parquet", "csv", "frame", "dataset", "lists", "rows"])
@pytest.mark.parametrize("kind", ROWS)
def test_rows_are_the_same_from_everywhere(kind: str, way: str, tmp_path: Path) -> None:
    found = read(source_of(way, ROWS[kind], tmp_path))
    assert found.kind == kind and list(found) == ROWS[kind]


def test_other_names_and_other_spellings() -> None:
    asked = [{"question": "1", "answer": "2", "id": 3}]
    found = read(asked, {"prompt": "question", "completion": "answer"})
    assert found.kind == "prompt" and found[0] == {"prompt": "1", "completion": "2", "id": 3}
    shared = [{"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Ho"}]}]
    assert read(shared)[0]["messages"] == CHAT
    shared[0]["conversations"][1]["weight"] = 0
    assert read(shared)[0]["messages"][1] == {**ANSWER, "weight": 0}


def test_columns_that_say_the_same_again(caplog: pytest.LogCaptureFixture) -> None:
    """As UltraFeedback has them: a prompt that both answers begin with, and messages beside preferences."""
    row = {"prompt": "Hi", "chosen": CHAT, "rejected": [USER, {**ANSWER, "content": "No"}], "messages": CHAT, "id": 1}
    assert "prompt" not in read([row])[0] and read([row]).kind == "preference"
    assert "that are ignored: 'messages', 'id'" in caplog.text
    assert read([row], kinds=("messages",)).kind == "messages"
    with pytest.raises(DataError, match="use text in it and in 'prompt'"):
        read([{**row, "prompt": "Ho"}])


def test_columns_are_renamed_at_once() -> None:
    """Also if their names are exchanged, or one column is used twice."""
    row = {"prompt": "the answer", "completion": "the question"}
    (found,) = read([row], {"prompt": "completion", "completion": "prompt"})
    assert (found["prompt"], found["completion"]) == ("the question", "the answer")
    (found,) = read([{"text": "both"}], {"prompt": "text", "completion": "text"})
    assert found == {"prompt": "both", "completion": "both"}


@pytest.mark.parametrize("answer", ['[{"name": "add", "arguments": {"a": 1}}]', '[{"role": 1}]', "[{", '[{"a": 1}, 2]'])
def test_an_answer_in_json_stays_text(answer: str) -> None:
    (found,) = read([{"prompt": json.dumps(CHAT[:1]), "completion": json.dumps(CHAT[1:])}])
    assert (found["prompt"], found["completion"]) == (CHAT[:1], CHAT[1:])
    assert read([{"prompt": "Hi", "completion": answer}])[0]["completion"] == answer


def test_a_template_is_not_used_for_plain_texts(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    pytest.importorskip("tokenizers", reason="the extra [llm] is not installed")
    from gradgraph.chat.tokens import Encoder

    (tmp_path / "own.jinja").write_text("{{ messages[0].content }}")
    encoder = Encoder(small_folder.write(tmp_path / "llm"), tmp_path / "own.jinja")
    encoder(read([{"text": "abc"}]))
    assert "the texts of the data are used verbatim, without the chat template" in caplog.text


def test_a_column_of_later_rows_is_named_too(caplog: pytest.LogCaptureFixture) -> None:
    read([{"text": "one", "id": None}, {"text": "two", "images": ["a.png"], "id": None}])
    assert "that are ignored: 'images'" in caplog.text and "id" not in caplog.text.split("ignored")[1]


def test_splits_are_named() -> None:
    with pytest.raises(DataError, match=r"have the splits 'train', 'test'; pass one of them, such as data\['train'\]"):
        read({name: Dataset(ROWS["text"]) for name in ("train", "test")})


def test_places_are_lines(tmp_path: Path) -> None:
    rows = read(jsonl(tmp_path / "a.jsonl", [{"text": str(i)} for i in range(4)]))
    assert rows.place(2) == f"line 5 of '{tmp_path / 'a.jsonl'}'"
    assert rows.taken([3, 1]).place(0) == rows.place(3) and rows.taken([3, 1])[0] == {"text": "3"}


def said(role: str, content: Any = "x") -> dict[str, Any]:
    return {"role": role, "content": content}


WRONG: list[tuple[str, Any, str]] = [
    ("no rows", [], "has no rows"),
    ("no columns", [{"a": 1}], "has the columns 'a', but chat data require 'chosen' and 'rejected'"),
    ("assistant first", [{"messages": [ANSWER]}], "message 1 of the role 'assistant' is the first"),
    ("two users", [{"messages": [USER, USER, ANSWER]}], "message 2 of the role 'user' follows 'user'"),
    ("late system", [{"messages": [*CHAT, said("system"), USER, ANSWER]}], "message 3 of the role 'system' follows"),
    ("no answer", [{"messages": [USER]}], "the last message has the role 'user'"),
    ("empty answer", [{"messages": [USER, said("assistant", " \n")]}], "message 2 is an empty answer"),
    ("unknown role", [{"messages": [said("usr")]}], "the role 'usr'; did you mean 'user'?"),
    ("no role", [{"messages": [{"content": "x"}]}], "message 1 has no role"),
    ("no list", [{"messages": "x"}], "the messages are 'x'"),
    ("pictures", [{"messages": [said("user", [{"type": "image"}]), ANSWER]}], "parts other than text"),
    ("no message", [{"messages": []}], "the list of messages is empty"),
    ("no content", [{"messages": [said("user", None), ANSWER]}], "message 1 has the content None"),
    ("empty completion", [{"prompt": "a", "completion": ""}], "'completion' is empty"),
    ("text and messages", [{"prompt": [USER], "completion": "a"}], "use text in both, or messages in both"),
    ("empty text", [{"text": "a"}, {"text": " "}], "the row at index 1 of the data: 'text' is empty"),
    ("a number", [{"text": 3}], "'text' is 3, but should be text"),
    ("a gap", [{"text": "a"}, {"text": None}, {}], "'text' is missing, but the first row has it; add it, or drop the"
                                                   " row (and 1 more row is wrong)"),
    ("empty rejected", [{"chosen": "a", "rejected": ""}], "'rejected' is empty"),
    ("rejected messages", [{"chosen": CHAT, "rejected": [USER]}], "in 'rejected', the last message"),
    ("a weight", [{"messages": [USER, {**ANSWER, "weight": 0.5}]}], "message 2 has the weight 0.5; use 1 to train"),
    ("from nobody", [{"conversations": [{"from": [], "value": "x"}]}], "message 1 has no role"),
    ("variables", [{"text": "a"}, {"text": "a", "chat_template_kwargs": [1]}], "'chat_template_kwargs' is a list"),
    ("a taken name", [{"messages": CHAT, "chat_template_kwargs": {"messages": []}}], "sets 'messages', which"),
    ("label", [{"prompt": "a", "completion": "b", "label": "good"}], "'label' is 'good'"),
]  # fmt: skip


@pytest.mark.parametrize("rows, words", [row[1:] for row in WRONG], ids=[row[0] for row in WRONG])
def test_wrong_rows(rows: Any, words: str) -> None:
    with pytest.raises(DataError) as caught:
        read(rows)
    assert words in str(caught.value) and "\n" not in str(caught.value)


FILES: list[tuple[str, bytes | int | None, str]] = [
    ("missing.jsonl", None, "does not exist"),
    ("empty.jsonl", b"", "has no rows"),
    ("broken.jsonl", b'{"text": "a"}\n{"text": \n', "line 2 of"),
    ("list.jsonl", b"[1]\n", "line 1 of"),
    ("latin.jsonl", b'{"text": "\xe9"}\n', "it is not UTF-8"),
    *(
        (f"large.{kind}", 2 << 30, "has 2.0 GiB, but all rows are loaded into memory")
        for kind in ("jsonl", "json", "csv", "tsv", "parquet")
    ),
    ("object.json", b'{"a": 1}', "should be a list of rows"),
    ("rows.xlsx", b"PK", "is not a table of texts"),
]


@pytest.mark.parametrize("name, content, words", FILES, ids=[row[0] for row in FILES])
def test_wrong_files(name: str, content: bytes | int | None, words: str, tmp_path: Path) -> None:
    path = tmp_path / name
    if isinstance(content, bytes):
        path.write_bytes(content)
    elif content is not None:
        with path.open("wb") as file:
            file.truncate(content)  # a file with holes: no disk space
    with pytest.raises(DataError) as caught:
        read(path)
    assert words in str(caught.value) and "\n" not in str(caught.value)

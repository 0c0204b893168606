"""Extractive question answering: windows and labels as in transformers' example, losses as in PyTorch, and answers."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

import gradgraph as gg
from gradgraph import frontend
from gradgraph.chat.question_answers import agreement
from gradgraph.chat.question_windows import Question
from gradgraph.errors import ArgumentError, DataError, GradgraphError
from gradgraph.frontend import nn

pytest.importorskip("tokenizers", reason="the extra [llm] is not installed")

from tests.chat.questions import CLS, LENGTH, STRIDE, as_in_run_qa, best_answer, padded, rows, tokenizer
from tests.kit.command_line import Cli

WIDTH = 8


class Marker(nn.Module):
    """Scores of each token as the first and as the last of the answer."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(98, WIDTH), nn.Embedding(LENGTH + 1, WIDTH)
        self.starts, self.ends = nn.Linear(WIDTH, 1), nn.Linear(WIDTH, 1)

    def forward(self, input_ids: Any, attention_mask: Any, token_type_ids: Any) -> Any:
        kept = (attention_mask + token_type_ids).to("float32").unsqueeze(-1)  # 2 in the context
        x = (self.words(input_ids) + self.places(attention_mask.cumsum(1))) * kept
        return self.starts(x).squeeze(-1), self.ends(x).squeeze(-1)


@pytest.fixture
def bert(folder: Path) -> Path:
    """``bert/`` in the current folder, as optimum writes it."""
    frontend.manual_seed(0)
    names = ("input_ids", "attention_mask", "token_type_ids")
    inputs = {name: frontend.Input(("rows", "tokens"), "int64") for name in names}
    (folder / "bert").mkdir()
    onnx.save(frontend.export(Marker(), inputs, outputs=["start_logits", "end_logits"]), folder / "bert" / "model.onnx")
    tokenizer().save(str(folder / "bert" / "tokenizer.json"))
    (folder / "bert" / "tokenizer_config.json").write_text(json.dumps({"cls_token": "<s>"}))
    (folder / "bert" / "config.json").write_text(json.dumps({"vocab_size": 98, "max_position_embeddings": 64}))
    return folder / "bert"


OPTIONS: dict[str, Any] = {"task": "question-answering", "length": LENGTH, "stride": STRIDE, "learning_rate": 0.05,
                           "progress": False}  # fmt: skip


def test_losses_and_answers_are_those_of_torch(bert: Path) -> None:
    torch = pytest.importorskip("torch", reason="in no extra; the losses are compared with PyTorch's")
    data, epochs = rows(30), 4
    windows = as_in_run_qa(data)
    assert len(windows) > 60 and sum(w["label"] == (0, 0) for w in windows) > 20
    found = gg.finetune(bert, data, "tuned", validation=data, epochs=epochs, batch_size=len(windows), **OPTIONS)
    assert found.figures["windows"] == len(windows)
    stored = {t.name: torch.nn.Parameter(torch.tensor(onnx.numpy_helper.to_array(t).copy()))
              for t in onnx.load(bert / "model.onnx").graph.initializer
              if t.name.startswith(("words", "places", "starts", "ends"))}  # fmt: skip
    assert len(stored) == 6
    ids = torch.tensor(padded([w["ids"] for w in windows], 0))
    mask = torch.tensor(padded([[1] * len(w["ids"]) for w in windows], 0))
    kept = (mask + torch.tensor(padded([w["types"] for w in windows], 0)))[..., None].float()

    def scores() -> list[Any]:
        x = (stored["words.weight"][ids] + stored["places.weight"][mask.cumsum(1)]) * kept
        return [(x @ stored[f"{name}.weight"].T + stored[f"{name}.bias"])[..., 0] for name in ("starts", "ends")]

    optimizer, wanted = torch.optim.AdamW([*stored.values()], weight_decay=0.0), []
    for step in range(epochs):
        optimizer.param_groups[0]["lr"] = 0.05 * 0.5 * (1 + math.cos(math.pi * step / epochs))
        losses = [torch.nn.functional.cross_entropy(s, torch.tensor([w["label"][i] for w in windows]))
                  for i, s in enumerate(scores())]  # fmt: skip
        optimizer.zero_grad()
        (sum(losses) / 2).backward()
        torch.nn.utils.clip_grad_norm_([*stored.values()], 1.0)
        optimizer.step()
        wanted.append(float(sum(losses).detach()) / 2)
    np.testing.assert_allclose(found.history["loss"], wanted, rtol=1e-5)
    assert wanted[-1] < 0.9 * wanted[0]
    answers = json.loads(Path("tuned/predictions.json").read_text())
    starts, ends = (s.detach().numpy() for s in scores())
    assert answers == {row["id"]: best_answer(row, windows, starts, ends) for row in data}
    assert {"val_exact_match", "val_f1"} <= found.figures.keys()
    assert {p.name for p in Path("tuned").iterdir()} == {"model.onnx", "tokenizer.json", "tokenizer_config.json",
                                                         "config.json", "predictions.json", "training"}  # fmt: skip


@pytest.mark.parametrize("where", ["tokenizer.json", "tokenizer_config.json"])
def test_a_tokenizer_that_pads_on_the_left(where: str, bert: Path) -> None:
    """Windows then begin with the context; losses do not depend on the side here, as scores of padding are equal."""
    from gradgraph.chat.question_windows import QuestionWindows, read_questions, windows_of
    from gradgraph.data.texts.tokenizer import Tokenizer

    if where == "tokenizer.json":
        runner = tokenizer()
        runner.enable_padding(direction="left", pad_id=0, pad_token="<pad>")
        runner.save(str(bert / "tokenizer.json"))
    else:
        (bert / "tokenizer_config.json").write_text(json.dumps({"padding_side": "left"}))
    read, made = read_questions(rows(12)), Tokenizer(bert / "tokenizer.json")
    windows = QuestionWindows(windows_of(read, made, LENGTH, STRIDE), read.rows, made, [CLS], LENGTH)
    step = gg.Trainer(gg.build(bert / "model.onnx", dict.fromkeys(("start_logits", "end_logits"), "cross_entropy")))
    specs = {spec.name: spec for spec in (*step.manifest.inputs, *step.manifest.targets)}
    (batch,) = windows.load(iter([range(len(windows))]), specs, [])
    for i, window in enumerate(windows.windows):
        question = read.rows[windows.owners[i]]
        row, gap = batch["input_ids"][i], batch["input_ids"].shape[1] - len(window)
        assert not row[:gap].any() and row[gap:].tolist() == window.ids.tolist()
        first, last = batch["start_logits_target"][i], batch["end_logits_target"][i]
        if (windows.answers[i] == windows.none[i]).all():
            assert row[first] == row[last] == CLS
        else:
            text = "".join(chr(ord(" ") + n - 3) for n in row[first : last + 1])
            assert text == question.answers[0][0]
    assert any((windows.answers != np.array(windows.none)[:, None]).all(1))


def test_a_run_that_stopped_goes_on(bert: Path) -> None:
    data, options = rows(10, with_none=False), OPTIONS | {"epochs": 2, "batch_size": 8}
    gg.finetune(bert, data, "whole", **options)
    gg.finetune(bert, data, "half", **options, max_steps=2)
    gg.finetune(bert, data, "half", **options, resume=True)
    assert Path("half/model.onnx").read_bytes() == Path("whole/model.onnx").read_bytes()
    with pytest.raises(DataError, match="began with other values of stride"):
        gg.finetune(bert, data, "half", **options | {"stride": 5}, resume=True)


def test_the_command(bert: Path, cli: Cli) -> None:
    data = rows(8)
    for row in data:  # in the form of SQuAD's own file
        pairs = zip(row["answers"]["text"], row["answers"]["answer_start"], strict=True)
        row["answers"] = [{"text": text, "answer_start": start} for text, start in pairs]
        row["asked"] = row.pop("question")
    Path("qa.jsonl").write_text("".join(json.dumps(row) + "\n" for row in data))
    ran = cli("finetune", "bert", "--task", "question-answering", "--data", "qa.jsonl", "--validation", "qa.jsonl",
              "--column", "question=asked", "--length", "32", "--epochs", "1", "-o", "tuned")  # fmt: skip
    assert ran.code == 0 and "val_f1: " in ran.err, ran.err
    assert set(json.loads(Path("tuned/predictions.json").read_text())) == {row["id"] for row in data}


def test_an_answer_of_one_character_has_all_its_tokens(folder: Path) -> None:
    """Byte-level tokens of a character share its span."""
    from tokenizers import Tokenizer as Runner
    from tokenizers import models, pre_tokenizers

    from gradgraph.chat.question_windows import QuestionWindows, read_questions, windows_of
    from gradgraph.data.texts.tokenizer import Tokenizer

    runner = Runner(models.BPE({letter: i for i, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}, []))
    runner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    runner.save("tokenizer.json")
    made, context = Tokenizer("tokenizer.json"), "a\N{FOX FACE}b"
    for text, tokens in (("\N{FOX FACE}", (2, 5)), ("b", (6, 6))):
        read = read_questions([row(question="?", context=context,
                                   answers={"text": [text], "answer_start": [context.index(text)]})])  # fmt: skip
        (found,) = QuestionWindows(windows_of(read, made, 16, 0), read.rows, made, [], 16).answers
        assert tuple(found) == tokens


AT_THE_ENDS = [("  Foxes  ", "  Foxes  ", "foxes"), ("foxes run ", "run ", "run"), (" the fox", " the", "the"),
               ("a \u0301", "\u0301", "")]  # fmt: skip


@pytest.mark.parametrize("context, answer, wanted", AT_THE_ENDS)
def test_characters_without_tokens_at_the_ends_of_an_answer(
    context: str, answer: str, wanted: str, folder: Path
) -> None:
    """Spaces at the ends of a context, and accents, which BERT's normalizer strips."""
    from tokenizers import Tokenizer as Runner
    from tokenizers import models, normalizers, pre_tokenizers

    from gradgraph.chat.question_windows import QuestionWindows, read_questions, windows_of
    from gradgraph.data.texts.tokenizer import Tokenizer

    words = ["[UNK]", "foxes", "run", "the", "fox", "a", "who"]
    runner = Runner(models.WordPiece({word: i for i, word in enumerate(words)}, unk_token="[UNK]"))
    runner.normalizer, runner.pre_tokenizer = normalizers.BertNormalizer(), pre_tokenizers.BertPreTokenizer()
    runner.save("tokenizer.json")
    made = Tokenizer("tokenizer.json")
    answers = {"text": [answer], "answer_start": [context.index(answer)]}
    read = read_questions([row(question="who", context=context, answers=answers)])
    found = QuestionWindows(windows_of(read, made, 16, 0), read.rows, made, [], 16)
    first, last = found.answers[0]
    assert found.lost == (wanted == "")
    assert wanted == "" or [words[n] for n in found.windows[0].ids[first : last + 1]] == [wanted]


IDS: dict[str, tuple[list[Any], list[str]]] = {
    "texts": (["a", " b"], ["a", " b"]), "whole numbers": ([7, 0], ["7", "0"]), "floats": ([7.0, 2.0], ["7", "2"]),
    "none": ([None, None], ["0", "1"]), "empty cells": (["", " "], ["0", "1"]), "nan": ([math.nan] * 2, ["0", "1"]),
}  # fmt: skip


@pytest.mark.parametrize("case", IDS)
def test_ids(case: str) -> None:
    """As a data frame has them: with floats for whole numbers, and NaN for missing ones."""
    pandas = pytest.importorskip("pandas", reason="the extra [tables] is not installed")
    from gradgraph.chat.question_windows import read_questions

    given, wanted = IDS[case]
    assert [q.name for q in read_questions(pandas.DataFrame([row(id=each) for each in given])).rows] == wanted


def row(**changes: Any) -> dict[str, Any]:
    return {"question": "who?", "context": "a fox", "answers": {"text": ["fox"], "answer_start": [2]}, **changes}


REFUSED: dict[str, tuple[dict[str, Any], type[GradgraphError], str]] = {
    "a missing column": ({"data": [{"question": "a", "context": "b"}]}, DataError, "has no column 'answers'"),
    "a missing column of ids": ({"columns": {"id": "key"}}, DataError, "the data has no column 'key'"),
    "no rows": ({"data": []}, DataError, "has no rows"),
    "a byte offset": ({"data": [row(), row(answers={"text": ["fox"], "answer_start": [3]})]}, DataError,
                      "row at index 1 of the data.*'fox' is not in the context at character 3; correct answer_start"),
    "an id twice": ({"data": [row(id="a"), row(id="a")]}, DataError, "index 1 of the data has the id 'a' of the row"),
    "an id that is missing": ({"data": [row(id=1), row(id=None)]}, DataError,
                              "row at index 1 of the data: 'id' is missing, but other rows have it; add it, or"),
    "an id of another type": ({"data": [row(id=0.5)]}, DataError, "'id' is 0.5, but should be text or a whole number"),
    "lists of other lengths": ({"data": [row(answers={"text": ["fox"], "answer_start": []})]}, DataError,
                               "'answers' is .*, but should be"),
    "a question of spaces": ({"data": [row(question="  ")]}, DataError, "'question' is .*, but should be text"),
    "a long question": ({"data": [row(question="who" * 20, context="fox" * 9, answers=[])], "length": 40}, DataError,
                        "leaves 0 of 40 tokens of a window to its context, but windows share 13 tokens"),
    "a wide stride": ({"length": 40, "stride": 40}, ArgumentError, "stride is 40, but windows have 40 tokens"),
    "more tokens than positions": ({"length": 65}, DataError, "the model has 64 positions"),
    "another column": ({"columns": {"prompt": "question"}}, ArgumentError, "has no column 'prompt'"),
    "an option of adapters": ({"rank": 4}, ArgumentError, "does not use 'rank'; omit it"),
    "stride of another task": ({"task": "text-classification", "stride": 4}, ArgumentError,
                               "stride applies to the task question-answering"),
    "patience without validation": ({"patience": 2}, ArgumentError, "evaluates validation data, and none are given"),
    "another task": ({"task": "token-classification", "data": "d.jsonl"}, DataError,
                     "was exported for question-answering, not for token-classification; pass the task question-ans"),
    "no tokenizer": ({}, DataError, "has no tokenizer.json"),
}  # fmt: skip


@pytest.mark.parametrize("what", REFUSED)
def test_what_is_refused(what: str, bert: Path) -> None:
    given, error, says = REFUSED[what]
    if what == "no tokenizer":
        (bert / "tokenizer.json").unlink()
    given = {"task": "question-answering", "data": [row()], "progress": False, **given}
    with pytest.raises(error, match=says):
        gg.finetune(bert, given.pop("data"), "tuned", **given)
    assert not Path("tuned").exists()


# with the values of SQuAD's evaluation script
AGREEMENT = {
    ("The  Fox!", ("fox",)): (100, 100), ("a red fox", ("fox", "red dog")): (0, 100 * 2 / 3), ("", ()): (100, 100),
    ("fox", ()): (0, 0), ("", ("fox",)): (0, 0), ("fox fox", ("fox",)): (0, 100 * 2 / 3),
    ("hen", ("fox", "the hen")): (100, 100),
}  # fmt: skip


@pytest.mark.parametrize("case", AGREEMENT)
def test_agreement(case: tuple[str, tuple[str, ...]]) -> None:
    given, references = case
    found = agreement({"0": given}, [Question("0", "?", "?", tuple((text, 0) for text in references))])
    assert (found["exact_match"], found["f1"]) == pytest.approx(AGREEMENT[case])

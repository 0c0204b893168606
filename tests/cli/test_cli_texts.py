"""Texts from the shell: a table and a tokenizer in, a model that finds both its columns and its tokenizer again."""

from __future__ import annotations

import csv
import io
import json
import re
from pathlib import Path

import onnx
import pytest

from gradgraph.data.record.data_names import DataNames
from tests.kit import tiny_bert
from tests.kit.command_line import Cli

pytest.importorskip("tokenizers")
pytest.importorskip("pandas")


@pytest.fixture
def texts(folder: Path) -> Path:
    """Models, a tokenizer, and tables of texts in the folder of ``cli``."""
    tiny_bert.tokenizer(folder / "tokenizer.json")
    onnx.save(tiny_bert.classifier(), folder / "bert.onnx")
    onnx.save(tiny_bert.classifier(2, of_tokens=True), folder / "tagger.onnx")
    for name, seed in (("reviews", 0), ("others", 1)):
        said, labels = tiny_bert.sentences(96, seed)
        rows = zip(("stars", *labels), ("review", *said), strict=True)
        (folder / f"{name}.csv").write_text("\n".join(f'{label},"{text}"' for label, text in rows))
    said = [text.replace(",", "").split() for text in tiny_bert.sentences(96)[0]]
    tagged = [{"tokens": t, "ner_tags": ["B-X" if w in tiny_bert.THINGS else "O" for w in t]} for t in said]
    (folder / "tagged.jsonl").write_text("\n".join(map(json.dumps, tagged)))
    return folder


LOSS = ("--loss", "cross_entropy", "--lr", "5e-3", "--batch-size", "16")
READ = ("--data", "reviews.csv", "--tokenizer", "tokenizer.json")
TRAIN = ("train", "bert.onnx", *READ, "--target", "stars", *LOSS, "--metric", "accuracy", "--epochs", "3")


def rows_of(text: str) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(text)))


def test_the_tokenizer_goes_with_the_model(texts: Path, cli: Cli) -> None:
    assert cli(*TRAIN, "--validation", "others.csv", "--run", "run").code == 0
    names = DataNames.read_from(_metadata("run/trained.onnx"))
    assert (texts / "run" / "tokenizer.json").read_bytes() == (texts / "tokenizer.json").read_bytes()
    assert names.texts["input_ids"]["text"] == "review" and names.columns == {"target": ("stars",)}
    (texts / "tokenizer.json").unlink()
    said = [
        rows_of(cli("predict", model, "--data", "others.csv", "-o", "-").out)
        for model in ("run/trained.onnx", "run/step")
    ]
    assert said[0] == said[1] and set(said[0][0]) == {
        "logits[0]", "logits[1]", "class", "probability[bad]", "probability[good]",
    }  # fmt: skip
    labels = [row["stars"] for row in rows_of((texts / "others.csv").read_text())]
    assert sum(row["class"] == label for row, label in zip(said[0], labels, strict=True)) > 90
    evaluated = cli("evaluate", "run/step", "--data", "others.csv", "--worst", "2").out
    assert "accuracy" in evaluated and re.search("sample [0-9]+: .* text 'the .*', input_ids", evaluated)
    assert cli("export", "run/step", "-o", "away.onnx").code == 0
    assert (texts / "away.tokenizer.json").is_file()
    assert rows_of(cli("predict", "away.onnx", "--data", "others.csv", "-o", "-").out) == said[0]


def _metadata(path: str) -> dict[str, str]:
    return {entry.key: entry.value for entry in onnx.load(path, load_external_data=False).metadata_props}


def test_a_model_that_lost_its_tokenizer_says_so(texts: Path, cli: Cli) -> None:
    (texts / "a").mkdir()
    assert cli(*TRAIN, "--export", "a/b.onnx").code == 0
    kept = texts / "a" / "b.tokenizer.json"
    content = kept.read_bytes()
    kept.unlink()
    ran = cli("predict", "a/b.onnx", "--data", "others.csv", "-o", "-")
    assert (
        ran.code == 1
        and "no tokenizer is stored next to it; pass the tokenizer.json of its training: --tokenizer" in ran.err
    )
    kept.write_bytes(content.replace(b"[UNK]", b"[unk]"))
    ran = cli("predict", "a/b.onnx", "--data", "others.csv", "-o", "-")
    assert ran.code == 1 and "is not the tokenizer of its training" in ran.err
    ran = cli("predict", "a/b.onnx", "--data", "others.csv", "-o", "-", "--tokenizer", str(kept))
    assert ran.code == 1 and "the tokenizer differs from that of training" in ran.err
    assert cli("predict", "a/b.onnx", "--data", "others.csv", "-o", "-", "--tokenizer", "tokenizer.json").code == 0


def test_words_get_tags(texts: Path, cli: Cli) -> None:
    ran = cli("train", "tagger.onnx", "--data", "tagged.jsonl", "--tokenizer", "tokenizer.json", *LOSS,
              "--loss-option", "axis=-1", "--epochs", "12", "--run", "run")  # fmt: skip
    assert ran.code == 0, ran.err
    rows = rows_of(cli("predict", "run/trained.onnx", "--data", "tagged.jsonl", "-o", "-").out)
    there = [json.loads(line) for line in (texts / "tagged.jsonl").read_text().splitlines()]
    assert [row["words"].split() for row in rows] == [row["tokens"] for row in there]
    assert [row["tags"].split() for row in rows] == [row["ner_tags"] for row in there]
    found = json.loads(cli("evaluate", "run/step", "--data", "tagged.jsonl", "--json").out)
    assert found["entities"]["X"] == {"precision": 1.0, "recall": 1.0, "f1": 1.0, "support": 96}


def test_a_text_of_more_tokens_than_the_model_has_positions(texts: Path, cli: Cli) -> None:
    with (texts / "reviews.csv").open("a") as file:
        file.write("\ngood,the kind" + " kind" * 99)
    ran = cli(*TRAIN, "--run", "run")
    assert ran.code == 1 and "fails on the longest text, of 103 tokens" in ran.err and "--text length=64" in ran.err
    assert not (texts / "run").exists()
    assert cli(*TRAIN, "--text", "length=64", "--run", "run").code == 0


WRONG = [
    (("--data", "reviews.csv", "--target", "stars"), "texts require a tokenizer; add --tokenizer"),
    (("--data", "reviews.csv", "--text", "text=review"), "no tokenizer is given; add --tokenizer"),
    (("--data", "reviews.csv", "--tokenizer", "reviews.csv"), "is not a valid tokenizer"),
    (
        ("--data", "reviews.csv", "--tokenizer", "tokenizer.json", "--text", "txt=a"),
        "--text has no argument 'txt'; did you mean",
    ),
    ((*READ, "--text", "text=body"), "no column 'body'"),
    (READ, "no column with a usual name for labels"),
    (("--data", "train.npz", "--tokenizer", "tokenizer.json"), "'train.npz' is not a table of texts"),
]


@pytest.mark.parametrize(("words", "message"), WRONG)
def test_what_does_not_fit_is_said(words: tuple[str, ...], message: str, texts: Path, cli: Cli) -> None:
    ran = cli("train", "bert.onnx", "--loss", "cross_entropy", *words)
    assert ran.code in (1, 2) and message in ran.err

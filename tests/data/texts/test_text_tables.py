"""Tables of texts: each column becomes what a model takes, and what does not fit is said in one sentence."""

from __future__ import annotations

import importlib.util
import json
import logging
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import gradgraph as gg
from gradgraph.errors import DataError, UnmatchedError
from tests.kit import tiny_bert
from tests.kit.command_line import mlp

pytest.importorskip("tokenizers")

TEXTS, LABELS = tiny_bert.sentences(96)
FRAME = {"review": TEXTS, "stars": LABELS}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_bert.tokenizer(tmp_path_factory.mktemp("tokenizer") / "tokenizer.json")


@pytest.fixture(scope="module")
def left(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_bert.tokenizer(tmp_path_factory.mktemp("left") / "tokenizer.json", left=True)


@pytest.fixture(scope="module")
def steps() -> dict[str, gg.Step]:
    adamw, entropy = gg.optim.adamw(5e-3), gg.losses.cross_entropy
    return {
        "texts": gg.build(tiny_bert.classifier(), entropy(), adamw, metrics=["accuracy"]),
        "tokens": gg.build(tiny_bert.classifier(3, of_tokens=True), entropy(axis=-1), adamw),
        "choices": gg.build(tiny_bert.chooser(), entropy(), adamw),
        "numbers": gg.build(tiny_bert.classifier(1), gg.losses.mse(), adamw),
        "fixed": gg.build(tiny_bert.classifier(tokens=12), entropy(), adamw),
    }


def specs_of(step: gg.Step, targets: bool = True) -> dict[str, Any]:
    return {spec.name: spec for spec in (*step.manifest.inputs, *(step.manifest.targets if targets else ()))}


def loaded(data: gg.text.TextTable, step: gg.Step, rows: list[int], targets: bool = True) -> dict[str, np.ndarray]:
    specs = specs_of(step, targets)
    names = data.names_for(specs, gg.DataNames())
    return next(data.load(iter([rows]), specs, (0, 0), names))


def reference(path: Path, texts: list[Any], width: int, words: bool = False) -> list[np.ndarray]:
    """The package's own padding of one batch: ids, mask and types."""
    from tokenizers import Tokenizer

    own = Tokenizer.from_file(str(path))
    side = (own.padding or {}).get("direction", "right")
    own.enable_padding(direction=side, pad_id=0, length=width)
    made = own.encode_batch(texts, is_pretokenized=words)
    return [np.array([getattr(one, part) for one in made]) for part in ("ids", "attention_mask", "type_ids")]


@pytest.mark.parametrize("which", ["tokenizer", "left"])
@pytest.mark.parametrize("kind", ["text", "pair", "choices", "choices alone"])
def test_batches_are_those_of_the_package(
    which: str, kind: str, steps: dict[str, gg.Step], request: pytest.FixtureRequest
) -> None:
    path = request.getfixturevalue(which)
    frame = {"a": TEXTS[:10], "b": TEXTS[10:20], "c": TEXTS[20:30], "d": TEXTS[30:40], "label": [0, 1] * 5}
    rows = [7, 2, 5]
    given: dict[str, Any] = {
        "text": {"text": "a"},
        "pair": {"text": "a", "pair": "b"},
        "choices": {"text": "a", "choices": ["b", "c", "d"]},
        "choices alone": {"choices": ["b", "c", "d"]},
    }[kind]
    data = gg.text.table(frame, path, **given)
    batch = loaded(data, steps["choices" if "choices" in kind else "texts"], rows)
    texts: dict[str, list[Any]] = {
        "text": [frame["a"][i] for i in rows],
        "pair": [(frame["a"][i], frame["b"][i]) for i in rows],
        "choices": [(frame["a"][i], frame[c][i]) for i in rows for c in "bcd"],
        "choices alone": [frame[c][i] for i in rows for c in "bcd"],
    }
    expected = reference(path, texts[kind], batch["input_ids"].shape[-1])
    for name, array in zip(tiny_bert.NAMES, expected, strict=True):
        assert np.array_equal(batch[name].reshape(array.shape), array), name
    longest = int(batch["attention_mask"].sum(axis=-1).max())
    assert batch["input_ids"].shape[-1] == -(-longest // 8) * 8
    assert batch["target"].tolist() == [frame["label"][i] for i in rows]


@pytest.mark.parametrize("which", ["tokenizer", "left"])
def test_the_first_token_of_a_word_has_its_label(
    which: str, steps: dict[str, gg.Step], request: pytest.FixtureRequest
) -> None:
    words = [["the", "fox", "is", "wonderfully", "kind"], ["owl"], ["calm", "wonderfully"]]
    tags = [["O", "B-A", "O", "B-T", "I-T"], ["B-A"], ["B-T", "I-T"]]
    with pytest.raises(DataError, match="4 classes"):  # B-A, B-T, I-T and O, where the model has three
        loaded(gg.text.table({"w": words, "tags": tags}, request.getfixturevalue(which)), steps["tokens"], [0])
    tags[0][1] = tags[1][0] = "O"
    data = gg.text.table({"w": words, "tags": tags}, request.getfixturevalue(which))
    batch = loaded(data, steps["tokens"], [0, 2])
    names = data.names_for(specs_of(steps["tokens"]), gg.DataNames())
    assert names.classes == {"target": ("B-T", "I-T", "O")} and names.columns == {"target": ("tags",)}
    there = [row[mask == 1].tolist() for row, mask in zip(batch["target"], batch["attention_mask"], strict=True)]
    #          [CLS] the fox is wonder ##fully kind [SEP]         [CLS] calm wonder ##fully [SEP]
    assert there == [[-100, 2, 2, 2, 0, -100, 1, -100], [-100, 0, 1, -100, -100]]
    assert (batch["target"][batch["attention_mask"] == 0] == -100).all()
    of_classes = np.where(batch["target"] < 0, 1, batch["target"])
    assert data.tagged([0, 2], of_classes, specs_of(steps["tokens"], False), names) == [tags[0], tags[2]]


def test_what_is_cut_is_counted(tokenizer: Path, steps: dict[str, gg.Step], caplog: pytest.LogCaptureFixture) -> None:
    data = gg.text.table(FRAME, tokenizer, text="review", label="stars", length=6)
    with caplog.at_level(logging.WARNING):
        batch = loaded(data, steps["texts"], list(range(len(TEXTS))))
    lengths = [len(text.replace(",", " ,").split()) + 2 for text in TEXTS]
    long = sum(n > 6 for n in lengths)
    assert 0 < long < len(TEXTS)
    assert f"{long} of 96 texts of the table are longer than 6 tokens" in caplog.text
    assert batch["input_ids"].shape == (96, 6) and (batch["input_ids"][:, -1] == 3).sum() == sum(
        n >= 6 for n in lengths
    )


@pytest.mark.parametrize("strategy", ["longest_first", "only_first", "only_second"])
@pytest.mark.parametrize("direction", ["left", "right"])
@pytest.mark.parametrize("kind", ["text", "pair", "words"])
def test_texts_are_cut_as_the_tokenizer_says(
    kind: str, direction: str, strategy: str, left: Path, steps: dict[str, gg.Step], tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    from tokenizers import Tokenizer

    own = Tokenizer.from_file(str(left))
    own.enable_truncation(9, strategy="longest_first" if kind != "pair" else strategy, direction=direction)
    data = json.loads(own.to_str())
    if kind != "pair":  # of single texts it says nothing
        data["truncation"]["strategy"] = "".join(part.capitalize() for part in strategy.split("_"))
    (tmp_path / "tokenizer.json").write_text(json.dumps(data))
    frame = {"a": [" ".join(TEXTS[:3]), "the owl", "calm fox"], "b": ["the fox", " ".join(TEXTS[3:6]), "owl"]}
    if kind != "pair" or strategy != "longest_first":  # what may not be cut may not be too long
        frame["a" if strategy == "only_second" and kind == "pair" else "b"] = ["the fox", "the owl", "calm fox"]
    tags = [["O" if k % 3 else "B" for k in range(len(text.split()))] for text in frame["a"]]
    given: dict[str, Any] = {"text": {"text": "a"}, "pair": {"text": "a", "pair": "b"}, "words": {"words": "a"}}[kind]
    labels: list[Any] = tags if kind == "words" else [0, 1, 0]
    table = gg.text.table(frame | {"label": labels}, tmp_path / "tokenizer.json", **given)
    with caplog.at_level(logging.WARNING):
        batch = loaded(table, steps["tokens" if kind == "words" else "texts"], [0, 1, 2])
    texts: list[Any] = frame["a"] if kind == "text" else [*zip(frame["a"], frame["b"], strict=True)]
    texts = [text.split() for text in frame["a"]] if kind == "words" else texts
    made = own.encode_batch(texts, is_pretokenized=kind == "words")
    assert sum(bool(one.overflowing) for one in made) >= 1
    assert f"their {'beginnings' if direction == 'left' else 'ends'} are truncated" in caplog.text
    for row, one in enumerate(made):
        there = batch["attention_mask"][row] == 1
        ids = [i for i, real in zip(one.ids, one.attention_mask, strict=True) if real]
        assert batch["input_ids"][row][there].tolist() == ids
        if kind == "words":
            numbers = [n for n, real in zip(one.word_ids, one.attention_mask, strict=True) if real]
            first = [n is not None and n != before for n, before in zip(numbers, [None, *numbers], strict=False)]
            classes = {"B": 0, "O": 1}
            expected = [classes[tags[row][n]] if is_first else -100 for n, is_first in zip(numbers, first, strict=True)]
            assert batch["target"][row][there].tolist() == expected


def test_a_model_of_fixed_length_gets_it(tokenizer: Path, steps: dict[str, gg.Step]) -> None:
    batch = loaded(gg.text.table(FRAME, tokenizer, text="review", label="stars"), steps["fixed"], [0, 1])
    assert batch["input_ids"].shape == (2, 12)
    with pytest.raises(DataError, match="has 12; pass a smaller length"):
        loaded(gg.text.table(FRAME, tokenizer, text="review", label="stars", length=13), steps["fixed"], [0])


def test_texts_of_similar_lengths_come_together(tokenizer: Path, steps: dict[str, gg.Step]) -> None:
    texts, labels = tiny_bert.sentences(1000, seed=1)
    data = gg.text.table({"t": texts, "label": labels}, tokenizer)
    data.names_for(specs_of(steps["texts"]), gg.DataNames())
    lengths = np.array([len(text.replace(",", " ,").split()) + 2 for text in texts])
    orders = [data.order(3, epoch, 16) for epoch in (0, 1, 1)]
    assert all(sorted(order) == list(range(1000)) for order in orders)
    assert (orders[0] != orders[1]).any() and (orders[1] == orders[2]).all()

    def padding(order: np.ndarray) -> float:
        batches = [lengths[order[first : first + 16]] for first in range(0, 1000, 16)]
        return float(np.mean([batch.max() * len(batch) - batch.sum() for batch in batches]))

    assert padding(orders[0]) < 0.2 * padding(np.random.default_rng(0).permutation(1000))


LABELLED = [  # kind of step, labels, what they become, names of classes
    ("texts", ["yes", "no", "yes"], [1, 0, 1], ("no", "yes")),
    ("texts", [0, 1, 1], [0, 1, 1], None),
    ("texts", ["1", "0", "1"], [1, 0, 1], None),
    ("texts", [True, False, True], [1, 0, 1], ("False", "True")),
    ("texts", [1, 2, 2], [0, 1, 1], ("1", "2")),
    ("texts", ["10", "9", "10"], [1, 0, 1], ("9", "10")),
    ("numbers", ["0.5", "2", "-1e3"], [[0.5], [2.0], [-1000.0]], None),
    ("numbers", [1, 2, 3], [[1.0], [2.0], [3.0]], None),
]


@pytest.mark.parametrize(("kind", "labels", "numbers", "classes"), LABELLED)
def test_labels(
    kind: str, labels: list[Any], numbers: list[Any], classes: Any, tokenizer: Path, steps: dict[str, gg.Step]
) -> None:
    data = gg.text.table({"t": TEXTS[:3], "label": labels}, tokenizer)
    assert loaded(data, steps[kind], [0, 1, 2])["target"].tolist() == numbers
    names = data.names_for(specs_of(steps[kind]), gg.DataNames())
    assert names.classes == ({} if classes is None else {"target": classes})


def test_known_classes_keep_their_numbers(tokenizer: Path, steps: dict[str, gg.Step]) -> None:
    specs = specs_of(steps["texts"])
    names = gg.text.table(FRAME, tokenizer, text="review", label="stars").names_for(specs, gg.DataNames())
    some = gg.text.table({"review": TEXTS[:2], "stars": ["good", "good"]}, tokenizer)
    assert next(some.load(iter([[0, 1]]), specs, (), names))["target"].tolist() == [1, 1]
    other = gg.text.table({"review": TEXTS[:2], "stars": ["good", "great"]}, tokenizer)
    with pytest.raises(UnmatchedError, match="new class 'great'"):
        other.names_for(specs, names)
    with pytest.raises(UnmatchedError, match="has no column 'review'"):
        gg.text.table({"body": TEXTS[:2], "stars": LABELS[:2]}, tokenizer).names_for(specs, names)


def test_another_tokenizer_is_refused(tokenizer: Path, left: Path, steps: dict[str, gg.Step]) -> None:
    specs = specs_of(steps["texts"])
    names = gg.text.table(FRAME, tokenizer, text="review", label="stars").names_for(specs, gg.DataNames())
    with pytest.raises(UnmatchedError, match="the tokenizer differs from that of training"):
        gg.text.table(FRAME, left).names_for(specs, names)
    assert gg.DataNames.from_data(json.loads(json.dumps(names.as_data()))) == names


WRONG: list[tuple[dict[str, Any], dict[str, Any], str, str]] = [
    ({"a": ["x"], "b": ["y"], "label": [0]}, {}, "texts", r"several columns of texts \('a', 'b'\)"),
    ({"a": ["x"], "z": [0]}, {}, "texts", "the table has no column with a usual name for labels, only 'a', 'z'"),
    ({"a": [1.5], "label": [0]}, {}, "texts", "has no column of texts, only 'a', 'label'"),
    ({"a": ["x", None], "label": [0, 1]}, {"text": "a"}, "texts", "'a' of the table has 1 missing value in 2 rows"),
    ({"a": ["x", "y"], "label": [0, float("nan")]}, {}, "texts", "'label' of the table has 1 missing value"),
    ({"a": ["x", "y"], "label": ["yes", " "]}, {"text": "a"}, "texts", "'label' of the table has 1 missing value"),
    ({"a": ["x", 3], "label": [0, 1]}, {"text": "a"}, "texts", "'a' contains 3 instead of a text"),
    ({"a": ["x", "y"], "label": [0]}, {}, "texts", "differ in length"),
    ({"a": ["x"], "label": [0]}, {"text": "b"}, "texts", "has no column 'b'"),
    ({"a": [], "label": []}, {}, "texts", "is empty"),
    ({"a": ["x"], "label": ["much"]}, {}, "numbers", "1 value of 1 that are not finite numbers, such as 'much'"),
    ({"a": ["x"] * 3, "label": list("abc")}, {}, "texts", "3 classes"),
    (
        {"a": ["x"], "label": [0]},
        {"choices": ["a"]},
        "texts",
        "choices names 1 column, but 'input_ids' expects one text",
    ),
    (
        {"a": ["x"], "label": [0]},
        {"choices": ["a"]},
        "choices",
        "choices names 1 column, but 'input_ids' expects 3 choices",
    ),
    ({"a": ["x"], "label": [0]}, {}, "choices", "expects several choices"),
    ({"a": ["x"], "label": [0]}, {}, "tokens", "expects a label for each token"),
    ({"a": [["x"]], "tags": [["O"]]}, {}, "texts", "a list of labels for each text"),
    (
        {"a": [["x", "y"]], "tags": [["O"]]},
        {},
        "tokens",
        "the row at index 0 of the table has 2 words in 'a' and 1 label in",
    ),
    ({"a": [3], "tags": [["O"]]}, {"words": "a"}, "tokens", "'a' contains 3, but each of its values must be a list"),
]


@pytest.mark.parametrize(("frame", "given", "kind", "message"), WRONG)
def test_what_does_not_fit_is_said(
    frame: dict[str, Any], given: dict[str, Any], kind: str, message: str, tokenizer: Path, steps: dict[str, gg.Step]
) -> None:
    with pytest.raises(DataError, match=message):
        loaded(gg.text.table(frame, tokenizer, **given), steps[kind], [0])


@pytest.mark.parametrize("given", [{"words": "a", "text": "a"}, {"pair": "a"}, {"choices": ["a"], "pair": "a"}])
def test_arguments_that_exclude_each_other(given: dict[str, Any], tokenizer: Path) -> None:
    with pytest.raises(DataError, match="pass"):
        gg.text.table({"a": ["x"]}, tokenizer, **given)


def test_a_table_of_texts_is_for_models_of_texts(tokenizer: Path) -> None:
    step = gg.build(mlp(), "cross_entropy")
    with pytest.raises(DataError, match="a table of texts provides token ids"):
        gg.text.table(FRAME, tokenizer).names_for(specs_of(step), gg.DataNames())


CELLS = 'review,stars,note\n"Na",good,a\n"NULLS",bad,NA\n"",good,null\n"the ""kind"" fox, 007",bad,b\n'


@pytest.mark.parametrize("library", ["pandas", "polars"])
def test_cells_of_csv_are_texts(library: str, tmp_path: Path, tokenizer: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip(library)
    if library == "polars":
        monkeypatch.setitem(sys.modules, "pandas", None)
    (tmp_path / "t.csv").write_text(CELLS)
    columns = gg.text.table(tmp_path / "t.csv", tokenizer).columns
    assert columns.texts("review") == ["Na", "NULLS", "", 'the "kind" fox, 007']
    with pytest.raises(DataError, match=r"'note' of .* has 2 missing values, such as 'NA', in 4 rows; fill or drop"):
        columns.texts("note")  # as pandas and every other table has it
    assert gg.text.table({"note": ["NA", "b"]}, tokenizer).columns.texts("note") == ["NA", "b"]


def test_frames_of_every_kind_are_read(tmp_path: Path, tokenizer: Path, steps: dict[str, gg.Step]) -> None:
    pandas = pytest.importorskip("pandas")
    frame = pandas.DataFrame(FRAME)
    frames: list[Any] = [FRAME, frame, frame.astype("string")]
    frame.to_csv(tmp_path / "t.csv", index=False)
    frame.to_csv(tmp_path / "t.tsv", index=False, sep="\t")
    frame.to_json(tmp_path / "t.jsonl", orient="records", lines=True)
    frames += [tmp_path / f"t{suffix}" for suffix in (".csv", ".tsv", ".jsonl")]
    if importlib.util.find_spec("pyarrow") is not None:
        frame.to_parquet(tmp_path / "t.parquet")
        frames += [tmp_path / "t.parquet", importlib.import_module("pyarrow").table(FRAME)]
    batches = [loaded(gg.text.table(one, tokenizer, label="stars"), steps["texts"], [4, 9]) for one in frames]
    for batch in batches[1:]:
        assert all(np.array_equal(batch[name], batches[0][name]) for name in batch)


CONLL = "-DOCSTART- -X- O\n\n# id 1\nthe DT O\n#  NN B-A\n\n\nfox NN B-A\r\nis VB O\n"


def test_files_of_tagged_words(tmp_path: Path, tokenizer: Path) -> None:
    (tmp_path / "t.conll").write_bytes(CONLL.replace("# id 1", "# id 1 2 3").encode())
    columns = gg.text.table(tmp_path / "t.conll", tokenizer).columns
    assert columns.lists("words") == [["the", "#"], ["fox", "is"]] and columns.lists("tags") == [
        ["O", "B-A"],
        ["B-A", "O"],
    ]
    (tmp_path / "t.conll").write_text("20\u00a0000 B-N\nkm  O\n\na\u3000b\tO\n", "utf-8")
    columns = gg.text.table(tmp_path / "t.conll", tokenizer).columns
    assert columns.lists("words") == [["20\u00a0000", "km"], ["a\u3000b"]]
    assert columns.lists("tags") == [["B-N", "O"], ["O"]]
    for text, message in (
        ("a O\nb\n", "line 2 of .* has 1 fields, but the first word has 2"),
        ("\n", "contains no words"),
    ):
        (tmp_path / "t.conll").write_text(text)
        with pytest.raises(DataError, match=message):
            gg.text.table(tmp_path / "t.conll", tokenizer)


HOSTILE = [
    *(b"", b"{", b"\xff\xfe\x00", b"[]", b"[" * 100_000),
    b'{"model": {"type": "BPE", "vocab": {}, "merges": [["a", "b"]]}}',
    b'{"model": {"type": "WordLevel", "vocab": {"a": -1}, "unk_token": "a"}}',
]


@pytest.mark.parametrize("content", HOSTILE)
def test_a_tokenizer_of_a_stranger_is_one_sentence(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_bytes(content)
    with pytest.raises(DataError, match="is not a valid tokenizer") as caught:
        gg.text.Tokenizer(tmp_path / "tokenizer.json")
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 500


def test_a_pipe_is_no_tokenizer(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "tokenizer.json")
    with pytest.raises(DataError, match="it is not a regular file"):
        gg.text.Tokenizer(tmp_path / "tokenizer.json")
    with pytest.raises(DataError, match="cannot be read"):
        gg.text.Tokenizer(tmp_path / "none.json")


def test_a_run_that_goes_on_sees_the_same_texts(tmp_path: Path, tokenizer: Path, steps: dict[str, gg.Step]) -> None:
    def data() -> gg.text.TextTable:
        return gg.text.table(FRAME, tokenizer, text="review", label="stars")

    whole = gg.Trainer(steps["texts"], seed=3)
    whole.fit(data(), 2, 16, progress=False)
    first = gg.Trainer(steps["texts"], seed=3)
    first.fit(data(), 2, 16, progress=False, max_steps=8)  # in the middle of the second epoch
    first.save(tmp_path / "run.ckpt")
    second = gg.Trainer.resume(steps["texts"], tmp_path / "run.ckpt")
    second.fit(data(), 2, 16, progress=False)
    states = whole.state_dict(), second.state_dict()
    assert second.progress.steps == whole.progress.steps == 12
    assert all(np.array_equal(states[0][name], states[1][name]) for name in states[0])


def test_padding_changes_no_prediction(tokenizer: Path, steps: dict[str, gg.Step]) -> None:
    data = gg.text.table(FRAME, tokenizer, text="review", label="stars")
    trainer = gg.Trainer(steps["texts"])
    trainer.names = data.names_for(specs_of(steps["texts"]), gg.DataNames())
    together, alone = trainer.predict(data, batch_size=32), trainer.predict(data, batch_size=1)
    assert np.abs(together - alone).max() < 1e-5 and len(together) == 96


def test_a_model_without_a_mask_is_told_of_padding(tokenizer: Path, caplog: pytest.LogCaptureFixture) -> None:
    from gradgraph.frontend import Input, export, nn

    class Bag(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words, self.head = nn.Embedding(64, 4), nn.Linear(4, 2)

        def forward(self, ids: Any) -> Any:
            return self.head(self.words(ids).mean(dim=1))

    step = gg.build(export(Bag(), {"ids": Input(("rows", "tokens"), "int64")}, outputs=["logits"]), "cross_entropy")
    data = gg.text.table(FRAME, tokenizer, text="review", label="stars")
    with caplog.at_level(logging.WARNING):
        loaded(data, step, [0])
        loaded(data, step, [1])
    assert caplog.text.count("so it treats padding as text") == 1

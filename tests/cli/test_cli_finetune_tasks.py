"""Classifiers of texts and of tokens are fine-tuned from a folder of optimum, with the losses of PyTorch."""

from __future__ import annotations

import csv
import json
import math
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest

import gradgraph as gg
from gradgraph import frontend
from gradgraph.chat.chat_recipe import LABELLED
from gradgraph.errors import ArgumentError, DataError, OutputError, UnmatchedError
from gradgraph.frontend import nn

pytest.importorskip("tokenizers", reason="the extra [llm] is not installed")

from tests.chat import small_folder
from tests.kit.command_line import Cli

WIDTH, LABELS = 8, ("bad", "good", "mixed")
ROWS = [("kind" if i % 3 else "rude", f"a {'kind' * (i % 3 > 0)} or {'rude' * (i % 3 < 2)} fox {i}", LABELS[i % 3])
        for i in range(24)]  # fmt: skip
CONFIG = {"id2label": dict(enumerate(LABELS)), "model_type": "bert", "vocab_size": 98, "max_position_embeddings": 64}


class Classifier(nn.Module):
    def __init__(self, of_tokens: bool, outputs: int = len(LABELS)) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(98, WIDTH), nn.Linear(WIDTH, outputs)
        self.of_tokens = of_tokens

    def forward(self, input_ids: Any, attention_mask: Any) -> Any:
        x, seen = self.words(input_ids), attention_mask.to("float32").unsqueeze(-1)
        if self.of_tokens:
            return self.head(x * seen)
        return self.head((x * seen).sum(1) / seen.sum(1))


def written(folder: Path, task: str, outputs: int = len(LABELS)) -> Path:
    """A folder as optimum writes it."""
    frontend.manual_seed(0)
    of_tokens = task.startswith("token")
    inputs = {n: frontend.Input(("rows", "tokens"), "int64") for n in ("input_ids", "attention_mask")}
    folder.mkdir()
    onnx.save(frontend.export(Classifier(of_tokens, outputs), inputs, outputs=["logits"]), folder / "model.onnx")
    small_folder.tokenizer().save(str(folder / "tokenizer.json"))
    kind = "BertForTokenClassification" if of_tokens else "BertForSequenceClassification"
    (folder / "config.json").write_text(json.dumps(CONFIG | {"architectures": [kind]}))
    return folder


@pytest.fixture
def texts(folder: Path) -> Path:
    """``bert/`` and ``reviews.csv`` in the folder of ``cli``."""
    lines = [f"{text},{label}" for _, text, label in ROWS]
    (folder / "reviews.csv").write_text("\n".join(["review,opinion", *lines]) + "\n")
    return written(folder / "bert", "text-classification")


NAMED = ("--column", "text=review", "--column", "label=opinion")


def of_torch(model: Path, epochs: int, rate: float) -> list[float]:
    """Losses of AdamW with warm-up, cosine decay and clipping, on all rows at once."""
    torch = pytest.importorskip("torch", reason="in no extra; the losses are compared with PyTorch's")
    stored = {t.name: torch.nn.Parameter(torch.tensor(onnx.numpy_helper.to_array(t).copy()))
              for t in onnx.load(model).graph.initializer if t.name.startswith(("words", "head"))}  # fmt: skip
    words, weight, bias = (next(w for n, w in stored.items() if n.startswith(p))
                           for p in ("words", "head.weight", "head.bias"))  # fmt: skip
    ids = [[small_folder.WORDS[letter] for letter in text] for _, text, _ in ROWS]
    target = torch.tensor([LABELS.index(label) for *_, label in ROWS])
    rising = min(round(0.03 * epochs), epochs - 1)
    optimizer, losses = torch.optim.AdamW([words, weight, bias], weight_decay=0.0), []
    for step in range(epochs):
        at = step - rising
        share = step / rising if at < 0 else 0.5 * (1 + math.cos(math.pi * at / (epochs - rising)))
        optimizer.param_groups[0]["lr"] = rate * share
        pooled = torch.stack([words[torch.tensor(row)].mean(0) for row in ids])
        loss = torch.nn.functional.cross_entropy(pooled @ weight.T + bias, target)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_([words, weight, bias], 1.0)
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


def test_a_classifier_of_texts_has_the_losses_of_torch(texts: Path, cli: Cli) -> None:
    ran = cli("finetune", "bert", "--task", "text-classification", "--data", "reviews.csv", *NAMED, "--epochs", "30",
              "--lr", "0.2", "--batch-size", "24", "--validation", "reviews.csv", "-o", "tuned")  # fmt: skip
    assert ran.code == 0, ran.err
    assert "val_accuracy: 1" in ran.err
    names = {path.name for path in Path("tuned").iterdir()}
    assert {"model.onnx", "tokenizer.json", "config.json", "training"} <= names
    rows = [line.split(",") for line in Path("tuned/training/history.csv").read_text().splitlines()]
    losses = [float(row[rows[0].index("loss")]) for row in rows[1:]]
    np.testing.assert_allclose(losses, of_torch(Path("bert/model.onnx"), 30, 0.2), rtol=1e-4)
    assert cli("predict", "tuned/model.onnx", "--data", "reviews.csv", "-o", "said.csv").code == 0
    said = csv.DictReader(Path("said.csv").read_text().splitlines())
    assert [row["class"] for row in said] == [label for *_, label in ROWS]
    session = ort.InferenceSession("tuned/model.onnx", providers=["CPUExecutionProvider"])
    assert {v.name for v in session.get_inputs()} == {"input_ids", "attention_mask"}


def test_a_run_that_stopped_goes_on(texts: Path) -> None:
    options: dict[str, Any] = {"task": "text-classification", "columns": {"text": "review", "label": "opinion"},
                               "epochs": 4, "batch_size": 8, "learning_rate": 0.05, "progress": False}  # fmt: skip
    whole = gg.finetune("bert", "reviews.csv", "whole", **options)
    gg.finetune("bert", "reviews.csv", "half", **options, max_steps=5)
    again = gg.finetune("bert", "reviews.csv", "half", **options, resume=True)
    assert again.figures["steps"] == whole.figures["steps"] == 12
    assert Path("half/model.onnx").read_bytes() == Path("whole/model.onnx").read_bytes()
    with pytest.raises(OutputError, match="is not an empty folder"):
        gg.finetune("bert", "reviews.csv", "half", **options)


def test_a_classifier_of_tokens_learns(folder: Path) -> None:
    written(folder / "tagger", "token-classification")
    rows = [{"words": text.split(), "tags": [LABELS[len(word) % 3] for word in text.split()]} for _, text, _ in ROWS]
    (folder / "tags.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = gg.finetune(folder / "tagger", folder / "tags.jsonl", folder / "tuned", task="token-classification",
                        learning_rate=0.05, epochs=6, progress=False)  # fmt: skip
    assert found.history["loss"][-1] < 0.8 * found.history["loss"][0]


def test_the_class_names_of_the_data_become_those_of_the_folder(texts: Path) -> None:
    config = json.loads((texts / "config.json").read_text())
    (texts / "config.json").write_text(json.dumps(config | {"id2label": {str(i): f"LABEL_{i}" for i in range(3)}}))
    gg.finetune("bert", "reviews.csv", "tuned", task="text-classification", epochs=1, progress=False,
                columns={"text": "review", "label": "opinion"})  # fmt: skip
    found = json.loads(Path("tuned/config.json").read_text())
    assert found.pop("label2id") == {label: i for i, label in enumerate(LABELS)}
    assert found == config | {"id2label": {str(i): label for i, label in enumerate(LABELS)}}


MANY = [[1, 1, 0], [0, 0, 0], [0.0, True, "1"]]  # labels of texts, by class


def test_several_labels_of_a_text_are_trained_by_binary_cross_entropy(texts: Path) -> None:
    config = json.loads((texts / "config.json").read_text()) | {"problem_type": "multi_label_classification"}
    (texts / "config.json").write_text(json.dumps(config))
    rows = [{"text": text, "label": labels} for (_, text, _), labels in zip(ROWS, MANY * 8, strict=True)]
    Path("many.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = gg.finetune("bert", "many.jsonl", "tuned", task="text-classification", epochs=1, batch_size=24,
                        progress=False)  # fmt: skip
    session = ort.InferenceSession("bert/model.onnx", providers=["CPUExecutionProvider"])
    scores = []
    for row in rows:
        ids = np.array([[small_folder.WORDS[letter] for letter in row["text"]]])
        scores.append(session.run(None, {"input_ids": ids, "attention_mask": np.ones_like(ids)})[0][0])
    x, y = np.array(scores, np.float64), np.array(MANY * 8, np.float64)
    wanted = np.mean(np.log1p(np.exp(-np.abs(x))) + np.maximum(x, 0) - x * y)
    np.testing.assert_allclose(found.history["loss"][0], wanted, rtol=1e-5)
    options: dict[str, Any] = {"task": "text-classification", "epochs": 1, "batch_size": 24, "progress": False}
    named = [{"text": row["text"], "label": [n for n, one in zip(LABELS, row["label"], strict=True) if int(one)]}
             for row in rows]  # fmt: skip
    Path("named.jsonl").write_text("".join(json.dumps(row) + "\n" for row in named))
    assert gg.finetune("bert", "named.jsonl", "named", **options).history["loss"] == found.history["loss"]
    for odd, says in (([1, 0], r"has \[1, 0\] for a text, .* use lists of 3 numbers"), ("good", "not finite numbers"),
                      (["good", "new"], "has the new class 'new'; the model has 'bad', 'good', 'mixed'"),
                      (["good", 1], "use lists of 3 numbers")):  # fmt: skip
        Path("odd.jsonl").write_text(json.dumps({"text": "a", "label": odd}) + "\n")
        with pytest.raises((DataError, UnmatchedError), match=says):
            gg.finetune("bert", "odd.jsonl", "odd", task="text-classification", progress=False)
        assert not Path("odd").exists()
    (texts / "config.json").write_text(json.dumps({**config, "id2label": {str(i): f"LABEL_{i}" for i in range(3)}}))
    with pytest.raises(DataError, match=r"has lists of names, but .* its 3 classes have no names"):
        gg.finetune("bert", "named.jsonl", "odd", task="text-classification", progress=False)


OTHERS = {"feature-extraction": {"last_hidden_state": 3}, "fill-mask": {"logits": 3}}


@pytest.mark.parametrize("made_for", OTHERS)
@pytest.mark.parametrize("task", ["text-generation", "text2text-generation", *LABELLED])
def test_a_model_for_a_task_that_is_not_supported_is_refused(made_for: str, task: str, texts: Path) -> None:
    """By what it computes: the architecture in the configuration may be that of the weights it began with."""
    model = onnx.load(texts / "model.onnx")
    values = [onnx.helper.make_tensor_value_info(name, 1, ["rows", "tokens", 98][:rank])
              for name, rank in OTHERS[made_for].items()]  # fmt: skip
    model.graph.node.extend(
        onnx.helper.make_node("Identity", ["logits"], [v.name]) for v in values if v.name != "logits"
    )
    del model.graph.output[:]
    model.graph.output.extend(values)
    onnx.save(model, texts / "model.onnx")
    config = json.loads((texts / "config.json").read_text())
    (texts / "config.json").write_text(json.dumps(config | {"architectures": ["BertForMaskedLM"]}))
    supported = ("text-generation, text2text-generation, automatic-speech-recognition, text-classification, "
                 "token-classification, question-answering")  # fmt: skip
    with pytest.raises(DataError, match=f"was exported for {made_for}, not for {task}; export it .*: {supported}"):
        gg.finetune("bert", "reviews.csv", "tuned", task=task, progress=False)


REFUSED: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "an option of adapters": ({"rank": 4, "memory": "4GB"}, ArgumentError, "does not use 'rank', 'memory'; omit them"),
    "patience without validation": ({"patience": 2}, ArgumentError, "evaluates validation data, and none are given"),
    "a chat template": ({"template": "none"}, ArgumentError, "does not use 'template'"),
    "rows in memory": ({"data": [{"text": "a", "label": 1}]}, ArgumentError, "reads files, but data is a list"),
    "another column": ({"columns": {"prompt": "review"}}, ArgumentError, "has no column 'prompt'"),
    "another task": ({"task": "token-classification"}, DataError, "was exported for text-classification, not for "
                     "token-classification; pass the task text-classification, or export the model for token-"),
    "the default task": ({"task": "text-generation"}, DataError, "not for text-generation; pass the task text-cl"),
    "more tokens than positions": ({"length": 65}, DataError, "length is 65, but the model has 64 positions; lower"),
    "a class in the validation data alone": ({"validation": "others.csv", "columns": {"text": "review", "label":
                                              "opinion"}}, DataError, "has the new class 'worse'"),
    "columns of unusual names": ({}, DataError, "say which: columns={'label': 'opinion'}"),
    "no tokenizer": ({}, DataError, "has no tokenizer.json"),
}  # fmt: skip


@pytest.mark.parametrize("what", REFUSED)
def test_what_a_task_does_not_take(what: str, texts: Path, cli: Cli) -> None:
    given, error, says = REFUSED[what]
    if what == "no tokenizer":
        (texts / "tokenizer.json").unlink()
    Path("others.csv").write_text("review,opinion\na fox,worse\n")
    given = {"data": "reviews.csv", "task": "text-classification", **given}
    with pytest.raises(error, match=says):
        gg.finetune("bert", given.pop("data"), "tuned", **given)
    assert not Path("tuned").exists()
    ran = cli("finetune", "bert", "--task", "text-classification", "--data", "reviews.csv", "--show", "1")
    assert ran.code == 2 and "--show prints chat data" in ran.err
    ran = cli("finetune", "bert", "--task", "text-classification", "--data", "reviews.csv", "-o", "tuned")
    assert what == "no tokenizer" or "--column label=opinion" in ran.err
    assert not Path("tuned").exists()
    shutil.rmtree(texts)


@pytest.mark.parametrize("with_another", [True, False])
@pytest.mark.parametrize("classes", [LABELS, ("p", "q", "r")], ids=["of the model", "new"])
def test_the_column_of_labels_is_the_chosen_one(classes: tuple[str, ...], with_another: bool, texts: Path) -> None:
    """Whatever its classes are called, and whether another column has the usual name."""
    other = {"label": LABELS[0]} if with_another else {}
    rows = [{"text": text, **other, "stars": classes[LABELS.index(label)]} for _, text, label in ROWS]
    Path("stars.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = gg.finetune("bert", "stars.jsonl", "tuned", task="text-classification", batch_size=24, epochs=1,
                        columns={"text": "text", "label": "stars"}, progress=False)  # fmt: skip
    np.testing.assert_allclose(found.history["loss"], of_torch(texts / "model.onnx", 1, 1e-3), rtol=1e-5)
    assert [*json.loads(Path("tuned/config.json").read_text())["id2label"].values()] == [*classes]


WRONG = {  # problem type, labels, and what the error says
    "a class index among labels by class": ("multi_label_classification", [0, 1, 2], r"contains 2\.0 .* from 0 to 1"),
    "a negative label": ("multi_label_classification", [0, -1, 0], r"contains -1\.0 .* from 0 to 1"),
    "an infinite label by class": ("multi_label_classification", [0, "inf", 0], "use lists of 3 numbers"),
    "an infinite number": ("regression", [0.5, "inf", 2], "use lists of 3 numbers"),
    "NaN as text": ("regression", [0.5, "nan", 2], "use lists of 3 numbers"),
    "a fraction of a class": (None, 0.5, r"contains 0\.5, which is not a class"),
    "a list of one label": (None, ["good"], "has a list of labels for each text, but the model expects one"),
}


@pytest.mark.parametrize("what", WRONG)
def test_labels_that_make_no_sense_are_refused(what: str, texts: Path) -> None:
    problem, label, says = WRONG[what]
    config = json.loads((texts / "config.json").read_text()) | ({"problem_type": problem} if problem else {})
    (texts / "config.json").write_text(json.dumps(config | {"id2label": {}}))
    good = 1 if problem is None else [0, 1, 1]
    rows = [{"text": f"a {i}", "label": label if i == 1 or isinstance(label, list) else good} for i in range(4)]
    Path("odd.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(DataError, match=says):
        gg.finetune("bert", "odd.jsonl", "odd", task="text-classification", progress=False)
    assert not Path("odd").exists()


@pytest.mark.parametrize("problem", [None, "regression"])
def test_a_model_of_one_output_learns_numbers(problem: str | None, folder: Path) -> None:
    """As in transformers, by mean squared error, whether or not the configuration says so."""
    written(folder / "bert", "text-classification", outputs=1)
    config = CONFIG | {"id2label": {"0": "LABEL_0"}, "problem_type": problem}
    (folder / "bert" / "config.json").write_text(json.dumps(config))
    rows = [{"text": text, "label": i / 2 - 3} for i, (_, text, _) in enumerate(ROWS)]
    Path("stars.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = gg.finetune("bert", "stars.jsonl", "tuned", task="text-classification", batch_size=24, epochs=1,
                        progress=False)  # fmt: skip
    session = ort.InferenceSession("bert/model.onnx", providers=["CPUExecutionProvider"])
    ids = [np.array([[small_folder.WORDS[letter] for letter in row["text"]]]) for row in rows]
    said = [session.run(None, {"input_ids": i, "attention_mask": np.ones_like(i)})[0].item() for i in ids]
    wanted = np.mean([(score - row["label"]) ** 2 for score, row in zip(said, rows, strict=True)])
    np.testing.assert_allclose(found.history["loss"][0], wanted, rtol=1e-5)

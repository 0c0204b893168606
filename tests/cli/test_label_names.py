"""Names of classes in the config.json of Hugging Face beside a model, where the model has none of its own."""

from __future__ import annotations

import csv
import json
import logging
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

import gradgraph as gg
from gradgraph.data.record.label_names import names_beside
from gradgraph.frontend import export, nn
from tests.kit.command_line import Cli


def ok(cli: Cli, *words: str) -> str:
    ran = cli(*words)
    assert ran.code == 0, ran.err
    return ran.out


X = np.random.default_rng(0).normal(size=(40, 4)).astype(np.float32)
Y = X[:, :3].argmax(1)
NAMES = ["cat", "dog", "hen"]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    onnx.save(export(nn.Linear(4, 3), {"x": ("batch", 4)}), "model.onnx")
    np.savez("data.npz", x=X, target=Y)
    return tmp_path


def config(labels: Any, folder: str = ".") -> None:
    Path(folder, "config.json").write_text(json.dumps({"model_type": "bert", "id2label": labels}))


def named(names: list[str]) -> dict[str, str]:
    return {str(i): name for i, name in enumerate(names)}


def test_a_model_is_predicted_by_them(folder: Path, cli: Cli) -> None:
    config(named(NAMES))
    ok(cli, "predict", "model.onnx", "--data", "data.npz", "-o", "p.csv")
    rows = list(csv.DictReader(Path("p.csv").read_text().splitlines()))
    assert {row["class"] for row in rows} <= {*NAMES}
    Path("onnx").mkdir()
    Path("model.onnx").rename("onnx/model.onnx")
    ok(cli, "predict", "onnx/model.onnx", "--data", "data.npz", "-o", "q.csv")
    assert Path("q.csv").read_text() == Path("p.csv").read_text()


def test_a_step_and_what_it_exports_have_them(folder: Path, cli: Cli) -> None:
    config(named(NAMES))
    words = ["--data", "data.npz", "--epochs", "1", "--metric", "f1"]
    ok(cli, "train", "model.onnx", *words, "-o", "step", "--checkpoint", "run.ckpt", "--export", "trained.onnx")
    assert "hen" in ok(cli, "evaluate", "step", "--checkpoint", "run.ckpt", "--data", "data.npz", "--per-class")
    Path("config.json").unlink()
    ok(cli, "predict", "trained.onnx", "--data", "data.npz", "-o", "p.csv")
    assert "probability[hen]" in Path("p.csv").read_text()


def test_names_of_its_own_come_first(folder: Path, cli: Cli) -> None:
    trainer = gg.Trainer(gg.build("model.onnx"), device="cpu")
    trainer.names = gg.DataNames(classes={"target": ["a", "b", "c"]})
    trainer.export("own.onnx")
    config(named(NAMES))
    ok(cli, "predict", "own.onnx", "--data", "data.npz", "-o", "p.csv")
    assert "probability[b]" in Path("p.csv").read_text()
    assert gg.build("own.onnx").manifest.data.classes == {"target": ("a", "b", "c")}


def test_those_of_another_head_are_left_out(folder: Path) -> None:
    config(named([*NAMES, "owl"]))
    assert not gg.build("model.onnx").manifest.data.classes


@pytest.mark.parametrize(
    ("labels", "is_told"),
    [
        (named(["LABEL_0", "LABEL_1", "LABEL_2"]), False),  # nobody has named them
        ({"0": "LABEL_0"}, False),
        ({"0": "cat", "2": "hen"}, True),
        (named(["cat", "cat", "hen"]), True),
        ({"0": "cat", "1": 3, "2": None}, True),
        (["cat", "dog", "hen"], True),
        ("cat", True),
        (3, True),
    ],
)
def test_what_names_no_class(folder: Path, caplog: pytest.LogCaptureFixture, labels: Any, is_told: bool) -> None:
    config(labels)
    with caplog.at_level(logging.WARNING, "gradgraph"):
        assert not names_beside("model.onnx")
    assert ("to distinct names" in caplog.text) == is_told


@pytest.mark.parametrize("content", ["", "{", "[]", "null", "\x00", '{"id2label": null}'])
def test_a_file_of_another_program(folder: Path, content: str) -> None:
    Path("config.json").write_text(content)
    assert not names_beside("model.onnx") and not names_beside(b"model")

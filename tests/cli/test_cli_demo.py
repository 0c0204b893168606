"""The demo, shortened: everything it promises is written, and the commands it prints can be typed again."""

from __future__ import annotations

import importlib.util
import re
import shlex
from pathlib import Path

import onnx
import pytest

from gradgraph.cli import digits
from tests.kit.command_line import Cli

pytest.importorskip("sklearn", reason="the demo requires scikit-learn")
pytest.importorskip("matplotlib", reason="the demo requires matplotlib")

PICTURES = {"loss.png", "predictions.png"}
FILES = {
    "digits.onnx",
    "train.npz",
    "validation.npz",
    "step",
    "run.ckpt",
    "run.previous.ckpt",
    "trained.onnx",
    *PICTURES,
}


@pytest.mark.sweep(0)
def test_the_printed_commands_repeat_the_demo(cli: Cli, folder: Path) -> None:
    ran = cli("demo", "--out", "my digits", "--epochs", "2")
    assert ran.code == 0, ran.err
    assert {p.name for p in (folder / "my digits").iterdir()} == FILES
    assert all((folder / "my digits" / f).read_bytes().startswith(b"\x89PNG") for f in PICTURES)
    accuracies = re.findall(r"held-out accuracy in \w+ +([\d.]+)%", ran.out)
    assert len(accuracies) == 2
    assert accuracies[0] == accuracies[1]
    assert float(accuracies[0]) > 80
    trained = folder / "my digits" / "trained.onnx"
    first = onnx.load(trained)
    trained.unlink()
    typed = [shlex.split(line[2:]) for line in ran.err.splitlines() if line.startswith("$ ")]
    assert [words[:2] for words in typed] == [["gradgraph", "build"], ["gradgraph", "train"], ["gradgraph", "export"]]
    for words in typed:
        assert cli(*words[1:]).code == 0
    assert onnx.load(trained) == first


def test_missing_packages_are_named(cli: Cli, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "sklearn" else find(name))
    before = set(folder.iterdir())
    ran = cli("demo")
    assert ran.code == 1
    assert ran.err == "error: the demo requires scikit-learn; pip install scikit-learn\n"
    assert set(folder.iterdir()) == before


def test_a_file_in_the_way(cli: Cli) -> None:
    ran = cli("demo", "--out", "model.onnx")
    assert ran.code == 1
    assert "choose another --out" in ran.err


@pytest.mark.sweep(0)
def test_a_low_accuracy_is_a_failure(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gradgraph.cli.demo.EPOCHS", 1)
    monkeypatch.setattr("gradgraph.cli.demo.ACCURACY", 1.1)
    few = [{name: array[:64] for name, array in part.items()} for part in digits.split()]
    monkeypatch.setattr(digits, "split", lambda: few)
    ran = cli("demo", "--epochs", "1", "--quiet")
    assert ran.code == 1
    assert "below the required" in ran.err

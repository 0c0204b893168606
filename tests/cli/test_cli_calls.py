"""Losses, optimizers and schedules are typed as calls, as in Python, and an argument stands in one place."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import onnx
import pytest

from gradgraph.cli.app import run
from tests.kit.command_line import mlp


@pytest.fixture
def model(tmp_path: Path) -> str:
    onnx.save(mlp(), tmp_path / "m.onnx")
    return str(tmp_path / "m.onnx")


def manifest(model: str, *options: str) -> Any:
    step = Path(model).parent / "step"
    assert run(["build", model, *options, "-o", str(step), "--force"]) == 0
    return {k: v for k, v in json.loads((step / "manifest.json").read_text()).items() if k != "digests"}


@pytest.mark.sweep(0.6)
@pytest.mark.parametrize(
    ("call", "apart"),
    [
        (["--loss", "focal(gamma=3)"], ["--loss", "focal", "--loss-option", "gamma=3"]),
        (["--loss", "focal(3)"], ["--loss", "focal", "--loss-option", "gamma=3"]),
        (["--loss", "logits=focal(gamma=3):0.5"],
         ["--loss", "logits=focal:0.5", "--loss-option", "logits.gamma=3"]),
        (["--loss", "logits=focal(gamma=3):0.5", "--loss", "logits=cross_entropy(label_smoothing=0.1)"],
         ["--loss", "logits=focal:0.5", "--loss", "logits=cross_entropy", "--loss-option", "logits.gamma=3",
          "--loss-option", "logits.label_smoothing=0.1"]),
        (["--optimizer", "sgd(0.1, momentum=0.9)"],
         ["--optimizer", "sgd", "--lr", "0.1", "--optimizer-option", "momentum=0.9"]),
        (["--optimizer", "sgd(0.1)", "--schedule", "cosine(total_steps=9)"],
         ["--optimizer", "sgd", "--schedule", "cosine(0.1, 9)"]),
        (["--optimizer", "adamw()"], []),
    ],
)  # fmt: skip
def test_a_call_is_its_options(model: str, call: list[str], apart: list[str]) -> None:
    assert manifest(model, *call) == manifest(model, *apart)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--loss", "focal(gamma=3)", "--loss-option", "gamma=2"], "the loss focal is given 'gamma' twice"),
        (["--loss", "focal(gama=3)"], "the loss focal has no argument 'gama'; did you mean 'gamma'?"),
        (["--loss", "fical(gamma=3)"], "there is no loss 'fical'; did you mean 'focal'?"),
        (["--loss", "focal(gamma=3"], "'focal(gamma=3' is not a valid loss; write a name, or a call such as 'mse()'"),
        (["--loss", "logits=focal(gamma=3)x"], "is not a valid loss; write a name, or a call"),
        (["--loss", "logits=focal(gamma=3):x"], "the weight in 'logits=focal(gamma=3):x' is not a number"),
        (["--optimizer", "sgd(0.1)", "--lr", "0.2"], "the optimizer sgd is given 'lr' twice"),
        (["--lr", "0.1", "--optimizer-option", "lr=0.2"], "the optimizer adamw is given 'lr' twice"),
        (["--optimizer", "sgd(momentun=1)"], "did you mean 'momentum'?"),
        (["--optimizer", "sdg", "--schedule", "cosine(1, 2)"], "there is no optimizer 'sdg'; did you mean 'sgd'?"),
    ],
)  # fmt: skip
def test_refused(model: str, options: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["build", model, *options, "-o", str(Path(model).parent / "step")]) == 1
    assert says in " ".join(capsys.readouterr().err.split())

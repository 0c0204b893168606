"""--schedule: schedules are typed as in Python."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest

from tests.kit.command_line import Cli


def described(cli: Cli, *words: str) -> object:
    ran = cli("build", "model.onnx", "--json", "--optimizer", "sgd", *words)
    assert ran.code == 0, ran.err
    return json.loads(ran.out)["manifest"]["optimizer"]["arguments"]["lr"]


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--schedule", "cosine(0.1, 10 * 100)"], {"schedule": "cosine", "lr": 0.1, "total_steps": 1000, "end": 0.0}),
        (["--schedule", "cosine(total_steps=9)", "--lr", "0.2"],
         {"schedule": "cosine", "lr": 0.2, "total_steps": 9, "end": 0.0}),
        (["--schedule", "multi_step(milestones=[3, 6])"],
         {"schedule": "multi_step", "lr": 0.001, "milestones": [3, 6], "gamma": 0.1}),
        (["--schedule", "warmup(5, exponential(0.1, gamma=0.9))"],
         {"schedule": "warmup", "steps": 5, "start": 0.0,
          "then": {"schedule": "exponential", "lr": 0.1, "gamma": 0.9}}),
        (["--schedule", "sequential([constant(0.1), linear(0.2, 5)], milestones=[3])"],
         {"schedule": "sequential", "milestones": [3], "schedules": [
             {"schedule": "constant", "lr": 0.1},
             {"schedule": "linear", "lr": 0.2, "total_steps": 5, "end": 0.0}]}),
        (["--schedule", "function('rates.py:fall', 20)"],
         {"schedule": "function", "rate": "fall", "total_steps": 20}),
    ],
)  # fmt: skip
def test_a_schedule_is_typed_as_in_python(cli: Cli, folder: Path, words: list[str], expected: object) -> None:
    (folder / "rates.py").write_text("def fall(step):\n    return 0.1 / (1 + step)\n")
    assert described(cli, *words) == expected


def trained(cli: Cli, *words: str) -> dict[str, object]:
    ran = cli("train", "model.onnx", "--data", "train.npz", "--json", *words)
    assert ran.code == 0, ran.err
    return json.loads(ran.out)


def test_train_knows_how_many_steps_there_are(cli: Cli, folder: Path) -> None:
    words = ["--batch-size", "20", "--epochs", "3", "--schedule", "warmup(2, cosine)", "-o", "step"]
    trained(cli, *words)
    rate = json.loads((folder / "step" / "manifest.json").read_text())["optimizer"]["arguments"]["lr"]
    assert rate["then"]["total_steps"] == 3 * 5 - 2 and rate["then"]["lr"] == 0.001


def test_train_reduces_the_rate_on_a_plateau(cli: Cli, folder: Path) -> None:
    rate = "reduce_on_plateau(patience=0, threshold=0.9, factor=0.5)"
    trained(cli, "--epochs", "4", "--lr", "0.1", "--schedule", rate, "--history", "log.csv")
    rows = list(csv.DictReader((folder / "log.csv").read_text().splitlines()))
    assert [float(row["learning_rate"]) for row in rows] == pytest.approx([0.1, 0.1, 0.05, 0.025])


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("cosin", "there is no schedule 'cosin'; did you mean 'cosine'"),
        ("cosine(0.1, 10", "is not a schedule; write one as in Python"),
        ("cosine(0.1, steps=10)", "the schedule cosine has no argument 'steps'"),
        ("cosine(0.1)", "the schedule cosine requires total_steps; add it, as in --schedule 'cosine(total_steps=…)'"),
        ("cosine(0.1, 10, 0.0, 7)", "takes 3 arguments, not 4"),
        ("0.1", "is not a schedule"),
        ("cosine(0.1, 1 / 0)", "divides by zero"),
        ("cosine(0.1, __import__('os'))", "there is no schedule '__import__'"),
        ("cosine(0.1, x.y)", "arguments of a schedule are numbers, lists or schedules"),
        ("cosine('a', 10)", "lr is 'a'; it should be a finite number"),
        ("function('nowhere.py:f', 10)", "cannot be imported"),
        ("function('f', 10)", "names no module or file with the function"),
        ("reduce_on_plateau", "pass it to `gradgraph train`"),
    ],
)
def test_a_slip_is_named(cli: Cli, text: str, says: str) -> None:
    ran = cli("build", "model.onnx", "--schedule", text)
    assert ran.code == 1 and says in ran.err, ran.err

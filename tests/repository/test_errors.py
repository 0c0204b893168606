"""What an error knows: its sentence, the remedy in Python and on the command line; names are shown and suggested."""

from __future__ import annotations

import copy
import json
import pickle
import subprocess
import sys

import pytest

from gradgraph import errors
from gradgraph.backends import BACKENDS
from gradgraph.cli.app import COMMANDS
from gradgraph.errors import DataError, GradgraphError, OutputError, escaped, escaped_json, suggestion
from gradgraph.losses import LOSSES
from gradgraph.metrics import METRICS
from gradgraph.optim.recipes import RECIPES

CLASSES = [v for v in vars(errors).values() if isinstance(v, type) and issubclass(v, GradgraphError)]


@pytest.mark.parametrize("kind", CLASSES, ids=lambda kind: kind.__name__)
def test_an_error_knows_both_remedies(kind: type[GradgraphError]) -> None:
    error = kind("the folder is full", remedy="pass force=True", shell="add --force")
    assert str(error) == "the folder is full; pass force=True"
    assert error.in_shell() == "the folder is full; add --force"
    assert (error.problem, error.remedy, error.shell_remedy) == ("the folder is full", "pass force=True", "add --force")
    for again in (pickle.loads(pickle.dumps(error)), copy.copy(error)):
        assert (str(again), again.in_shell()) == (str(error), error.in_shell())
    moved = error.at("batch 3")
    assert type(moved) is kind
    assert (str(moved), moved.in_shell()) == (f"batch 3: {error}", f"batch 3: {error.in_shell()}")


@pytest.mark.parametrize(
    ("sentence", "problem", "remedy"),
    [
        ("'x' is empty; give a sample", "'x' is empty", "give a sample"),
        ("'x' is empty", "'x' is empty", None),
        ("'a; b' is empty", "'a; b' is empty", None),
        ("the model's 'a; b' is empty; give the model's rows", "the model's 'a; b' is empty", "give the model's rows"),
        ("one; two; three", "one; two", "three"),
        ("", "", None),
    ],
)
def test_a_sentence_is_a_problem_and_its_remedy(sentence: str, problem: str, remedy: str | None) -> None:
    error = DataError(sentence)
    assert (error.problem, error.remedy, error.shell_remedy) == (problem, remedy, remedy)
    assert (str(error), error.in_shell()) == (sentence, sentence)


def test_an_output_error_is_an_oserror_too() -> None:
    with pytest.raises(OSError, match="full"):
        raise OutputError("full", remedy="make room")


SLIPS = [
    ("adamW", RECIPES, "adamw"), ("AdamW", RECIPES, "adamw"), ("Adam", RECIPES, "adam"), ("SGD", RECIPES, "sgd"),
    ("RMSProp", RECIPES, "rmsprop"), ("addam", RECIPES, "adam"),
    ("CrossEntropyLoss", LOSSES, "cross_entropy"), ("cross-entropy", LOSSES, "cross_entropy"),
    ("MSELoss", LOSSES, "mse"), ("BCEWithLogits", LOSSES, "bce_with_logits"),
    ("Accuracy", METRICS, "accuracy"), ("acuracy", METRICS, "accuracy"),
    ("ORT_CPU", BACKENDS, "ort-cpu"), ("Portable", BACKENDS, "portable"),
    ("Train", COMMANDS, "train"), ("chekc", COMMANDS, "check"),
]  # fmt: skip


@pytest.mark.parametrize(("typed", "known", "meant"), SLIPS, ids=[s[0] for s in SLIPS])
def test_capitals_and_signs_do_not_hide_what_is_meant(typed: str, known: list[str], meant: str) -> None:
    assert suggestion(typed, known) == f"; did you mean '{meant}'?"


@pytest.mark.parametrize("known", [RECIPES, LOSSES, METRICS, BACKENDS, COMMANDS], ids=" ".join)
def test_every_name_in_capitals_suggests_itself(known: list[str]) -> None:
    assert [suggestion(name.upper(), known) for name in known] == [f"; did you mean '{name}'?" for name in known]


STEERING = "\x1b[2J\x7f\x9b\u200e\u202e\u2066\u2069\ufeff\u2028\u00a0\u3000\U000e0041"


def test_nothing_that_steers_a_terminal_is_printed() -> None:
    assert escaped(f"w{STEERING}é 字").isprintable()
    document = {f"w{STEERING}é": [STEERING, 'a "b"', "é 字 😀"]}
    text = escaped_json(json.dumps(document, ensure_ascii=False, indent=1))
    assert all(line.isprintable() for line in text.split("\n"))
    assert json.loads(text) == document
    assert "字 😀" in text


@pytest.mark.parametrize(("configured", "lines"), [("", 0), ("logging.basicConfig(); ", 1)])
def test_lines_that_onnx_ir_logs_go_where_the_user_sends_logs(configured: str, lines: int) -> None:
    program = f"import logging; {configured}import gradgraph; logging.getLogger('onnx_ir.serde').warning('odd file')"
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert ran.stderr.count("\n") == lines

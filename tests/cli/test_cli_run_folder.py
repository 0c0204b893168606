"""gradgraph train --run: one folder with all that a run makes, and a page that explains it."""

from __future__ import annotations

import hashlib
import re
import shlex
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.kit.command_line import Cli
from tests.kit.npz import npz

RUN = Path("runs/one")
TRAIN = ("train", "model.onnx", "--data", "train.npz", "--epochs", "2", "--run", str(RUN))


def ok(cli: Cli, *words: str) -> str:
    ran = cli(*words)
    assert ran.code == 0, ran.err
    return ran.out


def test_the_page_says_what_came_of_what(cli: Cli) -> None:
    ok(cli, *TRAIN, "--validation", "held_out.npz", "--patience", "1", "--metric", "accuracy")
    page = (RUN / "README.md").read_text()
    assert page.startswith("# one\n") and f"gradgraph {shlex.join(TRAIN)}" in page
    for name in ("model.onnx", "train.npz", "held_out.npz"):
        assert f"`{name}`, {Path(name).stat().st_size:,} bytes, sha256 {digest(name)}" in page
    history = (RUN / "history.csv").read_text().splitlines()
    best = dict(zip(history[0].split(","), history[-1].split(","), strict=True))
    assert f"| val_accuracy | {float(best['val_accuracy']):.6g} |" in page
    assert "6 steps, 2 epochs." in page
    there = set(re.findall(r"^\| `([^`]+)` \|", page, re.MULTILINE))
    assert there == {p.name for p in RUN.iterdir()} - {"README.md", "run.previous.ckpt"}


def digest(name: str) -> str:
    return hashlib.sha256(Path(name).read_bytes()).hexdigest()


@pytest.mark.sweep(0)
def test_its_commands_work(cli: Cli) -> None:
    """What the page says comes next does, and a run that went on is the run that did not stop."""
    ok(cli, *TRAIN)
    page = (RUN / "README.md").read_text()
    commands = [shlex.split(line, comments=True)[1:] for line in page.splitlines() if line.startswith("gradgraph")]
    assert [words[0] for words in commands] == ["train", "train", "evaluate", "predict", "runs"]
    assert "worst" in page and ok(cli, *commands[2]).count("sample") == 10
    ok(cli, *commands[3])
    ok(cli, *commands[1], "--epochs", "4")
    assert "12 steps, 4 epochs." in (RUN / "README.md").read_text()
    assert "one" in ok(cli, *commands[4])
    ok(cli, *TRAIN[:5], "4", "--export", "whole.onnx", "--data", "train.npz", "--epochs", "4")
    predicted = []
    for model in ("whole.onnx", str(RUN / "trained.onnx")):
        ok(cli, "predict", model, "--data", "held_out.npz", "-o", "p.npz")
        predicted.append(npz("p.npz")["logits"])
    np.testing.assert_array_equal(*predicted)


def test_a_step_folder_is_not_copied_and_named_files_stay_where_they_were_named(cli: Cli) -> None:
    ok(cli, "build", "model.onnx", "-o", "step")
    ok(cli, "train", "step", "--data", "train.npz", "--epochs", "1", "--run", "one", "--export", "elsewhere.onnx")
    assert not Path("one/step").exists() and not Path("one/trained.onnx").exists() and Path("elsewhere.onnx").exists()
    assert "gradgraph evaluate one --data train.npz" in Path("one/README.md").read_text()
    ok(cli, "evaluate", "one", "--data", "train.npz")


REFUSED = {
    "a run that is there": (TRAIN, "already exists; add --resume to resume from it"),
    "a trial": ((*TRAIN, "--dry-run"), "a trial has none"),
    "a file": ((*TRAIN[:-1], "model.onnx/run"), "pass another path to --run"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_a_run_is_one_sentence(cli: Cli, name: str) -> None:
    words, says = REFUSED[name]
    if name == "a run that is there":
        ok(cli, *TRAIN)
    before = {p: p.read_bytes() for p in RUN.rglob("*") if p.is_file()}
    ran = cli(*words)
    assert ran.code != 0 and says in ran.err
    assert before == {p: p.read_bytes() for p in RUN.rglob("*") if p.is_file()}


FILES = ("README.md", "recipe.toml", "history.csv", "trained.onnx", "log.jsonl", "run.best.ckpt", "notes.txt", "step/a")


@pytest.mark.parametrize("mine", FILES)
def test_a_folder_with_files_of_others_is_refused(cli: Cli, mine: str) -> None:
    """Each file that a run writes, and one that it does not."""
    (RUN / mine).parent.mkdir(parents=True)
    (RUN / mine).write_text("mine")
    ran = cli(*TRAIN)
    assert ran.code == 1 and "is not empty; pass another folder to --run, or add --force" in ran.err
    ran = cli(*TRAIN, "--resume")
    assert ran.code == 1 and ("contains no run to resume" in ran.err) is (mine != "recipe.toml")
    assert [p.read_text() for p in RUN.rglob("*") if p.is_file()] == ["mine"]


def test_an_empty_folder_is_filled_and_force_writes_over_another(cli: Cli) -> None:
    RUN.mkdir(parents=True)
    ok(cli, *TRAIN, "--validation", "held_out.npz", "--patience", "1")
    assert (RUN / "run.best.ckpt").exists()
    (RUN / "README.md").write_text("mine")
    ok(cli, *TRAIN, "--force")
    assert (RUN / "README.md").read_text().startswith("# one")
    assert not (RUN / "run.best.ckpt").exists()  # of the other run: evaluate would take its weights


@pytest.mark.sweep(0)
def test_a_run_that_goes_on_keeps_its_recipe_and_a_page_of_others(cli: Cli) -> None:
    ok(cli, *TRAIN)
    recipe = (RUN / "recipe.toml").read_text() + "# mine\n"
    (RUN / "recipe.toml").write_text(recipe)
    ok(cli, "train", str(RUN / "recipe.toml"), "--resume", "--epochs", "3")
    assert (RUN / "recipe.toml").read_text() == recipe
    assert "9 steps, 3 epochs." in (RUN / "README.md").read_text()
    (RUN / "README.md").write_text("mine")
    ok(cli, "train", str(RUN / "recipe.toml"), "--resume", "--epochs", "4")
    assert (RUN / "README.md").read_text() == "mine"
    assert len((RUN / "history.csv").read_text().splitlines()) == 5


@pytest.mark.sweep(0)
def test_the_command_of_the_page_stays_and_later_ones_are_listed(cli: Cli) -> None:
    ok(cli, *TRAIN)
    first, recipe = f"gradgraph {shlex.join(TRAIN)}", (RUN / "recipe.toml").read_bytes()
    later = [("train", str(RUN), "--resume", "--epochs", "3"), ("train", str(RUN / "recipe.toml"), "--resume")]
    for words in later:
        ok(cli, *words)
        page = (RUN / "README.md").read_text()
        assert f"```sh\n{first}\n```" in page and "--resume --epochs" not in page
        assert (RUN / "recipe.toml").read_bytes() == recipe
    listed = (RUN / "commands.txt").read_text().splitlines()
    assert listed[1::2] == [first, *(f"gradgraph {shlex.join(words)}" for words in later)]
    assert [line.partition("UTC, after ")[2] for line in listed[::2]] == ["0 steps", "6 steps", "9 steps"]
    ok(cli, *TRAIN, "--force")
    assert len((RUN / "commands.txt").read_text().splitlines()) == 2


def test_a_run_goes_on_where_it_was_moved_to(cli: Cli) -> None:
    ok(cli, *TRAIN)
    RUN.rename("elsewhere")
    ok(cli, "train", "elsewhere", "--resume", "--epochs", "3")
    assert not RUN.exists() and "9 steps, 3 epochs." in Path("elsewhere/README.md").read_text()


def test_the_curves_are_drawn(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    ok(cli, *TRAIN)
    page = (RUN / "README.md").read_text()
    assert "](plot.svg)" in page and "| `plot.svg` |" in page
    assert (RUN / "plot.svg").read_text().startswith("<svg")


def test_data_that_do_not_fit_leave_no_folder(cli: Cli) -> None:
    np.savez("wrong.npz", x=np.zeros((4, 5), np.float32), target=np.zeros(4, np.int64))
    assert cli(*TRAIN, "--data", "wrong.npz").code == 1
    assert not RUN.exists()

"""Whose weights a command takes of a step folder: the run's, those before training where that is said, or none."""

from __future__ import annotations

import logging
from pathlib import Path

import click
import pytest

import gradgraph as gg
from gradgraph.cli.app import COMMANDS
from gradgraph.cli.app import cli as group
from tests.kit.command_line import Cli
from tests.kit.npz import npz

RUN, DATA = Path("runs/one"), ("--data", "held_out.npz")
TAKE_A_CHECKPOINT = {  # every command that reads a step folder and the weights of a run
    "evaluate": DATA,
    "predict": (*DATA, "-o", "p.npz"),
    "export": ("-o", "w.safetensors"),
}


def test_these_are_all_commands_that_read_with_a_checkpoint() -> None:
    commands = {name: group.get_command(click.Context(group), name) for name in COMMANDS}
    having = {n for n, c in commands.items() if c and any("--checkpoint" in p.opts for p in c.params)}
    assert having - {"train", "explain"} == {*TAKE_A_CHECKPOINT}


@pytest.mark.sweep(0.11)
@pytest.mark.parametrize("name", TAKE_A_CHECKPOINT)
def test_a_step_of_a_run_is_read_with_its_weights(name: str, cli: Cli) -> None:
    assert cli("train", "model.onnx", "--data", "train.npz", "--epochs", "1", "--run", str(RUN)).code == 0
    words, step = TAKE_A_CHECKPOINT[name], str(RUN / "step")
    by_default, file = cli(name, step, *words), Path(words[-1])
    given = file.read_bytes()
    assert by_default.code == 0 and f"with the weights of {RUN / 'run.ckpt'}" in by_default.err
    named = cli(name, step, "--checkpoint", str(RUN / "run.ckpt"), *words)
    assert (named.out, file.read_bytes()) == (by_default.out, given) and "with the weights of" not in named.err
    before = cli(name, step, "--untrained", *words)
    assert before.code == 0 and "with the weights of" not in before.err
    assert (before.out, file.read_bytes()) != (by_default.out, given)
    both = cli(name, step, "--untrained", "--checkpoint", str(RUN / "run.ckpt"), *words)
    assert both.code == 2 and "give one" in both.err


def test_explanations_are_of_a_run_with_its_weights(cli: Cli) -> None:
    assert cli("train", "model.onnx", "--data", "train.npz", "--epochs", "1", "--run", str(RUN)).code == 0
    step, checkpoint = str(RUN / "step"), ("--checkpoint", str(RUN / "run.ckpt"))
    found = {}
    for name, words in {"default": (), "named": checkpoint, "untrained": ("--untrained",)}.items():
        ran = cli("explain", step, *DATA, *words, "--no-checks", "-o", name)
        assert ran.code == 0 and (f"with the weights of {RUN / 'run.ckpt'}" in ran.err) == (name == "default")
        found[name] = Path(name, "attributions.npz").read_bytes()
    assert found["default"] == found["named"] != found["untrained"]


@pytest.mark.sweep(0)
def test_the_best_epoch_comes_first(cli: Cli) -> None:
    words = ("--validation", "held_out.npz", "--patience", "2", "--epochs", "2")
    assert cli("train", "model.onnx", "--data", "train.npz", *words, "--run", str(RUN)).code == 0
    assert f"with the weights of {RUN / 'run.best.ckpt'}" in cli("evaluate", str(RUN / "step"), *DATA).err


def test_without_a_run_the_weights_are_asked_for(cli: Cli) -> None:
    assert cli("build", "model.onnx", "-o", "step").code == 0
    for name in ("evaluate", "predict"):
        ran = cli(name, "step", *TAKE_A_CHECKPOINT[name])
        assert ran.code == 1 and "add --checkpoint run.ckpt, or --untrained" in " ".join(ran.err.split())
        assert not Path("p.npz").exists() and cli(name, "step", "--untrained", *TAKE_A_CHECKPOINT[name]).code == 0
    assert "with the initial weights" in cli("export", "step", "-o", "w.safetensors").err
    refused = cli("predict", "model.onnx", "--untrained", *DATA)
    assert refused.code == 2 and "--untrained requires a step folder" in refused.err


@pytest.mark.sweep(0)
def test_a_trainer_of_such_a_folder_warns(cli: Cli, caplog: pytest.LogCaptureFixture) -> None:
    assert cli("train", "model.onnx", "--data", "train.npz", "--epochs", "1", "--run", str(RUN)).code == 0
    x = npz("held_out.npz")["x"]

    def warned(trainer: gg.Trainer) -> int:
        caplog.clear()
        with caplog.at_level(logging.WARNING, logger="gradgraph"):
            trainer.predict(x)
            trainer.evaluate("held_out.npz")
            trainer.export()
        return sum("weights before training" in message for message in caplog.messages)

    trainer = gg.Trainer(RUN / "step")
    assert (warned(trainer), warned(trainer)) == (1, 0)
    trainer = gg.Trainer(RUN / "step")
    trainer.fit("train.npz", 1, progress=False)
    assert warned(trainer) == 0
    assert warned(gg.Trainer.resume(RUN / "step", RUN / "run.ckpt")) == 0
    assert warned(gg.Trainer(gg.Step.load(RUN / "step"))) == 0

"""A folder with several named steps on the command line: trained by a pattern, resumed, exported, inspected."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

import gradgraph as gg
from tests.kit.command_line import Cli, mlp


@pytest.fixture
def step(folder: Path) -> Path:
    model = mlp()
    names = [t.name for t in model.graph.initializer]
    both = {
        "head": gg.StepOptions(optimizer=gg.optim.sgd(0.1), train=names[2:]),
        "body": gg.StepOptions(optimizer=gg.optim.adam(1e-3), train=names[:2]),
    }
    return gg.build(model, steps=both).save(folder / "step")


def test_it_trains_by_a_pattern_and_goes_on(cli: Cli, step: Path, folder: Path) -> None:
    words = ["train", "step", "--data", "train.npz", "--every", "body=2", "--checkpoint", "run.ckpt", "--epochs", "2"]
    assert cli(*words, "--max-steps", "3").code == 0
    ran = cli(*words, "--resume", "--validation", "held_out.npz", "--export", "trained.onnx", "--json")
    assert ran.code == 0, ran.err
    found = json.loads(ran.out)
    assert found["history"]["step"] == [4, 9]  # three batches of 96 samples each; the body on the second of two
    assert {"head.loss", "body.loss", "val_head.loss", "val_body.accuracy"} <= found["history"].keys()
    assert (folder / "trained.onnx").exists()
    whole = gg.Trainer(step)
    with np.load(folder / "train.npz") as data:
        whole.fit(dict(data), epochs=2, every={"body": 2}, progress=False)
    again = gg.Trainer.resume(step, folder / "run.ckpt")
    assert all(np.array_equal(v, again.state_dict()[n]) for n, v in whole.state_dict().items())


@pytest.mark.sweep(0)
def test_other_commands_read_it(cli: Cli, step: Path) -> None:
    shown = cli("inspect", "step")
    assert (shown.code, shown.out.count("\nstep            ")) == (0, 2)
    facts = json.loads(cli("inspect", "step", "--json").out)
    assert list(facts["steps"]) == ["head", "body"]
    assert {"train.head", "train.body", "eval"} <= facts["nodes"].keys()
    assert cli("export", "step", "-o", "plain.onnx").code == 0
    assert cli("predict", "step", "--untrained", "--data", "held_out.npz", "-o", "found.npz").code == 0
    assert cli("train", "step", "--data", "train.npz", "--dry-run").code == 0
    assert cli("tune", "step", "--batch-size", "8").code == 0
    profiled = cli("train", "step", "--data", "train.npz", "--profile")
    assert [line.split()[0] for line in profiled.out.splitlines() if " takes " in line] == ["head:", "body:"]
    timed = json.loads(cli("train", "step", "--data", "train.npz", "--profile", "--json").out)["profile"]
    assert list(timed) == ["head", "body"]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--lr", "0.1"], "a single learning_rate was given, but each step has its own; remove --lr"),
        (["--find-lr"], "find_lr needs one step"),
        (["--every", "tail=2"], "there is no step 'tail'"),
        (["--every", "body"], "'body' should be STEP=N, such as generator=5"),
        (["--every", "body=x"], "should be a whole number above zero"),
        (["--every", "body=2", "--every", "head=2"], "no step trains on every batch"),
    ],
)
def test_what_is_refused(cli: Cli, step: Path, words: list[str], says: str) -> None:
    ran = cli("train", "step", "--data", "train.npz", *words)
    assert ran.code != 0
    assert says in " ".join(ran.err.split())


def test_a_model_has_one_step(cli: Cli, folder: Path) -> None:
    ran = cli("train", "model.onnx", "--data", "train.npz", "--every", "a=2")
    assert ran.code != 0
    assert "this one has a single step; remove it" in " ".join(ran.err.split())

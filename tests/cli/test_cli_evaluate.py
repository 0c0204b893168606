"""gradgraph evaluate: loss and metrics of a step, its classes, and the samples it is worst at."""

from __future__ import annotations

import json

import pytest

import gradgraph as gg
from tests.kit.command_line import Cli


def test_scores_classes_and_the_worst_samples(cli: Cli) -> None:
    words = ("--metric", "f1", "-o", "step", "--checkpoint", "run.ckpt")
    assert cli("train", "model.onnx", "--data", "train.npz", *words).code == 0
    evaluated = ("evaluate", "step", "--checkpoint", "run.ckpt", "--data", "held_out.npz")
    t = gg.Trainer.resume("step", "run.ckpt")
    scores = t.evaluate("held_out.npz")
    assert cli(*evaluated).out.splitlines() == [f"{name} {value:.6g}" for name, value in scores.items()]
    ran = cli(*evaluated, "--per-class", "--worst", "2")
    assert ran.code == 0 and str(t.per_class("held_out.npz")) in ran.out and str(t.worst("held_out.npz", 2)) in ran.out
    found = json.loads(cli(*evaluated, "--class", "a", "--class", "b", "--class", "c", "--worst", "2", "--json").out)
    assert found["scores"] == pytest.approx(scores) and [row["class"] for row in found["classes"]["classes"]] == [
        *"abc"
    ]
    assert [w["sample"] for w in found["worst"]] == [w.index for w in t.worst("held_out.npz", 2)]
    assert cli("build", "model.onnx", "-o", "plain").code == 0
    ran = cli("evaluate", "plain", "--untrained", "--data", "held_out.npz", "--per-class")
    assert ran.code == 1 and "build it with --metric confusion_matrix" in ran.err

"""Artifacts on request: `gradgraph build` and `gradgraph export` with options for other ways to train and to run."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from command_line import Cli
from test_separate import assert_same_steps

import gradgraph as gg


def test_build_writes_gradient_and_apply(cli: Cli) -> None:
    assert cli("build", "model.onnx", "--separate", "--backend", "portable").code == 0
    step = gg.Step.load("step")
    assert not any(model.functions for model in step.separate.values())
    assert ", gradient " in step.summary()
    assert_same_steps(step, [{"x": np.ones((2, 4), np.float32), "target": np.array([0, 2])}] * 2)
    assert gg.Trainer("step", device="cpu").step({"x": np.ones((2, 4), np.float32), "target": np.array([0, 2])})
    assert cli("build", "model.onnx", "--force").code == 0
    assert not Path("step", "gradient.onnx").exists()

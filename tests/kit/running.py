"""Helpers of several tests: run a model in onnxruntime, train a step in a minimal loop, stop and resume a run."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort

import gradgraph as gg
from gradgraph.runtime.saved.history import History
from gradgraph.step.step import Step


def session(model: onnx.ModelProto) -> ort.InferenceSession:
    options = ort.SessionOptions()
    options.log_severity_level = 3
    options.intra_op_num_threads = 1
    return ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])


def run(model: onnx.ModelProto, feeds: Mapping[str, Any] | None = None) -> dict[str, np.ndarray]:
    """Return the outputs by name."""
    s = session(model)
    return dict(zip([o.name for o in s.get_outputs()], s.run(None, dict(feeds or {})), strict=True))


class Loop:
    """A minimal training loop, which only runs models: init.onnx once, then train.onnx with its outputs fed back."""

    def __init__(self, step: Step) -> None:
        self.step = step
        self.state = run(step.init)
        self._train = session(step.train)
        self._names = [o.name for o in self._train.get_outputs()]

    def __call__(self, feeds: Mapping[str, Any], **rates: float) -> dict[str, np.ndarray]:
        scalars = {k: np.array(v, np.float32) for k, v in {**self.step.manifest.hyperparameters, **rates}.items()}
        copies = {k: v.copy() for k, v in self.state.items()}  # some kernels overwrite their inputs
        results = dict(zip(self._names, self._train.run(None, {**feeds, **scalars, **copies}), strict=True))
        self.state = {s.name: results.pop(s.next) for s in self.step.manifest.state}
        return results

    def evaluate(self, feeds: Mapping[str, Any]) -> dict[str, np.ndarray]:
        wanted = {i.name for i in self.step.eval.graph.input}
        return run(self.step.eval, {k: v for k, v in {**feeds, **self.state}.items() if k in wanted})


def resumed(step: Step, data: Any, folder: Path, stop: int, **fit: Any) -> tuple[gg.Trainer, History]:
    """Return trainer and history of a run stopped after ``stop`` steps and resumed; assert it equals a whole run."""
    checkpoint = folder / "run.ckpt"
    whole, half = (gg.Trainer(step, device="cpu", seed=1) for _ in range(2))
    history = whole.fit(data, progress=False, **fit)
    half.fit(data, progress=False, **fit, max_steps=stop, checkpoint=checkpoint)
    again = gg.Trainer.resume(step, checkpoint, device="cpu")
    assert again.fit(data, progress=False, **fit, checkpoint=checkpoint) == history
    expected, found = whole.state_dict(), again.state_dict()
    assert found.keys() == expected.keys()
    assert all(np.array_equal(value, expected[name]) for name, value in found.items())
    return again, history

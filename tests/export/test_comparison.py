"""What is said of an exported model beside the graph that evaluates: how near it is, and what it consists of."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import pytest

import gradgraph as gg
from gradgraph import frontend
from gradgraph.export import compared, export_report, float16_storage, inference_model
from gradgraph.frontend import nn
from gradgraph.step.step import Step


def step(batch: str | int = "batch") -> Step:
    layers = (nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(36 * 4, 3))
    return gg.build(
        frontend.export(nn.Sequential(*layers), {"x": (batch, 1, 8, 8)}), "cross_entropy", gg.optim.adam(1e-2)
    )


def trained(built: Step, path: Path) -> Path:
    rng = np.random.default_rng(0)
    data = {"x": rng.normal(size=(8, 1, 8, 8)).astype(np.float32), "target": np.arange(8) % 3}
    trainer = gg.Trainer(built, device="cpu")
    trainer.fit(data, batch_size=4, epochs=2, progress=False)
    trainer.save(path)
    return path


@pytest.mark.parametrize("batch", ["batch", 4])
def test_a_trained_model_gives_what_the_step_evaluates_to(batch: str | int, tmp_path: Path) -> None:
    built = step(batch)
    checkpoint = trained(built, tmp_path / "run.ckpt")
    model = inference_model(built, checkpoint)
    report = export_report(model, built, checkpoint)
    assert report.compared["output"].relative < 1e-6
    assert "'output' is equal up to rounding" in str(report)
    assert report.operators_after == dict(Counter(n.op_type for n in model.graph.node))
    assert report.operators_before == dict(Counter(n.op_type for n in built.eval.graph.node))
    assert (report.opset, report.bytes) == (model.opset_import[0].version, model.ByteSize())
    assert report.input_shapes == {"x": [batch, 1, 8, 8]}
    assert report.output_shapes == {"output": [batch, 3]}


def test_other_weights_are_seen(tmp_path: Path) -> None:
    built = step()
    checkpoint = trained(built, tmp_path / "run.ckpt")
    report = export_report(inference_model(built), built, checkpoint)
    assert report.compared["output"].relative > 1e-3
    assert "differs by" in str(report)


def test_what_rounding_costs_is_told(tmp_path: Path) -> None:
    built = step()
    small = float16_storage(inference_model(built)).result
    assert 1e-6 < export_report(small, built).compared["output"].relative < 1e-2


def test_the_comparison_of_outputs() -> None:
    a = {"y": np.array([[1.0, 2.0], [4.0, 3.0]]), "n": np.array([3, 4]), "s": np.array(["a"])}
    b = {"y": np.array([[1.0, 2.5], [2.0, 3.0]]), "n": np.array([3, 4])}
    found = compared(lambda _: a, lambda _: b, [0])
    assert vars(found["y"]) == {"largest": 2.0, "relative": 0.5, "same_class": 0.5}
    assert vars(found["n"]) == {"largest": 0.0, "relative": 0.0, "same_class": None}
    assert list(found) == ["y", "n"]
    nan = {"y": np.array([[np.nan, 1.0]])}
    assert compared(lambda _: nan, lambda _: nan, [0])["y"].largest == 0
    other = {"y": np.zeros((1, 2))}
    assert compared(lambda _: nan, lambda _: other, [0])["y"].largest == np.inf
    assert compared(lambda _: a, lambda _: other, [0])["y"].largest == np.inf

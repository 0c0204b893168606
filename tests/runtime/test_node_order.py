"""Nodes that need no batch stand first in what onnxruntime is given; what a step gives is the same."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import helper, parser

import gradgraph as gg
from gradgraph.frontend import export, nn
from gradgraph.runtime.execution import opener
from gradgraph.runtime.execution.node_order import computed_as_written, in_good_order

STEP = """
<ir_version: 10, opset_import: ["" : 21]>
step (float x, float w, float m, bool c) => (float y, float next) {
    t = Neg(x)
    u = Neg(w)
    y = Add(t, u)
    v = Clip(u, , )
    kept = Clip(x, , m)
    next = Mul(v, kept)
}
"""


def outputs(model: onnx.ModelProto) -> list[str]:
    return [node.output[0] for node in model.graph.node]


def test_nodes_without_a_batch_come_first_and_results_last() -> None:
    model = parser.parse_model(STEP)
    assert outputs(in_good_order(model, ["x"], ["next"])) == ["u", "v", "t", "kept", "next", "y"]


def test_the_update_whose_gradient_comes_first_stands_last() -> None:
    """Onnxruntime begins with the last one: were it that of the first layer, all gradients would wait for theirs."""
    model = parser.parse_model("""
        <ir_version: 10, opset_import: ["" : 21]>
        step (float[n] x, float[n] v, float[n] w) => (float[n] later, float[n] last, float[n] y) {
            y = Exp (x)
            gradient = Neg (x)
            last = Add (v, gradient)
            before = Sin (gradient)
            later = Add (w, before)
        }""")
    for node in model.graph.node:
        node.name = f"grad/{node.op_type}" if node.op_type in ("Neg", "Sin") else node.op_type
    assert outputs(in_good_order(model, ["x"], ["later", "last"])) == ["gradient", "before", "later", "last", "y"]


def negating(name: str) -> onnx.GraphProto:
    result = helper.make_tensor_value_info(f"-{name}", onnx.TensorProto.FLOAT, [])
    return helper.make_graph([helper.make_node("Neg", [name], [result.name])], "body", [], [result])


def test_a_node_whose_body_reads_the_batch_waits_for_it() -> None:
    model = parser.parse_model(STEP)
    for name, read in (("i", "x"), ("j", "w")):
        branches = {"then_branch": negating(read), "else_branch": negating("w")}
        model.graph.node.append(helper.make_node("If", ["c"], [name], **branches))
    assert outputs(in_good_order(model, ["x"], ["next", "i", "j"])) == ["u", "v", "j", "t", "kept", "next", "i", "y"]


@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
def test_a_step_gives_the_same_in_either_order(optimizer: str, monkeypatch: pytest.MonkeyPatch) -> None:
    layers = nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 16, 3, groups=16), nn.GELU()
    network = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(0.5), nn.Linear(16, 5))
    step = gg.build(export(network, {"x": ("batch", 3, 12, 12)}), "cross_entropy", optimizer)
    rng = np.random.default_rng(0)
    batch = {"x": rng.normal(size=(4, 3, 12, 12)).astype(np.float32), "target": rng.integers(0, 5, 4)}
    moved = []

    def kept(model: onnx.ModelProto, batch: list[str], following: list[str]) -> onnx.ModelProto:
        copy = onnx.ModelProto.FromString(model.SerializeToString())
        moved.append(outputs(in_good_order(copy, batch, following)) != outputs(model))
        return model

    def losses() -> list[float]:
        trainer = gg.Trainer(step, device="cpu")
        return [float(trainer.step(batch)["loss"]) for _ in range(4)]

    found = losses()
    monkeypatch.setattr(opener, "in_good_order", kept)
    assert losses() == found
    assert all(moved)


def ran(model: onnx.ModelProto, folder: Path) -> list[str]:
    """The nodes in the order in which onnxruntime computes them as they are."""
    settings = ort.SessionOptions()
    settings.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    settings.enable_profiling, settings.profile_file_prefix = True, str(folder / "profile")
    session = ort.InferenceSession(model.SerializeToString(), settings)
    session.run(None, {"x": np.ones(4, np.float32)})
    events = json.loads(Path(session.end_profiling()).read_text())
    return [e["name"].removesuffix("_kernel_time") for e in events if e["name"].endswith("_kernel_time")]


def test_what_stands_in_the_order_of_execution_is_executed_in_it_again(tmp_path: Path) -> None:
    model = parser.parse_model("""
        <ir_version: 10, opset_import: ["" : 21]>
        pieces (float[4] x) => (float[4] y, float[4] z) {
            a1 = Neg (x)
            b1 = Neg (a1)
            z = Exp (b1)
            a2 = Sin (x)
            b2 = Add (a2, b1)
            a3 = Cos (x)
            b3 = Add (a3, b2)
            y = Sum (b1, b2, b3)
        }""")
    for node in model.graph.node:
        node.name = node.output[0]
    written = outputs(model)
    assert ran(model, tmp_path) != written
    assert ran(computed_as_written(model), tmp_path) == written

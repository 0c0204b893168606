"""Constants that sessions compute in advance: of frozen weights, and none that are large and filled with one number."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

import gradgraph as gg
from gradgraph.runtime.execution.session import LARGEST_FILLED, Placement, create_session

ROWS, WIDTH = 20_000, 16  # 1.28 MB


def executed(model: onnx.ModelProto, path: Path) -> onnx.GraphProto:
    create_session(model, Placement.choose("cpu"), optimized=path)
    return onnx.load(path).graph


def model(nodes: list[onnx.NodeProto], weight: np.ndarray) -> onnx.ModelProto:
    graph = helper.make_graph(
        nodes,
        "m",
        [helper.make_tensor_value_info("ids", TensorProto.INT64, ["n"])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["n", WIDTH])],
        [numpy_helper.from_array(weight, "w")],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)


def test_zeros_of_an_embedding_s_gradient_do_not_stay_in_memory(tmp_path: Path) -> None:
    weight = np.random.default_rng(0).normal(size=(ROWS, WIDTH)).astype(np.float32)
    assert weight.nbytes > LARGEST_FILLED
    step = gg.build(model([helper.make_node("Gather", ["w", "ids"], ["y"])], weight), "mse", gg.optim.adamw(0.1))
    trainer = gg.Trainer(step, device="cpu", options=gg.RuntimeOptions(native_kernels=False))
    graph = executed(trainer._session.opener.lowered(trainer._session.part.model, {"n": 4}), tmp_path / "executed.onnx")
    assert any(node.op_type == "ConstantOfShape" for node in graph.node)
    assert all(len(t.raw_data) <= LARGEST_FILLED for t in graph.initializer)
    batch = {"ids": np.array([3, 3, 7, ROWS - 1]), "target": np.zeros((4, WIDTH), np.float32)}
    plain = gg.Trainer(step, device="cpu", options=gg.RuntimeOptions(optimization="none", native_kernels=False))
    for _ in range(2):
        assert trainer.step(batch)["loss"] == plain.step(batch)["loss"]
    np.testing.assert_array_equal(trainer.state_dict()["w"], plain.state_dict()["w"])


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_what_is_computed_of_frozen_weights_is_computed_once(dtype: type, tmp_path: Path) -> None:
    nodes = [
        helper.make_node("Cast", ["w"], ["c"], to=TensorProto.FLOAT),
        helper.make_node("Sin", ["c"], ["s"]),
        helper.make_node("Gather", ["s", "ids"], ["y"]),
    ]
    graph = executed(model(nodes, np.ones((ROWS, WIDTH), dtype)), tmp_path / "executed.onnx")
    assert [node.op_type for node in graph.node] == ["Gather"]

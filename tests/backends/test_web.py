"""Steps for the web: large stored weights become floats again in the backward pass, to the same bits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper, numpy_helper

import gradgraph as gg
from gradgraph.backends.web import web_lowering

WIDTH, BLOCK = 64, 32


def in_four_bits(shape: list[Any], layers: int = 3) -> onnx.ModelProto:
    """Products of stored weights in 4 bits, with a relu between."""
    rng = np.random.default_rng(0)
    nodes, weights, x = [], [], "x"
    for i in range(layers):
        packed = rng.integers(0, 256, (WIDTH, WIDTH // BLOCK, BLOCK // 2), np.uint8)
        scales = rng.uniform(0.01, 0.03, WIDTH * WIDTH // BLOCK).astype(np.float32)
        weights += [numpy_helper.from_array(packed, f"w{i}"), numpy_helper.from_array(scales, f"s{i}")]
        sizes = {"K": WIDTH, "N": WIDTH, "bits": 4, "block_size": BLOCK}
        product = helper.make_node("MatMulNBits", [x, f"w{i}", f"s{i}"], [f"h{i}"], domain="com.microsoft", **sizes)
        nodes += [product, helper.make_node("Relu", [f"h{i}"], [f"r{i}"])]
        x = f"r{i}"
    value = helper.make_tensor_value_info
    graph = helper.make_graph(nodes, "net", [value("x", TensorProto.FLOAT, shape)],
                              [value(x, TensorProto.FLOAT, shape)], weights)  # fmt: skip
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=10)


def saved(folder: Path, shape: list[Any]) -> Path:
    adapted = gg.lora(in_four_bits(shape), "*", rank=2)
    gg.build(adapted, "mse", gg.optim.sgd(0.1), backend="web", seed=0).save(folder)
    return folder


@pytest.mark.parametrize("backend", ["web", "web-gpu"])
def test_weights_of_four_bits_were_tried(backend: str, caplog: pytest.LogCaptureFixture) -> None:
    gg.build(gg.lora(in_four_bits(["rows", WIDTH], 1), "*", rank=2), "mse", gg.optim.sgd(0.1), backend=backend)
    assert not [record for record in caplog.records if "are untested" in record.getMessage()]


def dequantised(step: Path) -> list[onnx.NodeProto]:
    return [n for n in onnx.load(step / "train.onnx").graph.node if n.op_type == "DequantizeLinear"]


def run(file: Path, feeds: dict[str, Any], level: Any) -> dict[str, Any]:
    """What the file itself gives."""
    options = ort.SessionOptions()
    options.graph_optimization_level = level
    session = ort.InferenceSession(file, options, providers=["CPUExecutionProvider"])
    names = [output.name for output in session.get_outputs()]
    return dict(zip(names, session.run(None, feeds), strict=True))


@pytest.mark.parametrize("level", ["ORT_DISABLE_ALL", "ORT_ENABLE_ALL"])
@pytest.mark.parametrize("sizes", [(5,), (2, 5)], ids=["Gemm", "MatMul"])
def test_each_pass_has_floats_of_its_own(
    sizes: tuple[int, ...], level: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shape = [*map("axis{}".format, range(len(sizes))), WIDTH]
    plain = saved(tmp_path / "plain", shape)  # these are too small
    monkeypatch.setattr(web_lowering, "LARGE", WIDTH * WIDTH)
    again = saved(tmp_path / "again", shape)
    assert (len(dequantised(plain)), len(dequantised(again))) == (3, 5)  # the first layer's x has no gradient
    rng = np.random.default_rng(1)
    how = getattr(ort.GraphOptimizationLevel, level)
    batch = {n: rng.normal(size=(*sizes, WIDTH)).astype(np.float32) for n in ("x", "target")}
    feeds = {**run(plain / "init.onnx", {}, how), **batch, "learning_rate": np.array(0.1, np.float32)}
    expected, found = (run(step / "train.onnx", feeds, how) for step in (plain, again))
    for name, array in expected.items():
        np.testing.assert_array_equal(found[name], array, err_msg=name)


def test_onnxruntime_does_not_take_them_for_equal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(web_lowering, "LARGE", WIDTH * WIDTH)
    step = saved(tmp_path / "again", ["rows", 5, WIDTH])
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_ENABLE_BASIC
    options.optimized_model_filepath = str(tmp_path / "optimised.onnx")
    ort.InferenceSession(step / "train.onnx", options, providers=["CPUExecutionProvider"])
    kept = [n for n in onnx.load(tmp_path / "optimised.onnx").graph.node if n.op_type == "DequantizeLinear"]
    assert len(kept) == 5

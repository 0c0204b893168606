"""Models that onnxruntime saved in blocks of channels (NCHWc) are refused where weights or gradients are needed."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest

import gradgraph as gg
from gradgraph import surgery
from gradgraph.errors import GradgraphError
from gradgraph.machine.hardware import nchwc_block
from tests.kit.small_models import real

pytestmark = pytest.mark.skipif(not nchwc_block(), reason="onnxruntime has no blocked layout on this machine")
NETWORK = """<ir_version: 10, opset_import: ["" : 21]>
network (float[batch, 16, 8, 8] x) => (float[batch, 16, 8, 8] y) {
    h = Conv <pads = [1, 1, 1, 1]> (x, w)
    y = Relu (h)
}"""


def original() -> onnx.ModelProto:
    model = onnx.parser.parse_model(NETWORK)
    model.graph.initializer.append(onnx.numpy_helper.from_array(real(16, 16, 3, 3).astype(np.float32), "w"))
    return model


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("blocks") / "saved.onnx"
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_ENABLE_ALL
    options.optimized_model_filepath = str(file)
    options.log_severity_level = 4  # it warns that the file suits this machine
    ort.InferenceSession(original().SerializeToString(), options, providers=["CPUExecutionProvider"])
    return file


@pytest.mark.parametrize(
    "use",
    [
        lambda file: gg.build(file, "mse", "sgd"),
        lambda file: gg.vjp(file),
        lambda file: surgery.lora(file, "*", rank=2),
        lambda file: surgery.load_weights(original(), file),
    ],
    ids=["build", "vjp", "lora", "load_weights"],
)
def test_every_door_refuses_them(use, saved):
    with pytest.raises(GradgraphError, match="stores channels in blocks whose size depends on the processor"):
        use(saved)

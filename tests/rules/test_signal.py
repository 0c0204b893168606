"""What onnxruntime admits beyond the specification."""

from __future__ import annotations

import numpy as np
import onnx
import onnxruntime as ort
import pytest

import gradgraph as gg

SIGNAL = np.random.default_rng(0).uniform(-1, 1, (2, 17, 1)).astype(np.float32)
COTANGENT = np.random.default_rng(1).uniform(-1, 1, (2, 3, 4, 2)).astype(np.float32)


def gradient(signal: np.ndarray, known: bool) -> np.ndarray:
    tensor = onnx.helper.make_tensor_value_info
    graph = onnx.helper.make_graph(
        [onnx.helper.make_node("STFT", ["x", "step", "window"], ["y"])],
        "stft",
        [tensor("x", onnx.TensorProto.FLOAT, signal.shape if known else [None] * signal.ndim)],
        [tensor("y", onnx.TensorProto.FLOAT, None)],
        [
            onnx.numpy_helper.from_array(np.array(5), "step"),
            onnx.numpy_helper.from_array(np.hanning(6).astype(np.float32), "window"),
        ],
    )
    m = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 17)], ir_version=8)
    session = ort.InferenceSession(gg.vjp(m, wrt="x").SerializeToString(), providers=["CPUExecutionProvider"])
    return np.asarray(session.run(None, {"x": signal, "y.cotangent": COTANGENT})[-1])


@pytest.mark.parametrize("known", [True, False], ids=["known", "unknown"])
def test_a_signal_may_lack_its_last_axis(known: bool) -> None:
    np.testing.assert_allclose(gradient(SIGNAL[..., 0], known), gradient(SIGNAL, known)[..., 0], rtol=1e-6, atol=1e-7)

"""Rounding errors of normalizations over two or three numbers, whose gradient is about 1e-5 of the cotangent."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
from onnx import TensorProto, helper

import gradgraph as gg
from gradgraph.runtime.execution.session import RuntimeOptions
from gradgraph.verify.reference import Oracle, in_float64

# operator, shape of x, attributes
CASES: list[tuple[str, tuple[int, ...], dict[str, Any]]] = [
    ("BatchNormalization", (2, 256), {}),
    ("BatchNormalization", (3, 256), {}),
    ("BatchNormalization", (2, 256, 1, 1), {}),
    ("BatchNormalization", (1, 256, 1, 2), {}),
    ("InstanceNormalization", (8, 64, 2), {}),
    ("InstanceNormalization", (8, 64, 1, 3), {}),
    ("GroupNormalization", (8, 64, 1, 1), {"num_groups": 32}),
]
MOST = 1e-6  # largest relative error in norm; with one projection of x's cotangent, as in PyTorch, 1.5e-6 to 2e-5


def errors(op_type: str, shape: tuple[int, ...], attributes: dict[str, Any], backend: str) -> dict[str, float]:
    """Return the errors of the gradients of x and scale against float64, relative in norm."""
    model = _model(op_type, shape, attributes)
    gradient = gg.vjp(model, outputs=["y"], wrt=["x", "scale"], backend=backend)
    options = RuntimeOptions(threads=1, native_kernels=backend.endswith("native")).session_options()
    session = ort.InferenceSession(gradient.SerializeToString(), options, providers=["CPUExecutionProvider"])
    rng = np.random.default_rng(0)
    vector = shape[1:2]
    arrays = {
        "x": 1 + rng.normal(size=shape),
        "scale": 1 + 0.3 * rng.normal(size=vector),
        "bias": rng.normal(size=vector),
        "mean": np.zeros(vector),
        "var": np.ones(vector),
        "y.cotangent": rng.normal(size=shape),
    }
    feeds = {i.name: arrays[i.name].astype(np.float32) for i in session.get_inputs()}
    found = dict(zip([o.name for o in session.get_outputs()], session.run(None, feeds), strict=True))
    portable = gg.vjp(model, outputs=["y"], wrt=["x", "scale"])
    exact = Oracle(in_float64(portable))({k: v.astype(np.float64) for k, v in feeds.items()})
    return {n: np.linalg.norm(found[n] - exact[n]) / np.linalg.norm(exact[n]) for n in ("x.grad", "scale.grad")}


def _model(op_type: str, shape: tuple[int, ...], attributes: dict[str, Any]) -> onnx.ModelProto:
    vectors, outputs = ["scale", "bias"], ["y"]
    if op_type == "BatchNormalization":
        vectors, outputs = [*vectors, "mean", "var"], ["y", "batch_mean", "batch_var"]
        attributes = {"training_mode": 1, "momentum": 0.0}
    inputs = [helper.make_tensor_value_info("x", TensorProto.FLOAT, shape)]
    inputs += [helper.make_tensor_value_info(v, TensorProto.FLOAT, shape[1:2]) for v in vectors]
    node = helper.make_node(op_type, ["x", *vectors], outputs, **attributes)
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT, shape)
    graph = helper.make_graph([node], "few", inputs, [y])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)

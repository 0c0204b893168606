"""Operators that opset 21 does not have, or has no longer: gradients of what they are written as there."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest
from onnx.reference import ReferenceEvaluator
from onnx.reference.op_run import OpRun

from gradgraph.transforms import vjp
from gradgraph.verify.gradcheck import directional, inner
from gradgraph.verify.reference import Oracle


class Scatter(OpRun):
    """The ReferenceEvaluator has none."""

    op_domain = ""

    def _run(self, x: np.ndarray, indices: np.ndarray, updates: np.ndarray, axis: int = 0) -> tuple[np.ndarray]:
        y = x.copy()
        np.put_along_axis(y, indices, updates, axis)
        return (y,)


X = np.random.default_rng(0).uniform(0.2, 2.0, (3, 7)) * np.random.default_rng(1).choice([-1.0, 1.0], (3, 7))
X[1, 2] = X[2, 1] = X[2, 4] = 0.0  # one zero, and two along one axis
IMAGE = np.random.default_rng(2).uniform(-1, 1, (1, 2, 3, 2))
CACHE, UPDATE = (np.random.default_rng(n).uniform(-1, 1, (2, n, 4, 3)) for n in (2, 2))
CASES: list[tuple[str, int, list[np.ndarray], dict[str, Any]]] = [
    *(
        ("CumProd", 26, [X, np.array(axis)], {"exclusive": exclusive, "reverse": reverse})
        for axis in (0, -1)
        for exclusive in (0, 1)
        for reverse in (0, 1)
    ),
    ("CumProd", 26, [X[:, :1], np.array(1)], {"exclusive": 1}),
    ("TensorScatter", 24, [CACHE, UPDATE[:, :, :2], np.array([1, 2])], {}),
    ("TensorScatter", 24, [CACHE, UPDATE[:, :, :3], np.array([3, 2])], {"mode": "circular"}),
    ("TensorScatter", 24, [CACHE, UPDATE[..., :1]], {"axis": -1}),
    ("Scatter", 10, [X, np.array([[2, 0], [1, 6], [3, 4]]), X[:, :2] * 2], {"axis": 1}),
    ("Upsample", 9, [IMAGE, np.array([1, 1, 2, 3], np.float32)], {"mode": "nearest"}),
]


@pytest.mark.parametrize("known", [True, False], ids=["known", "unknown"])
@pytest.mark.parametrize(("op_type", "opset", "inputs", "attrs"), CASES)
def test_gradients(op_type: str, opset: int, inputs: list[np.ndarray], attrs: dict[str, Any], known: bool) -> None:
    feeds = {f"x{i}": x for i, x in enumerate(inputs)}
    differentiable = [n for n, x in feeds.items() if x.dtype == np.float64]
    m = model(op_type, opset, feeds, attrs, known)
    values, gradient = (
        ReferenceEvaluator(m, new_ops=[Scatter] * (op_type == "Scatter")),
        Oracle(vjp(m, wrt=differentiable)),
    )
    y = np.asarray(values.run(None, feeds)[0])
    cotangent = np.random.default_rng(3).uniform(-1, 1, y.shape)
    results = gradient({**feeds, "y.cotangent": cotangent})
    found = directional(
        lambda at: inner([cotangent], [np.asarray(values.run(None, dict(at))[0])]),
        feeds,
        {n: results[f"{n}.grad"] for n in differentiable},
        np.random.default_rng(4),
    )
    np.testing.assert_allclose(results["y"], y, atol=1e-12)
    assert [f for f in found if not f.error < 1e-6] == []


def model(
    op_type: str, opset: int, feeds: dict[str, np.ndarray], attrs: dict[str, Any], known: bool
) -> onnx.ModelProto:
    infos = [
        onnx.helper.make_tensor_value_info(
            name,
            onnx.helper.np_dtype_to_tensor_dtype(x.dtype),
            x.shape if known else [f"{name}_{axis}" for axis in range(x.ndim)],
        )
        for name, x in feeds.items()
    ]
    node = onnx.helper.make_node(op_type, list(feeds), ["y"], **attrs)
    output = onnx.helper.make_tensor_value_info("y", onnx.TensorProto.DOUBLE, None)
    graph = onnx.helper.make_graph([node], op_type, infos, [output])
    return onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", opset)], ir_version=8)

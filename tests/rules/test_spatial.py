"""The oracle's sampling kernels against onnxruntime: same numbers, in float64 inside."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest

from gradgraph.verify.reference import Oracle

RNG = np.random.default_rng(0)


def real(*shape: int, scale: float = 1.0) -> np.ndarray:
    return np.asarray(RNG.uniform(-scale, scale, shape), np.float32)


def model(op_type: str, inputs: list[np.ndarray | None], **attrs: Any) -> tuple[onnx.ModelProto, dict[str, np.ndarray]]:
    feeds = {f"x{i}": x for i, x in enumerate(inputs) if x is not None}
    names = [f"x{i}" if x is not None else "" for i, x in enumerate(inputs)]
    infos = [
        onnx.helper.make_tensor_value_info(n, onnx.helper.np_dtype_to_tensor_dtype(x.dtype), x.shape)
        for n, x in feeds.items()
    ]
    node = onnx.helper.make_node(op_type, names, ["y"], **attrs)
    graph = onnx.helper.make_graph(
        [node], op_type, infos, [onnx.helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, None)]
    )
    return onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 21)], ir_version=10), feeds


def in_onnxruntime(m: onnx.ModelProto, feeds: dict[str, np.ndarray]) -> np.ndarray:
    options = ort.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level = 1, 3
    session = ort.InferenceSession(m.SerializeToString(), options, providers=["CPUExecutionProvider"])
    return np.asarray(session.run(None, feeds)[0])


BOXES = np.array([[0.3, 0.2, 5.1, 4.4], [-2, -1, 3.2, 9], [1, 1, 1.2, 1.1], [4, 3, 2, 1], [0, 0, 7, 6]], np.float32)
BATCH = np.array([0, 1, 1, 0, 1], np.int64)
BINS = np.concatenate([BATCH[:, None].astype(np.float32), BOXES], 1)
SAMPLED = [
    ("GridSample", [real(2, 3, 5, 4), real(2, 4, 6, 2, scale=1.7)], {"mode": m, "padding_mode": p, "align_corners": a})
    for m, p, a in itertools.product(["linear", "nearest", "cubic"], ["zeros", "border", "reflection"], [0, 1])
] + [
    (
        "GridSample",
        [real(2, 3, 3, 5, 4), real(2, 2, 3, 2, 3, scale=1.7)],
        {"mode": m, "padding_mode": p, "align_corners": a},
    )
    for m, p, a in itertools.product(["linear", "nearest"], ["zeros", "border", "reflection"], [0, 1])
]
TABLE: list[tuple[str, list[np.ndarray | None], dict[str, Any]]] = [
    *SAMPLED,
    *(("AffineGrid", [real(2, 2, 3), np.array([2, 1, n, 5])], {"align_corners": a}) for n in (4, 1) for a in (0, 1)),
    *(("AffineGrid", [real(2, 3, 4), np.array([2, 1, 3, 4, 5])], {"align_corners": a}) for a in (0, 1)),
    *(
        (
            "RoiAlign",
            [real(2, 3, 6, 7), BOXES, BATCH],
            {
                "mode": m,
                "sampling_ratio": r,
                "coordinate_transformation_mode": c,
                "output_height": 2,
                "output_width": 3,
                "spatial_scale": 0.8,
            },
        )
        for m, r, c in itertools.product(["avg", "max"], [0, 2], ["half_pixel", "output_half_pixel"])
    ),
    ("MaxRoiPool", [real(2, 3, 6, 7), BINS], {"pooled_shape": [2, 3]}),
    ("MaxRoiPool", [real(2, 3, 6, 7), BINS], {"pooled_shape": [3, 2], "spatial_scale": 0.7}),
    ("Col2Im", [real(2, 6, 9), np.array([4, 5]), np.array([2, 3])], {}),
    (
        "Col2Im",
        [real(1, 4, 6), np.array([5, 4]), np.array([2, 2])],
        {"strides": [2, 1], "pads": [1, 0, 0, 1], "dilations": [2, 2]},
    ),
    ("Col2Im", [real(1, 8, 12), np.array([4, 3, 3]), np.array([2, 2, 2])], {}),
    ("DeformConv", [real(2, 4, 5, 6), real(2, 4, 3, 2), real(2, 12, 3, 5, scale=2), real(2), real(2, 6, 3, 5)], {}),
    (
        "DeformConv",
        [real(1, 4, 5, 6), real(4, 2, 2, 2), real(1, 16, 2, 6, scale=2), None, real(1, 8, 2, 6)],
        {"group": 2, "offset_group": 2, "strides": [2, 1], "pads": [1, 1, 0, 1], "dilations": [2, 2]},
    ),
]


@pytest.mark.parametrize(("op_type", "inputs", "attrs"), TABLE)
def test_kernels_are_onnxruntimes(op_type: str, inputs: list[np.ndarray | None], attrs: dict[str, Any]) -> None:
    m, feeds = model(op_type, inputs, **attrs)
    np.testing.assert_allclose(Oracle(m)(feeds)["y"], in_onnxruntime(m, feeds), rtol=1e-4, atol=1e-5)

"""Resize in onnxruntime itself: ⟨c, R(x) - R(0)⟩ = ⟨Rᵀc, x⟩ for every mode, also where kernels round differently."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest

import gradgraph.rules.families  # noqa: F401  (fills the registry)
from gradgraph.transforms import vjp

COORDINATES = (
    "half_pixel",
    "half_pixel_symmetric",
    "pytorch_half_pixel",
    "align_corners",
    "asymmetric",
    "tf_crop_and_resize",
)
ROUNDINGS = ("round_prefer_floor", "round_prefer_ceil", "floor", "ceil")
ROI = np.array([0.0, 0.0, 0.1, -0.2, 1.0, 1.0, 0.9, 1.3], np.float32)


def model(shape: tuple[Any, ...], roi: Any, scales: Any, sizes: Any, **attrs: Any) -> onnx.ModelProto:
    given = {"roi": roi, "scales": scales, "sizes": sizes}
    constants = {k: np.asarray(v, np.int64 if k == "sizes" else np.float32) for k, v in given.items() if v is not None}
    names = ["x", *(k if k in constants else "" for k in given)]
    tensor = onnx.helper.make_tensor_value_info
    graph = onnx.helper.make_graph(
        [onnx.helper.make_node("Resize", names, ["y"], **attrs)],
        "resize",
        [tensor("x", onnx.TensorProto.FLOAT, shape)],
        [tensor("y", onnx.TensorProto.FLOAT, [None] * len(shape))],
        [onnx.numpy_helper.from_array(v, k) for k, v in constants.items()],
    )
    return onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 21)], ir_version=10)


def run(m: onnx.ModelProto, feeds: dict[str, np.ndarray]) -> list[Any]:
    options = ort.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level = 1, 3
    return list(
        ort.InferenceSession(m.SerializeToString(), options, providers=["CPUExecutionProvider"]).run(None, feeds)
    )


def assert_adjoint(m: onnx.ModelProto, shape: tuple[int, ...]) -> None:
    rng = np.random.default_rng(0)
    x = rng.uniform(-1, 1, shape).astype(np.float32)
    y = run(m, {"x": x})[0] - run(m, {"x": np.zeros_like(x)})[0]
    c = rng.uniform(-1, 1, y.shape).astype(np.float32)
    gradient = run(vjp(m, wrt="x"), {"x": x, "y.cotangent": c})[-1]
    assert gradient.shape == x.shape
    scale = np.abs(c * y).sum() + 1
    assert abs(float(np.sum(c * y)) - float(np.sum(gradient * x))) < 1e-5 * scale


@pytest.mark.sweep(0.5)
@pytest.mark.parametrize("shape", [(1, 2, 5, 4), ("n", "c", "h", "w")], ids=["static", "dynamic"])
@pytest.mark.parametrize("coordinates", COORDINATES)
@pytest.mark.parametrize("mode", ["nearest", "linear", "cubic"])
def test_adjoint_in_onnxruntime(mode: str, coordinates: str, shape: tuple[Any, ...]) -> None:
    roi = ROI if coordinates == "tf_crop_and_resize" else None
    for rounding, scale in itertools.product(ROUNDINGS if mode == "nearest" else ROUNDINGS[:1], (0.3, 1.3, 2.0)):
        m = model(
            shape,
            roi,
            [1, 1, scale, 1.6],
            None,
            mode=mode,
            coordinate_transformation_mode=coordinates,
            nearest_mode=rounding,
            extrapolation_value=3.0,
        )
        assert_adjoint(m, (1, 2, 5, 4))


@pytest.mark.parametrize(
    ("sizes", "attrs"),
    [
        ([3, 7], {"mode": "linear", "antialias": 1}),
        ([3, 7], {"mode": "cubic", "antialias": 1, "cubic_coeff_a": -0.5}),
        ([7, 7], {"mode": "linear", "keep_aspect_ratio_policy": "not_larger"}),
        ([7, 7], {"mode": "nearest", "keep_aspect_ratio_policy": "not_smaller"}),
        ([9, 3], {"mode": "linear", "keep_aspect_ratio_policy": "not_smaller"}),
        (
            [7, 3],
            {
                "mode": "linear",
                "keep_aspect_ratio_policy": "not_larger",
                "coordinate_transformation_mode": "align_corners",
            },
        ),
    ],
)
def test_adjoint_with_sizes(sizes: list[int], attrs: dict[str, Any]) -> None:
    for shape in ((1, 2, 5, 4), ("n", "c", "h", "w")):
        assert_adjoint(model(shape, None, None, sizes, axes=[2, 3], **attrs), (1, 2, 5, 4))


@pytest.mark.sweep(0.07)
@pytest.mark.parametrize("shape", [(1, 2, 5, 4), ("n", "c", "h", "w")], ids=["static", "dynamic"])
@pytest.mark.parametrize("coordinates", COORDINATES)
@pytest.mark.parametrize(
    ("mode", "antialias"), [("nearest", 0), ("linear", 0), ("cubic", 0), ("linear", 1), ("cubic", 1)]
)
def test_adjoint_with_one_aspect_ratio(mode: str, antialias: int, coordinates: str, shape: tuple[Any, ...]) -> None:
    """Common scales of 0.6, 1.25, 1.4 and 1.75: sizes are rounded up and down, the scale is not."""
    roi = np.array([0.1, -0.2, 0.9, 1.3], np.float32) if coordinates == "tf_crop_and_resize" else None
    given = itertools.product(
        ("not_larger", "not_smaller"), ([3, 7], [7, 5]), (0, 1) if antialias or mode == "cubic" else (0,)
    )
    for policy, sizes, exclude in given:
        m = model(
            shape,
            roi,
            None,
            sizes,
            axes=[2, 3],
            mode=mode,
            antialias=antialias,
            exclude_outside=exclude,
            coordinate_transformation_mode=coordinates,
            keep_aspect_ratio_policy=policy,
            extrapolation_value=3.0,
        )
        assert_adjoint(m, (1, 2, 5, 4))


def test_coordinates_have_more_digits_than_float16() -> None:
    """A coordinate of 300 would be a quarter of a pixel off in float16, and so would the weights."""
    m = model(("h", "w"), None, None, [700, 6], mode="linear", keep_aspect_ratio_policy="not_smaller")
    half = onnx.ModelProto.FromString(m.SerializeToString())
    for value in (*half.graph.input, *half.graph.output):
        value.type.tensor_type.elem_type = onnx.TensorProto.FLOAT16
    x = np.zeros((300, 3), np.float16)
    c = np.random.default_rng(0).uniform(-1, 1, (700, 7)).astype(np.float16)
    (expected,) = run(vjp(m, wrt="x"), {"x": x.astype(np.float32), "y.cotangent": c.astype(np.float32)})[1:]
    (got,) = run(vjp(half, wrt="x"), {"x": x, "y.cotangent": c})[1:]
    np.testing.assert_allclose(got, expected, atol=0.02)


def test_a_whole_factor_is_block_sums() -> None:
    for shape in ((1, 2, 5, 4), ("n", 2, "h", "w")):
        nodes = vjp(model(shape, None, [1, 1, 2, 3], None), wrt="x").graph.node
        assert [n.op_type for n in nodes if n.op_type != "Resize"] == ["AveragePool", "Mul"]

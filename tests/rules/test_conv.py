"""What convolution and pooling emit, an empty batch, and the oracle's own kernels against onnxruntime's."""

from __future__ import annotations

import contextlib
import itertools
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx.reference import ReferenceEvaluator

from gradgraph.errors import ModelError
from gradgraph.graph.shapes import IR_VERSION, OPSET
from gradgraph.transforms import vjp
from gradgraph.verify.reference import KERNELS

Shape = tuple[int | str, ...]


def one_node(op_type: str, x: Shape, weights: list[np.ndarray], outputs: int = 1, **attrs: Any) -> onnx.ModelProto:
    names, ys = ["x", "w", "b"][: len(weights) + 1], ["y", "indices"][:outputs]
    types = [onnx.TensorProto.FLOAT, onnx.TensorProto.INT64]
    graph = onnx.helper.make_graph(
        [onnx.helper.make_node(op_type, names, ys, **attrs)],
        "one",
        [onnx.helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, x)],
        [onnx.helper.make_tensor_value_info(y, t, None) for y, t in zip(ys, types, strict=False)],
        [onnx.numpy_helper.from_array(w, n) for w, n in zip(weights, names[1:], strict=True)],
    )
    return onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", OPSET)], ir_version=IR_VERSION)


def numbers(*shape: int) -> np.ndarray:
    return np.random.default_rng(0).normal(size=shape).astype(np.float32)


def run(model: onnx.ModelProto, feeds: dict[str, np.ndarray]) -> list[Any]:
    return list(ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"]).run(None, feeds))


# --- the oracle ----------------------------------------------------------------------------------------

GEOMETRY = [
    {"strides": [s] * 2, "pads": [begin, 0, end, 1], "dilations": [d, 1]}
    for s, (begin, end), d in itertools.product((1, 2, 3), ((0, 0), (1, 0), (1, 1)), (1, 2))
]


def assert_same(model: onnx.ModelProto, x: np.ndarray) -> None:
    ours = ReferenceEvaluator(model, new_ops=list(KERNELS)).run(None, {"x": x})
    for a, b in zip(ours, run(model, {"x": x}), strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("attrs", GEOMETRY)
def test_oracle_convolves_as_onnxruntime(attrs: dict[str, Any]) -> None:
    x, w, b = numbers(2, 4, 8, 7), numbers(6, 2, 3, 2), numbers(6)
    assert_same(one_node("Conv", x.shape, [w, b], group=2, **attrs), x)
    room = [s - 1 for s in attrs["strides"]]
    up = one_node("ConvTranspose", x.shape, [numbers(4, 3, 3, 2), b], group=2, output_padding=room, **attrs)
    assert_same(up, x)


@pytest.mark.parametrize("ceil", [0, 1])
@pytest.mark.parametrize("attrs", GEOMETRY)
def test_oracle_pools_as_onnxruntime(attrs: dict[str, Any], ceil: int) -> None:
    x = numbers(2, 3, 8, 7)
    attrs = {**attrs, "kernel_shape": [3, 2], "ceil_mode": ceil}
    for order in (0, 1):
        assert_same(one_node("MaxPool", ("n", "c", "h", "w"), [], outputs=2, storage_order=order, **attrs), x)
    for counted in (0, 1):
        assert_same(one_node("AveragePool", ("n", "c", "h", "w"), [], count_include_pad=counted, **attrs), x)
    assert_same(one_node("LpPool", ("n", "c", "h", "w"), [], p=3, **attrs), x)


# --- windows that ONNX's rules count and runtimes drop ---------------------------------------------------

# size, kernel, stride and padding of an axis; whether the last window that is counted starts behind the end
LAST_WINDOWS = [(3, 1, 3, 0, True), (7, 2, 4, 1, True), (6, 2, 4, 1, True), (4, 1, 3, 0, False), (6, 2, 3, 1, False)]


@pytest.mark.parametrize(("size", "kernel", "stride", "pad", "behind"), LAST_WINDOWS)
def test_a_window_behind_the_end_is_refused(size: int, kernel: int, stride: int, pad: int, behind: bool) -> None:
    attrs = {"kernel_shape": [kernel, 1], "strides": [stride, 1], "pads": [pad, 0, 0, 0], "ceil_mode": 1}
    model = one_node("MaxPool", (1, 2, size, "w"), [], outputs=2, **attrs)  # places of maxima: nothing can be cut off
    said = pytest.raises(ModelError, match=f"along an axis of size {size}, but the last one would start beyond")
    with said if behind else contextlib.nullcontext():
        vjp(model, outputs=["y"], wrt=["x"])


# --- ranks that are not known -----------------------------------------------------------------------------


@pytest.mark.parametrize("ceil", [0, 1])
@pytest.mark.parametrize("op_type", ["MaxPool", "AveragePool", "LpPool"])
def test_a_pool_of_a_tensor_of_unknown_rank(op_type: str, ceil: int) -> None:
    """The kernel tells the rank of what a pool reads."""
    attrs: dict[str, Any] = {"kernel_shape": [2, 2], "strides": [2, 2], "ceil_mode": ceil}
    known = one_node(op_type, (2, 3, 5, 4), [], **attrs)
    unknown = onnx.ModelProto()
    unknown.CopyFrom(known)
    unknown.graph.input.append(onnx.helper.make_tensor_value_info("s", onnx.TensorProto.INT64, ["n"]))
    unknown.graph.node[0].input[0] = "r"
    unknown.graph.node.insert(0, onnx.helper.make_node("Reshape", ["x", "s"], ["r"]))
    x, dy = numbers(2, 3, 5, 4), numbers(2, 3, 3 if ceil else 2, 2)
    expected = run(vjp(known, wrt=["x"]), {"x": x, "y.cotangent": dy})[-1]
    found = run(vjp(unknown, wrt=["x"]), {"x": x, "s": np.array(x.shape), "y.cotangent": dy})[-1]
    assert found.shape == x.shape
    np.testing.assert_allclose(found, expected, rtol=1e-6)


# --- what is emitted -----------------------------------------------------------------------------------

LAYERS = [
    # a change here is a decision about speed, see `input_gradient`, `weight_gradient` and `spread`
    ("Conv", ("n", 16, 8, 8), (32, 16, 1, 1), {}, "x", "Conv Transpose"),
    ("Conv", ("n", 16, 8, 8), (32, 16, 3, 3), {"pads": [1] * 4}, "x", "Conv Slice Transpose"),
    ("Conv", ("n", 16, 8, 8), (16, 1, 3, 3), {"pads": [1] * 4, "group": 16}, "x", "Conv Slice"),
    ("Conv", ("n", 16, 8, 8), (32, 16, 3, 3), {"pads": [1] * 4, "strides": [2] * 2}, "x", "ConvTranspose"),
    ("Conv", ("n", 3, 8, 8), (32, 3, 3, 3), {}, "x", "ConvTranspose"),
    ("Conv", ("n", 16, 8, 8), (32, 16, 1, 1), {}, "w", "MatMul ReduceSum Reshape*3 Transpose"),
    ("Conv", ("n", 16, 8, 8), (32, 16, 3, 3), {}, "w", "Gather MatMul ReduceSum Reshape*5 Transpose*2"),
    ("Conv", ("n", 3, 8, 8), (32, 3, 3, 3), {}, "w", "Conv Transpose*3"),
    ("ConvTranspose", ("n", 16, 8, 8), (16, 8, 2, 2), {"strides": [2] * 2}, "x", "Conv"),
    ("MaxPool", ("n", 16, 8, 8), None, {"kernel_shape": [2] * 2, "strides": [2] * 2}, "x", "MaxPool MaxUnpool"),
    ("AveragePool", ("n", 16, 8, 8), None, {"kernel_shape": [2] * 2, "strides": [2] * 2}, "x", "Mul Resize"),
    ("AveragePool", ("n", 16, 8, 8), None, {"kernel_shape": [3] * 2}, "x", "AveragePool"),
    ("GlobalAveragePool", ("n", 16, 8, 8), None, {}, "x", "Mul"),
]


@pytest.mark.parametrize(("op_type", "x", "w", "attrs", "wrt", "expected"), LAYERS)
def test_common_layers_cost_few_nodes(
    op_type: str, x: Shape, w: tuple[int, ...] | None, attrs: dict[str, Any], wrt: str, expected: str
) -> None:
    model = one_node(op_type, x, [] if w is None else [numbers(*w)], **attrs)
    emitted = sorted(n.op_type for n in vjp(model, outputs="y", wrt=wrt).graph.node[1:])
    counted = [f"{k}*{n}" if n > 1 else k for k, n in ((k, emitted.count(k)) for k in sorted(set(emitted)))]
    assert " ".join(counted) == expected


@pytest.mark.parametrize(("op_type", "x", "w", "attrs", "wrt", "expected"), LAYERS)
def test_an_empty_batch_gives_zeros(
    op_type: str, x: Shape, w: tuple[int, ...] | None, attrs: dict[str, Any], wrt: str, expected: str
) -> None:
    model = one_node(op_type, x, [] if w is None else [numbers(*w)], **attrs)
    empty = np.zeros((0, *x[1:]), np.float32)
    (y,) = run(model, {"x": empty})
    _, gradient = run(vjp(model, outputs="y", wrt=wrt), {"x": empty, "y.cotangent": y})
    assert gradient.shape == (empty.shape if wrt == "x" else w)
    assert not gradient.any()

"""Convolution and pooling against PyTorch, as real models have them: weights known, batch or image sizes open."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest

from gradgraph.graph.shapes import IR_VERSION, OPSET
from gradgraph.transforms import vjp

torch = pytest.importorskip("torch", reason="compares with PyTorch")
F = torch.nn.functional
pytestmark = pytest.mark.torch

Shape = tuple[int, ...]

# the shape of x, the shape of w, the options of torch.nn.functional.conv{1,2,3}d
CONVS: list[tuple[Shape, Shape, dict[str, Any]]] = [
    ((2, 16, 9, 8), (24, 16, 3, 3), {"padding": 1}),
    ((2, 16, 9, 8), (24, 16, 3, 3), {"padding": 1, "stride": 2}),
    ((2, 16, 10, 8), (24, 16, 3, 2), {"padding": (2, 0), "stride": (3, 2), "dilation": (1, 3)}),
    ((2, 3, 15, 16), (8, 3, 7, 7), {"padding": 3, "stride": 2}),
    ((2, 16, 7, 7), (32, 16, 1, 1), {}),
    ((2, 16, 7, 7), (32, 16, 1, 1), {"stride": 2}),
    ((2, 24, 7, 7), (24, 1, 3, 3), {"padding": 1, "groups": 24}),
    ((2, 24, 7, 7), (48, 1, 3, 3), {"padding": 1, "groups": 24, "stride": 2}),
    ((2, 24, 7, 7), (12, 8, 3, 3), {"padding": 1, "groups": 3}),
    ((2, 16, 21), (4, 16, 5), {"stride": 3, "dilation": 2, "padding": 4}),
    ((1, 5, 4, 5, 6), (6, 5, 3, 2, 3), {"padding": 1, "stride": (1, 2, 2)}),
    ((1, 4, 3, 3), (2, 4, 3, 3), {"padding": 6, "dilation": 3}),
]
TRANSPOSED: list[tuple[Shape, Shape, dict[str, Any]]] = [
    ((2, 16, 5, 4), (16, 8, 4, 4), {"padding": 1, "stride": 2}),
    ((2, 16, 5, 4), (16, 8, 3, 3), {"padding": 1, "stride": 2, "output_padding": 1}),
    ((2, 4, 5), (4, 3, 3), {"dilation": 2, "stride": 3}),
    ((2, 6, 5, 4), (6, 2, 3, 3), {"groups": 3, "stride": 2, "padding": 1}),
    ((1, 3, 2, 3, 2), (3, 2, 2, 3, 2), {"stride": 2}),
]
# the shape of x, the size of the window, the options of torch.nn.functional.{max,avg}_pool{1,2,3}d
POOLS: list[tuple[Shape, int, dict[str, Any]]] = [
    ((2, 3, 8, 8), 2, {}),
    ((2, 3, 9, 8), 2, {}),
    ((2, 3, 9, 8), 3, {"stride": 2, "padding": 1}),
    ((2, 3, 9, 8), 3, {"stride": 1, "padding": 1}),
    ((2, 3, 10, 8), 3, {"stride": 3, "ceil_mode": True}),
    ((2, 3, 10, 7), 3, {"stride": 3, "padding": 1, "ceil_mode": True}),
    ((2, 3, 13), 4, {"stride": 2, "padding": 2}),
    ((1, 2, 5, 6, 7), 3, {"stride": 2, "padding": 1, "ceil_mode": True}),
]
OPEN = ["nothing", "batch", "sizes"]


def open_shape(shape: Shape, which: str) -> list[int | str]:
    unknown = {"nothing": 0, "batch": 1, "sizes": len(shape)}[which]
    return [f"d{i}" if i < unknown and i != 1 else d for i, d in enumerate(shape)]


def gradients(
    op_type: str, x: np.ndarray, dy: np.ndarray, attrs: dict[str, Any], which: str, *weights: np.ndarray
) -> list[np.ndarray]:
    """Those of x and the weights, from onnxruntime."""
    names = ["x", "w", "b"][: len(weights) + 1]
    node = onnx.helper.make_node(op_type, names, ["y"], **attrs)
    value = onnx.helper.make_tensor_value_info
    graph = onnx.helper.make_graph(
        [node],
        "one",
        [value("x", onnx.TensorProto.FLOAT, open_shape(x.shape, which))],
        [value("y", onnx.TensorProto.FLOAT, None)],
        [onnx.numpy_helper.from_array(w, n) for w, n in zip(weights, names[1:], strict=True)],
    )
    opset = onnx.helper.make_opsetid("", OPSET)
    model = vjp(onnx.helper.make_model(graph, opset_imports=[opset], ir_version=IR_VERSION), outputs="y", wrt=names)
    session = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    return list(session.run([f"{n}.grad" for n in names], {"x": x, "y.cotangent": dy}))


def check(op_type: str, attrs: dict[str, Any], which: str, f: Callable[..., Any], *shapes: Shape) -> None:
    rng = np.random.default_rng(0)
    arrays = [rng.normal(size=s).astype(np.float32) for s in shapes]
    tensors = [torch.tensor(a, dtype=torch.float64, requires_grad=True) for a in arrays]
    y = f(*tensors)
    dy = rng.normal(size=tuple(y.shape)).astype(np.float32)
    expected = torch.autograd.grad(y, tensors, torch.tensor(dy, dtype=torch.float64))
    got = gradients(op_type, arrays[0], dy, attrs, which, *arrays[1:])
    for g, e in zip(got, expected, strict=True):
        np.testing.assert_allclose(g, e.numpy(), rtol=1e-4, atol=1e-5 * float(e.abs().max()))


def spread(value: int | tuple[int, ...], rank: int) -> list[int]:
    return [value] * rank if isinstance(value, int) else list(value)


def attributes(options: dict[str, Any], rank: int) -> dict[str, Any]:
    """PyTorch's options under ONNX's names."""
    lists = {"stride": "strides", "dilation": "dilations", "output_padding": "output_padding"}
    attrs: dict[str, Any] = {lists[k]: spread(v, rank) for k, v in options.items() if k in lists}
    attrs["pads"] = spread(options.get("padding", 0), rank) * 2
    if "groups" in options:
        attrs["group"] = options["groups"]
    if options.get("ceil_mode"):
        attrs["ceil_mode"] = 1
    return attrs


@pytest.mark.parametrize("which", OPEN)
@pytest.mark.parametrize(("x", "w", "options"), CONVS)
def test_conv(x: Shape, w: Shape, options: dict[str, Any], which: str) -> None:
    rank = len(x) - 2
    f = getattr(F, f"conv{rank}d")
    check("Conv", attributes(options, rank), which, lambda *a: f(*a, **options), x, w, w[:1])


@pytest.mark.parametrize("which", OPEN)
@pytest.mark.parametrize(("x", "w", "options"), TRANSPOSED)
def test_conv_transpose(x: Shape, w: Shape, options: dict[str, Any], which: str) -> None:
    rank, bias = len(x) - 2, (w[1] * options.get("groups", 1),)
    f = getattr(F, f"conv_transpose{rank}d")
    check("ConvTranspose", attributes(options, rank), which, lambda *a: f(*a, **options), x, w, bias)


@pytest.mark.parametrize("which", OPEN)
@pytest.mark.parametrize(("x", "size", "options"), POOLS)
def test_max_pool(x: Shape, size: int, options: dict[str, Any], which: str) -> None:
    rank = len(x) - 2
    attrs = {"strides": [size] * rank, **attributes(options, rank), "kernel_shape": [size] * rank}
    f = getattr(F, f"max_pool{rank}d")
    check("MaxPool", attrs, which, lambda a: f(a, size, **options), x)


@pytest.mark.parametrize("which", OPEN)
@pytest.mark.parametrize("count", [0, 1])
@pytest.mark.parametrize(("x", "size", "options"), POOLS)
def test_average_pool(x: Shape, size: int, options: dict[str, Any], count: int, which: str) -> None:
    rank = len(x) - 2
    attrs = {"strides": [size] * rank, **attributes(options, rank), "kernel_shape": [size] * rank}
    f = getattr(F, f"avg_pool{rank}d")
    check(
        "AveragePool",
        {**attrs, "count_include_pad": count},
        which,
        lambda a: f(a, size, **options, count_include_pad=bool(count)),
        x,
    )


@pytest.mark.parametrize("which", OPEN)
def test_global_pools(which: str) -> None:
    x = (2, 3, 4, 5)
    check("GlobalMaxPool", {}, which, lambda a: F.adaptive_max_pool2d(a, 1), x)
    check("GlobalAveragePool", {}, which, lambda a: F.adaptive_avg_pool2d(a, 1), x)
    check(
        "LpPool",
        {"kernel_shape": [2, 2], "p": 3},
        which,
        lambda a: (F.avg_pool2d(a.abs() ** 3, 2, 1) * 4) ** (1 / 3),
        x,
    )


@pytest.mark.parametrize("which", ["nothing", "sizes"])
def test_windows_behind_the_end(which: str) -> None:
    """ONNX's shape inference counts a window that no runtime has."""
    x, options = (2, 3, 10, 8), {"stride": 3, "padding": 1, "ceil_mode": True}
    attrs = {**attributes(options, 2), "kernel_shape": [2, 2]}
    check("MaxPool", attrs, which, lambda a: F.max_pool2d(a, 2, **options), x)
    check("AveragePool", attrs, which, lambda a: F.avg_pool2d(a, 2, **options, count_include_pad=False), x)
    check("AveragePool", attrs | {"count_include_pad": 1}, which, lambda a: F.avg_pool2d(a, 2, **options), x)


@pytest.mark.parametrize("which", ["nothing", "batch"])
def test_the_maximum_of_equals_is_the_first(which: str) -> None:
    x = np.zeros((1, 1, 4, 4), np.float32)
    t = torch.tensor(x, requires_grad=True)
    for stride in (1, 2):
        y = F.max_pool2d(t, 2, stride)
        (expected,) = torch.autograd.grad(y.sum(), t)
        attrs = {"kernel_shape": [2, 2], "strides": [stride, stride]}
        (got,) = gradients("MaxPool", x, np.ones(tuple(y.shape), np.float32), attrs, which)
        np.testing.assert_array_equal(got, expected.numpy())

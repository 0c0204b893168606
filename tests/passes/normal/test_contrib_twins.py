"""Operators of com.microsoft that ONNX has, too: onnxruntime's kernels compute the same as their standard forms."""

from __future__ import annotations

import numpy as np
import pytest

import gradgraph as gg
from gradgraph.errors import ModelError, UnsupportedOperatorError
from tests.kit.differences import wrong_gradients
from tests.kit.small_models import assert_same, model_of, normal_form, real, run
from tests.passes.normal.test_contrib import MICROSOFT, check, check_values, fused


def with_constants(op, feeds, constants, attrs, outputs=("y",)):
    """A node whose inputs ``constants`` are stored."""
    model, _ = fused(op, feeds | constants, attrs, outputs)
    weights = {n: a for n, a in constants.items() if a is not None}
    return model_of(model.graph.node, feeds, outputs, 17, weights, domains=MICROSOFT), feeds


def whole(*numbers, dtype: type = np.int64):
    return np.array(numbers, dtype)


@pytest.mark.sweep(0.3)
@pytest.mark.parametrize("upper", [None, 0, 1])
@pytest.mark.parametrize("k", [None, 0, 1, -2, 9], ids=str)
@pytest.mark.parametrize("shape", [(3, 4), (2, 4, 3)], ids=str)
def test_trilu(shape, k, upper):
    feeds = {"x": real(*shape), "k": None if k is None else np.array(k)}
    check(*fused("Trilu", feeds, {} if upper is None else {"upper": upper}))


@pytest.mark.parametrize("axis", [0, 1, 2, -1, -2, -3])
def test_expand_dims(axis):
    check(*with_constants("ExpandDims", {"x": real(2, 3)}, {"a": np.array(axis, np.int32)}, {}))


INDICES = {
    "elements": [[0, 1, 2], [1, 2, 0], [1, 2, 0]],
    "slices": [[1], [0]],
    "negative": [[-1, -3], [1, 0]],
    "two axes": [[[0, 1], [1, 0]]],
}


@pytest.mark.parametrize("dtype", [np.int32, np.int64])
@pytest.mark.parametrize("case", INDICES)
def test_gather_nd(case, dtype):
    feeds = {"x": real(2, 3, 4), "i": np.array(INDICES[case], dtype)}
    model, given = fused("GatherND", feeds, {})
    check(model, given)


PADS = {
    "constant": ([1, 0, 2, 1], None),
    "value": ([1, 0, 2, 1], np.array(0.5, np.float32)),
    "value of shape [1]": ([1, 0, 2, 1], np.array([0.5], np.float32)),
    "of two axes": ([[0, 2, 1, 0]], None),
    "negative": ([-1, 1, 0, -1], None),
}


@pytest.mark.sweep(0.4)
@pytest.mark.parametrize("fed", [False, True])
@pytest.mark.parametrize("mode", ["constant", "reflect", "edge"])
@pytest.mark.parametrize("case", PADS)
def test_pad(case, mode, fed):
    pads, value = PADS[case]
    if mode != "constant" and (case == "negative" or value is not None):
        pytest.skip("onnxruntime's kernel reads the value in the mode 'constant' only, and removes nothing in others")
    x, rest = {"x": real(3, 4)}, {"p": np.array(pads), "v": value}
    model = fused("Pad", x | rest, {"mode": mode}) if fed else with_constants("Pad", x, rest, {"mode": mode})
    check(*model, wrt=["x"])


@pytest.mark.sweep(0.3)
@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.int32, np.int64])
@pytest.mark.parametrize("shape", [(), (1,)], ids=str)
@pytest.mark.parametrize("numbers", [(0, 5, None), (1, 8, 3), (5, 0, -2)], ids=str)
def test_range(numbers, shape, dtype):
    feeds = {n: None if a is None else np.full(shape, a, dtype) for n, a in zip("sld", numbers, strict=True)}
    check_values(*fused("Range", feeds, {}))


def test_unique():
    x = np.array([2, 1, 1, 3, 4, 3, 2], np.float32)
    check_values(*fused("Unique", {"x": x}, {}, ["y", "i", "n"]))
    check(*fused("Unique", {"x": np.array([2, 1, 3, 0.5], np.float32)}, {}, ["y", "i", "n"]))


@pytest.mark.sweep(0.4)
@pytest.mark.parametrize("step", [1, 2, 3])
@pytest.mark.parametrize("dim", [0, 1, -1, -2])
@pytest.mark.parametrize("dynamic", [False, True])
def test_unfold_tensor(dim, step, dynamic):
    check(*fused("UnfoldTensor", {"x": real(5, 6, 4)}, {"dim": dim, "size": 3, "step": step}, dynamic=dynamic))


@pytest.mark.parametrize("shape", [(1, 1), (2, 2), (3, 4, 4), (2, 1, 6, 6), (0, 3, 3)], ids=str)
def test_inverse(shape):
    x = real(*shape) + 2 * np.eye(shape[-1], dtype=np.float32)
    model, given = fused("Inverse", {"x": x}, {})
    check(model, given, atol=1e-4) if x.size else check_values(model, given)


@pytest.mark.parametrize("rows, columns", [(1e-6, 1.0), (1e6, 1e10), (1e-30, 1.0), ("several", "several")], ids=str)
def test_the_determinants_of_an_inverse_neither_overflow_nor_vanish(rows, columns):
    several = np.logspace(-8, 5, 8)
    rows, columns = (several if n == "several" else n for n in (rows, columns))
    x = ((0.3 * real(8, 8) + 2 * np.eye(8)) * np.reshape(rows, (-1, 1)) * columns).astype(np.float32)
    model, given = fused("Inverse", {"x": x}, {})
    expected = np.linalg.inv(x.astype(np.float64)).astype(np.float32)
    assert_same([expected], run(normal_form(model), given), rtol=1e-3, atol=0)


@pytest.mark.parametrize("dynamic", [False, True])
def test_larger_matrices_keep_their_operator(dynamic):
    x = real(9, 9) + 3 * np.eye(9, dtype=np.float32)
    model, given = fused("Inverse", {"x": x}, {}, dynamic=dynamic)
    assert_same(run(model, given), run(normal_form(model), given))
    with pytest.raises(UnsupportedOperatorError, match=r"\(node 'fused'\), as its matrices have more than 8 rows"):
        gg.vjp(model, wrt=["x"])


def test_sample_op():
    check(*fused("SampleOp", {"x": real(2, 3)}, {}))


@pytest.mark.parametrize("metric", ["euclidean", "sqeuclidean", None])
def test_distances(metric):
    feeds = {"a": real(4, 3), "b": real(5, 3, seed=1)}
    check(*fused("CDist", feeds, {"metric": metric} if metric else {}), atol=1e-5)


def test_the_distance_of_a_row_to_itself_has_a_finite_gradient():
    x = {"x": real(3, 2), "z": real(3, 2)}
    model, _ = fused("CDist", x, {"metric": "euclidean"})
    gradient = gg.vjp(model, wrt=["x", "z"])
    results = run(gradient, x | {"y.cotangent": np.ones((3, 3), np.float32)})
    assert all(np.isfinite(r).all() for r in results)


GRID = np.random.default_rng(0).uniform(-1.3, 1.3, (2, 3, 4, 2)).astype(np.float32)


@pytest.mark.sweep(0.4)
@pytest.mark.parametrize("align", [0, 1])
@pytest.mark.parametrize("padding", ["zeros", "border", "reflection"])
@pytest.mark.parametrize("mode", [None, "bilinear", "bicubic", "nearest"])
def test_grid_sample(mode, padding, align):
    attrs = {"align_corners": align, "padding_mode": padding} | ({"mode": mode} if mode else {})
    wrt = ["x"] if mode == "nearest" else None
    check(*fused("GridSample", {"x": real(2, 3, 4, 5), "g": GRID}, attrs), wrt=wrt, atol=1e-5)


BOXES = np.array([[0.1, 0.2, 0.8, 0.9], [-0.2, 0.0, 0.55, 1.3], [0.9, 0.75, 0.15, 0.05], [0, 0, 1, 1]], np.float32)


@pytest.mark.sweep(0.5)
@pytest.mark.parametrize("size", [(3, 4), (1, 2), (4, 1)], ids=str)
@pytest.mark.parametrize("mode", ["bilinear", "nearest"])
@pytest.mark.parametrize("value", [0.0, 2.5])
def test_crop_and_resize(size, mode, value):
    feeds = {
        "x": real(2, 3, 5, 6),
        "r": BOXES,
        "b": whole(0, 1, 1, 0, dtype=np.int32),
        "s": whole(*size, dtype=np.int32),
    }
    attrs = {"mode": mode, "extrapolation_value": value}
    check(*fused("CropAndResize", feeds, attrs), wrt=["x"], atol=1e-5)


@pytest.mark.parametrize("mode", ["bilinear", "nearest"])
@pytest.mark.parametrize("image", [(16, 9), (1, 7), (1, 1)], ids=str)
def test_boxes_that_end_at_the_border_of_the_image(image, mode):
    """Their last points are inside, although the positions of points are rounded; a single pixel has no outside."""
    low = np.random.default_rng(0).uniform(-0.2, 0.8, (50, 2)).astype(np.float32)
    boxes = np.concatenate([low, np.ones_like(low)], 1)
    boxes[::2] = boxes[::2, [2, 3, 0, 1]]
    feeds = {"x": real(1, 1, *image) + 9, "r": boxes, "b": np.zeros(50, np.int32), "s": whole(11, 7, dtype=np.int32)}
    check_values(*fused("CropAndResize", feeds, {"mode": mode}), atol=1e-3)


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("size", [(3, 4), (1, 2)], ids=str)
def test_boxes_have_gradients(size, dynamic):
    """Of points that are not on a pixel, where slopes jump."""
    inner = np.array([[0.13, 0.23, 0.81, 0.93], [0.91, 0.77, 0.17, 0.07]], np.float32)
    feeds = {"x": real(2, 3, 5, 6), "r": inner, "b": whole(0, 1, dtype=np.int32), "s": whole(*size, dtype=np.int32)}
    check(*fused("CropAndResize", feeds, {}, dynamic=dynamic), atol=1e-5)


@pytest.mark.sweep(0.5)
@pytest.mark.parametrize("fed", [False, True])
@pytest.mark.parametrize("pads", [[0, 0, 0, 0], [1, 0, 0, 2], [1, 1, 1, 1]], ids=str)
@pytest.mark.parametrize(
    "attrs", [{}, {"strides": [2, 1]}, {"strides": [2, 2], "output_padding": [1, 0], "group": 2}], ids=str
)
def test_transposed_convolution(attrs, pads, fed):
    x = {"x": real(1, 4, 5, 4), "w": real(4, 2, 3, 3, seed=1)}
    rest = {"p": np.array(pads), "b": real(2 * attrs.get("group", 1), seed=2)}
    if fed:
        model, given = fused("ConvTransposeWithDynamicPads", x | rest, attrs)
    else:
        model, given = with_constants("ConvTransposeWithDynamicPads", x, rest, attrs)
    check(model, given, atol=1e-5)


# onnxruntime has no kernels of the next ones for the CPU: the formula is the expectation


@pytest.mark.parametrize("op", ["ComplexMul", "ComplexMulConj"])
@pytest.mark.parametrize("shapes", [((3, 4, 2), (3, 4, 2)), ((3, 4, 2), (4, 2))], ids=str)
def test_products_of_complex_numbers(op, shapes):
    a, b = (real(*s, seed=i) for i, s in enumerate(shapes))
    z, w = (x[..., 0] + 1j * x[..., 1] for x in (a, b))
    expected = z * (w.conj() if op == "ComplexMulConj" else w)
    model, given = fused(op, {"a": a, "b": b}, {})
    found = normal_form(model)
    assert_same([np.stack([expected.real, expected.imag], -1)], run(found, given))
    assert wrong_gradients(model, found, given, ["a", "b"]) == []


@pytest.mark.parametrize("size", [8, 6])
def test_rfft(size):
    x = real(2, 3, size)
    model, given = fused("Rfft", {"x": x}, {"signal_ndim": 1})
    expected = np.fft.rfft(x)
    found = normal_form(model)
    assert_same([np.stack([expected.real, expected.imag], -1).astype(np.float32)], run(found, given), atol=1e-5)
    assert wrong_gradients(model, found, given, ["x"]) == []


@pytest.mark.parametrize("padding", [None, -1])
def test_torch_embedding(padding):
    feeds = {"w": real(5, 3), "i": np.array([[0, 4], [2, 2]])}
    rest = {} if padding is None else {"p": np.array(padding), "f": np.array(False)}
    model, given = with_constants("TorchEmbedding", feeds, rest, {})
    found = normal_form(model)
    assert_same([feeds["w"][feeds["i"]]], run(found, given))
    assert wrong_gradients(model, found, given, ["w"]) == []


REFUSED = {
    "'fused'.*the metric 'cosine'": ("CDist", {"a": real(2, 3), "b": real(2, 3)}, {"metric": "cosine"}),
    "'fused'.*scales gradients by the frequency": (
        "TorchEmbedding",
        {"w": real(5, 3), "i": whole(1, 2), "p": None, "f": np.array(True)},
        {},
    ),
    "'fused'.*a row for padding": ("TorchEmbedding", {"w": real(5, 3), "i": whole(1, 2), "p": np.array(0)}, {}),
    "'fused'.*transforms several axes": ("Rfft", {"x": real(2, 8)}, {"signal_ndim": 2}),
    "'fused'.*auto_pad='SAME_UPPER'": (
        "ConvTransposeWithDynamicPads",
        {"x": real(1, 2, 3, 3), "w": real(2, 2, 3, 3), "p": whole(1, 1, 1, 1)},
        {"auto_pad": "SAME_UPPER"},
    ),
}


@pytest.mark.parametrize("message", REFUSED)
def test_an_option_without_a_form_is_named(message):
    model, _ = fused(*REFUSED[message])
    with pytest.raises(ModelError, match=message):
        normal_form(model)

"""auto_pad and output_shape become explicit pads, for sizes known and unknown."""

import itertools

import numpy as np
import onnx_ir as ir
import pytest
from onnx import helper

from gradgraph.errors import ModelError
from gradgraph.passes.normal import normalise
from tests.kit.small_models import assert_same, model_of, normal_form, op_types, real, run

MODES = ["SAME_UPPER", "SAME_LOWER", "VALID"]
WINDOWS = [
    {"kernel_shape": [3, 3]},
    {"kernel_shape": [3, 2], "strides": [2, 3]},
    {"kernel_shape": [2, 4], "strides": [3, 1]},
]
TRANSPOSED = [
    {"kernel_shape": [3, 3]},
    {"kernel_shape": [3, 4], "strides": [2, 3]},
    {"kernel_shape": [4, 3], "strides": [2, 2]},
]
X = real(2, 3, 7, 8)


def _weight(op, window):
    return {"w": real(3, 2, *window["kernel_shape"]) if op == "ConvTranspose" else real(2, 3, *window["kernel_shape"])}


def _model(op, dynamic, attrs, weights):
    x = (np.float32, ["n", 3, "h", "w"]) if dynamic else X
    return model_of([helper.make_node(op, ["x", *weights], ["y"], **attrs)], {"x": x}, weights=weights)


POOLS = [("MaxPool", {}), ("AveragePool", {}), ("AveragePool", {"count_include_pad": 1}), ("LpPool", {"p": 2})]


@pytest.mark.sweep(0.607)
@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize(("mode", "window"), list(itertools.product(MODES, WINDOWS)), ids=str)
@pytest.mark.parametrize(("op", "extra"), [("Conv", {}), *POOLS], ids=str)
def test_windows(op, extra, mode, window, dynamic):
    weights = _weight(op, window) if op == "Conv" else {}
    model = _model(op, dynamic, {**window, **extra, "auto_pad": mode}, weights)
    found = normal_form(model)
    assert_same(run(model, {"x": X}), run(found, {"x": X}), rtol=1e-4)
    node = next(n for n in found.graph.node if n.op_type == op)
    assert "auto_pad" not in {a.name for a in node.attribute}
    assert "pads" in {a.name for a in node.attribute}
    if not dynamic or mode == "VALID" or set(window.get("strides", [1])) == {1}:
        assert op_types(found) == [op]


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("op", ["MaxPool", "AveragePool"])
@pytest.mark.parametrize("ceil_mode", [0, 1])
def test_strides_larger_than_the_kernel_need_no_pads(op, ceil_mode, dynamic):
    attrs = {"kernel_shape": [1, 1], "strides": [2, 2], "auto_pad": "SAME_UPPER", "ceil_mode": ceil_mode}
    assert_same([X[:, :, ::2, ::2]], run(normal_form(_model(op, dynamic, attrs, {})), {"x": X}))


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize(("mode", "pads"), [("SAME_UPPER", [1, 1, 1, 2]), ("SAME_LOWER", [1, 2, 1, 1])])
@pytest.mark.parametrize("op", ["Conv", "MaxPool", "AveragePool"])
def test_dilations_count(op, mode, pads, dynamic):
    """Not compared with the same model before: onnxruntime refuses, or forgets, dilations here."""
    window = {"kernel_shape": [2, 2], "strides": [3, 1], "dilations": [2, 3]}
    if op == "AveragePool" and not dynamic:
        pytest.skip("refused: see test_what_cannot_be_made_explicit_is_named")
    weights = _weight(op, window) if op == "Conv" else {}
    found = run(normal_form(_model(op, dynamic, {**window, "auto_pad": mode}, weights)), {"x": X})
    before = np.pad(X, [(0, 0), (0, 0), *zip(pads[:2], pads[2:], strict=True)], constant_values=-np.inf)
    filled = np.maximum(before, -1e9) if op == "MaxPool" else np.where(np.isinf(before), 0, before)
    model = _model(op, True, window, weights)
    expected = run(model, {"x": filled})[0]
    if op == "AveragePool":
        expected = expected / run(model, {"x": np.isfinite(before).astype(np.float32)})[0]
    assert_same([expected], found, rtol=1e-4)


@pytest.mark.parametrize("extra", [{}, {"output_padding": [1, 0]}], ids=str)
@pytest.mark.parametrize(("mode", "window"), list(itertools.product(MODES, TRANSPOSED)), ids=str)
def test_transposed_convolution(mode, window, extra):
    if extra and window.get("strides", [1])[0] == 1:
        pytest.skip("output_padding must be smaller than the stride")
    model = _model("ConvTranspose", False, {**window, **extra, "auto_pad": mode}, _weight("ConvTranspose", window))
    assert_same(run(model, {"x": X}), run(normal_form(model), {"x": X}), rtol=1e-4)


@pytest.mark.parametrize("mode", ["NOTSET", "SAME_UPPER", "SAME_LOWER"])
@pytest.mark.parametrize("output_shape", [[14, 16], [13, 15], [15, 17], [12, 13]], ids=str)
def test_transposed_convolution_to_a_shape(output_shape, mode):
    window = {"kernel_shape": [3, 3], "strides": [2, 2]}
    attrs = {**window, "output_shape": output_shape, "auto_pad": mode}
    model = _model("ConvTranspose", False, attrs, _weight("ConvTranspose", window))
    found = normal_form(model)
    assert_same(run(model, {"x": X}), run(found, {"x": X}), rtol=1e-4)
    assert "output_shape" not in {a.name for a in found.graph.node[0].attribute}


def test_transposed_convolution_to_a_shape_larger_than_the_windows_reach():
    window = {"kernel_shape": [2, 2], "strides": [3, 3]}
    model = _model("ConvTranspose", False, {**window, "output_shape": [21, 24]}, _weight("ConvTranspose", window))
    assert_same(run(model, {"x": X}), run(normal_form(model), {"x": X}), rtol=1e-4)


REFUSED = [
    ("MaxPool", {"kernel_shape": [2, 2], "strides": [2, 2], "auto_pad": "SAME_UPPER"}, 2, "unknown until run time"),
    ("ConvTranspose", {"strides": [2, 2], "output_shape": [9, 9]}, 1, "input's size is unknown"),
    (
        "AveragePool",
        {"kernel_shape": [2, 2], "dilations": [3, 3], "auto_pad": "SAME_UPPER"},
        1,
        "as large as its kernel",
    ),
    ("ConvTranspose", {"strides": [4, 4], "auto_pad": "SAME_UPPER"}, 1, "runtimes disagree"),
]


@pytest.mark.parametrize(("op", "attrs", "outputs", "message"), REFUSED, ids=lambda v: v if isinstance(v, str) else "")
def test_what_cannot_be_made_explicit_is_named(op, attrs, outputs, message):
    names = ["y", "z"][:outputs]
    weights = {"w": real(3, 2, 3, 3)} if op == "ConvTranspose" else {}
    node = helper.make_node(op, ["x", *weights], names, name="here", **attrs)
    dims = ["n", 3, 7, 8] if "dilations" in attrs else ["n", 3, "h", "w"]
    model = model_of([node], {"x": (np.float32, dims)}, names, weights=weights)
    with pytest.raises(ModelError, match=message) as caught:
        normalise(ir.from_proto(model))
    assert "'here'" in str(caught.value)


DEFAULTS = [
    ("Conv", {"w": real(2, 3, 3, 2)}, {"kernel_shape": [3, 2], "strides": [1, 1], "pads": [0] * 4, "group": 1}),
    ("ConvTranspose", {"w": real(3, 2, 3, 2)}, {"kernel_shape": [3, 2], "output_padding": [0, 0], "dilations": [1, 1]}),
    ("MaxPool", {}, {"strides": [1, 1], "dilations": [1, 1], "pads": [0] * 4, "ceil_mode": 0, "storage_order": 0}),
    ("AveragePool", {}, {"strides": [1, 1], "dilations": [1, 1], "count_include_pad": 0}),
]


@pytest.mark.parametrize(("op", "weights", "expected"), DEFAULTS, ids=lambda v: v if isinstance(v, str) else "")
def test_defaults_of_windows_are_written(op, weights, expected):
    attrs = {} if weights else {"kernel_shape": [2, 2]}
    node = normal_form(_model(op, True, attrs, weights)).graph.node[0]
    found = {a.name: helper.get_attribute_value(a) for a in node.attribute}
    assert {k: found[k] for k in expected} == expected

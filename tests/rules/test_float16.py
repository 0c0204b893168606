"""Rules in float16, where onnxruntime rounds what some operators give and not what others do.

A rule that compares an output with an input then finds no winner. So every case of every rule is tried in the forms of
``float16_forms.py``. ``python -m pytest tests/rules/test_float16.py -k Clip`` tries one rule.
"""

from __future__ import annotations

import numpy as np
import onnx
import onnx.parser
import pytest
from onnx import numpy_helper

import gradgraph as gg
from gradgraph.rules.registry import RULES, Case, Rule
from gradgraph.verify.reference import Oracle
from tests.kit.float16_forms import disagreements, in_float64, reason_to_skip
from tests.kit.running import Loop, run

CASES = [pytest.param(r, c, id=f"{r.op_type}-{i}") for r in RULES.values() for i, c in enumerate(r.cases)]


@pytest.mark.sweep(0.06)
@pytest.mark.parametrize(("rule", "case"), CASES)
def test_gradients_do_not_depend_on_what_is_rounded(rule: Rule, case: Case) -> None:
    if reason := reason_to_skip(rule, case):
        pytest.skip(reason)
    assert disagreements(rule, case) == []


# --- by hand -----------------------------------------------------------------------------------------------

TYPED = {np.float16: "float16", np.float64: "double"}


def written(text: str, dtype: type[np.floating]) -> onnx.ModelProto:
    """A model whose ``real`` is ``dtype``; numbers in it are whole, as the text form takes bits for float16."""
    source = f'<ir_version: 10, opset_import: ["": 21]> g {text}'.replace("real", TYPED[dtype])
    return onnx.parser.parse_model(source)


CHOICES = {
    "Clip": "a = Exp(x)  y = Clip(a, c, d)",
    "Max": "a = Mul(x, x)  y = Max(a, w)",
    "Max of three": "a = Mul(x, x)  b = Sin(w)  y = Max(a, w, b)",
    "Min": "a = Exp(x)  b = Mul(w, w)  y = Min(a, b)",
    "ReduceMax": "a = Exp(x)  y = ReduceMax<keepdims = 0>(a, one)",
    "ReduceMin": "a = Exp(x)  y = ReduceMin(a, one)",
    "Scatter max": "a = Exp(x)  b = Exp(w)  y = ScatterElements<axis = 1, reduction = 'max'>(a, at, b)",
    "Scatter min": "a = Exp(x)  b = Mul(w, w)  y = ScatterElements<axis = 1, reduction = 'min'>(a, at, b)",
    "MaxPool": "a = Exp(x)  i = Unsqueeze(a, zero)  y = MaxPool<kernel_shape = [3], strides = [2]>(i)",
    "TopK": "a = Exp(x)  y, places = TopK<axis = 1>(a, four)",
    "HardSigmoid": "a = Mul(x, w)  y = HardSigmoid<alpha = 0.5>(a)",
    "Relu of a product": "a = Mul(x, w)  y = Relu(a)",
    "Mod": "a = Exp(x)  b = Exp(w)  y = Mod<fmod = 1>(a, b)",
    "a ReLU6 between products": "a = MatMul(x, w)  b = Clip(a, c, d)  y = MatMul(b, w)",
}


@pytest.mark.parametrize("choice", CHOICES)
def test_a_choice_among_computed_numbers_is_the_same(choice: str) -> None:
    body = CHOICES[choice].replace("'", '"')
    size = "[8, 8]"
    text = (
        f"(real{size} x, real{size} w, real c, real d, int64{size} at) => (real[] z) "
        "<int64[1] one = {1}, int64[1] zero = {0}, int64[1] four = {4}, int64[1] all = {-1}>"
        f" {{ {body}  z = Reshape(y, all) }}"
    )
    rng = np.random.default_rng(0)
    x, w = rng.normal(size=(2, 8, 8)).astype(np.float16)
    feeds = {"x": x, "w": w, "c": np.array(0, np.float16), "d": np.array(6, np.float16)}
    feeds["at"] = rng.integers(0, 8, (8, 8))
    exact = gg.vjp(written(text, np.float64), wrt=["x", "w"], allow_unused=True)
    half = gg.vjp(written(text, np.float16), wrt=["x", "w"], allow_unused=True)
    assert isinstance(exact, onnx.ModelProto)
    assert isinstance(half, onnx.ModelProto)
    size_of_z = Oracle(written(text, np.float64))(in_float64(feeds))["z"].shape
    feeds["z.cotangent"] = rng.uniform(0.5, 1.0, size_of_z).astype(np.float16)
    found, wanted = run(half, feeds), Oracle(exact)(in_float64(feeds))
    for name in ("x.grad", "w.grad"):
        np.testing.assert_allclose(found[name].astype(np.float64), wanted[name], rtol=1e-2, atol=1e-2, err_msg=name)


THRESHOLDS = [0.1, 0.2, 0.3, 0.7, 1.1, 2.3]  # float16 has a number just above or just below each


@pytest.mark.parametrize("threshold", THRESHOLDS)
@pytest.mark.parametrize("op_type", ["Shrink", "ThresholdedRelu"])
def test_beside_a_threshold_the_slope_is_that_of_the_value(op_type: str, threshold: float) -> None:
    """The threshold is float32: of two neighbours in float16 between which it lies, one passes."""
    near = np.float16(threshold)
    x = np.array([np.nextafter(near, np.float16(-9)), near, np.nextafter(near, np.float16(9))], np.float16)
    attribute = "lambd" if op_type == "Shrink" else "alpha"
    model = written(f"(real[3] x) => (real[3] y) {{ y = {op_type}<{attribute} = {threshold}>(x) }}", np.float16)
    found = run(gg.vjp(model, wrt="x"), {"x": x, "y.cotangent": np.ones(3, np.float16)})
    passes = x.astype(np.float64) > float(np.float32(threshold))
    assert found["x.grad"].tolist() == passes.tolist() == (found["y"] != 0).tolist()


def test_a_network_with_relu6_trains_in_float16() -> None:
    """Its hidden numbers are computed, its limits are constants, and what passes them goes on."""
    model = written(
        "(real[n, 8] x) => (real[n, 1] y) <real c = {0}, real d = {17920}>"
        " { a = MatMul(x, w)  b = Exp(a)  h = Clip(b, c, d)  t = Concat<axis = 1>(h, x)  y = MatMul(t, v) }",
        np.float16,
    )
    rng = np.random.default_rng(0)
    for name, size in (("w", (8, 16)), ("v", (24, 1))):
        weight = (rng.normal(size=size) / 4).astype(np.float16)
        model.graph.initializer.append(numpy_helper.from_array(weight, name))
    step = gg.build(model, loss="mse", optimizer=gg.optim.sgd(0.02), train="w")
    train = Loop(step)
    x = rng.normal(size=(32, 8)).astype(np.float16)
    feeds = {"x": x, "target": (x @ rng.normal(size=(8, 1))).astype(np.float16)}
    losses = [float(train(feeds)["loss"]) for _ in range(20)]
    assert losses[-1] < 0.8 * losses[0]


GUARDED = {
    "ReduceL2": "y = ReduceL2(a, one)",
    "ReduceProd": "y = ReduceProd(a, one)",
    "ReduceLogSumExp": "y = ReduceLogSumExp(a, one)",
    "Pow": "y = Pow(a, w)",
    "LpNormalization": "y = LpNormalization(a)",
    "LpPool": "i = Unsqueeze(a, zero)  y = LpPool<kernel_shape = [2]>(i)",
    "GlobalLpPool": "i = Unsqueeze(a, zero)  y = GlobalLpPool<p = 3>(i)",
}


@pytest.mark.parametrize("number", [0.0, 2e-5])
@pytest.mark.parametrize("operator", GUARDED)
def test_what_rounds_to_nothing_divides_nothing(operator: str, number: float) -> None:
    """Squares of 2e-5 are zero in float16, and are not where they stay unrounded."""
    text = (
        "(real[2, 4] x, real w) => (real[] z) <int64[1] one = {1}, int64[1] zero = {0},"
        f" int64[1] all = {{-1}}> {{ a = Mul(x, x)  {GUARDED[operator]}  z = Reshape(y, all) }}"
    )
    x = np.array([[0.5, number, 2.0, 1.5], [number] * 4], np.float16)
    model = written(text, np.float16)
    feeds = {"x": x, "w": np.array(1, np.float16)}
    gradient = gg.vjp(model, wrt=["x"])
    assert isinstance(gradient, onnx.ModelProto)
    count = run(model, {k: v for k, v in feeds.items() if k in {i.name for i in model.graph.input}})["z"].shape
    found = run(gradient, {**feeds, "z.cotangent": np.ones(count, np.float16)})
    assert np.isfinite(found["x.grad"]).all(), found["x.grad"]

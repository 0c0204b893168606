"""What the rule kit does not reach: numbers in formulas, derivatives at zeros, element types, how little is emitted."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx
import onnx.parser
import pytest

import gradgraph.rules.families  # noqa: F401  (fills the registry)
from gradgraph.rules.registry import RULES, Case, Point, Rule, case, positive, real
from gradgraph.transforms import vjp
from gradgraph.verify import cases
from gradgraph.verify.reference import Oracle
from tests.kit.running import run

FAMILIES = ("elementwise", "activation", "reduction")
HALF = [
    pytest.param(r, c, id=f"{r.op_type}-{i}")
    for r in RULES.values()
    if r.family in FAMILIES and r.op_type not in ("Celu", "Cast")  # Celu knows float32 only; Cast's cases widen
    for i, c in enumerate(r.cases)
]


def model(body: str, inputs: str = "double[2, 3] x") -> onnx.ModelProto:
    """One graph from ONNX's text form, whose numbers are Constant nodes."""
    text = f'<ir_version: 10, opset_import: ["": 21]> g ({inputs}) => (double[M, N] z) {{ {body} }}'
    return onnx.parser.parse_model(text)


def emitted(m: onnx.ModelProto, wrt: Sequence[str]) -> list[str]:
    """The operators that the backward pass adds."""
    result = vjp(m, wrt=list(wrt))
    assert isinstance(result, onnx.ModelProto)
    return [n.op_type for n in result.graph.node if n.name.startswith("grad/")]


@pytest.mark.parametrize("exponent", [-2.0, -1.0, 0.0, 0.5, 1.0, 2.0, 3.0, 2.5])
def test_power_of_one_number(exponent: float) -> None:
    m = model(f"e = Constant<value = double {{ {exponent} }}> () z = Pow(x, e)")
    x = np.random.default_rng(0).uniform(0.5, 2.0, (2, 3))
    for t in (trial := cases.Trial(m, {"x": x}, ["x"], ["z"]), cases.second_order(trial)):
        assert max(f.error for f in cases.check_first_order(t)) < cases.TOLERANCE
    assert len(emitted(m, ["x"])) <= 3


def test_a_trained_exponent_is_read_at_run_time() -> None:
    weight = onnx.numpy_helper.from_array(np.array(2.5), "p")
    m = model("z = Pow(x, p)")
    m.graph.initializer.append(weight)
    result = vjp(m, wrt=["x", "p"])  # named, an exponent is a weight
    assert isinstance(result, onnx.ModelProto)
    trained = next(t for t in result.graph.initializer if t.name == "p")
    trained.CopyFrom(onnx.numpy_helper.from_array(np.array(2.0), "p"))
    x = np.full((2, 3), 5.0)
    np.testing.assert_allclose(Oracle(result)({"x": x, "z.cotangent": np.ones((2, 3))})["x.grad"], 2 * x)


@pytest.mark.parametrize(("low", "high"), [(-0.5, 0.5), (0.5, -0.5), (0.3, 0.3)])
def test_clip_between_numbers(low: float, high: float) -> None:
    m = model(
        f"a = Constant<value = double {{ {low} }}> () b = Constant<value = double {{ {high} }}> () z = Clip(x, a, b)"
    )
    x = np.array([[-2.0, low, 0.0], [0.1, high, 2.0]])
    result = vjp(m, wrt=["x"])
    assert isinstance(result, onnx.ModelProto)
    got = Oracle(result)({"x": x, "z.cotangent": np.ones((2, 3))})["x.grad"]
    np.testing.assert_array_equal(got, (x >= low) & (x <= high))


# --- derivatives of gradients at zeros ---------------------------------------------------------------------

ZEROS: list[tuple[str, Case, Mapping[str, Any]]] = [
    ("ReduceProd", case(real(2, 3), [1]), {"x0": [[0.0, 2.0, 3.0], [1.0, 2.0, 0.0]]}),
    ("ReduceProd", case(real(2, 3), [1], keepdims=0), {"x0": [[0.0, 0.0, 3.0], [0.0, 0.0, 0.0]]}),
    ("Pow", case(positive(3), real(3)), {"x1": [0.0, 1.0, 2.0]}),
]


@pytest.mark.parametrize(("op_type", "call", "at"), ZEROS)
def test_second_order_at_zeros(op_type: str, call: Case, at: Mapping[str, Any]) -> None:
    t = cases.trial(RULES["", op_type], call)
    moved = {name: np.array(values) for name, values in at.items()}
    t = cases.second_order(dataclasses.replace(t, feeds={**t.feeds, **moved}))
    assert max(f.error for f in cases.check_first_order(t)) < cases.TOLERANCE


# --- element types -----------------------------------------------------------------------------------------


@pytest.mark.sweep(0.441)
@pytest.mark.parametrize(("rule", "call"), HALF)
def test_gradient_is_a_valid_model_in_float16(rule: Rule, call: Case) -> None:
    t = cases.trial(rule, call, dtype=np.float16)
    result = vjp(t.model, outputs=t.read, wrt=t.wrt)
    assert isinstance(result, onnx.ModelProto)
    onnx.checker.check_model(result, full_check=True)
    half = onnx.TensorProto.FLOAT16
    assert {o.type.tensor_type.elem_type for o in result.graph.output if o.name.endswith(".grad")} == {half}


def test_cast_gives_the_gradient_its_inputs_type() -> None:
    m = model("z = Cast<to = 11>(x)", "float16[2, 3] x")
    result = vjp(m, wrt=["x"])
    assert isinstance(result, onnx.ModelProto)
    got = Oracle(result)({"x": np.ones((2, 3), np.float16), "z.cotangent": np.full((2, 3), 0.5)})["x.grad"]
    assert got.dtype == np.float16 and (got == 0.5).all()


POINTS = [
    pytest.param(r, p, id=f"{r.op_type}-{i}")
    for r in RULES.values()
    if r.family in FAMILIES
    for i, p in enumerate(r.points)
]


@pytest.mark.parametrize(("rule", "at"), POINTS)
def test_conventions_hold_in_onnxruntime_in_float32(rule: Rule, at: Point) -> None:
    t = cases.trial(rule, at.case, fed=True, dtype=np.float32)
    wanted = {f"x{i}.grad": g for i, g in enumerate(at.gives) if g is not None}
    result = vjp(t.model, outputs=t.read, wrt=[name.removesuffix(".grad") for name in wanted])
    ones = np.ones_like(Oracle(t.model)(t.feeds)["y0"])
    got = run(result, {**t.feeds, "y0.cotangent": ones})
    for name, expected in wanted.items():
        np.testing.assert_allclose(got[name], np.asarray(expected, np.float32), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("size", ["100000", "N"])
def test_mean_of_more_elements_than_float16_counts(size: str) -> None:
    header = f'<ir_version: 10, opset_import: ["": 21]> g (float16[{size}] x) => (float16[1] z)'
    result = vjp(onnx.parser.parse_model(f"{header} {{ z = ReduceMean(x) }}"), wrt=["x"])
    feeds = {"x": np.zeros(100000, np.float16), "z.cotangent": np.full(1, 1024.0, np.float16)}
    np.testing.assert_allclose(run(result, feeds)["x.grad"].astype(float), 0.01024, rtol=0.01)


def test_tanh_gelu_of_large_numbers_in_float16() -> None:
    t = cases.trial(RULES["", "Gelu"], case([300.0, -300.0, 6e4], approximate="tanh"), fed=True, dtype=np.float16)
    got = run(vjp(t.model, outputs=["y0"], wrt=["x0"]), {**t.feeds, "y0.cotangent": np.ones(3, np.float16)})["x0.grad"]
    np.testing.assert_array_equal(got, [1.0, 0.0, 1.0])


# --- few nodes -----------------------------------------------------------------------------------------------

PLAIN = {
    "z = Relu(x)": ["Greater", "Cast", "Mul"],
    "z = LeakyRelu<alpha = 0.1>(x)": ["Greater", "Cast", "Clip", "Mul"],
    "z = Sigmoid(x)": ["Mul", "Sub", "Mul"],
    "z = Tanh(x)": ["Mul", "Sub", "Mul"],
    "z = Elu(x)": ["Min", "Add", "Mul"],
    "z = Exp(x)": ["Mul"],
    "z = Mul(x, x)": ["Mul", "Add"],
    "a = Constant<value = double {-1.0}> () b = Constant<value = double {1.0}> () z = Clip(x, a, b)": [
        "Equal",
        "Cast",
        "Mul",
    ],
    "e = Constant<value = double {2.0}> () z = Pow(x, e)": ["Mul", "Mul"],
    "a = Constant<value = int64[1] {1}> () z = ReduceSum(x, a)": ["Expand"],
    "a = Constant<value = int64[1] {1}> () z = ReduceMean(x, a)": ["Mul", "Expand"],
    "z = ReduceMean(x)": ["Mul", "Expand"],
    "z = Gelu(x)": ["Mul", "Mul", "Sub", "Exp", "Mul", "Erf", "Mul", "Add", "Add", "Mul"],
}


@pytest.mark.parametrize("body", PLAIN)
def test_the_plain_case_is_short(body: str) -> None:
    assert emitted(model(body), ["x"]) == PLAIN[body]

"""Composites are found in their cases, and only where every gradient through them ends at their inputs."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import helper, numpy_helper, parser

import gradgraph as gg
from gradgraph.autodiff.append import append_vjp
from gradgraph.autodiff.select import find_path
from gradgraph.passes.normal import normalise
from gradgraph.rules.composites.table import COMPOSITES, calls
from gradgraph.rules.named_operators import DOMAIN
from gradgraph.rules.registry import Case, Rule, vjp
from gradgraph.verify import cases
from tests.kit import near_misses
from tests.kit.near_misses import found
from tests.kit.small_models import run

CASES = [
    pytest.param(c.rule, case, id=f"{name}-{i}")
    for name, c in COMPOSITES.items()
    for i, case in enumerate(c.rule.cases)
]


@pytest.mark.parametrize(("rule", "case"), CASES)
def test_a_case_is_found(rule: Rule, case: Case) -> None:
    assert not near_misses.is_missed(rule, case)


@pytest.mark.sweep(0.003)
@pytest.mark.parametrize(("rule", "case"), CASES)
def test_what_is_taken_for_a_composite_is_one(rule: Rule, case: Case) -> None:
    assert not near_misses.disagreements(rule, case)


def graph(text: str, outputs: str = "float[2, 3] y", inputs: str = "float[2, 3] x") -> onnx.ModelProto:
    model = parser.parse_model(f'<ir_version: 10, opset_import: ["": 21]> g ({inputs}) => ({outputs}) {{ {text} }}')
    return onnx.shape_inference.infer_shapes(model)


SILU = graph("s = Sigmoid(x)  y = Mul(x, s)")


def test_a_gradient_by_a_value_inside_goes_through_the_parts() -> None:
    """Of y = x·s by s: x."""
    model = graph("s = Sigmoid(x)  y = Mul(x, s)", "float[2, 3] y, float[2, 3] s")
    assert found(model, ["x"]) == {"Silu": 1}
    work = normalise(model)
    s = next(y for node in work.graph for y in node.outputs if y.name == "s")
    path = find_path(work, [work.graph.outputs[0]], [s])
    assert not calls(path.nodes, path.active, {s})


def test_a_row_that_is_masked_as_a_whole_has_no_gradient() -> None:
    """PyTorch puts zeros in the place of its weights, 0/0, and exporters write that."""
    model = graph(
        "zero = Constant<value = float {0.0}>() t = Add(x, m) s = Softmax(t) n = IsNaN(s) p = Where(n, zero, s)"
        " y = MatMul(p, v)",
        "float[2, 4] y",
        "float[2, 3] x, float[2, 3] m, float[3, 4] v",
    )
    assert found(model, ["x", "v"]) == {"WeighedValues": 1}
    x, v = np.arange(6, dtype=np.float32).reshape(2, 3), np.arange(12, dtype=np.float32).reshape(3, 4)
    fed = {
        "x": x,
        "m": np.float32([[0, 0, -np.inf], [-np.inf] * 3]),
        "v": v,
        "y.cotangent": np.float32([[1, 2, 3, 4]] * 2),
    }
    _, dx, dv = run(gg.vjp(model, wrt=["x", "v"]), fed)
    p = np.exp(x[0, :2]) / np.exp(x[0, :2]).sum()
    dp = v[:2] @ fed["y.cotangent"][0]
    np.testing.assert_allclose(dx, [[*p * (dp - p @ dp), 0], [0, 0, 0]], rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(dv, np.outer([*p, 0], fed["y.cotangent"][0]), rtol=1e-5)


def test_a_users_rule_of_a_part_counts() -> None:
    from gradgraph.rules.registry import RULES

    known = RULES["", "Sigmoid"]
    try:
        vjp("Sigmoid")(lambda op, dy, y, x: (dy,))
        gradient = gg.vjp(SILU, wrt=["x"])
    finally:
        RULES["", "Sigmoid"] = known
    x = np.linspace(-2, 2, 6, dtype=np.float32).reshape(2, 3)
    y, dx = run(gradient, {"x": x, "y.cotangent": np.ones_like(x)})
    np.testing.assert_allclose(dx, y / x + x, rtol=1e-5, atol=1e-6)


def test_a_number_that_is_trained_is_no_number() -> None:
    """A temperature has a gradient, so the scores are no longer a product by a number."""
    text = "s = MatMul(q, k)  r = Mul(s, c)  p = Softmax(r)  y = MatMul(p, v)"
    inputs = "float[2, 3, 4] q, float[2, 4, 5] k, float[2, 5, 2] v, float[1] c"
    model = graph(text, "float[2, 3, 2] y", inputs)
    assert found(model, ["q", "k", "v", "c"]) == {"WeighedValues": 1}


def constant(name: str, array: Any) -> onnx.NodeProto:
    return helper.make_node("Constant", [], [name], value=numpy_helper.from_array(np.asarray(array, np.float32), name))


HALF, EPSILON = np.full((1, 1, 1, 1), 0.5), np.full((1, 1, 1, 1), 0.1)
LARGER = {  # numbers and constants that make the output larger than what is read
    "GELU by a number of four axes": (
        [constant("one", 1), constant("root", 2**0.5), constant("half", HALF)],
        "u = Div(x, root)  e = Erf(u)  a = Add(e, one)  m = Mul(x, a)  y = Mul(m, half)",
    ),
    "RMS norm with an epsilon of four axes": (
        [constant("two", 2), constant("e", EPSILON)],
        "a = Constant<value_ints = [-1]>()  q = Pow(x, two)  m = ReduceMean(q, a)  v = Add(m, e)  r = Sqrt(v)"
        "  y = Div(x, r)",
    ),
    "RMS norm with an epsilon for each of two": (
        [constant("two", 2), constant("e", [[[0.1]], [[0.2]]])],
        "a = Constant<value_ints = [-1]>()  q = Pow(x, two)  m = ReduceMean(q, a)  v = Add(m, e)  r = Sqrt(v)"
        "  i = Reciprocal(r)  y = Mul(i, x)",
    ),
}


@pytest.mark.parametrize("name", LARGER)
@pytest.mark.parametrize("sizes", [(2, 3), (1, 2, 3)], ids=str)
def test_a_number_that_makes_the_output_larger(name: str, sizes: tuple[int, ...]) -> None:
    """The gradient has the shape of what it is a gradient of, and is that of the rules of the parts."""
    constants, text = LARGER[name]
    model = parser.parse_model(
        f'<ir_version: 10, opset_import: ["": 21]> g (float{list(sizes)} x) => (float y) {{ {text} }}'
    )
    for node in reversed(constants):
        model.graph.node.insert(0, node)
    model.graph.output[0].type.tensor_type.ClearField("shape")
    x = np.random.default_rng(0).normal(size=sizes).astype(np.float32)
    (y,) = run(model, {"x": x})
    gradient = run(gg.vjp(model, wrt=["x"]), {"x": x, "y.cotangent": np.ones_like(y)})[-1]
    assert gradient.shape == x.shape
    step = 1e-2
    for at in np.ndindex(*sizes):
        nudge = np.zeros_like(x)
        nudge[at] = step
        up, down = (run(model, {"x": x + sign * nudge})[0].astype(np.float64).sum() for sign in (1, -1))
        assert gradient[at] == pytest.approx((up - down) / (2 * step), abs=5e-3)


@pytest.mark.parametrize("name", COMPOSITES)
def test_half_precision(name: str) -> None:
    """The numbers of a formula are those of the type."""
    trial = cases.trial(COMPOSITES[name].rule, COMPOSITES[name].rule.cases[0], dtype=np.float16)
    assert found(trial.model, trial.wrt)[name] == 1
    exact = cases.trial(COMPOSITES[name].rule, COMPOSITES[name].rule.cases[0], dtype=np.float32)
    results = []
    for t in (trial, exact):
        gradient = gg.vjp(t.model, outputs=t.read, wrt=t.wrt)
        feeds = {k: v.astype(np.float32).astype(v.dtype) for k, v in exact.feeds.items()}
        shapes = {y.name: y.type.tensor_type for y in gradient.graph.input if y.name.endswith(".cotangent")}
        forward = dict(zip([y.name for y in t.model.graph.output], run(t.model, _as(feeds, t)), strict=True))
        cotangents = {n: np.ones_like(forward[n.removesuffix(".cotangent")]) for n in shapes}
        results.append(run(gradient, _as(feeds, t) | cotangents)[-len(t.wrt) :])
    for half, single in zip(*results, strict=True):
        np.testing.assert_allclose(half, single, rtol=3e-2, atol=1e-2)


def _as(feeds: dict[str, np.ndarray], trial: cases.Trial) -> dict[str, np.ndarray]:
    return {k: v.astype(trial.feeds[k].dtype) for k, v in feeds.items()}


def test_named_operators_are_written() -> None:
    """One node for each, when they keep their names."""
    work: ir.Model = append_vjp(normalise(SILU), None, ["x"], named_operators=True)
    assert [n.op_type for n in work.graph if n.domain == DOMAIN] == ["SiluGrad"]

"""Composites are found in their cases, and only where every gradient through them ends at their inputs."""

from __future__ import annotations

from collections import Counter

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import TensorProto, helper, parser
from small_models import run

import gradgraph as gg
from gradgraph.autodiff.append import append_vjp
from gradgraph.autodiff.select import find_path
from gradgraph.composites import COMPOSITES, calls
from gradgraph.normal import normalise
from gradgraph.operators import DOMAIN
from gradgraph.registry import Case, vjp
from gradgraph.verify import cases

OTHERS = {  # cases of nodes that look like the composite: they go by the rules of their operators
    "PickedLogProbability": 6,
    "Attention": 0,
}
CASES = [
    pytest.param(name, case, i < len(c.rule.cases) - OTHERS.get(name, 0), id=f"{name}-{i}")
    for name, c in COMPOSITES.items()
    for i, case in enumerate(c.rule.cases)
]


def found(model: onnx.ModelProto, wrt: list[str]) -> Counter[str]:
    """How often each composite is found."""
    work = normalise(model, parameters=wrt)
    values = {v.name: v for v in (*work.graph.inputs, *work.graph.initializers.values())}
    values |= {y.name: y for node in work.graph for y in node.outputs}
    path = find_path(
        work, [y for y in work.graph.outputs if y.dtype.is_floating_point()], [values[x] for x in wrt], True
    )
    named = calls(path.nodes, path.active, set(path.wrt)).values()
    return Counter(call.composite.rule.op_type for call in named)


@pytest.mark.parametrize(("name", "case", "is_one"), CASES)
def test_a_case_is_found(name: str, case: Case, is_one: bool) -> None:
    trial = cases.trial(COMPOSITES[name].rule, case)
    assert found(trial.model, trial.wrt)[name] == is_one


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


def test_a_users_rule_of_a_part_counts() -> None:
    from gradgraph.registry import RULES

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


def test_a_number_of_more_axes_changes_nothing() -> None:
    """½ as [1, 1, 1, 1] gives the product four axes."""
    half = helper.make_tensor("half", TensorProto.FLOAT, [1, 1, 1, 1], [0.5])
    model = graph("e = Erf(u)  a = Add(e, one)  m = Mul(x, a)  y = Mul(m, half)", "float[1, 1, 2, 3] y")
    first = helper.make_node("Div", ["x", "root"], ["u"])
    model.graph.node.insert(0, first)
    numbers = (("one", 1.0), ("root", 2.0**0.5))
    model.graph.initializer.extend([half, *(helper.make_tensor(n, TensorProto.FLOAT, [], [c]) for n, c in numbers)])
    x = np.ones((2, 3), np.float32)
    _, dx = run(gg.vjp(model, wrt=["x"]), {"x": x, "y.cotangent": np.ones((1, 1, 2, 3), np.float32)})
    np.testing.assert_allclose(dx, 1.0833154, rtol=1e-5)


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

"""Tangents through If, Loop and Scan: of second order, in onnxruntime, nested, and how much the bodies compute."""

from __future__ import annotations

from collections import Counter

import numpy as np
import onnx
import onnx.parser
import onnx_ir as ir
import pytest

import gradgraph as gg
import gradgraph.rules.families
from gradgraph.rules.registry import RULES, Case, Rule
from gradgraph.verify import cases
from gradgraph.verify.reference import Oracle
from tests.autodiff.test_forward import products
from tests.kit.running import run
from tests.kit.small_models import every_node

assert gradgraph.rules
OPERATORS = ("If", "Loop", "Scan")
CASES = [pytest.param(RULES["", k], c, id=f"{k}-{i}") for k in OPERATORS for i, c in enumerate(RULES["", k].cases)]


def freed(t: cases.Trial, suffix: str) -> cases.Trial:
    """``t`` with another word in place of ``suffix``, so that the next transform can give its names."""

    def name(old: str) -> str:
        return old.replace(suffix, "_first")

    model = ir.from_proto(t.model)
    for value in (*model.graph.inputs, *model.graph.outputs):
        value.name = name(value.name or "")
    feeds = {name(k): v for k, v in t.feeds.items()}
    return cases.Trial(ir.to_proto(model), feeds, [*map(name, t.wrt)], [*map(name, t.read)])


def of_tangents(t: cases.Trial) -> cases.Trial:
    """The trial whose operator is forward mode of ``t``: inputs and tangents in, tangents out."""
    model = gg.jvp(t.model, wrt=t.wrt, outputs=t.read, allow_unused=True)
    tangents = [i.name for i in model.graph.input if i.name.endswith(".tangent")]
    moves = drawn(t, tangents)
    return cases.Trial(model, t.feeds | moves, [*t.wrt, *moves], [f"{y}.tangent" for y in t.read])


def drawn(t: cases.Trial, tangents: list[str]) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(3)
    likes = {x: t.feeds[x.removesuffix(".tangent")] for x in tangents}
    return {x: rng.uniform(-1, 1, like.shape).astype(like.dtype) for x, like in likes.items()}


@pytest.mark.sweep(0.521)
@pytest.mark.parametrize(("rule", "case"), CASES)
def test_tangents_of_tangents_agree_with_gradients_of_tangents(rule: Rule, case: Case) -> None:
    forward, reverse = products(freed(of_tangents(cases.trial(rule, case, unknown=True)), ".tangent"))
    assert forward == pytest.approx(reverse, rel=1e-9, abs=1e-9)


@pytest.mark.sweep(0.252)
@pytest.mark.parametrize(("rule", "case"), CASES)
def test_tangents_of_gradients_agree_with_gradients_of_gradients(rule: Rule, case: Case) -> None:
    forward, reverse = products(freed(cases.second_order(cases.trial(rule, case)), ".grad"))
    assert forward == pytest.approx(reverse, rel=1e-9, abs=1e-9)


@pytest.mark.parametrize(("rule", "case"), CASES)
def test_onnxruntime_gives_the_same_in_float32(rule: Rule, case: Case) -> None:
    single, double = (of_tangents(cases.trial(rule, case, dtype=dtype)) for dtype in (np.float32, np.float64))
    onnx.checker.check_model(single.model)
    expected = Oracle(double.model)(double.feeds)
    for name, got in run(single.model, single.feeds).items():
        np.testing.assert_allclose(got, expected[name], rtol=1e-4, atol=1e-5)


# --- what is emitted, in bodies too ---------------------------------------------------------------------


def parsed(text: str) -> onnx.ModelProto:
    return onnx.parser.parse_model(f'<ir_version: 10, opset_import: ["" : 21]> {text}')


def everything(graph: onnx.GraphProto) -> Counter[str]:
    return Counter(node.op_type for node in every_node(graph))


RECURRENCE = """
m (float[T, 3] xs, float[3] s, float[3, 3] w) => (float[3] y, float[T, 3] ys) {
    y, ys = Scan <num_scan_inputs = 1, body = b (float[3] h, float[3] x) => (float[3] k, float[3] r) {
        p = MatMul(w, h) q = Add(p, x) k = Tanh(q) r = Exp(k)
    }> (s, xs)
}
"""

COUNTED = """
m (int64 n, float[3] s, float[3, 3] w) => (float[3] y, float[K, 3] ys) {
    y, ys = Loop <body = b (int64 i, bool c, float[3] h) => (bool d, float[3] k, float[3] r) {
        d = Identity(c) p = MatMul(w, h) k = Tanh(p) r = Exp(k)
    }> (n, , s)
}
"""


@pytest.mark.parametrize(("model", "operator"), [(RECURRENCE, "Scan"), (COUNTED, "Loop")])
def test_one_loop_computes_each_value_once_and_its_tangent(model: str, operator: str) -> None:
    found = everything(gg.jvp(parsed(model), wrt="*").graph)
    assert [found[k] for k in (operator, "Tanh", "Exp", "MatMul")] == [1, 1, 1, 3]


def test_the_branch_that_runs_computes_values_and_tangents_once() -> None:
    text = """m (bool c, float[3] x) => (float[3] y) {
        y = If (c) <
            then_branch = t () => (float[3] a) { a = Tanh(x) }, else_branch = e () => (float[3] b) { b = Exp(x) }
        >
    }"""
    assert everything(gg.jvp(parsed(text)).graph) == {"If": 1, "Tanh": 1, "Exp": 1, "Mul": 3, "Sub": 1}


def test_what_does_not_move_has_no_tangent_in_the_loop() -> None:
    """Of a counter, of a state that stands for itself, and of the other scan input there is none."""
    text = """m (float[T, 3] xs, float[T, 3] us, float[3] s, float[3] v) => (float[3] y, float[3] z, float[T, 3] ys) {
        y, z, ys = Scan <num_scan_inputs = 2, body = b (float[3] h, float[3] g, float[3] x, float[3] u)
            => (float[3] k, float[3] l, float[3] r) { k = Mul(h, x) l = Mul(g, u) r = Sin(k) }> (s, v, xs, us)
    }"""
    m = gg.jvp(parsed(text), wrt="xs")
    (scan,) = (n for n in m.graph.node if n.op_type == "Scan")
    assert (len(scan.input), len(scan.output)) == (4 + 2, 3 + 2)
    rng = np.random.default_rng(0)
    xs, us, dxs = rng.normal(size=(3, 4, 3)).astype(np.float32)
    feeds = {"xs": xs, "us": us, "s": xs[0], "v": us[0], "xs.tangent": dxs}
    got = run(m, feeds)
    products_ = xs[0] * np.cumprod(xs, 0)
    relative = np.cumsum(dxs / xs, 0)
    np.testing.assert_allclose(got["y.tangent"], (products_ * relative)[-1], rtol=1e-4)
    np.testing.assert_allclose(got["ys.tangent"], np.cos(products_) * products_ * relative, rtol=1e-3, atol=1e-6)
    np.testing.assert_array_equal(got["z.tangent"], np.zeros(3))


def test_what_comes_after_a_loop_reads_what_its_bodies_compute() -> None:
    """Order, names and declared outputs of a model in which a loop stands between other operators."""
    text = """m (int64 n, float[B, 3] x) => (float[B, 3] h, float[B, 3] y, float[] z) {
        a = Sin(x)
        h = Loop <body = b (int64 i, bool c, float[B, 3] s) => (bool d, float[B, 3] t) {
            d = Identity(c) e = Softmax(s) t = Mul(e, x)
        }> (n, , a)
        g = Mul(h, h)
        y = Loop <body = f (int64 j, bool o, float[B, 3] u) => (bool q, float[B, 3] v) {
            q = Identity(o) v = Mul(u, a)
        }> (n, , g)
        z = ReduceSum <keepdims = 0> (y)
    }"""
    m = gg.jvp(parsed(text), wrt="x")
    onnx.checker.check_model(m, full_check=True)
    assert [o.name for o in m.graph.output] == ["h", "y", "z", "h.tangent", "y.tangent", "z.tangent"]
    rng = np.random.default_rng(0)
    x, dx = rng.normal(size=(2, 2, 3))
    feeds = {"n": np.array(3), "x": x}
    f, h = Oracle(parsed(text)), 1e-6
    ahead, behind = f(feeds | {"x": x + h * dx}), f(feeds | {"x": x - h * dx})
    got = Oracle(m)(feeds | {"x.tangent": dx})
    for name in ("h", "y", "z"):
        np.testing.assert_allclose(got[f"{name}.tangent"], (ahead[name] - behind[name]) / (2 * h), rtol=1e-6, atol=1e-9)
    single = {k: v.astype(np.float32) if v.dtype == np.float64 else v for k, v in (feeds | {"x.tangent": dx}).items()}
    for name, value in run(m, single).items():
        np.testing.assert_allclose(value, got[name], rtol=1e-4, atol=1e-5)


def test_a_loop_that_has_rows_only() -> None:
    """Neither condition nor state: onnxruntime counts the inputs that are not there."""
    text = """m (int64 n, float[3] x) => (float[K, 3] ys) {
        ys = Loop <body = b (int64 i, bool c) => (bool d, float[3] y) { d = Identity(c) y = Mul(x, x) }> (n, , )
    }"""
    x, dx = np.array([[1, 2, 3], [4, 5, 6]], np.float32)
    got = run(gg.jvp(parsed(text), wrt="x"), {"n": np.array(2), "x": x, "x.tangent": dx})
    np.testing.assert_array_equal(got["ys.tangent"], [2 * x * dx] * 2)


@pytest.mark.parametrize("depth", [1, 3])
def test_loops_in_loops(depth: int) -> None:
    """The innermost body squares the state."""
    body = "t0 = Mul(s0, s0)"
    for k in range(depth):
        body = (
            f"t{k + 1} = Loop <body = b{k} (int64 i{k}, bool c{k}, float[2] s{k}) => (bool d{k}, float[2] t{k}) "
            f"{{ d{k} = Identity(c{k}) {body} }}> (n, , s{k + 1})"
        )
    text = f"m (int64 n, float[2] s{depth}) => (float[2] t{depth}) {{ {body} }}"
    m = gg.jvp(parsed(text), wrt=f"s{depth}")
    assert everything(m.graph)["Loop"] == depth
    x, power = np.array([1.01, -0.99]), 2 ** (2**depth)
    got = Oracle(m)({"n": np.array(2), f"s{depth}": x, f"s{depth}.tangent": np.ones(2)})
    np.testing.assert_allclose(got[f"t{depth}.tangent"], power * x ** (power - 1), rtol=1e-9)

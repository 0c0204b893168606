"""Products of a few rows with one weight: which become one, and what they give."""

from __future__ import annotations

import numpy as np
import onnx
import pytest

import gradgraph as gg
from gradgraph.backends.engine import for_machine
from gradgraph.backends.ort_cpu import ORT_CPU, stacked_products
from tests.kit.running import run

HEAD = '<ir_version: 10, opset_import: ["" : 21]> g'
rng = np.random.default_rng(0)


@pytest.fixture(autouse=True)
def any_weight(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights of tests are small."""
    monkeypatch.setattr(stacked_products, "LARGE_WEIGHT", 1)


def graph(text: str) -> onnx.ModelProto:
    """A model with a weight w of [4, 5], and v of [5, 4]."""
    model = onnx.parser.parse_model(f"{HEAD} {text}")
    for name, shape in {"w": (4, 5), "v": (5, 4)}.items():
        model.graph.initializer.append(onnx.numpy_helper.from_array(rng.normal(size=shape).astype(np.float32), name))
    return onnx.shape_inference.infer_shapes(model)


def lowered(model: onnx.ModelProto) -> list[str]:
    """The nodes of this machine's form, which gives the same outputs."""
    result = for_machine(model, ORT_CPU)
    feeds = {
        v.name: rng.normal(size=[d.dim_value for d in v.type.tensor_type.shape.dim]).astype(np.float32)
        for v in model.graph.input
    }
    for (name, a), (other, b) in zip(run(model, feeds).items(), run(result, feeds).items(), strict=True):
        assert name == other
        np.testing.assert_allclose(b, a, rtol=1e-5, atol=1e-6)
    return [n.op_type for n in result.graph.node]


TWO = "(float[{rows}, 4] x, float[{rows}, 4] z) => (float[{rows}, 5] y, float[{rows}, 5] u)"
GEMM = "(float[2, 4] x, float[2, 4] z, float[5] b) => (float[2, 5] y, float[2, 5] u)"
STACKED = ["Concat", "MatMul", "Split"]


@pytest.mark.parametrize(("rows", "wanted"), [("1", STACKED), ("8", STACKED), ("9", ["MatMul"] * 2), ("2, 3", STACKED)])
def test_few_rows_that_meet_one_weight_are_one_product(rows: str, wanted: list[str]) -> None:
    assert lowered(graph(TWO.format(rows=rows) + " { y = MatMul(x, w)  u = MatMul(z, w) }")) == wanted


@pytest.mark.parametrize("attributes", ["transB = 1", "transB = 1, alpha = 0.5, beta = 2.0", "beta = 0.0"])
@pytest.mark.parametrize("later", ["(z, {w})", "(z, {w}, b)"])
def test_what_is_added_is_added_behind(attributes: str, later: str) -> None:
    w = "v" if "transB" in attributes else "w"
    text = f"{{ y = Gemm <{attributes}> (x, {w}, b)  u = Gemm <{attributes}> {later.format(w=w)} }}"
    found = lowered(graph(f"{GEMM} {text}"))
    assert [n for n in found if n in ("Gemm", "MatMul", "Concat", "Split")] in (
        ["Concat", "Gemm", "Split"],
        STACKED,
    )


def test_products_that_wait_for_each_other_stay_apart() -> None:
    text = "(float[2, 4] x) => (float[2, 5] y, float[2, 5] u) { y = MatMul(x, w) t = MatMul(y, v) u = MatMul(t, w) }"
    assert lowered(graph(text)) == ["MatMul"] * 3


def test_a_branch_between_two_products_keeps_them_apart() -> None:
    text = """(float[2, 4] x, bool c) => (float[2, 5] y, float[2, 5] u) {
        y = MatMul(x, w)
        z = If (c) <then_branch = t () => (float[2, 4] p) { p = MatMul(y, v) }, else_branch = e () => (float[2, 4] q) { q = Relu(x) }>
        u = MatMul(z, w) }"""  # noqa: E501
    model = graph(text)
    assert [n.op_type for n in for_machine(model, ORT_CPU).graph.node] == ["MatMul", "If", "MatMul"]


def test_other_weights_orders_and_fed_ones_stay_apart() -> None:
    fed = "(float[2, 4] x, float[2, 4] z, float[4, 5] f) => (float[2, 5] y, float[2, 5] u)"
    assert lowered(graph(fed + " { y = MatMul(x, f)  u = MatMul(z, f) }")) == ["MatMul"] * 2
    square = "(float[2, 4] x, float[2, 5] z) => (float[2, 5] y, float[2, 4] u)"
    assert lowered(graph(square + " { y = MatMul(x, w)  u = Gemm <transB = 1> (z, w) }")) == ["MatMul", "Gemm"]


def test_tangents_of_several_layers_go_with_their_values() -> None:
    model = graph(
        "(float[1, 4] x) => (float[1, 4] y) { a = MatMul(x, w) b = Tanh(a) c = MatMul(b, v) d = Tanh(c) y = Mul(d, d) }"
    )
    feeds = {n: rng.normal(size=(1, 4)).astype(np.float32) for n in ("x", "x.tangent")}
    plain, stacked = gg.jvp(model, wrt=["x"]), gg.jvp(model, wrt=["x"], backend=ORT_CPU.name)
    assert [n.op_type for n in stacked.graph.node].count("MatMul") == 2
    for a, b in zip(run(plain, feeds).values(), run(stacked, feeds).values(), strict=True):
        np.testing.assert_allclose(b, a, rtol=1e-5, atol=1e-6)

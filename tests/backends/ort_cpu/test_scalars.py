"""Numbers that meet a tensor ending in axes of one element: raised to its rank, and the result is the same."""

from __future__ import annotations

import numpy as np
import onnx
import onnx_ir as ir
import pytest

from gradgraph.backends.engine import lower
from gradgraph.backends.ort_cpu import ORT_CPU
from gradgraph.passes.normal import normalise
from gradgraph.passes.normal.edit import nodes_of
from tests.kit.running import run


def lowered(text: str) -> tuple[onnx.ModelProto, onnx.ModelProto]:
    model = onnx.parser.parse_model(f'<ir_version: 10, opset_import: ["" : 21]> g {text}')
    return model, ir.to_proto(lower(normalise(model), ORT_CPU))


def same(model: onnx.ModelProto, result: onnx.ModelProto) -> None:
    rng = np.random.default_rng(0)
    feeds = {
        v.name: rng.normal(size=[3 if d.dim_param else d.dim_value for d in v.type.tensor_type.shape.dim]).astype("f")
        for v in model.graph.input
    }
    for a, b in zip(run(model, feeds).values(), run(result, feeds).values(), strict=True):
        np.testing.assert_array_equal(b, a)
        assert b.shape == a.shape


def raised(model: onnx.ModelProto) -> int:
    return sum(n.op_type == "Reshape" for n in nodes_of(ir.from_proto(model)))


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("(float[4, 2, 1, 1] x, float a) => (float[4, 2, 1, 1] y) { y = Mul(x, a) }", 1),
        ("(float[4, 2, 1, 1] x, float[1] a) => (float[4, 2, 1, 1] y) { y = Sub(a, x) }", 1),
        ("(float[4, 1] x, float a, float b) => (float[4, 1] y) { z = Mul(x, a) y = Add(z, b) }", 2),
        ("(float[4, 1] x, float a) => (float[4, 1] y) { z = Mul(x, a) y = Div(z, a) }", 1),
        ("(float[2,1] x, float[2,1,1] z, float a) => (float[2,1] w, float[2,1,1] y) {w = Mul(x, a) y = Mul(z, a)}", 2),
        ("(float[n, 1] x, float a) => (float[n, 1] y) { y = Mul(x, a) }", 1),
        ("(float[0, 1] x, float a) => (float[0, 1] y) { y = Mul(x, a) }", 1),
        ("(float[4, 1] x, float a) => (float[4, 1] y) { c = Greater(x, a) y = Where(c, a, x) }", 1),
        ("(float[4, 1] x, float a, float b) => (float[4, 1] y) { y = Max(a, x, b) }", 2),
    ],
)  # fmt: skip
def test_numbers_are_raised_once_for_each_rank(text: str, count: int) -> None:
    model, result = lowered(text)
    assert raised(result) == count
    same(model, result)


@pytest.mark.parametrize(
    "text",
    [
        "(float[4, 2] x, float a) => (float[4, 2] y) { y = Mul(x, a) }",
        "(float[4] x, float a) => (float[4] y) { y = Mul(x, a) }",
        "(float[4, 2, 1] x, float[2, 1] a) => (float[4, 2, 1] y) { y = Mul(x, a) }",
        "(float[4, 1] x, float[1, 1] a) => (float[4, 1] y) { y = Mul(x, a) }",
        "(float[4, 1] x, float[1, 1, 1] a) => (float[1, 4, 1] y) { y = Mul(x, a) }",
        "(float a, float[1] b) => (float[1] y) { y = Mul(a, b) }",
    ],
)
def test_others_stay(text: str) -> None:
    model, result = lowered(text)
    assert raised(result) == 0
    same(model, result)


def test_each_graph_raises_its_own() -> None:
    text = """(float[3, 4, 1] xs, float a) => (float[3, 4, 1] ys, float[4, 1] z) {
        ys = Scan<num_scan_inputs = 1, body = b (float[4, 1] x) => (float[4, 1] y) { y = Mul(x, a) }>(xs)
        x0 = Gather<axis = 0>(xs, first)  z = Mul(x0, a) }"""
    model, result = lowered(text.replace("{\n        ys", "<int64 first = {1}> {\n        ys", 1))
    assert raised(result) == 2
    same(model, result)

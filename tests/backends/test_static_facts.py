"""What follows of a model before it runs: sizes behind arithmetic on sizes, and what comes of constants alone."""

from __future__ import annotations

import onnx.parser
import onnx_ir as ir
import pytest

import gradgraph as gg
from gradgraph.backends.facts import facts_of
from gradgraph.backends.static_facts import derive_facts, is_derived
from gradgraph.graph.shapes import IR_VERSION, OPSET

HEAD = f'<ir_version: {IR_VERSION}, opset_import: ["": {OPSET}, "own": 1]>'
# how PyTorch writes a convolution without a bias: zeros, as many as the weight has channels, of the type of the image
BIAS = """{
    count = Shape <start=0, end=1> (w) one = Constant <value_ints=[1]> () size = Expand (count, one)
    zero = Constant <value_float=0.0> () typed = CastLike (zero, x) b = Expand (typed, size) y = Conv (x, w, b) }"""
INPUTS = "(float[2, 3, 8, 8] x, float[4, 3, 3, 3] w) => (float[2, 4, 6, 6] y)"


def model(text: str) -> onnx.ModelProto:
    return onnx.parser.parse_model(f"{HEAD} {text}")


def facts(proto: onnx.ModelProto, op_type: str) -> frozenset[str]:
    work = ir.from_proto(proto)
    derive_facts(work)
    assert [n.op_type for n in work.graph] == [n.op_type for n in proto.graph.node]
    return facts_of(next(n for n in work.graph if n.op_type == op_type))


def test_sizes_behind_arithmetic_on_sizes_are_known() -> None:
    found = facts(model(f"g {INPUTS} {BIAS}"), "Conv")
    assert "open" not in found
    assert "input 2 rank 1" in found


def test_open_sizes_stay_open() -> None:
    found = facts(model("g (float[n, 4] x) => (y) { s = Shape(x) y = Expand(x, s) }"), "Expand")
    assert {"input 0 open", "input 1 computed"} <= found
    assert "input 1 derived" not in found


def test_what_comes_of_constants_is_derived() -> None:
    text = """g (float[2, 6] x) => (y) {
        one = Constant <value_ints=[-1]> () s = Shape <start=0, end=1> (x) t = Concat <axis=0> (s, one)
        y = Reshape(x, t) }"""
    found = facts(model(text), "Reshape")
    assert {"input 1 derived", "input 1 negative"} <= found
    assert "input 1 computed" not in found


def test_sizes_are_known_that_stored_floats_give() -> None:
    proto = model("""g (float[2, 7] x) => (y) <float[1] seven = {7.0}, int64 zero = {0}, int64 one = {1}> {
        s = Squeeze(seven) n = Cast <to=7> (s) r = Range(zero, n, one) f = CastLike(r, x) y = Add(x, f) }""")
    assert "input 1 open" not in facts(proto, "Add")


def test_what_is_drawn_is_not() -> None:
    work = ir.from_proto(model("g (float[2] x) => (y) { r = RandomNormal <shape=[2]> () y = Add(x, r) }"))
    derive_facts(work)
    assert not is_derived(work.graph.node(0).outputs[0])


@pytest.mark.parametrize("backend", ["openvino", "tract"])
def test_functions_lose_no_shapes(backend: str) -> None:
    """A convolution whose bias a function makes is not taken for one of open sizes."""
    body = BIAS.replace("x)", "x_)").replace("(x,", "(x_,").replace("(w)", "(w_)").replace("w, b", "w_, b")
    function = f'<domain: "own", opset_import: ["": {OPSET}]> convolution (x_, w_) => (y) {body}'
    proto = model(f"g {INPUTS} {{ y = own.convolution(x, w) }} {function}")
    report = gg.check_backend(proto, backend)
    assert [str(f) for f in report.findings if f.verdict in ("refused", "wrong") and f.node != "the model"] == []

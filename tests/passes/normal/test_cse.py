"""Common subexpressions: what is merged, what must not be, and that every output keeps its name and its numbers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable

import numpy as np
import onnx
import onnx_ir as ir
import pytest

import gradgraph as gg
from gradgraph.frontend import export, nn
from gradgraph.graph.builder import FAN_OUT
from gradgraph.graph.prune import prune
from gradgraph.passes.normal import normalise
from gradgraph.passes.normal.simplifying import cse
from gradgraph.passes.normal.simplifying.clean import clean_up
from gradgraph.passes.normal.simplifying.cse import merge_equal, name_outputs
from tests.kit.running import run

X = np.random.default_rng(0).uniform(0.5, 2.0, (2, 3)).astype(np.float32)


def model(body: str, outputs: str = "float[n, 3] y", inputs: str = "float[n, 3] x", extra: str = "") -> ir.Model:
    header = f'<ir_version: 10, opset_import: ["": 21, "other": 1]> g ({inputs}) => ({outputs}) {extra}'
    return normalise(onnx.parser.parse_model(f"{header} {{ {body} }}"))


def kinds(found: ir.Model) -> Counter[str]:
    return Counter(n.op_type for n in found.graph)


# what is written, what is left
ROWS = {
    "the same": ("a = Exp(x) b = Exp(x) y = Sub(a, b)", "Exp Sub"),
    "the same twice over": ("a = Exp(x) b = Exp(x) c = Sin(a) d = Sin(b) y = Sub(c, d)", "Exp Sin Sub"),
    "factors in the other order": ("a = Exp(x) b = Mul(a, x) c = Mul(x, a) y = Sub(b, c)", "Exp Mul Sub"),
    "differences in the other order": ("a = Exp(x) b = Sub(a, x) c = Sub(x, a) y = Mul(b, c)", "Exp Sub Sub Mul"),
    "other attributes": (
        "a = Softmax<axis=0>(x) b = Softmax<axis=1>(x) y = Mul(a, b)",
        "Softmax Softmax Mul",
    ),
    "an attribute of 0.0 and one of -0.0": (
        "a = LeakyRelu<alpha=0.0>(x) b = LeakyRelu<alpha=-0.0>(x) y = Mul(a, b)",
        "LeakyRelu LeakyRelu Mul",
    ),
    "equal constants": (
        "p = Constant<value_float=2.5>() q = Constant<value_float=2.5>() a = Mul(x, p) b = Mul(x, q) y = Sub(a, b)",
        "Mul Sub",
    ),
    "constants of another type": (
        "p = Constant<value_ints=[1]>() a = ReduceSum(x, p) b = ReduceMax(x, p) y = Sub(a, b)",
        "ReduceSum ReduceMax Sub",
    ),
    "several outputs": (
        "s = Constant<value_ints=[1, 2]>() a, b = Split<axis=1>(x, s) c, d = Split<axis=1>(x, s) "
        "e = Mul(a, d) f = Mul(c, b) y = Concat<axis=1>(e, f, b)",
        "Split Mul Concat",
    ),
    "an output that only the second has": (
        "w = Constant<value_floats=[1.0, 2.0, 3.0]>() a = LayerNormalization(x, w) b, m = LayerNormalization(x, w) "
        "c = Sub(a, b) y = Add(c, m)",
        "LayerNormalization LayerNormalization Sub Add",
    ),
    "numbers drawn": (
        "a = RandomNormalLike<seed=1.0>(x) b = RandomNormalLike<seed=1.0>(x) y = Sub(a, b)",
        "RandomNormalLike RandomNormalLike Sub",
    ),
    "what may drop out one day": (
        "a = Dropout(x) b = Dropout(x) y = Sub(a, b)",
        "Dropout Dropout Sub",
    ),
    "operators of another domain": (
        "a = other.Exp(x) b = other.Exp(x) y = Sub(a, b)",
        "Exp Exp Sub",
    ),
    "shapes of tensors of named sizes": (
        "a = Exp(x) s = Shape(x) t = Shape<start=0, end=2>(a) u = Max(s, t) y = Expand(a, u)",
        "Exp Shape Max Expand",
    ),
    "shapes of other sizes": (
        "a = Transpose(x) s = Shape(x) t = Shape(a) u = Concat<axis=0>(s, t) r = Cast<to=1>(u) "
        "q = ReduceSum<keepdims=0>(r) y = Mul(x, q)",
        "Transpose Shape Shape Concat Cast ReduceSum Mul",
    ),
    "shapes of sizes found at run time": (
        "z = NonZero(x) w = NonZero(x) s = Shape(z) i = Neg(x) v = NonZero(i) t = Shape(v) u = Concat<axis=0>(s, t) "
        "r = Cast<to=1>(u) q = ReduceSum<keepdims=0>(r) y = Mul(x, q)",
        "NonZero Neg NonZero Shape Shape Concat Cast ReduceSum Mul",
    ),
}


@pytest.mark.parametrize("name", ROWS)
def test_rows(name: str) -> None:
    body, left = ROWS[name]
    before = model(body)
    runs = not {"other.", "Random", "Dropout"} & {word for word in ("other.", "Random", "Dropout") if word in body}
    expected = run(ir.to_proto(before), {"x": X})["y"] if runs else None
    after = prune(merge_equal(before))
    assert kinds(after) == Counter(left.split())
    if expected is not None:
        np.testing.assert_array_equal(run(ir.to_proto(after), {"x": X})["y"], expected)
    assert kinds(prune(merge_equal(after))) == Counter(left.split())  # idempotent


def test_outputs_keep_their_names() -> None:
    body = "a = Exp(x) y = Exp(x) c = Sin(a) z = Sin(y) w = Sin(a)"
    found = merge_equal(model(body, "float[n, 3] y, float[n, 3] z, float[n, 3] w"))
    assert [v.name for v in found.graph.outputs] == ["y", "z", "w"]
    assert kinds(found) == Counter({"Exp": 1, "Sin": 2})  # z and w need a node each
    results = run(ir.to_proto(found), {"x": X})
    for name, expected in {"y": np.exp(X), "z": np.sin(np.exp(X)), "w": np.sin(np.exp(X))}.items():
        np.testing.assert_allclose(results[name], expected, rtol=1e-5)


def test_identity_before_an_output_gives_its_name_to_the_node_before_it() -> None:
    found = name_outputs(model("a = Exp(x) y = Identity(a) z = Identity(a)", "float[n, 3] y, float[n, 3] z"))
    assert kinds(found) == Counter({"Exp": 1, "Identity": 1})  # one value has one name
    results = run(ir.to_proto(found), {"x": X})
    np.testing.assert_array_equal(results["y"], results["z"])


def test_an_input_that_is_an_output_keeps_its_identity() -> None:
    found = name_outputs(model("y = Identity(x)"))
    assert kinds(found) == Counter({"Identity": 1})
    np.testing.assert_array_equal(run(ir.to_proto(found), {"x": X})["y"], X)


def test_parameters_of_equal_numbers_are_not_merged() -> None:
    weights = "<float[3] v = {1, 1, 1}, float[3] w = {1, 1, 1}>"
    found = merge_equal(model("a = Mul(x, v) b = Mul(x, w) y = Sub(a, b)", extra=weights))
    assert kinds(found) == Counter({"Mul": 2, "Sub": 1})


def test_bodies_are_swept_on_their_own() -> None:
    body = "o = Exp(s) p = Exp(s) q = Mul(o, p) t = Add(q, s) k = Identity(t)"
    found = model(
        f"c = Constant<value_int=3>() t0 = Constant<value=bool {{1}}>() a = Exp(x) l = Loop(c, t0, x) "
        f"<body = b (int64 i, bool g, float[n, 3] s) => (bool h, float[n, 3] k) {{ h = Identity(g) {body} }}> "
        "y = Add(a, l)"
    )
    expected = run(ir.to_proto(found), {"x": X / 9})["y"]
    loop = next(n for n in merge_equal(found).graph if n.op_type == "Loop")
    assert Counter(n.op_type for n in loop.attributes["body"].as_graph())["Exp"] == 1
    assert kinds(found)["Exp"] == 1
    np.testing.assert_array_equal(run(ir.to_proto(found), {"x": X / 9})["y"], expected)


def test_no_value_is_read_by_too_many() -> None:
    """Sessions are created in time quadratic in the readers of one value."""
    count = 2 * FAN_OUT + 10
    nodes = " ".join(f"a{i} = Exp(x) b{i} = Add(a{i}, w{i})" for i in range(count))
    weights = ", ".join(f"float[3] w{i} = {{1, 2, 3}}" for i in range(count))
    total = f"y = Sum({', '.join(f'b{i}' for i in range(count))})"
    found = merge_equal(model(f"{nodes} {total}", extra=f"<{weights}>"))
    assert kinds(found)["Exp"] == 3
    assert max(len(v.uses()) for n in found.graph for v in n.outputs) <= FAN_OUT


def test_batch_normalisations_keep_scratch_tensors_of_their_own() -> None:
    """One layer applied twice is two nodes with the same running statistics; onnxruntime overwrites what they read."""
    weights = "<float[3] s = {1, 2, 3}, float[3] c = {0, 1, 2}, float[3] m = {0, 0, 0}, float[3] v = {1, 1, 1}>"
    nodes = "a = BatchNormalization(x, s, c, m, v) d = Exp(a) y = BatchNormalization(d, s, c, m, v)"
    step = gg.build(ir.to_proto(model(nodes, extra=weights)), "mse", "sgd")
    layers = [n for n in step.train.graph.node if n.op_type == "BatchNormalization"]
    scratch = [name for n in layers for name in n.input[3:5]]
    assert len(layers) == 2
    assert len(set(scratch)) == 4


def test_what_is_computed_twice_has_one_backward_pass() -> None:
    weights = "<float[3, 3] w = {1, 2, 3, 4, 5, 6, 7, 8, 9}>"
    nodes = "a = MatMul(x, w) b = MatMul(x, w) e = Exp(a) f = Sin(b) y = Add(e, f)"
    step = gg.build(ir.to_proto(model(nodes, extra=weights)), "mse", "sgd", train="w")
    products = [n for n in step.train.graph.node if n.op_type in ("MatMul", "Gemm")]
    assert len(products) == 2  # forward, and the gradient by w


def test_clean_up_leaves_nothing_unread_and_is_done_after_one_call() -> None:
    body = "a = Exp(x) b = Exp(x) s = Shape(x) c = Expand(b, s) d = Transpose<perm=[0, 1]>(c) y = Mul(a, d)"
    found = clean_up(model(body))
    assert kinds(found) == Counter({"Exp": 1, "Mul": 1})
    names = [n.name for n in found.graph]
    assert [n.name for n in clean_up(found).graph] == names


def test_a_key_that_is_known_is_the_one_that_would_be_found_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    known, read = cse._known_key, []

    def compared(node: ir.Node, keys: cse.Keys, constants: dict[int, Hashable], sizes_are_fixed: bool) -> object:
        before = keys.get(node)
        key = known(node, keys, constants, sizes_are_fixed)
        assert key == cse._node_key(node, {}, sizes_are_fixed)
        read.append(before is not None and before[1] is key)
        return key

    monkeypatch.setattr(cse, "_known_key", compared)
    layers = [(nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4), nn.GELU(), nn.AvgPool2d(2)) for _ in range(4)]
    network = nn.Sequential(*(layer for group in layers for layer in group), nn.Flatten(), nn.LayerNorm(4))
    gg.vjp(export(network, {"x": ("n", 4, 16, 16)}), backend="ort-cpu")
    assert sum(read) > 100
    assert not all(read)

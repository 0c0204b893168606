"""What the rule kit's cases do not reach: how much loops save and emit, activity inside bodies, pruning, errors."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx
import onnx.parser
import pytest
from onnx.reference import ReferenceEvaluator

import gradgraph as gg
from gradgraph.errors import DifferentiationError, UnsupportedOperatorError
from gradgraph.rules.registry import RULES, Rule
from gradgraph.verify import cases
from gradgraph.verify.reference import Oracle, in_float64
from tests.kit.running import run
from tests.kit.small_models import every_node

CONTROL = [RULES["", name] for name in ("If", "Loop", "Scan")]


def model(body: str, inputs: str, outputs: str = "float loss", weights: str = "") -> onnx.ModelProto:
    text = f'<ir_version: 10, opset_import: ["": 21, "custom": 1]> g ({inputs}) => ({outputs}) {weights} {{ {body} }}'
    return onnx.parser.parse_model(text)


def value_and_grad(m: onnx.ModelProto, wrt: Sequence[str] | None = None, **options: Any) -> onnx.ModelProto:
    result = gg.value_and_grad(m, output="loss", wrt=None if wrt is None else list(wrt), **options)
    assert isinstance(result, onnx.ModelProto)
    return result


def body_of(node: onnx.NodeProto) -> onnx.GraphProto:
    return next(a.g for a in node.attribute if a.type == onnx.AttributeProto.GRAPH)


# --- in place, and no more than is needed ----------------------------------------------------------------

POWER = """
y = Loop <body = b (int64 i, bool c, float[2] s) => (bool d, float[2] t) {{
    d = Identity(c)  h = MatMul(w, s)  t = {activation}(h)
}}> (n, , x)
loss = ReduceSum <keepdims = 0> (y)
"""


def power(activation: str, trips: int = 3) -> onnx.ModelProto:
    body = POWER.format(activation=activation)
    return model(f"n = Constant <value = int64 {{{trips}}}> () {body}", "float[2] x, float[2, 2] w")


def test_a_loop_that_runs_elsewhere_makes_its_iterations() -> None:
    """Onnx's ReferenceEvaluator takes a condition that is left out for false: the gradient was 1 for 8."""
    body = "b (int64 i, bool c, float[2] s) => (bool d, float[2] t) { d = Identity(c) t = Add(s, s) }"
    m = model(f"n = Constant <value_int = 3> () y = Loop <body = {body}> (n, , x)", "float[2] x", "float[2] y")
    feeds = {"x": np.array([1, 2], np.float32), "y.cotangent": np.array([1, 3], np.float32)}
    y, dx = ReferenceEvaluator(gg.vjp(m)).run(None, feeds)
    np.testing.assert_array_equal(y, [8, 16])
    np.testing.assert_array_equal(dx, [8, 24])


def test_a_body_takes_its_number_as_a_vector() -> None:
    """The legacy exporter of PyTorch declares it so, and onnxruntime gives it so; the gradient ran into a scalar."""
    body = """b (int64[1] i, bool c, float[2] s) => (bool d, float[2] t) {
        d = Identity(c)  e = Add(i, one)  p = Slice(w, i, e, zero)  q = Squeeze(p, zero)  t = Mul(s, q)
    }"""
    constants = "one = Constant <value_ints = [1]> ()  zero = Constant <value_ints = [0]> ()"
    loop = f"n = Constant <value_int = 3> ()  {constants}  y = Loop <body = {body}> (n, , x)"
    m = model(f"{loop}  loss = ReduceSum <keepdims = 0> (y)", "float[2] x, float[3, 2] w")
    feeds = {"x": np.array([1, 2], np.float32), "w": np.arange(1, 7, dtype=np.float32).reshape(3, 2)}
    found = run(value_and_grad(m, ["x", "w"]), feeds)
    product = feeds["w"].prod(axis=0)
    np.testing.assert_allclose(found["x.grad"], product)
    np.testing.assert_allclose(found["w.grad"], feeds["x"] * product / feeds["w"])


WITH_LOOPS = [
    pytest.param(trial.model, id=f"{rule.op_type}-{i}")
    for rule in RULES.values()
    if rule.op_type == "Loop" or "Sequence" in rule.op_type
    for i, case in enumerate(rule.cases)
    for trial in [cases.trial(rule, case)]
]


@pytest.mark.parametrize("m", WITH_LOOPS)
@pytest.mark.parametrize("transform", [gg.vjp, gg.jvp])
def test_every_loop_says_that_it_starts(m: onnx.ModelProto, transform: Any) -> None:
    found = transform(m, wrt=["x*"] if transform is gg.jvp else None, allow_unused=True)
    loops = [n for n in every_node(found.graph) if n.op_type == "Loop"]
    assert all(n.input[1] for n in loops)


def test_the_trip_count_does_not_show_in_the_size_of_the_model() -> None:
    few, many = (len(list(every_node(value_and_grad(power("Tanh", n), ["w"]).graph))) for n in (2, 20000))
    assert few == many < 40


@pytest.mark.parametrize(("wrt", "activation", "rows"), [("x", "Identity", 1), ("w", "Identity", 1), ("w", "Tanh", 1)])
def test_the_forward_loop_saves_what_the_gradient_reads(wrt: str, activation: str, rows: int) -> None:
    """One row per iteration: of the iteration number where nothing else is needed, for its count; else of the state."""
    loops = [n for n in value_and_grad(power(activation), [wrt]).graph.node if n.op_type == "Loop"]
    assert [len(loop.output) for loop in loops] == [1 + rows, 2 if wrt == "w" else 1]
    saved = [n.input[0] for n in body_of(loops[0]).node if n.name.endswith("/saved")]
    assert saved == ["s" if wrt == "w" else "i"]


def test_saved_rows_are_shared() -> None:
    """The second gradient reads what the first one saved."""
    once = value_and_grad(power("Tanh"), ["w"])
    total = once.graph.output[1].name
    once.graph.node.append(onnx.helper.make_node("ReduceSumSquare", [total], ["penalty"], keepdims=0))
    once.graph.output.append(onnx.helper.make_tensor_value_info("penalty", onnx.TensorProto.FLOAT, []))
    twice = gg.value_and_grad(once, output="penalty", wrt=["w"])
    assert isinstance(twice, onnx.ModelProto)
    assert next(len(n.output) for n in twice.graph.node if n.op_type == "Loop") == 2


STATES = {
    "known sizes": ("float[2]", "float[2] s", True),
    "a named size": ("float[N]", "float[n] s", True),
    "no sizes in the body": ("float[N]", "float[] s", True),
    "a state that grows": ("float[N]", "float[n] s", False),
}


@pytest.mark.parametrize("kind", STATES)
def test_states_of_one_shape_are_stacked_and_others_kept_in_a_sequence(kind: str) -> None:
    outside, inside, stacked = STATES[kind]
    step = "t = Mul(s, s)" if stacked else "q = Mul(s, s) t = Concat <axis = 0> (q, s)"
    m = model(
        f"""y = Loop <body = b (int64 i, bool c, {inside}) => (bool d, float[] t) {{ d = Identity(c) {step} }}> (n, , x)
        loss = ReduceSum <keepdims = 0> (y)""",
        f"{outside} x, int64 n",
    )
    used = {n.op_type for n in every_node(value_and_grad(m, ["x"]).graph)}
    assert ("SequenceInsert" in used) is not stacked


GATHERED = """
axes = Constant <value_ints = [0]> ()
n = Gather(size, axes)
y = Loop <body = b (int64 i, bool c, float[3] s) => (bool d, float[3] t) {
    d = Identity(c)  j = ADD  r = Gather(x, j)  t = Mul(s, r)
}> (n, , w)
loss = ReduceSum <keepdims = 0> (y)
"""


@pytest.mark.parametrize(("place", "as_rows"), [("Identity(i)", True), ("Add(i, one)", True), ("Mod(i, two)", False)])
def test_rows_read_by_counting_are_put_together_once(place: str, as_rows: bool) -> None:
    """A sum as large as x in every iteration would cost the square of the number of iterations."""
    m = model(
        "one = Constant <value_int = 1> () two = Constant <value_int = 2> () size = Shape(x)"
        + GATHERED.replace("ADD", place),
        "float[T, 3] x, float[3] w",
    )
    backward = next(
        n for n in value_and_grad(m, ["x"]).graph.node if n.op_type == "Loop" and n.name.startswith("grad/")
    )
    assert ("Pad" in {n.op_type for n in body_of(backward).node} or as_rows) and (len(backward.input) == 3) is as_rows


# --- names, types, pruning -------------------------------------------------------------------------------

CASES = [pytest.param(r, i, id=f"{r.op_type}-{i}") for r in CONTROL for i in range(len(r.cases))]


@pytest.mark.parametrize(("rule", "i"), CASES)
def test_every_name_is_given_once(rule: Rule, i: int) -> None:
    """Runtimes confuse a value of a body with one of the same name outside."""
    t = cases.trial(rule, rule.cases[i])
    result = gg.vjp(t.model, outputs=t.read, wrt=t.wrt, allow_unused=True)
    assert isinstance(result, onnx.ModelProto)
    onnx.checker.check_model(result)
    nodes = list(every_node(result.graph))
    graphs = [a.g for n in nodes for a in n.attribute if a.type == onnx.AttributeProto.GRAPH]
    names = [*(o for n in nodes for o in n.output if o), *(x.name for g in (result.graph, *graphs) for x in g.input)]
    assert len(names) == len(set(names))


BRANCHES = """
c = Greater(thr, one)
y = If (c) <
    then_branch = a () => (float[2] a0) { a0 = Mul(w, x) },
    else_branch = b () => (float[2] b0) { b1 = Exp(v) b0 = Mul(b1, x) }
>
loss = ReduceSum <keepdims = 0> (y)
"""
WEIGHTS = "<float[2] w = {1.0, 2.0}, float[2] v = {0.5, 0.25}, float[1] thr = {3.0}, float[1] one = {1.0}>"


def test_what_only_decides_is_not_trained() -> None:
    m = model(BRANCHES, "float[2] x", weights=WEIGHTS.replace("thr = {3.0}", "thr = {3.0}, float[1] spare = {1.0}"))
    assert [o.name for o in value_and_grad(m).graph.output] == ["loss", "w.grad", "v.grad"]


def test_what_only_removed_bodies_read_is_pruned() -> None:
    m = model("e = Exp(v) f = Exp(w)" + BRANCHES.replace("Exp(v)", "Mul(v, e)"), "float[2] x", weights=WEIGHTS)
    m.graph.output.append(onnx.helper.make_tensor_value_info("f", onnx.TensorProto.FLOAT, [2]))
    result = gg.vjp(m, outputs=["f"], wrt=["w"])
    assert isinstance(result, onnx.ModelProto)
    del result.graph.output[0]
    pruned = gg.vjp(result, outputs=["f"], wrt=["w"])
    assert isinstance(pruned, onnx.ModelProto)
    assert "If" not in {n.op_type for n in pruned.graph.node}


@pytest.mark.parametrize(("wrt", "branches"), [(["w"], 1), (["w", "v"], 2)])
def test_a_branch_gives_gradients_of_what_is_asked_for_only(wrt: list[str], branches: int) -> None:
    m = model(BRANCHES, "float[2] x", weights=WEIGHTS)
    result = value_and_grad(m, wrt)
    backward = [n for n in result.graph.node if n.op_type == "If"][-1]
    assert len(backward.output) == branches
    got = run(result, {"x": np.array([3.0, 4.0], np.float32)})
    np.testing.assert_allclose(got["w.grad"], [3.0, 4.0])


# --- through bodies --------------------------------------------------------------------------------------

DEEP = """
total = Scan <num_scan_inputs = 1, body = a (float[2] s, float[2] row) => (float[2] t) {
    u = Loop <body = b (int64 i, bool c, float[2] p) => (bool d, float[2] q) {
        odd = Mod(i, two)
        choice = Cast <to = 9> (odd)
        q = If (choice) <
            then_branch = e () => (float[2] e0) { e1 = Mul(p, w) e0 = Add(e1, row) },
            else_branch = f () => (float[2] f0) { f1 = CALL f0 = Mul(f1, v) }
        >
        d = Identity(c)
    }> (n, , s)
    t = Mul(u, w)
}> (start, x)
loss = ReduceSum <keepdims = 0> (total)
"""


def deep(call: str) -> onnx.ModelProto:
    numbers = "two = Constant <value_int = 2> () n = Constant <value_int = 3> () start = Identity(v)"
    numbers += " size = Constant <value_ints = [2]> ()"
    return model(numbers + DEEP.replace("CALL", call), "float[N, 2] x", weights=WEIGHTS)


@pytest.mark.parametrize("call", ["Sin(p)", "CenterCropPad(p, size)"])  # this one has no rule, but a body
def test_if_in_loop_in_scan(call: str) -> None:
    m = deep(call)
    x = np.random.default_rng(0).uniform(0.5, 1.5, (3, 2)).astype(np.float32)
    got = run(value_and_grad(m, ["w", "v", "x"]), {"x": x})
    for name in ("w", "v"):
        expected = differences(m, name, {"x": x})
        np.testing.assert_allclose(got[f"{name}.grad"], expected, rtol=2e-3, err_msg=name)


def differences(m: onnx.ModelProto, name: str, feeds: Mapping[str, np.ndarray]) -> np.ndarray:
    """The gradient of the loss by an initializer, entry by entry, from float64 central differences."""
    wide = in_float64(m)
    tensor = next(t for t in wide.graph.initializer if t.name == name)
    start, f = onnx.numpy_helper.to_array(tensor).copy(), []
    for entry, sign in itertools.product(range(start.size), (1, -1)):
        moved = start.copy()
        moved[entry] += sign * 1e-6
        tensor.CopyFrom(onnx.numpy_helper.from_array(moved, name))
        f.append(Oracle(wide)({k: v.astype(np.float64) for k, v in feeds.items()})["loss"])
    return (np.array(f[::2]) - np.array(f[1::2])) / 2e-6


# --- errors ----------------------------------------------------------------------------------------------


def test_missing_rules_in_bodies_are_listed_with_all_others() -> None:
    m = deep("custom.Inner(p)")
    m.graph.node.insert(len(m.graph.node) - 1, onnx.helper.make_node("Outer", ["total"], ["z"], domain="custom"))
    m.graph.node[-1].input[0] = "z"
    with pytest.raises(UnsupportedOperatorError, match=r"custom\.Inner.*custom\.Outer|custom\.Outer.*custom\.Inner"):
        value_and_grad(m, ["w"])


DRAWN = """
y = Loop <body = b (int64 i, bool c, float[2] s) => (bool d, float[2] t) {
    d = Identity(c)  r = NOISE(s)  t = Mul(s, r)
}> (n, , x)
loss = ReduceSum <keepdims = 0> (y)
"""


def test_random_numbers_in_a_body_are_refused() -> None:
    with pytest.raises(
        UnsupportedOperatorError, match=r"\(RandomNormalLike\) draws .* inside .* \(Loop\), .* draw them outside"
    ):
        value_and_grad(model(DRAWN.replace("NOISE", "RandomNormalLike"), "float[2] x, int64 n"), ["x"])


def test_a_sequence_read_by_a_scan_is_refused() -> None:
    body = """
    s = SplitToSequence <axis = 0> (w, sizes)
    y = Scan <num_scan_inputs = 1, body = b (float[2] x) => (float[k, 2] z) { e = SequenceAt(s, k) z = Mul(e, x) }> (x)
    loss = ReduceSum <keepdims = 0> (y)
    """
    with pytest.raises(UnsupportedOperatorError, match=r"\(Scan\) reads the sequence 's' from outside"):
        value_and_grad(model(body, "float[N, 2] x, float[4, 2] w, int64[2] sizes, int64 k"), ["w"])


def test_a_weight_that_only_decides_is_named() -> None:
    with pytest.raises(DifferentiationError, match=r"does not depend on 'thr'.*not floating"):
        value_and_grad(model(BRANCHES, "float[2] x", weights=WEIGHTS), ["thr"])


def test_states_of_a_loop_whose_body_tells_no_types() -> None:
    """As onnxscript writes a ``for`` in a function: its states have neither element type nor shape."""
    model = onnx.parser.parse_model("""<ir_version: 9, opset_import: ["": 18, "own": 1]>
    g (float[n, 2] x) => (float[n, 2] y) <float[2, 2] w = {0.5, -1, 0.25, 2}, int64 count = {3}> {
        y = own.Repeated(x, w, count)
    }
    <domain: "own", opset_import: ["": 18]>
    Repeated (x, w, count) => (last) {
        last = Loop(count, "", x)<body = b (int64 i, bool go, float h) => (bool on, float after) {
            t = MatMul(h, w) s = Tanh(t) after = Add(s, x) on = Identity(go)
        }>
    }""")
    body = model.functions[0].node[0].attribute[0].g
    for value in (body.input[2], *body.output):
        value.ClearField("type")
    x, w = np.array([[0.3, -0.2]]), np.array([[0.5, -1], [0.25, 2]])
    h, dh = x, np.ones_like(x)
    for _ in range(3):
        t = np.tanh(h @ w)
        h, dh = t + x, (dh @ w) * (1 - t**2) + np.ones_like(x)  # along x.tangent = 1
    found = run(gg.jvp(model, wrt="x"), {"x": x.astype(np.float32), "x.tangent": np.ones((1, 2), np.float32)})
    np.testing.assert_allclose(found["y.tangent"], dh, rtol=1e-5)
    gradient = run(gg.vjp(model, wrt="x"), {"x": x.astype(np.float32), "y.cotangent": np.ones((1, 2), np.float32)})
    np.testing.assert_allclose(gradient["x.grad"].sum(), dh.sum(), rtol=1e-5)

"""Sequences in the normal form, and what is left of them at run time."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx
import onnx.parser
import pytest

import gradgraph as gg
from gradgraph.verify.reference import Oracle, in_float64
from tests.kit.running import run


def model(body: str, inputs: str) -> onnx.ModelProto:
    body += " loss = ReduceSumSquare <keepdims = 0> (y)"
    return onnx.parser.parse_model(
        f'<ir_version: 10, opset_import: ["": 21]> g ({inputs}) => (float loss) '
        f"<int64 one = {{1}}, int64 two = {{2}}, int64 last = {{-1}}, int64[2] parts = {{1, 3}}> {{ {body} }}"
    )


def gradient(m: onnx.ModelProto, *wrt: str) -> onnx.ModelProto:
    result = gg.value_and_grad(m, output="loss", wrt=list(wrt))
    assert isinstance(result, onnx.ModelProto)
    return result


def operators(graph: onnx.GraphProto) -> set[str]:
    inner = (a.g for n in graph.node for a in n.attribute if a.type == onnx.AttributeProto.GRAPH)
    return {n.op_type for n in graph.node}.union(*map(operators, inner))


CONTAINERS = {"Optional", "OptionalGetElement", "OptionalHasElement", "If"} | {
    s.name for s in onnx.defs.get_all_schemas() if "Sequence" in s.name and s.name != "ReverseSequence"
}

# body, inputs, what it computes
RESOLVED: dict[str, tuple[str, str, Callable[[np.ndarray], np.ndarray]]] = {
    "equal pieces": (
        "s = SplitToSequence <axis = -1> (x, two) a = SequenceAt(s, one) b = SequenceAt(s, last) y = Mul(a, b)",
        "float[3, 4] x",
        lambda x: x[:, 2:] ** 2,
    ),
    "a shorter last piece": (
        "s = SplitToSequence <axis = 1> (x, two) a = SequenceAt(s, one) b = SequenceAt(s, last) y = MatMul(a, b)",
        "float[2, 4] x",
        lambda x: x[:, 2:] @ x[:, 2:],
    ),
    "given pieces of an open axis": (
        "s = SplitToSequence <axis = 1> (x, parts) y = SequenceAt(s, last)",
        "float[3, N] x",
        lambda x: x[:, 1:],
    ),
    "slices of a known axis": (
        "s = SplitToSequence <axis = 1, keepdims = 0> (x) a = SequenceAt(s, one) b = SequenceAt(s, last) y = Mul(a, b)",
        "float[3, 4] x",
        lambda x: x[:, 1] * x[:, 3],
    ),
    "slices of an open axis": (
        "s = SplitToSequence <axis = 1, keepdims = 0> (x) y = SequenceAt(s, last)",
        "float[3, N] x",
        lambda x: x[:, -1],
    ),
    "a slice chosen at run time": (
        "n = Shape <start = 0, end = 1> (x) z = Sub(n, parts) i = ReduceMin <keepdims = 0> (z) "
        "s = SplitToSequence (x) y = SequenceAt(s, i)",
        "float[M, N] x",
        lambda x: x[:1],
    ),
    "the number of slices": (
        "s = SplitToSequence (x) k = SequenceLength(s) f = CastLike(k, x) y = Mul(f, x)",
        "float[N, 4] x",
        lambda x: 3 * x,
    ),
    "a list that is edited and stacked": (
        "a = Exp(x) s = SequenceConstruct(x, a) t = SequenceInsert(s, x, one) u = SequenceErase(t, last) "
        "y = ConcatFromSequence <axis = -1, new_axis = 1> (u)",
        "float[3, 4] x",
        lambda x: np.stack([x, x], -1),
    ),
    "a list that is built from nothing and concatenated": (
        "s = SequenceEmpty() t = SequenceInsert(s, x) u = SequenceInsert(t, x) y = ConcatFromSequence <axis = 0> (u)",
        "float[3, 4] x",
        lambda x: np.concatenate([x, x]),
    ),
    "read in a branch": (
        "s = SplitToSequence <axis = 1> (x, two) n = SequenceLength(s) c = Equal(n, two) y = If (c) <"
        "then_branch = p () => (float[3, 2] p0) { p0 = SequenceAt(s, last) },"
        "else_branch = q () => (float[3, 2] q0) { q0 = SequenceAt(s, one) }>",
        "float[3, 4] x",
        lambda x: x[:, 2:],
    ),
    "an optional that is there": (
        "o = Optional(x) c = OptionalHasElement(o) e = OptionalGetElement(o) f = CastLike(c, e) y = Mul(e, f)",
        "float[3, 4] x",
        lambda x: x,
    ),
}


@pytest.mark.parametrize("name", RESOLVED)
def test_known_sequences_become_tensors(name: str) -> None:
    body, inputs, expected = RESOLVED[name]
    result = gradient(model(body, inputs), "x")
    assert not operators(result.graph) & CONTAINERS
    x = np.random.default_rng(0).uniform(0.5, 1.5, (2 if "last piece" in name else 3, 4)).astype(np.float32)
    got = run(result, {"x": x})
    np.testing.assert_allclose(got["loss"], np.sum(expected(x) ** 2), rtol=1e-5)


def test_many_slices_do_not_make_many_outputs() -> None:
    m = model("s = SplitToSequence <keepdims = 0> (x) y = SequenceAt(s, last)", "float[5000, 2] x")
    assert len(gradient(m, "x").graph.node) < 20


def test_a_list_of_unlike_tensors_in_a_loop() -> None:
    """Elements of different shapes, chosen at run time, one of them twice."""
    body = """
    three = Constant <value_int = 3> ()
    axes = Constant <value_ints = [0]> ()
    s = SequenceConstruct(a, b)
    start = Unsqueeze(f0, axes)
    y = Loop <body = l (int64 i, bool c, float[n] t) => (bool d, float[m] u) {
        d = Identity(c)
        k = Mod(i, two)
        e = SequenceAt(s, k)
        g = Mul(e, e)
        u = Concat <axis = 0> (t, g)
    }> (three, , start)
    """
    m = model(body, "float[2] a, float[3] b, float f0")
    feeds = {"a": np.array([1, 2], np.float32), "b": np.array([3, 1, 2], np.float32), "f0": np.array(1, np.float32)}
    got = run(gradient(m, "a", "b", "f0"), feeds)
    np.testing.assert_allclose(got["a.grad"], 2 * 4 * feeds["a"] ** 3)  # of 2 Σ a⁴
    np.testing.assert_allclose(got["b.grad"], 4 * feeds["b"] ** 3)
    np.testing.assert_allclose(got["f0.grad"], 2)


def test_a_list_that_is_read_while_it_grows() -> None:
    body = """
    s0 = SequenceConstruct(x, a)
    s = Loop <body = l (int64 i, bool c, seq(float[2]) t) => (bool d, seq(float[2]) u) {
        d = Identity(c)
        e = SequenceAt(t, i)
        f = SequenceAt(t, last)
        g = Mul(e, f)
        u = SequenceInsert(t, g)
    }> (n, , s0)
    y = SequenceAt(s, last)
    """
    x, a = np.array([1, 2], np.float32), np.array([3, 1], np.float32)
    # x, a, xa, a(xa), (xa)(xxa) ...
    for n, (p, q) in enumerate([(0, 1), (1, 1), (1, 2), (2, 3), (3, 5)]):
        got = run(
            gradient(model(body, "float[2] x, float[2] a, int64 n"), "x", "a"), {"x": x, "a": a, "n": np.array(n)}
        )
        y = x**p * a**q
        np.testing.assert_allclose(got["loss"], np.sum(y**2), rtol=1e-5)
        np.testing.assert_allclose(got["x.grad"], 2 * y**2 * p / x, rtol=1e-5)
        np.testing.assert_allclose(got["a.grad"], 2 * y**2 * q / a, rtol=1e-5)


def test_a_branch_that_gives_a_sequence() -> None:
    body = """
    t = ReduceSum <keepdims = 0> (b)
    c = Cast <to = 9> (t)
    s = If (c) <
        then_branch = p () => (seq(float[n]) p0) { p0 = SequenceConstruct(a, b) },
        else_branch = q () => (seq(float[n]) q0) { q0 = SequenceConstruct(b) }
    >
    y = ConcatFromSequence <axis = 0> (s)
    """
    result = gradient(model(body, "float[2] a, float[3] b"), "a", "b")
    for b, share in ((np.ones(3), 2.0), (np.zeros(3), 0.0)):
        got = run(result, {"a": np.ones(2, np.float32), "b": b.astype(np.float32)})
        np.testing.assert_allclose(got["a.grad"], [share, share])
        np.testing.assert_allclose(got["b.grad"], 2 * b)


# what is taken from a sequence of x and z, which are of unequal size
TAKEN = {
    "erased": "s = SequenceConstruct(a, b) e = SequenceErase(s, i) y = ConcatFromSequence <axis = 0> (e)",
    "inserted": "s = SequenceConstruct(a) e = SequenceInsert(s, b, i) y = ConcatFromSequence <axis = 0> (e)",
    "at": "s = SequenceConstruct(a, b) e = SequenceAt(s, i) y = Mul(e, e)",
    "cut": "c = Concat <axis = 0> (a, b) s = SplitToSequence <axis = 0> (c, parts) e = SequenceAt(s, i) y = Sqrt(e)",
}


@pytest.mark.parametrize("dtype", ["float", "float16"])
@pytest.mark.parametrize("sizes", [("n", "m"), ("3", "4"), ("3", "m")])
@pytest.mark.parametrize("taken", TAKEN)
def test_elements_of_unequal_size_get_buffers_of_their_own(taken: str, sizes: tuple[str, str], dtype: str) -> None:
    body = f"a = Sin(x) b = Sqrt(z) {TAKEN[taken]}"
    m = onnx.parser.parse_model(
        f'<ir_version: 10, opset_import: ["": 21]> g ({dtype}[{sizes[0]}] x, {dtype}[{sizes[1]}] z, int64 i) => '
        f"({dtype}[k] y) <int64[2] parts = {{3, 4}}> {{ {body} }}"
    )
    number = np.float32 if dtype == "float" else np.float16
    x, z = np.linspace(0.2, 0.8, 3).astype(number), np.linspace(0.3, 1.2, 4).astype(number)
    gradient = gg.vjp(m, outputs=["y"], wrt=["x", "z"])
    for i in (0, 1):
        feeds = {"x": x, "z": z, "i": np.array(i)}
        feeds["y.cotangent"] = np.linspace(-1, 1, len(run(m, feeds)["y"])).astype(number)
        wide = {k: v.astype(np.float64) if v.dtype.kind == "f" else v for k, v in feeds.items()}
        exact = Oracle(in_float64(gradient))(wide)
        for name, value in run(gradient, feeds).items():
            np.testing.assert_allclose(value, exact[name], rtol=1e-5 if dtype == "float" else 1e-2, atol=1e-3)

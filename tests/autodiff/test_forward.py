"""Forward mode: against reverse mode over every case of every rule, by hand, in composition, and how much it emits."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import TensorProto, helper, numpy_helper

import gradgraph as gg
import gradgraph.rules.families
from gradgraph.autodiff.shared_sizes import COMPARED
from gradgraph.autodiff.tangents import PUSHES
from gradgraph.errors import DifferentiationError, UnknownNameError
from gradgraph.rules.registry import RULES, Case, Rule, vjp
from gradgraph.verify import cases
from gradgraph.verify.reference import Oracle
from tests.kit.running import run

RNG = np.random.default_rng(0)
CASES = [pytest.param(r, c, id=f"{r.op_type}-{i}") for r in RULES.values() for i, c in enumerate(r.cases)]
FLOAT = TensorProto.FLOAT
node = helper.make_node


# --- ⟨u, J·t⟩ = ⟨Jᵀ·u, t⟩ -------------------------------------------------------------------------------


def products(t: cases.Trial) -> tuple[float, float]:
    """⟨u, J·t⟩ by forward mode and ⟨Jᵀ·u, t⟩ by reverse mode, in float64."""
    rng = np.random.default_rng(1)
    ys = Oracle(t.model)(t.feeds)
    u = {y: np.asarray(rng.uniform(-1, 1, ys[y].shape)) for y in t.read}
    tangent = {x: np.asarray(rng.uniform(-1, 1, t.feeds[x].shape)) for x in t.wrt}
    forward = Oracle(gg.jvp(t.model, wrt=t.wrt, outputs=t.read, allow_unused=True))
    reverse = Oracle(gg.vjp(t.model, outputs=t.read, wrt=t.wrt, allow_unused=True))
    pushed = forward({**t.feeds, **{f"{x}.tangent": d for x, d in tangent.items()}})
    pulled = reverse({**t.feeds, **{f"{y}.cotangent": d for y, d in u.items()}})
    for y in t.read:
        assert pushed[f"{y}.tangent"].shape == ys[y].shape
        np.testing.assert_allclose(pushed[y], ys[y], rtol=1e-12)
    return (
        sum(float((u[y] * pushed[f"{y}.tangent"]).sum()) for y in t.read),
        sum(float((pulled[f"{x}.grad"] * tangent[x]).sum()) for x in t.wrt),
    )


@pytest.mark.sweep(0.02)
@pytest.mark.parametrize(("rule", "case"), CASES)
def test_forward_and_reverse_mode_agree(rule: Rule, case: Case) -> None:
    if "a loop of no steps" in case.first_order_only:
        pytest.skip(case.first_order_only)
    forward, reverse = products(cases.trial(rule, case, unknown=not case.known_shapes))
    assert forward == pytest.approx(reverse, rel=1e-9, abs=1e-9)


@pytest.mark.sweep(0.098)
@pytest.mark.parametrize(("rule", "case"), [p for p in CASES if p.values[0].op_type in PUSHES])
def test_they_agree_where_shapes_are_known_and_only_one_input_moves(rule: Rule, case: Case) -> None:
    t = cases.trial(rule, case)
    for x in t.wrt:
        forward, reverse = products(cases.Trial(t.model, t.feeds, [x], t.read))
        assert forward == pytest.approx(reverse, rel=1e-9, abs=1e-9)


def test_every_operator_of_the_table_has_a_rule_with_cases() -> None:
    assert [name for name in PUSHES if not RULES["", name].cases] == []


# --- names, defaults, composition, errors --------------------------------------------------------------


def graph_model(
    nodes: list[onnx.NodeProto],
    inputs: dict[str, list[Any]],
    outputs: dict[str, list[Any]],
    weights: dict[str, np.ndarray] | None = None,
) -> onnx.ModelProto:
    graph = helper.make_graph(
        nodes,
        "test",
        [helper.make_tensor_value_info(k, FLOAT, v) for k, v in inputs.items()],
        [helper.make_tensor_value_info(k, FLOAT, v) for k, v in outputs.items()],
        [numpy_helper.from_array(v, k) for k, v in (weights or {}).items()],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)


W = RNG.normal(size=(3, 2)).astype(np.float32)
B = np.array([0.1, -0.2], np.float32)
X = RNG.normal(size=(4, 3)).astype(np.float32)


def layer() -> onnx.ModelProto:
    """``y = tanh(x·w + b)`` and ``z = x·w`` for a symbolic batch."""
    nodes = [node("MatMul", ["x", "w"], ["z"]), node("Add", ["z", "b"], ["h"]), node("Tanh", ["h"], ["y"])]
    return graph_model(nodes, {"x": ["n", 3]}, {"y": ["n", 2], "z": ["n", 2]}, {"w": W, "b": B})


def test_names_shapes_and_numbers() -> None:
    m = gg.jvp(layer())
    assert [i.name for i in m.graph.input] == ["x", "w.tangent", "b.tangent"]
    assert [o.name for o in m.graph.output] == ["y", "z", "y.tangent", "z.tangent"]
    assert [d.dim_param or d.dim_value for d in m.graph.output[2].type.tensor_type.shape.dim] == ["n", 2]
    onnx.checker.check_model(m, full_check=True)
    dw, db = RNG.normal(size=W.shape).astype(np.float32), RNG.normal(size=B.shape).astype(np.float32)
    result = run(m, {"x": X, "w.tangent": dw, "b.tangent": db})
    y = np.tanh(X @ W + B)
    np.testing.assert_allclose(result["z.tangent"], X @ dw, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(result["y.tangent"], (1 - y * y) * (X @ dw + db), rtol=1e-5, atol=1e-6)


def test_a_summand_alone_is_broadcast_and_an_output_that_does_not_move_is_zero() -> None:
    result = run(gg.jvp(layer(), wrt="b"), {"x": X, "b.tangent": np.ones(2, np.float32)})
    np.testing.assert_allclose(result["y.tangent"], 1 - np.tanh(X @ W + B) ** 2, rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(result["z.tangent"], np.zeros((4, 2)))


def test_an_input_that_is_an_output_passes_its_tangent_on() -> None:
    m = graph_model([node("Neg", ["x"], ["y"])], {"x": [2]}, {"y": [2], "x": [2]})
    tangent = np.array([1.0, 2.0], np.float32)
    result = run(gg.jvp(m), {"x": np.zeros(2, np.float32), "x.tangent": tangent})
    np.testing.assert_array_equal(result["y.tangent"], -tangent)
    np.testing.assert_array_equal(result["x.tangent_1"], tangent)


def test_the_kind_of_model_that_went_in_comes_out() -> None:
    m = layer()
    before = m.SerializeToString()
    assert isinstance(gg.jvp(m), onnx.ModelProto)
    assert isinstance(gg.jvp(ir.from_proto(m)), ir.Model)
    assert m.SerializeToString() == before


def test_the_gradient_of_a_tangent_is_the_hessian() -> None:
    """With y = Σ x⁴: the tangent is 4 x³·t, and its gradient by x is 12 x²·t."""
    nodes = [node("Pow", ["x", "four"], ["p"]), node("ReduceSum", ["p"], ["y"], keepdims=0)]
    m = graph_model(nodes, {"x": [3]}, {"y": []}, {"four": np.array(4.0, np.float32)})
    x, t = np.array([1.0, -2.0, 0.5], np.float32), np.array([0.5, 1.0, -1.0], np.float32)
    composed = gg.value_and_grad(gg.jvp(m, wrt="x"), output="y.tangent", wrt=["x", "x.tangent"])
    result = run(composed, {"x": x, "x.tangent": t})
    np.testing.assert_allclose(result["y.tangent"], (4 * x**3 * t).sum(), rtol=1e-6)
    np.testing.assert_allclose(result["x.grad"], 12 * x**2 * t, rtol=1e-6)
    np.testing.assert_allclose(result["x.tangent.grad"], 4 * x**3, rtol=1e-6)


def test_tangents_of_tangents() -> None:
    m = graph_model([node("Sin", ["x"], ["y"])], {"x": [3]}, {"y": [3]})
    twice = gg.jvp(gg.jvp(m), wrt="x", outputs="y.tangent")
    assert [i.name for i in twice.graph.input] == ["x", "x.tangent", "x.tangent_1"]
    x, s, t = RNG.normal(size=(3, 3)).astype(np.float32)
    result = run(twice, {"x": x, "x.tangent": s, "x.tangent_1": t})
    np.testing.assert_allclose(result["y.tangent.tangent"], -np.sin(x) * s * t, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"wrt": "v"}, UnknownNameError, "no input, initializer or inner value matches 'v'"),
        ({"wrt": "w", "outputs": "u"}, UnknownNameError, "matches 'u'"),
        ({"wrt": "b", "outputs": "z"}, DifferentiationError, "does not depend on 'b'"),
    ],
)
def test_errors_are_those_of_the_other_transforms(options: dict[str, Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        gg.jvp(layer(), **options)


def test_a_rule_that_is_not_linear_in_its_cotangent_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(RULES, ("", "Pow"), RULES["", "Pow"])
    vjp("Pow", broadcasts=True)(lambda op, dz, z, x, y: (dz * dz,))
    m = graph_model([node("Pow", ["x", "c"], ["y"])], {"x": [2]}, {"y": [2]}, {"c": np.array(2.5, np.float32)})
    with pytest.raises(DifferentiationError, match="not linear in its cotangent"):
        gg.jvp(m, wrt="x")


# --- what is emitted -----------------------------------------------------------------------------------


def work(m: onnx.ModelProto) -> Counter[str]:
    """The operators of ``m``, without what compares the sizes of its inputs."""
    own = [n for n in m.graph.node if not n.name.startswith("sizes/") and COMPARED not in n.name]
    return Counter(n.op_type for n in own)


def perceptron() -> onnx.ModelProto:
    """Three Gemms with Tanh between, for a symbolic batch."""
    sizes, nodes, weights = [8, 8, 8, 4], [], {}
    for i, (n, m) in enumerate(itertools.pairwise(sizes)):
        weights |= {f"w{i}": np.ones((n, m), np.float32), f"b{i}": np.ones(m, np.float32)}
        nodes.append(node("Gemm", [f"h{i}", f"w{i}", f"b{i}"], [f"a{i}" if i < 2 else "y"]))
        nodes += [node("Tanh", [f"a{i}"], [f"h{i + 1}"])] if i < 2 else []
    return graph_model(nodes, {"h0": ["n", 8]}, {"y": ["n", 4]}, weights)


@pytest.mark.parametrize(
    ("wrt", "products", "sums"),
    [("h0", 3 + 3, 0), (None, 3 + 3 + 2, 2 * 2), ("*", 3 + 3 + 3, 3 * 2)],  # one more for each factor that moves
)
def test_a_perceptron_costs_at_most_three_times_its_matrix_products(wrt: str | None, products: int, sums: int) -> None:
    """Two products are added to each other, and to the tangent of the bias: Gemm copies a third input."""
    m = gg.jvp(perceptron(), wrt=wrt)
    tanh = {"Tanh": 2, "Mul": 4, "Sub": 2}  # Tanh' = 1 - y², times the tangent
    assert work(m) == Counter({"Gemm": products, **tanh, "Add": sums})


DIMS = (["n", 8], ["n", 3, 8], ["n", "none", 8])


@pytest.mark.parametrize(
    ("dims", "wrt", "emitted"),
    [
        *[(dims, "x", "MatMul") for dims in DIMS],
        *[(dims, ["w", "b"], "MatMul Add") for dims in DIMS],
        *[(dims, "*", "MatMul MatMul Add Add") for dims in DIMS],
    ],
)
def test_the_tangent_of_a_linear_layer(dims: list[Any], wrt: str | list[str], emitted: str) -> None:
    rng = np.random.default_rng(2)
    w, b = rng.normal(size=(8, 4)).astype(np.float32), rng.normal(size=4).astype(np.float32)
    nodes = [node("MatMul", ["x", "w"], ["z"]), node("Add", ["b", "z"], ["y"])]
    m = gg.jvp(graph_model(nodes, {"x": dims}, {"y": [*dims[:-1], 4]}, {"w": w, "b": b}), wrt=wrt)
    assert work(m) == Counter(["MatMul", "Add", *emitted.split()])
    x, dx = rng.normal(size=(2, *({"n": 5, "none": 0}.get(d, d) for d in dims))).astype(np.float32)
    tangents = {"x": dx, "w": rng.normal(size=w.shape).astype(np.float32), "b": b + 1}
    fed = {f"{k}.tangent": v for k, v in tangents.items() if f"{k}.tangent" in {i.name for i in m.graph.input}}
    moves = {k: fed.get(f"{k}.tangent", np.zeros_like(v)) for k, v in tangents.items()}
    expected = moves["x"] @ w + x @ moves["w"] + moves["b"]
    np.testing.assert_allclose(run(m, {"x": x, **fed})["y.tangent"], expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("wrt", ["a", "b", "c", "ab", "ac", "bc", "abc"])
@pytest.mark.parametrize("summand", [(), (1,), (4,), (5, 1), (5, 4)])
def test_the_tangent_of_a_gemm_with_factors(wrt: str, summand: tuple[int, ...]) -> None:
    """``0.5·aᵀ·bᵀ + 3·c``."""
    shapes = {"a": (3, 5), "b": (4, 3), "c": summand}
    rng = np.random.default_rng(3)
    values, moves = ({k: rng.normal(size=s).astype(np.float32) for k, s in shapes.items()} for _ in range(2))
    product = node("Gemm", ["a", "b", "c"], ["y"], alpha=0.5, beta=3.0, transA=1, transB=1)
    m = gg.jvp(graph_model([product], {k: list(s) for k, s in shapes.items()}, {"y": [5, 4]}), wrt=list(wrt))
    dy = run(m, values | {f"{k}.tangent": moves[k] for k in wrt})["y.tangent"]
    da, db, dc = (moves[k] if k in wrt else np.zeros_like(moves[k]) for k in "abc")
    expected = 0.5 * (da.T @ values["b"].T + values["a"].T @ db.T) + 3 * dc
    np.testing.assert_allclose(dy, np.broadcast_to(expected, (5, 4)), rtol=1e-5, atol=1e-5)


def test_a_column_of_biases_is_added() -> None:
    """Not every bias is a row."""
    w, b = np.ones((3, 2), np.float32), np.ones((4, 1), np.float32)
    nodes = [node("MatMul", ["x", "w"], ["z"]), node("Add", ["z", "b"], ["y"])]
    m = gg.jvp(graph_model(nodes, {"x": ["n", 4, 3]}, {"y": ["n", 4, 2]}, {"w": w, "b": b}), wrt=["w", "b"])
    x = np.ones((2, 4, 3), np.float32)
    db = np.array([[1.0], [2.0], [3.0], [4.0]], np.float32)
    result = run(m, {"x": x, "w.tangent": w, "b.tangent": db})
    np.testing.assert_allclose(result["y.tangent"], x @ w + db)


def test_element_wise_functions_cost_one_product_beside_their_derivative() -> None:
    nodes = [node("Sin", ["x"], ["a"]), node("Exp", ["a"], ["b"]), node("Mul", ["b", "c"], ["y"])]
    m = gg.jvp(graph_model(nodes, {"x": ["n", 3]}, {"y": ["n", 3]}, {"c": B[:1]}), wrt="x")
    assert work(m) == {"Sin": 1, "Exp": 1, "Mul": 1 + 3, "Cos": 1}


@pytest.mark.parametrize(
    ("text", "emitted"),
    [
        ("y = Mul(x, x)", {"Mul": 1, "Add": 1}),
        ("s = Sigmoid(x)  y = Mul(x, s)", {"Mul": 2, "Sub": 1, "Add": 1}),  # SiLU
        ("s = Sigmoid(x)  y = Mul(s, x)", {"Mul": 2, "Sub": 1, "Add": 1}),
        ("s = Sigmoid(x)  z = Neg(x)  y = Mul(s, z)", {"Mul": 4, "Sub": 1, "Add": 1, "Neg": 1}),  # no SiLU
        ("z = Exp(x)  y = Div(x, z)", {"Mul": 2, "Sub": 1, "Div": 1}),
        ("z = Exp(x)  y = Div(z, c)", {"Mul": 1, "Div": 1}),
        ("y = Div(c, x)", {"Mul": 1, "Div": 1, "Neg": 1}),
        ("y = Abs(x)", {"Mul": 1, "Clip": 1, "Ceil": 1, "Floor": 1, "Add": 1}),
    ],
)
def test_products_quotients_and_signs_have_short_tangents(text: str, emitted: dict[str, int]) -> None:
    m = onnx.parser.parse_model(
        f'<ir_version: 10, opset_import: ["": 21]> g (float[n, 3] x, float[n, 3] c) => (float[n, 3] y) {{ {text} }}'
    )
    pushed = gg.jvp(m, wrt="x")
    assert work(pushed) == work(m) + Counter(emitted)
    x, dx, c = np.random.default_rng(4).normal(size=(3, 4, 3)).astype(np.float32)
    grad = gg.vjp(m, wrt="x")
    expected = dx * run(grad, {"x": x, "c": c, "y.cotangent": np.ones_like(x)})["x.grad"]
    fed = {k.name: {"x": x, "c": c, "x.tangent": dx}[k.name] for k in pushed.graph.input}
    np.testing.assert_allclose(run(pushed, fed)["y.tangent"], expected, rtol=1e-5, atol=1e-6)


FAR = np.array([-np.inf, -100, -6, -5.5, -1, -1e-30, 0, 0.5, 3, 5.5, 100], np.float32)


@pytest.mark.parametrize("branch", [False, True])
def test_gelu_and_its_tangent_share_the_error_function(branch: bool) -> None:
    gelu = [node("Gelu", ["x"], ["g"]), node("Sin", ["g"], ["y"])]
    if branch:
        bodies = [helper.make_graph(gelu, "b", [], [helper.make_tensor_value_info("g", FLOAT, ["n"])]) for _ in "ab"]
        keys = {"then_branch": bodies[0], "else_branch": bodies[1]}
        gelu = [
            node("ReduceMax", ["x"], ["m"], keepdims=0),
            node("Cast", ["m"], ["c"], to=9),
            node("If", ["c"], ["y"], **keys),
        ]
    m = graph_model(gelu, {"x": ["n"]}, {"y": ["n"]})
    pushed = gg.jvp(m, wrt="x")
    graph = (
        pushed.graph if not branch else next(a.g for a in pushed.graph.node[-1].attribute if a.name == "then_branch")
    )
    counts = Counter(n.op_type for n in graph.node)
    assert (counts["Gelu"], counts["Erf"], counts["HardSigmoid"], counts["Exp"]) == (0, 1, 1, 1)
    result = run(pushed, {"x": FAR, "x.tangent": np.full_like(FAR, 2)})
    np.testing.assert_array_equal(result["y"], run(m, {"x": FAR})["y"])


def test_gelu_at_every_distance_and_twice() -> None:
    m = graph_model([node("Gelu", ["x"], ["y"])], {"x": ["n"]}, {"y": ["n"]})
    x = np.linspace(-8, 8, 1001).astype(np.float32)
    ones = np.ones_like(x)
    twice = gg.jvp(gg.jvp(m, wrt="x"), wrt="x")
    result = run(twice, {"x": x, "x.tangent": ones, "x.tangent_1": ones})
    wide = x.astype(np.float64)
    phi = np.exp(-wide * wide / 2) / np.sqrt(2 * np.pi)
    cdf = np.array([0.5 * math.erfc(-v / math.sqrt(2)) for v in wide])
    np.testing.assert_allclose(result["y"], wide * cdf, atol=1e-6)
    np.testing.assert_allclose(result["y.tangent"], cdf + wide * phi, atol=1e-6)
    np.testing.assert_allclose(result["y.tangent.tangent"], (2 - wide * wide) * phi, rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize(("approximate", "dtype"), [("tanh", FLOAT), ("none", TensorProto.FLOAT16)])
def test_other_gelus_keep_their_operator(approximate: str, dtype: int) -> None:
    m = graph_model([node("Gelu", ["x"], ["y"], approximate=approximate)], {"x": [3]}, {"y": [3]})
    for value in (*m.graph.input, *m.graph.output):
        value.type.tensor_type.elem_type = dtype
    assert work(gg.jvp(m))["Gelu"] == 1


def test_a_gate_that_is_an_output_has_a_tangent_of_its_own() -> None:
    nodes = [node("Sigmoid", ["x"], ["s"]), node("Mul", ["x", "s"], ["y"])]
    m = graph_model(nodes, {"x": [3]}, {"y": [3], "s": [3]})
    x, t = np.array([-1.0, 0.0, 2.0]), np.array([1.0, -2.0, 0.5])
    result, s = run(gg.jvp(m), {"x": x.astype(np.float32), "x.tangent": t.astype(np.float32)}), 1 / (1 + np.exp(-x))
    np.testing.assert_allclose(result["s.tangent"], t * s * (1 - s), rtol=1e-6)
    np.testing.assert_allclose(result["y.tangent"], t * (s + x * s * (1 - s)), rtol=1e-6)


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_the_tangent_of_abs_is_exact_at_every_number(dtype: type[np.floating[Any]]) -> None:
    info = np.finfo(dtype)
    edges = [0.0, info.smallest_subnormal, info.tiny, 0.25, 0.5, 0.75, 1.0, 1.5, 3.0, info.max, np.inf]
    x = np.array([*edges, *(-e for e in edges)], dtype)
    m = graph_model([node("Abs", ["x"], ["y"])], {"x": [len(x)]}, {"y": [len(x)]})
    for value in (*m.graph.input, *m.graph.output):
        value.type.tensor_type.elem_type = helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
    tangent = np.linspace(1, 2, len(x)).astype(dtype)
    result = run(gg.jvp(m), {"x": x, "x.tangent": tangent})
    np.testing.assert_array_equal(result["y.tangent"], tangent * np.sign(x))


@pytest.mark.parametrize("transform", [gg.jvp, gg.hvp])
def test_nothing_is_computed_twice(transform: Any) -> None:
    """Both gradients of Pow ask where the base is zero; the gradient of Gelu and its tangent share an exponential."""
    nodes = [node("Pow", ["x", "e"], ["p"]), node("Gelu", ["p"], ["g"]), node("ReduceSum", ["g"], ["y"], keepdims=0)]
    m = transform(graph_model(nodes, {"x": ["n"], "e": ["n"]}, {"y": []}), wrt=["x", "e"])
    computed = [(n.op_type, *n.input, *map(str, n.attribute)) for n in m.graph.node]
    assert [c for c, times in Counter(computed).items() if times > 1] == []


def test_nothing_of_the_backward_pass_is_left_behind_where_the_batch_is_symbolic() -> None:
    """LayerNormalization goes by transposing twice, and its backward pass reads shapes."""
    scale = np.ones(8, np.float32)
    nodes = [node("LayerNormalization", ["x", "s", "b"], ["h"]), node("LayerNormalization", ["h", "s", "b"], ["y"])]
    m = gg.jvp(graph_model(nodes, {"x": ["n", 8]}, {"y": ["n", 8]}, {"s": scale, "b": scale}), wrt="*")
    read = {name for n in m.graph.node for name in n.input}
    assert not [name for name in read if name.endswith(".cotangent")]
    assert work(m)["ReduceSum"] == 2 * 2  # two means a layer


@pytest.mark.sweep(0)
def test_a_long_chain_is_linear_in_its_length() -> None:
    count = 1500
    nodes = [node("Sin", [f"h{i}"], [f"h{i + 1}"]) for i in range(count)]
    m = gg.jvp(graph_model(nodes, {"h0": [2]}, {f"h{count}": [2]}))
    assert work(m) == {"Sin": count, "Cos": count, "Mul": count}

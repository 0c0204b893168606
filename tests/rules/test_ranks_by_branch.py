"""If whose branches differ in rank, and what reads the result: right in every element type, whichever branch runs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import onnx
import onnx.parser
import pytest
from onnx import TensorProto, helper

import gradgraph as gg
import gradgraph.rules.families
from gradgraph.errors import ModelError
from gradgraph.rules.composites.table import rules_with_cases
from gradgraph.rules.registry import Case, Draw
from gradgraph.verify import cases
from gradgraph.verify.gradcheck import directional
from gradgraph.verify.reference import Oracle, in_float64
from tests.kit.running import run

Feeds = dict[str, np.ndarray[Any, Any]]
DTYPES = {"double": np.float64, "float": np.float32, "float16": np.float16}
TOLERANCES = {"double": 1e-6, "float": 1e-6, "float16": 2e-2}

# what torch.squeeze(h, -1) becomes in the legacy exporter
SQUEEZED = """
h = Tanh(x)
last = Constant <value_ints = [-1]> ()
sizes = Shape(h)
size = Gather(sizes, last)
one = Constant <value_ints = [1]> ()
single = Equal(size, one)
y = If (single) <
    then_branch = a () => (real[k, n] a0) { a0 = Squeeze(h, last) },
    else_branch = b () => (real[k, n, m] b0) { b0 = Identity(h) }
>
"""

AFTER = {
    "nothing but a sum": "z = Identity(y)",
    "element by element": "e = Exp(y)  f = Mul(e, y)  z = Sub(f, w)",
    "a broadcast both ways": "e = Mul(y, v)  z = Add(e, w)",
    "reductions": "e = ReduceSumSquare <keepdims = 1> (y, one)  f = ReduceMean <keepdims = 0> (y, last)  z = Mul(e, f)",
    "a softmax of the last axis": "e = Softmax <axis = -1> (y)  z = Mul(e, y)",
    "new axes": "e = Unsqueeze(y, one)  f = Transpose(e)  z = Mul(f, f)",
    "a normalization by its channels": """
        two = Constant <value_ints = [2]> ()
        e = Expand(w, two)
        f = BatchNormalization(y, e, e, e, e)
        z = Mul(f, y)""",
    "a normalization of the batch": """
        two = Constant <value_ints = [2]> ()
        e = Expand(w, two)
        a = Neg(e)
        b = Exp(e)
        f, mean, variance = BatchNormalization <training_mode = 1> (y, e, e, a, b)
        z = Mul(f, y)""",
    "a normalization by groups": """
        two = Constant <value_ints = [2]> ()
        e = Expand(w, two)
        f = GroupNormalization <num_groups = 1> (y, e, e)
        z = Mul(f, y)""",
    "joined to itself": "e = Concat <axis = 0> (y, y)  z = Mul(e, e)",
    "an If by its rank": """
        s = Shape(y)
        rank = Size(s)
        two = Constant <value_int = 2> ()
        flat = Equal(rank, two)
        z = If (flat) <
            then_branch = c () => (real[k, p, q] c0) { c1 = Unsqueeze(y, last) c0 = Mul(c1, w) },
            else_branch = d () => (real[k, p, q] d0) {
                d0 = If (flat) <
                    then_branch = e () => (real[] e0) { e0 = Squeeze(y, one) },
                    else_branch = f () => (real[k, p, q] f0) { f1 = Sin(y) f0 = Mul(f1, w) }
                >
            }
        >""",
    "a Loop whose state changes its rank": """
        trips = Constant <value_int = 2> ()
        zero = Constant <value_ints = [0]> ()
        z = Loop <body = c (int64 i, bool go, real[] s) => (bool on, real[] t) {
            on = Identity(go)
            c0 = Unsqueeze(s, zero)
            t = Mul(c0, w)
        }> (trips, , y)""",
    "a Loop that reads it": """
        trips = Constant <value_int = 2> ()
        z, rows = Loop <body = c (int64 i, bool go, real[p] s) => (bool on, real[p] t, real r) {
            on = Identity(go)
            even = Cast <to = 9> (i)
            c0 = If (even) <
                then_branch = d () => (real[] d0) { d0 = Mul(y, s) },
                else_branch = e () => (real[] e0) { e1 = ReduceSum(y, last) e0 = Mul(e1, w) }
            >
            r = ReduceSum <keepdims = 0> (c0)
            c1 = Mul(s, r)
            t = Tanh(c1)
        }> (trips, , w)""",
    "a Scan that reads it": """
        two = Constant <value_ints = [2]> ()
        lines = Expand(w, two)
        column = Unsqueeze(lines, last)
        z, rows = Scan <num_scan_inputs = 1, body = c (real[p] s, real[p] r) => (real[p] t, real[q] u) {
            c0 = ReduceSumSquare <keepdims = 0> (y)
            c1 = Mul(c0, r)
            t = Add(s, c1)
            u = Sin(t)
        }> (w, column)""",
}


def model(after: str, dtype: str, sizes: str) -> onnx.ModelProto:
    body = f"{SQUEEZED} {after} s0 = Sin(z)  loss = ReduceSum <keepdims = 0> (s0)"
    text = f"g (real[{sizes}] x, real[1] w, real[2, 1, 1, 1] v) => (real loss) {{ {body} }}".replace("real", dtype)
    return onnx.parser.parse_model(f'<ir_version: 10, opset_import: ["": 21]> {text}')


def numbers(last: int, dtype: str) -> Feeds:
    rng = np.random.default_rng(last)
    shapes = {"x": (3, 2, last), "w": (1,), "v": (2, 1, 1, 1)}
    return {name: rng.uniform(0.2, 1, shape).astype(DTYPES[dtype]) for name, shape in shapes.items()}


def wide(feeds: Feeds) -> Feeds:
    return {name: array.astype(np.float64) for name, array in feeds.items()}


@pytest.mark.sweep(0.07)
@pytest.mark.parametrize("sizes", ["k, n, m", "3, 2, m"])
@pytest.mark.parametrize("last", [1, 2])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("after", AFTER)
def test_the_gradient_is_right_whichever_branch_runs(after: str, dtype: str, last: int, sizes: str) -> None:
    forward = model(AFTER[after], dtype, sizes)
    feeds = numbers(last, dtype)
    gradient = gg.value_and_grad(forward, output="loss", wrt=list(feeds), allow_unused=True)
    assert isinstance(gradient, onnx.ModelProto)
    loss, exact = Oracle(in_float64(forward)), Oracle(in_float64(gradient))(wide(feeds))
    rng = np.random.default_rng(0)
    found = directional(lambda f: float(loss(f)["loss"]), wide(feeds), {n: exact[f"{n}.grad"] for n in feeds}, rng)
    assert [f for f in found if not f.error < 1e-6] == []
    got = run(gradient, feeds)
    for name in feeds:
        assert got[f"{name}.grad"].dtype == DTYPES[dtype]
        expected = exact[f"{name}.grad"]
        margin = TOLERANCES[dtype] * max(1.0, float(np.abs(expected).max()))
        np.testing.assert_allclose(got[f"{name}.grad"], expected, rtol=10 * TOLERANCES[dtype], atol=10 * margin)
    pushed = gg.jvp(forward, wrt=["x"], allow_unused=True)
    tangent = rng.normal(size=feeds["x"].shape)
    slope = Oracle(in_float64(pushed))({**wide(feeds), "x.tangent": tangent})["loss.tangent"]
    assert float(slope) == pytest.approx(float(np.sum(exact["x.grad"] * tangent)), rel=1e-9)


# --- every operator -------------------------------------------------------------------------------------

# operators that count axes from the front, or along all of them, where nothing in the node tells their number
NEED_RANKS = {"Compress", "DFT", "Einsum", "LRN", "LayerNormalization", "MatMul", "Pad", "Resize", "STFT", "Unique"}
RULES = {r.op_type: r for r in rules_with_cases() if r.domain == ""}


def behind_a_choice(t: cases.Trial, holds: bool) -> cases.Trial:
    """The first input comes out of an If that gives it another axis where the condition does not say ``holds``."""
    model = onnx.ModelProto()
    model.CopyFrom(t.model)
    graph = model.graph
    kind = next(v.type.tensor_type.elem_type for v in graph.input if v.name == "x0")
    for node in graph.node:
        node.input[:] = ["chosen" if name == "x0" else name for name in node.input]
    written = {"Identity": ["x0"], "Unsqueeze": ["x0", "first"]}
    branches = [
        helper.make_graph([helper.make_node(op, names, [op])], op, [], [helper.make_tensor_value_info(op, kind, None)])
        for op, names in written.items()
    ]
    then, otherwise = branches if holds else branches[::-1]
    graph.node.insert(0, helper.make_node("If", ["c"], ["chosen"], then_branch=then, else_branch=otherwise))
    graph.initializer.append(onnx.numpy_helper.from_array(np.array([0]), "first"))
    graph.input.append(helper.make_tensor_value_info("c", TensorProto.BOOL, []))
    return replace(t, model=model, feeds={**t.feeds, "c": np.array(holds)})


def moves_first(case: Case) -> bool:
    first = case.inputs[0]
    return isinstance(first, Draw) and first.differentiable and not case.graph and not case.known_shapes


@pytest.mark.sweep(0.005)
@pytest.mark.parametrize("holds", [True, False])
@pytest.mark.parametrize("name", [name for name, r in RULES.items() if any(map(moves_first, r.cases))])
def test_every_operator_reads_a_tensor_of_either_rank_or_says_that_it_cannot(name: str, holds: bool) -> None:
    for case in filter(moves_first, RULES[name].cases):
        trial = behind_a_choice(cases.trial(RULES[name], case, unknown=True), holds)
        try:
            found = cases.check_first_order(trial)
        except ModelError as error:
            assert "the rank of" in str(error) and name in NEED_RANKS, (case, error)
        else:
            assert [f for f in found if not f.error < cases.TOLERANCE] == [], case


# --- what cannot be known -------------------------------------------------------------------------------

OPEN = """
h = Reshape(x, s)
e = Tanh(h)
b = LRN <size = 3> (e)
s0 = Sin(b)
loss = ReduceSum <keepdims = 0> (s0)
"""


def of_open_rank(inputs: str) -> onnx.ModelProto:
    return onnx.parser.parse_model(
        f'<ir_version: 10, opset_import: ["": 21]> g ({inputs}) => (float loss) {{ {OPEN} }}'
    )


def test_the_error_names_what_decides_the_rank_and_its_advice_helps() -> None:
    m = of_open_rank("float[n] x, int64[k] s")
    with pytest.raises(
        ModelError, match=r"^the rank of 'h' is unknown, as .* 'h' \(Reshape\) .* add the shape to value_info"
    ):
        gg.value_and_grad(m, output="loss", wrt=["x"])
    m.graph.value_info.append(helper.make_tensor_value_info("h", TensorProto.FLOAT, [None] * 4))
    gradient = gg.value_and_grad(m, output="loss", wrt=["x"])
    rng = np.random.default_rng(0)
    feeds = {"x": rng.normal(size=24).astype(np.float32), "s": np.array([2, 3, 2, 2])}
    exact = Oracle(in_float64(gradient))(feeds | {"x": feeds["x"].astype(np.float64)})
    np.testing.assert_allclose(run(gradient, feeds)["x.grad"], exact["x.grad"], rtol=1e-4, atol=1e-6)


def test_an_input_without_a_shape_is_named() -> None:
    m = of_open_rank("float[] x, int64[k] s")
    m.graph.node[0].CopyFrom(helper.make_node("Identity", ["x"], ["h"]))
    message = r"^the rank of 'x' is unknown, as it has no shape in the file; add its shape$"
    with pytest.raises(ModelError, match=message):
        gg.value_and_grad(m, output="loss", wrt=["x"])

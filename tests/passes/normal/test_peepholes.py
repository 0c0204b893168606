"""The peephole table: each row rewrites what it says, keeps every output, and is done after one sweep."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import helper, numpy_helper

from gradgraph.files.models import load_model
from gradgraph.graph.prune import prune
from gradgraph.passes.normal import normalise
from gradgraph.passes.normal.simplifying import peepholes
from gradgraph.passes.normal.simplifying.clean import clean_up
from gradgraph.passes.normal.simplifying.peepholes import REWRITES, simplify
from tests.kit.running import run

node = helper.make_node
X = np.random.default_rng(0).uniform(0.5, 2.0, (2, 3)).astype(np.float32)
SQUARE = np.random.default_rng(1).uniform(0.5, 2.0, (3, 3)).astype(np.float32)


def model(nodes: list[onnx.NodeProto], constants: dict[str, np.ndarray], rank: int = 2) -> ir.Model:
    shape = ["n", 3][-rank:]
    graph = helper.make_graph(
        nodes,
        "peephole",
        [helper.make_tensor_value_info("x", 1, shape)],
        [helper.make_tensor_value_info("y", 1, None)],
        [numpy_helper.from_array(v, k) for k, v in constants.items()],
    )
    return normalise(load_model(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)))


def scalar(x: float) -> np.ndarray:
    return np.array(x, np.float32)


def unary(op_type: str, number: float, swapped: bool = False) -> tuple[list[onnx.NodeProto], dict[str, np.ndarray]]:
    inputs = ["c", "x"] if swapped else ["x", "c"]
    return [node(op_type, inputs, ["h"]), node("Sin", ["h"], ["y"])], {"c": scalar(number)}


def pair(
    first: onnx.NodeProto, second: onnx.NodeProto, **constants: np.ndarray
) -> tuple[list[onnx.NodeProto], dict[str, np.ndarray]]:
    return [first, second, node("Sin", ["b"], ["y"])], constants


def text(body: str, **constants: np.ndarray) -> tuple[list[onnx.NodeProto], dict[str, np.ndarray]]:
    """Nodes from ``x`` to ``b`` in ONNX's text form, and a Sin behind them."""
    nodes = onnx.parser.parse_graph(f"g (float[n, 3] x) => (float y) {{ {body} y = Sin(b) }}").node
    return list(nodes), constants


THIRD, HALF, TWO = (f"{k} = Constant<value_float={v}>()" for k, v in (("a", 0.3), ("h", 0.5), ("t", 2.0)))

# name -> nodes and constants, what is left
ROWS = {
    "x**2": (unary("Pow", 2), "Mul Sin"),
    "x**3": (unary("Pow", 3), "Mul Mul Sin"),
    "x**1": (unary("Pow", 1), "Sin"),
    "x**0.5": (unary("Pow", 0.5), "Sqrt Sin"),
    "x**-1": (unary("Pow", -1), "Reciprocal Sin"),
    "x**0": (unary("Pow", 0), "Shape ConstantOfShape Sin"),
    "x**2.5 stays": (unary("Pow", 2.5), "Pow Sin"),
    "x*1": (unary("Mul", 1), "Sin"),
    "1*x": (unary("Mul", 1, swapped=True), "Sin"),
    "x/1": (unary("Div", 1), "Sin"),
    "1/x stays": (unary("Div", 1, swapped=True), "Div Sin"),
    "x+0": (unary("Add", 0), "Sin"),
    "0+x": (unary("Add", 0, swapped=True), "Sin"),
    "x-0": (unary("Sub", 0), "Sin"),
    "0-x stays": (unary("Sub", 0, swapped=True), "Sub Sin"),
    "-(-x)": (pair(node("Neg", ["x"], ["a"]), node("Neg", ["a"], ["b"])), "Sin"),
    "x+(-x)": (pair(node("Neg", ["x"], ["a"]), node("Add", ["x", "a"], ["b"])), "Sub Sin"),
    "x-(-x)": (pair(node("Neg", ["x"], ["a"]), node("Sub", ["x", "a"], ["b"])), "Add Sin"),
    "idle cast": (pair(node("Cast", ["x"], ["a"], to=1), node("Cast", ["a"], ["b"], to=1)), "Sin"),
    "transpose twice": (
        pair(node("Transpose", ["x"], ["a"], perm=[1, 0]), node("Transpose", ["a"], ["b"], perm=[1, 0])),
        "Sin",
    ),
    "reshape twice": (
        pair(
            node("Reshape", ["x", "flat"], ["a"]),
            node("Reshape", ["a", "rows"], ["b"]),
            flat=np.array([-1]),
            rows=np.array([3, -1]),
        ),
        "Reshape Sin",
    ),
    "idle expand": (
        pair(node("Expand", ["c", "size"], ["a"]), node("Mul", ["x", "a"], ["b"]), c=X[0], size=np.array([1, 3])),
        "Mul Sin",
    ),
    "idle expand in a sum": (
        pair(node("Expand", ["c", "size"], ["a"]), node("Sum", ["x", "a"], ["b"]), c=X[0], size=np.array([1, 3])),
        "Sum Sin",
    ),
    "idle expand in a choice": (
        (
            [
                node("Greater", ["x", "c"], ["large"]),
                node("Expand", ["c", "size"], ["a"]),
                node("Where", ["large", "x", "a"], ["b"]),
                node("Sin", ["b"], ["y"]),
            ],
            {"c": X[0], "size": np.array([1, 3])},
        ),
        "Greater Where Sin",
    ),
    "an expand that counts stays": (
        pair(node("Expand", ["x", "size"], ["a"]), node("Mul", ["c", "a"], ["b"]), c=X[0], size=np.array([4, 1, 1])),
        "Expand Mul Sin",
    ),
    "transposed product": (
        pair(node("Gemm", ["x", "w"], ["a"], alpha=0.5, transB=1), node("Transpose", ["a"], ["b"]), w=SQUARE),
        "Gemm Sin",
    ),
    "transposed product with a summand stays": (
        pair(node("Gemm", ["x", "w", "v"], ["a"]), node("Transpose", ["a"], ["b"]), w=SQUARE, v=X[0]),
        "Gemm Transpose Sin",
    ),
    "product and summand": (
        pair(node("Gemm", ["x", "w"], ["a"], alpha=0.5, transB=1), node("Add", ["x", "a"], ["b"]), w=SQUARE),
        "Gemm Sin",
    ),
    "a sum of products stays": (
        text("a = Gemm(x, w) r = Relu(x) c = Gemm(r, w) b = Add(a, c)", w=SQUARE),
        "Relu Gemm Gemm Add Sin",
    ),
    "transposed product and summand": (
        (
            [
                node("Gemm", ["x", "v"], ["g"]),
                node("Transpose", ["g"], ["t"], perm=[1, 0]),
                node("Transpose", ["x"], ["u"], perm=[1, 0]),
                node("Relu", ["u"], ["r"]),
                node("Add", ["t", "r"], ["b"]),
                node("Sin", ["b"], ["y"]),
            ],
            {"v": SQUARE},
        ),
        "Transpose Relu Gemm Sin",
    ),
    "a product that is read twice stays": (
        (
            [
                node("Gemm", ["x", "w"], ["a"]),
                node("Add", ["x", "a"], ["b"]),
                node("Mul", ["a", "b"], ["c"]),
                node("Sin", ["c"], ["y"]),
            ],
            {"w": SQUARE},
        ),
        "Gemm Add Mul Sin",
    ),
    "a product with a summand that is repeated stays": (
        pair(node("Gemm", ["x", "w"], ["a"]), node("Add", ["a", "v"], ["b"]), w=SQUARE, v=X[0]),
        "Gemm Add Sin",
    ),
    "-((-x)*c)": (text("a = Neg(x) m = Mul(a, c) b = Neg(m)", c=scalar(2)), "Mul Sin"),
    "-(c/(-x))": (text("a = Neg(x) m = Div(c, a) b = Neg(m)", c=scalar(2)), "Div Sin"),
    "(x*a)*2": (text(f"{THIRD} {TWO} m = Mul(x, a) b = Mul(m, t)"), "Mul Sin"),
    "2*(a*x)": (text(f"{THIRD} {TWO} m = Mul(a, x) b = Mul(t, m)"), "Mul Sin"),
    "(x*2)*0.5": (text(f"{HALF} {TWO} m = Mul(x, t) b = Mul(m, h)"), "Sin"),
    "(x+x)*0.5": (text(f"{HALF} m = Add(x, x) b = Mul(m, h)"), "Sin"),
    "(x+x)*a": (text(f"{THIRD} m = Add(x, x) b = Mul(m, a)"), "Mul Sin"),
    "(x*a)*a stays": (text(f"{THIRD} m = Mul(x, a) b = Mul(m, a)"), "Mul Mul Sin"),
    "x*2*a and x*2 stay": (text(f"{THIRD} {TWO} m = Mul(x, t) e = Mul(m, a) b = Add(m, e)"), "Mul Mul Add Sin"),
    "(x*p)*2 stays": (text(f"{TWO} m = Mul(x, p) b = Mul(m, t)", p=X[0]), "Mul Mul Sin"),
    "(x*huge)*huge stays": (
        text("c = Constant<value_float=1e20>() d = Constant<value_float=1.8446744e19>() m = Mul(x, c) b = Mul(m, d)"),
        "Mul Mul Sin",
    ),
    "-(c*x) stays": (text("m = Mul(x, c) b = Neg(m)", c=scalar(2)), "Mul Neg Sin"),
    "-(-x*c) that is read twice stays": (
        text("a = Neg(x) m = Mul(a, c) d = Neg(m) b = Mul(m, d)", c=scalar(2)),
        "Neg Mul Neg Mul Sin",
    ),
    "sum of one": (text("a = Relu(x) b = Sum(a)"), "Relu Sin"),
    "a wider cast between": (text("a = Cast<to=11>(x) b = Cast<to=1>(a)"), "Sin"),
    "a narrower cast between stays": (text("a = Cast<to=10>(x) b = Cast<to=1>(a)"), "Cast Cast Sin"),
    "casts from boolean": (
        text("g = Greater(x, c) i = Cast<to=7>(g) b = Cast<to=1>(i)", c=scalar(1)),
        "Greater Cast Sin",
    ),
    "few elements": (text("a = ConstantOfShape(size) b = Mul(x, a)", size=np.array([3])), "Mul Sin"),
    "many elements stay": (
        text("a = ConstantOfShape(size) m = ReduceSum<keepdims=0>(a) b = Mul(x, m)", size=np.array([65])),
        "ConstantOfShape ReduceSum Mul Sin",
    ),
    "bias of zeros": (
        text(
            "zero = Constant<value_float=0.0>() z = Expand(zero, size) p = Gemm(x, w, z) i = Reshape(p, image)"
            " c = Conv(i, kernel, z) t = ConvTranspose(c, kernel, z) b = Reshape(t, back)",
            size=np.array([3]),
            w=SQUARE,
            image=np.array([0, 3, 1]),
            kernel=np.ones((3, 3, 1), np.float32),
            back=np.array([0, 3]),
        ),
        "Gemm Reshape Conv ConvTranspose Reshape Sin",
    ),
}


@pytest.mark.parametrize("name", ROWS)
def test_rows(name: str) -> None:
    (nodes, constants), left = ROWS[name]
    before = model(nodes, constants)
    expected = run(ir.to_proto(before), {"x": X})["y"]
    after = prune(simplify(before))
    assert Counter(n.op_type for n in after.graph) == Counter(left.split())
    assert [o.name for o in after.graph.outputs] == ["y"]
    np.testing.assert_allclose(run(ir.to_proto(after), {"x": X})["y"], expected, rtol=1e-6)
    count = len(after.graph)
    assert len(prune(simplify(after)).graph) == count  # idempotent


def test_a_constant_that_broadcasts_its_partner_stays() -> None:
    nodes = [node("Mul", ["x", "c"], ["h"]), node("Sin", ["h"], ["y"])]
    after = simplify(model(nodes, {"c": np.ones((1, 1, 1), np.float32)}))
    assert [n.op_type for n in after.graph] == ["Mul", "Sin"]


def test_expand_to_no_elements_is_a_constant() -> None:
    """Where an axis of 1 becomes empty, onnxruntime's optimizer leaves the Expand out, and the axis is 1."""
    expands = model(*text("a = ReduceSum(x) b = Expand(a, size)", size=np.array([0, 3])))
    after = prune(simplify(expands))
    assert [n.op_type for n in after.graph] == ["Sin"]
    assert run(ir.to_proto(after), {"x": X})["y"].shape == (0, 3)


def test_an_output_that_equals_an_input_keeps_its_node() -> None:
    after = simplify(model([node("Mul", ["x", "c"], ["y"])], {"c": scalar(1)}))
    assert [o.name for o in after.graph.outputs] == ["y"]
    np.testing.assert_array_equal(run(ir.to_proto(after), {"x": X})["y"], X)


@pytest.mark.parametrize("constant", [True, False], ids=["a number", "a parameter"])
def test_only_a_bias_that_a_formula_made_goes(constant: bool) -> None:
    body = "v = Constant<value_floats=[0.0, 0.0, 0.0]>()" if constant else ""
    parameter = {} if constant else {"v": np.zeros(3, np.float32)}
    after = simplify(model(*text(f"{body} b = Gemm(x, w, v)", w=SQUARE, **parameter)))
    assert len(next(n for n in after.graph if n.op_type == "Gemm").inputs) == (2 if constant else 3)


def test_every_row_of_the_table_is_tried() -> None:
    tried = {n.op_type for (nodes, _), _ in ROWS.values() for n in nodes}
    own = {kind for kind, rewrites in REWRITES.items() if any(r.__module__ == peepholes.__name__ for r in rewrites)}
    assert own - tried == {"Identity"}  # the normal form has none left


def test_a_sweep_takes_nodes_out_of_the_graph_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each removal looks at all outputs of the graph, and a training step has three for each weight."""
    calls = []
    remove = ir.Graph.remove
    monkeypatch.setattr(ir.Graph, "remove", lambda graph, *args, **kw: calls.append(1) or remove(graph, *args, **kw))
    names = ["x", *(f"v{i}" for i in range(50)), "y"]
    graph = model([node("Neg", [a], [b]) for a, b in pairwise(names)], {})
    calls.clear()
    before = len(list(graph.graph))
    assert len(list(simplify(graph).graph)) < before
    assert len(calls) == 1


@pytest.mark.parametrize(("wide", "kinds"), [(100, ["Neg"]), (2**62, ["Expand", "Neg"])])
def test_an_expand_to_no_elements_is_a_constant_where_numpy_can_say_it(wide: int, kinds: list[str]) -> None:
    head = (
        f'<ir_version: 10, opset_import: ["": 21]> g (float[1] x) => (float[0, {wide}] y) <int64[2] s = {{0, {wide}}}>'
    )
    model = onnx.parser.parse_model(f"{head} {{ e = Expand(x, s) y = Neg(e) }}")
    assert [node.op_type for node in clean_up(normalise(model)).graph] == kinds

"""Groups of element-wise nodes as one native node: which, and that they compute the same."""

from __future__ import annotations

import numpy as np
import onnx
import onnx.parser
import onnx_ir as ir
import onnxruntime as ort
import pytest

import gradgraph as gg
from gradgraph.backends.ort_native import library as native
from gradgraph.backends.ort_native.chains import fuse_chains
from gradgraph.passes.normal import normalise
from tests.kit.running import run

Feeds = dict[str, np.ndarray]

OPERATORS = (
    "Abs Celu Elu Erf Exp Gelu HardSigmoid HardSwish LeakyRelu Mish Neg Relu Selu Sigmoid Softplus Softsign Tanh"
)
ALONE = {name: f"y = {name}(x)" for name in OPERATORS.split()} | {
    "ThresholdedRelu": "y = ThresholdedRelu<alpha = 0.0>(x)",  # elsewhere it jumps, and a difference is no derivative
    "Sqrt": "y = Sqrt(p)",
    "Reciprocal": "y = Reciprocal(p)",
    "SiLU": "s = Sigmoid(x)  y = Mul(x, s)",
    "Clip": "c = Constant<value_float = 0.5>()  d = Neg(c)  y = Clip(x, d, c)",
    "Add": "y = Add(x, z)",
    "Mul": "y = Mul(x, z)",
    "Div": "y = Div(x, p)",
    "Pow": "y = Pow(p, z)",
    "PRelu": "y = PRelu(x, z)",
    "Max": "y = Max(x, z)",
    "Min": "y = Min(x, z)",
    "chain of products": "a = Mul(x, z)  b = Mul(a, x)  c = Mul(b, z)  y = Mul(a, c)",
}


def alone(text: str, shape: tuple[int, int]) -> onnx.ModelProto:
    """A few nodes from those of ``x``, ``z`` and ``p``, which is positive, that they read, to ``y``."""
    dims = "[{}, {}]".format(*shape)
    inputs = ", ".join(f"float{dims} {x}" for x in "xzp" if f"({x}" in text or f"{x})" in text)
    return onnx.parser.parse_model(
        f'<ir_version: 10, opset_import: ["": 21]> g ({inputs}) => (float{dims} y) {{ {text} }}'
    )


def parsed(inputs: str, outputs: str, body: str) -> onnx.ModelProto:
    return onnx.parser.parse_model(f'<ir_version: 10, opset_import: ["": 21]> g ({inputs}) => ({outputs}) {{ {body} }}')


def fused(model: onnx.ModelProto) -> onnx.ModelProto:
    work = normalise(model)
    fuse_chains(work)
    onnx.checker.check_model(ir.to_proto(work))
    return ir.to_proto(work)


def op_types(model: onnx.ModelProto) -> list[str]:
    return sorted(node.op_type for node in model.graph.node)


def programs(model: onnx.ModelProto) -> list[str]:
    return [a.s.decode() for node in model.graph.node for a in node.attribute if a.name == "program"]


def computed(model: onnx.ModelProto, feeds: Feeds, threads: int = 2) -> Feeds:
    """With native kernels, and numbers below the smallest normal one kept as everywhere else."""
    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    native.here().add_to(options)
    session = ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    return dict(zip([y.name for y in session.get_outputs()], session.run(None, feeds), strict=True))


# --- which -----------------------------------------------------------------------------------------------------

X = "float[4, 6] x"


def test_a_chain_is_one_node() -> None:
    model = parsed(f"{X}, float[6] b", "float[4, 6] y, float[4, 6] z", "a = Add(x, b)  y = Exp(a)  z = Mul(y, x)")
    found = fused(model)
    assert programs(found) == ["Add 0 1; Exp 2; Mul 3 0"]
    assert [list(node.output) for node in found.graph.node] == [["y", "z"]]


def test_nothing_lies_between_the_nodes_of_a_group() -> None:
    """Mul reads what ReduceMean makes of Exp: one node of all three would have to run before and after it."""
    body = "a = Exp(x)  r = ReduceMean<keepdims = 1>(a)  b = Neg(a)  c = Tanh(b)  d = Mul(c, r)  y = Sqrt(d)"
    found = fused(parsed(X, "float[4, 6] y", body))
    assert sorted(programs(found)) == ["Exp 0; Neg 1; Tanh 2", "Mul 0 1; Sqrt 2"]
    assert [n.op_type for n in found.graph.node] == ["Elementwise", "ReduceMean", "Elementwise"]


def test_nodes_that_read_the_same_tensor_are_one_group() -> None:
    found = fused(parsed(X, "float[4, 6] y, float[4, 6] z", "y = Exp(x)  z = Tanh(x)"))
    assert programs(found) == ["Exp 0; Tanh 0"]


def test_nodes_that_read_the_same_number_are_not() -> None:
    body = "y = Mul(x, k)  z = Mul(w, k)"
    model = parsed(f"{X}, float[4, 6] w, float k", "float[4, 6] y, float[4, 6] z", body)
    assert op_types(fused(model)) == ["Mul", "Mul"]


def test_shapes_in_symbols() -> None:
    """Of one name they are one size; of two, or unknown, they may differ."""
    body = "a = Add(x, b)  y = Exp(a)"
    assert programs(fused(parsed('float["n", 6] x, float[6] b', 'float["n", 6] y', body)))
    assert not programs(fused(parsed('float["n", 6] x, float["m", 6] b', 'float["k", 6] y', body)))
    assert not programs(fused(parsed("float[?, 6] x, float[6] b", "float[?, 6] y", body)))


@pytest.mark.parametrize(
    "body",
    [
        "a = MatMul(x, w)  b = Add(a, c)  y = Relu(b)",  # onnxruntime makes a Gemm of the first two
        "a = Gemm(x, w, c)  y = Relu(a)",
        "y = Exp(x)",
    ],
)
def test_what_stays_as_it_is(body: str) -> None:
    found = fused(parsed(f"{X}, float[6, 6] w, float[6] c", "float[4, 6] y", body))
    assert "Elementwise" not in op_types(found)


def test_numbers_of_other_types_and_single_ones_stay() -> None:
    for inputs, output in (("double[4] x", "double[4] y"), ("float[1, 1] x", "float[1, 1] y"), ("float x", "float y")):
        assert op_types(fused(parsed(inputs, output, "a = Exp(x)  y = Neg(a)"))) == ["Exp", "Neg"]


def test_truth_values_stay_inside() -> None:
    """The second Where reads one that the graph gives, too: its comparison is left out, and so is the Where."""
    body = """
        k = Constant<value_float = 0.5>()  inside = Greater(x, k)  outside = Less(x, k)
        a = Where(inside, x, k)  b = Exp(a)  c = Where(outside, b, k)  d = Neg(c)  y = Tanh(d)"""
    model = parsed(X, "float[4, 6] y, bool[4, 6] outside", body)
    found = fused(model)
    assert op_types(found) == ["Elementwise", "Elementwise", "Less", "Where"]
    assert sorted(programs(found)) == ["Greater 0 #0.5; Where 1 0 #0.5; Exp 2", "Neg 0; Tanh 1"]


def test_a_body_may_read_what_lies_before_it() -> None:
    then = "then_branch = t () => (float[4, 6] u) { u = Neg(a) }, else_branch = e () => (float[4, 6] v) { v = Exp(a) }"
    body = f"a = Tanh(x)  c = If<{then}>(b)  d = Mul(a, c)  y = Sqrt(d)"
    found = fused(parsed(f"{X}, bool b", "float[4, 6] y", body))
    assert [n.op_type for n in found.graph.node] == ["Tanh", "If", "Elementwise"]


@pytest.mark.sweep(0)
def test_a_long_chain() -> None:
    nodes = [onnx.helper.make_node("Add" if i % 2 else "Mul", [f"a{i}", "x"], [f"a{i + 1}"]) for i in range(10_000)]
    ends = [onnx.helper.make_tensor_value_info(name, 1, [8]) for name in ("a0", "x", "a10000")]
    graph = onnx.helper.make_graph(nodes, "g", ends[:2], ends[2:])
    model = onnx.helper.make_model(graph, ir_version=10, opset_imports=[onnx.helper.make_opsetid("", 21)])
    (text,) = programs(fused(model))
    assert text.count(";") == 9_999


# --- the same numbers ------------------------------------------------------------------------------------------

UNARY = ("Abs", "Neg", "Sign", "Floor", "Ceil", "Round", "Relu", "LeakyRelu")
BINARY = ("Add", "Sub", "Mul", "Div", "Max", "Min", "PRelu")
COMPARE = ("Greater", "GreaterOrEqual", "Less", "LessOrEqual", "Equal")
SMOOTH = ("Tanh", "Sigmoid", "Erf", "Softplus", "Elu", "Softsign", "HardSigmoid", "Gelu", "Mish", "Selu", "HardSwish")
GIVEN = {"p": ("n", 3, 5), "q": ("n", 3, 5), "row": (5,), "column": (3, 1), "number": (), "one": (1, 1, 1)}


def drawn(rng: np.random.Generator, nodes: int, smooth: bool) -> onnx.ModelProto:
    """A random graph; without smooth functions its results are exact."""
    values, truths, body = ["p", "q"], [], []
    for i in range(nodes):
        a = values[-1] if rng.random() < 0.5 else str(rng.choice(values))
        b = str(rng.choice([*values, "row", "column", "number", "one"]))
        kind = rng.choice(["unary", "binary", "compare", "where", "clip", "smooth"])
        if kind == "compare" and not smooth:  # a rounding would change a choice
            truths.append(f"t{i}")
            body.append(f"t{i} = {rng.choice(COMPARE)}({a}, {b})")
            continue
        if kind == "where" and truths:
            made = f"Where({rng.choice(truths)}, {a}, {b})" if rng.random() < 0.7 else f"Cast<to = 1>({truths[-1]})"
        elif kind == "clip":
            made = f"Clip({a}, low, high)"
        elif kind == "smooth" and smooth:
            made = f"{rng.choice(SMOOTH)}({a})"
        elif kind == "binary":
            made = f"{rng.choice([op for op in BINARY if not smooth or op != 'Div'])}({a}, {b})"
        else:
            made = (
                f"{rng.choice([op for op in UNARY if not smooth or op not in ('Sign', 'Floor', 'Ceil', 'Round')])}({a})"
            )
        values.append(f"v{i}")
        body.append(f"v{i} = {made}")
    results = [values[-1], *rng.choice(values[2:], 2)] if len(values) > 3 else values[-1:]
    results = [v for v in dict.fromkeys(map(str, results)) if v.startswith("v")]
    dims = {name: ", ".join(f'"{d}"' if isinstance(d, str) else str(d) for d in shape) for name, shape in GIVEN.items()}
    inputs = ", ".join(f"float[{d}] {name}" if d else f"float {name}" for name, d in dims.items())
    outputs = ", ".join(f'float["n", 3, 5] {v}' for v in results)
    constants = "low = Constant<value_float = -1.5>()  high = Constant<value_float = 2.0>()"
    return parsed(inputs, outputs, f"{constants}  {'  '.join(body)}")


def fed(rng: np.random.Generator, rows: int) -> Feeds:
    shapes = {name: [rows if d == "n" else d for d in shape] for name, shape in GIVEN.items()}
    return {name: np.asarray(np.round(rng.normal(0, 2, shape), 1), np.float32) for name, shape in shapes.items()}


@pytest.mark.sweep(0.522)
@pytest.mark.usefixtures("library")
@pytest.mark.parametrize("smooth", [False, True], ids=["exact", "smooth"])
@pytest.mark.parametrize("seed", range(40))
def test_random_graphs(seed: int, smooth: bool) -> None:
    rng = np.random.default_rng(seed)
    model = drawn(rng, int(rng.integers(3, 30)), smooth)
    lowered = fused(model)
    for rows in (1, int(rng.integers(2, 2_000))):
        feeds = fed(rng, rows)
        needed = {x.name: feeds[x.name] for x in lowered.graph.input}
        wanted, one, two = run(model, feeds), computed(lowered, needed, threads=1), computed(lowered, needed)
        for name, value in wanted.items():
            np.testing.assert_array_equal(one[name], two[name])
            if smooth:
                np.testing.assert_allclose(two[name], value, rtol=2e-4, atol=1e-4 * float(np.abs(value).max()))
            else:
                np.testing.assert_array_equal(two[name], value)


def test_random_graphs_hold_chains() -> None:
    """What is drawn is what is meant: most nodes are in groups of several lines, with truth values among them."""
    found = [programs(fused(drawn(np.random.default_rng(seed), 25, False))) for seed in range(40)]
    lines = [text.split("; ") for texts in found for text in texts]
    assert sum(map(len, lines)) > 10 * len(found)
    assert {line.split()[0] for text in lines for line in text} >= {*COMPARE, *BINARY[:-1], *UNARY, "Where"}


@pytest.mark.usefixtures("library")
@pytest.mark.parametrize("name", ALONE)
def test_tangents_of_operators(name: str) -> None:
    """Value and tangent in one node, as the portable file gives them, with numbers at zeros and ties among them."""
    model = alone(ALONE[name], (37, 29))
    wrt = [x.name for x in model.graph.input]
    portable, lowered = (gg.jvp(model, wrt=wrt, backend=b) for b in ("portable", "ort-cpu-native"))
    assert isinstance(portable, onnx.ModelProto) and isinstance(lowered, onnx.ModelProto)
    if name not in ("Add", "Neg"):  # whose value and tangent have nothing in common
        assert op_types(lowered) == ["Elementwise"]
    rng = np.random.default_rng(0)
    feeds = {x.name: rng.normal(0, 2, (37, 29)).astype(np.float32) for x in portable.graph.input}
    for x in feeds:
        if x in ("x", "z"):
            feeds[x][::3] = np.round(feeds[x][::3])
    if "p" in feeds:
        feeds["p"] = np.abs(feeds["p"]) + np.float32(0.5)
    wanted, found = run(portable, feeds), computed(lowered, feeds)
    assert found.keys() == wanted.keys() == {"y", "y.tangent"}
    for key, value in wanted.items():
        np.testing.assert_allclose(found[key], value, rtol=2e-5, atol=2e-6 * float(np.abs(value).max()), err_msg=key)

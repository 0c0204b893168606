"""Products apart from their biases, and rows that are gathered: where these forms are chosen, and what they give."""

from __future__ import annotations

import numpy as np
import onnx
import onnx_ir as ir
import pytest

from gradgraph.backends.engine import lower
from gradgraph.backends.ort_cpu import ORT_CPU
from gradgraph.backends.ort_cpu import linear_forms as linear
from gradgraph.backends.ort_cpu import movement_forms as movement
from gradgraph.passes.normal import normalise
from gradgraph.passes.normal.simplifying.clean import clean_up
from tests.kit.running import run
from tests.kit.small_models import parsed

rng = np.random.default_rng(0)


@pytest.fixture(autouse=True)
def any_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors of tests are small."""
    monkeypatch.setattr(linear, "MANY_BIASED", 1)
    monkeypatch.setattr(movement, "FEWEST_MOVED", 1)
    monkeypatch.setattr(movement, "SHORTEST_ROW", 1)


def lowered(model: onnx.ModelProto) -> onnx.ModelProto:
    """In this machine's form, with the same outputs for random inputs."""
    result = ir.to_proto(clean_up(lower(normalise(model), ORT_CPU)))
    shapes = {v.name: [d.dim_value or 3 for d in v.type.tensor_type.shape.dim] for v in model.graph.input}
    feeds = {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}
    for a, b in zip(run(model, feeds).values(), run(result, feeds).values(), strict=True):
        np.testing.assert_allclose(b, a, rtol=1e-5, atol=1e-5)
    return result


def reads(model: onnx.ModelProto, op_type: str) -> list[str]:
    """What the nodes of this type read first, before any Reshape."""
    before = {n.output[0]: n.input[0] for n in model.graph.node if n.op_type == "Reshape"}
    firsts = [n.input[0] for n in model.graph.node if n.op_type == op_type]
    return [before.get(name, name) for name in firsts]


# --- weights first ----------------------------------------------------------------------------------------------

FED = """(float[{dims}, 6] x, float[5, 6] w) => (float[{dims}, 5] y)"""
TURNED = "t = Transpose<perm = [1, 0]>(w) y = MatMul(x, t)"


@pytest.fixture
def any_weight(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear, "LARGE_WEIGHT", 1)
    monkeypatch.setattr(linear, "FEW_ROWS", range(2, 9))


@pytest.mark.usefixtures("any_weight")
@pytest.mark.parametrize(
    ("dims", "text"), [("8", "y = Gemm<transB = 1>(x, w)"), ("8", TURNED), ("2, 4", TURNED), ("1, 2, 1", TURNED)]
)
def test_a_weight_that_is_fed_comes_first_where_rows_are_few(dims: str, text: str) -> None:
    found = lowered(parsed(f"{FED.format(dims=dims)} {{ {text} }}"))
    assert reads(found, "FusedMatMul") == ["w"]
    assert reads(found, "Gemm") == reads(found, "MatMul") == []


@pytest.mark.usefixtures("any_weight")
@pytest.mark.parametrize(
    ("dims", "text"),
    [
        ("9", "y = Gemm<transB = 1>(x, w)"),  # many rows
        ("n", "y = Gemm<transB = 1>(x, w)"),  # nobody knows how many
        ("8", "y = Gemm<transB = 1>(x, v)"),  # onnxruntime has its own copy of an initializer
        ("8", "t = Transpose<perm = [1, 0]>(v) y = MatMul(x, t)"),
        ("8", "t = Neg(w) u = Reshape(t, s) y = MatMul(x, u)"),  # no transposed matrix
    ],
)
def test_a_weight_stays_the_second_factor(dims: str, text: str) -> None:
    model = parsed(f"{FED.format(dims=dims)} {{ {text} }}")
    constants = {"v": rng.normal(size=(5, 6)).astype(np.float32), "s": np.array([6, 5])}
    model.graph.initializer.extend(onnx.numpy_helper.from_array(a, k) for k, a in constants.items() if f"{k})" in text)
    assert reads(lowered(model), "FusedMatMul") == []


# --- products ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rows", ["2, 3", "6"])
def test_a_bias_is_added_apart(rows: str) -> None:
    text = "(float[{0}, 4] x, float[4, 5] w, float[5] b) => (float[{0}, 5] y) {{ h = MatMul(x, w) y = Add(b, h) }}"
    assert reads(lowered(parsed(text.format(rows))), "FusedMatMul") == ["x"]


@pytest.mark.parametrize(
    "text",
    [
        "(float[n, 4] x, float[4, 5] w, float[5] b) => (float[n, 5] y) { h = MatMul(x, w) y = Add(h, b) }",
        "(float[6, 4] x, float[4, 5] w, float[6, 5] b) => (float[6, 5] y) { h = MatMul(x, w) y = Add(h, b) }",
        "(float[6, 4] x, float[4, 5] w, float[5] b) => (float[6, 5] y) { h = MatMul(x, w) y = Mul(h, b) }",
        "(float[2, 6, 4] x, float[2, 4, 5] w, float[5] b) => (float[2, 6, 5] y) { h = MatMul(x, w) y = Add(h, b) }",
        """(float[6, 4] x, float[4, 5] w, float[5] b) => (float[6, 5] y, float[6, 5] z)
            { h = MatMul(x, w) y = Add(h, b) z = Neg(h) }""",
    ],
    ids=["unknown size", "no vector", "no sum", "stack of weights", "read twice"],
)
def test_other_products_stay(text: str) -> None:
    assert not reads(lowered(parsed(text)), "FusedMatMul")


def test_small_products_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear, "MANY_BIASED", 31)
    model = parsed("(float[6, 4] x, float[4, 5] w, float[5] b) => (float[6, 5] y) { h = MatMul(x, w) y = Add(h, b) }")
    assert not reads(lowered(model), "FusedMatMul")


# --- rows -------------------------------------------------------------------------------------------------------


def second_part(first: int, rows: int, row: int) -> onnx.ModelProto:
    """Of 24 numbers: so many rows after the first ones; places and rows are traded."""
    part = rows * row
    return parsed(
        f"""(float[3, 5, 24] x) => (float[3, {rows}, 5, {row}] y)
        <int64[3] sizes = {{{first}, {part}, {24 - first - part}}}, int64[4] to = {{3, 5, {rows}, {row}}}>
        {{ a, b, c = Split<axis=-1>(x, sizes)  d = Reshape(b, to)  y = Transpose<perm=[0, 2, 1, 3]>(d) }}"""
    )


@pytest.mark.parametrize(("first", "rows", "row"), [(8, 4, 4), (16, 2, 4), (4, 4, 4), (0, 2, 1), (22, 2, 1)])
def test_rows_of_a_part_are_read_where_they_lie(first: int, rows: int, row: int) -> None:
    model = lowered(second_part(first, rows, row))
    assert reads(model, "Gather") == ["x"]
    assert not reads(model, "Transpose")


@pytest.mark.parametrize(
    ("first", "rows", "row"), [(2, 3, 4), (5, 3, 5)], ids=["begins inside a row", "rows do not fill the whole"]
)
def test_rows_that_lie_otherwise_are_read_from_the_part(first: int, rows: int, row: int) -> None:
    assert reads(lowered(second_part(first, rows, row)), "Gather") == ["b"]


def test_rows_of_a_part_along_another_axis_are_read_from_it() -> None:
    text = """(float[3, 4, 8] x) => (float[2, 3, 8] y) <int64[2] sizes = {2, 2}>
        { a, b = Split<axis=1>(x, sizes)  y = Transpose<perm=[1, 0, 2]>(b) }"""
    assert reads(lowered(parsed(text)), "Gather") == ["b"]


@pytest.mark.parametrize(
    "text",
    [
        "(float[3, 4, 8] x) => (float[4, 8, 3] y) { y = Transpose<perm=[1, 2, 0]>(x) }",
        "(float[3, n, 8] x) => (float[n, 3, 8] y) { y = Transpose<perm=[1, 0, 2]>(x) }",
    ],
    ids=["last axis moves", "unknown size"],
)
def test_other_transposes_stay(text: str) -> None:
    assert reads(lowered(parsed(text)), "Transpose") == ["x"]


@pytest.mark.parametrize(("name", "number"), [("FEWEST_MOVED", 97), ("SHORTEST_ROW", 9)])
def test_small_transposes_stay(name: str, number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(movement, name, number)
    model = parsed("(float[3, 4, 8] x) => (float[4, 3, 8] y) { y = Transpose<perm=[1, 0, 2]>(x) }")
    assert reads(lowered(model), "Transpose") == ["x"]

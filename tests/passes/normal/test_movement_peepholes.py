"""The peepholes for nodes that compute nothing: what is left of each row, and that it gives the same numbers."""

from __future__ import annotations

from collections import Counter

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest
from onnx.reference import ReferenceEvaluator

from gradgraph.passes.normal import normalise
from gradgraph.passes.normal.simplifying import movement_peepholes
from gradgraph.passes.normal.simplifying.clean import clean_up
from gradgraph.passes.normal.simplifying.peepholes import REWRITES
from tests.kit.running import run

X = np.random.default_rng(0).uniform(0.5, 2.0, (2, 3)).astype(np.float32)


def model(body: str) -> ir.Model:
    """From ``x`` to ``b`` in ONNX's text form; in ``{1, 2}`` stands a constant vector."""
    constants: list[str] = []
    while "{" in body:
        before, rest = body.split("{", 1)
        numbers, after = rest.split("}", 1)
        constants.append(f"c{len(constants)} = Constant<value_ints=[{numbers}]>()")
        body = f"{before}c{len(constants) - 1}{after}"
    return normalise(
        onnx.parser.parse_model(
            f'<ir_version: 10, opset_import: ["": 21]> g (float[n, 3] x) => (float y) '
            f"{{ {' '.join(constants)} none = Constant<value_float=0.0>() {body} y = Sin(b) }}"
        )
    )


def parts(first: str, second: str, total: str = "b = Sum(r, s)", fill: str = "none") -> str:
    """Two columns and one of ``x``, each between zeros, added."""
    pads = f"r = Pad(p, {first}, {fill}, {{1}}) s = Pad(q, {second}, {fill}, {{1}})"
    return f"p, q = Split<axis=1>(x, {{2, 1}}) {pads} {total}"


# what is written, what is left
ROWS = {
    "idle reshape": ("a = Relu(x) b = Reshape(a, {0, 3})", "Relu Sin"),
    "idle flatten": ("a = Relu(x) b = Flatten(a)", "Relu Sin"),
    "there and back": ("a = Unsqueeze(x, {1}) b = Squeeze(a, {1})", "Sin"),
    "there and back by a longer way": ("a = Unsqueeze(x, {0}) f = Flatten<axis=2>(a) b = Reshape(f, {-1, 3})", "Sin"),
    "there and further": ("a = Unsqueeze(x, {1}) f = Relu(a) b = Squeeze(f, {1})", "Unsqueeze Relu Squeeze Sin"),
    "two steps in one": ("a = Unsqueeze(x, {2}) b = Reshape(a, {3, -1})", "Reshape Sin"),
    "two steps, the first read twice": (
        "a = Unsqueeze(x, {2}) r = Reshape(a, {3, -1}) s = ReduceSum<keepdims=0>(a) b = Mul(r, s)",
        "Unsqueeze Reshape ReduceSum Mul Sin",
    ),
    "another shape stays": ("a = Relu(x) b = Reshape(a, {3, -1})", "Relu Reshape Sin"),
    "repeats nothing": ("a = Tile(x, {1, 1}) b = Expand(a, {1, 3})", "Sin"),
    "repeats once more": ("a = Tile(x, {1, 2}) b = Relu(a)", "Tile Relu Sin"),
    "takes all": ("b = Slice(x, {0}, {3}, {1})", "Sin"),
    "takes all backwards": ("b = Slice(x, {2}, {-4}, {1}, {-1})", "Slice Sin"),
    "takes less": ("b = Slice(x, {0}, {2}, {1})", "Slice Sin"),
    "pads nothing": ("a = Relu(x) b = Pad(a, {0, 0, 0, 0})", "Relu Sin"),
    "moves an axis of size 1": ("a = Unsqueeze(x, {1}) b = Transpose<perm=[1, 0, 2]>(a)", "Reshape Sin"),
    "moves others": ("a = Unsqueeze(x, {1}) b = Transpose<perm=[2, 1, 0]>(a)", "Unsqueeze Transpose Sin"),
    "target found at run time": (
        "t = Transpose<perm=[1, 0]>(x) s = Shape(x) b = Reshape(t, s)",
        "Transpose Reshape Sin",
    ),
    "side by side": (parts("{0, 1}", "{2, 0}"), "Split Concat Sin"),
    "side by side, in another order": (parts("{1, 0}", "{0, 2}", "b = Add(r, s)"), "Split Concat Sin"),
    "side by side, room at the ends": (parts("{1, 2}", "{3, 1}"), "Split Concat Pad Sin"),
    "side by side, read on their own too": (
        parts("{0, 1}", "{2, 0}", "t = Sum(r, s) b = Mul(t, r)"),
        "Split Pad Concat Mul Sin",
    ),
    "a gap between": (parts("{0, 2}", "{3, 0}"), "Split Pad Pad Sum Sin"),
    "one over the other": (parts("{0, 0}", "{1, 0}"), "Split Pad Sum Sin"),
    "on the same places": (parts("{0, 1}", "{1, 1}"), "Split Pad Pad Sum Sin"),
    "between ones": (
        "one = Constant<value_float=1.0>() " + parts("{0, 1}", "{2, 0}", fill="one"),
        "Split Pad Pad Sum Sin",
    ),
    "beside a third term": (parts("{0, 1}", "{2, 0}", "b = Sum(r, s, x)"), "Split Pad Pad Sum Sin"),
    "concat of one": ("a = Relu(x) b = Concat<axis=0>(a)", "Relu Sin"),
    "concat of concat": ("a = Concat<axis=0>(x, x) b = Concat<axis=0>(a, x)", "Concat Sin"),
    "concat of concat on another axis": (
        "a = Concat<axis=0>(x, x) c = Concat<axis=0>(x, x) b = Concat<axis=1>(a, c)",
        "Concat Concat Sin",
    ),
    "over axes of size 1": ("a = Unsqueeze(x, {1}) r = Relu(a) b = ReduceSum(r, {1})", "Unsqueeze Relu Sin"),
    "over axes of size 1, without them": (
        "a = Unsqueeze(x, {1}) r = Relu(a) b = ReduceMax<keepdims=0>(r, {1})",
        "Unsqueeze Relu Squeeze Sin",
    ),
    "squeezed sum": ("a = ReduceSum(x, {1}) b = Squeeze(a, {1})", "ReduceSum Sin"),
    "sum squeezed elsewhere": (
        "u = Unsqueeze(x, {0}) r = Exp(u) a = ReduceSum(r, {2}) b = Squeeze(a, {0})",
        "Unsqueeze Exp ReduceSum Squeeze Sin",
    ),
    "sum and squeeze in one": (
        "u = Unsqueeze(x, {0}) r = Exp(u) a = ReduceMean<keepdims=0>(r, {-1}) b = Squeeze(a, {0})",
        "Unsqueeze Exp ReduceMean Sin",
    ),
    "squeezed sum that is read twice": (
        "a = ReduceSum(x, {1}) s = Squeeze(a, {1}) u = Mul(a, s) b = Relu(u)",
        "ReduceSum Squeeze Mul Relu Sin",
    ),
    "placed in zeros": (
        "z = ConstantOfShape({30, 3}) i = Constant<value_ints=[2, -1]>() j = Unsqueeze(i, {1}) s = ScatterND(z, j, x) "
        "m = ReduceMax(x) w = Tile(m, {30, 3}) b = Add(w, s)",
        "ReduceMax Tile GatherND Add ScatterND Sin",
    ),
    "placed in zeros by adding": (
        "z = ConstantOfShape({30, 3}) i = Constant<value_ints=[2, 0]>() j = Unsqueeze(i, {1}) "
        's = ScatterND<reduction="add">(z, j, x) e = Exp(z) b = Add(s, e)',
        "ConstantOfShape ScatterND Exp Add Sin",
    ),
    "placed in zeros, read on its own too": (
        "z = ConstantOfShape({30, 3}) i = Constant<value_ints=[2, 0]>() j = Unsqueeze(i, {1}) "
        "s = ScatterND(z, j, x) e = Exp(s) b = Add(e, s)",
        "ConstantOfShape ScatterND Exp Add Sin",
    ),
    "placed in zeros that broadcast": (
        "z = ConstantOfShape({30, 3}) i = Constant<value_ints=[2, 0]>() j = Unsqueeze(i, {1}) "
        "s = ScatterND(z, j, x) o = Constant<value_float=1.0>() b = Add(s, o)",
        "ConstantOfShape ScatterND Add Sin",
    ),
    "over other axes": ("b = ReduceMean(x, {1})", "ReduceMean Sin"),
}


@pytest.mark.parametrize("name", ROWS)
def test_rows(name: str) -> None:
    body, left = ROWS[name]
    before = model(body)
    expected = run(ir.to_proto(before), {"x": X})["y"]
    after = clean_up(before)
    assert Counter(n.op_type for n in after.graph) == Counter(left.split())
    np.testing.assert_array_equal(run(ir.to_proto(after), {"x": X})["y"], expected)
    names = [n.name for n in after.graph]
    assert [n.name for n in clean_up(after).graph] == names  # idempotent


def test_many_nested_concats_are_left_alone() -> None:
    """Each would be written anew with all before it, in quadratic time."""
    length = 200
    chain = " ".join(f"a{i + 1} = Concat<axis=0>(a{i}, x)" for i in range(length))
    after = clean_up(model(f"a0 = Relu(x) {chain} b = Neg(a{length})"))
    assert max(len(n.inputs) for n in after.graph) <= 64
    assert run(ir.to_proto(after), {"x": X})["y"].shape == (2 * (length + 1), 3)


def test_every_row_of_the_table_is_tried() -> None:
    own = {
        kind
        for kind, rewrites in REWRITES.items()
        if any(r.__module__ == movement_peepholes.__name__ for r in rewrites)
    }
    tried = {word for body, _ in ROWS.values() for word in own if f"{word}(" in body or f"{word}<" in body}
    assert own - tried == {"ReduceMin", "ReduceProd"}  # the same row as ReduceMax


@pytest.mark.parametrize(
    ("pool", "begin", "end"),
    [
        ("MaxPool<kernel_shape=[3, 3]>", 1, 1),
        ("MaxPool<kernel_shape=[2, 2], strides=[2, 2]>", 1, 0),
        ("AveragePool<kernel_shape=[2, 2]>", 1, 2),  # a pool itself takes no padding as wide as its kernel
        ("AveragePool<kernel_shape=[3, 3], count_include_pad=1>", 2, 1),
    ],
)
@pytest.mark.parametrize("fill", ["", "none", "other"])
def test_zeros_before_a_pool_stay_zeros_in_onnxruntime(pool: str, begin: int, end: int, fill: str) -> None:
    """Its optimizer makes such a Pad part of the pool, where maxima of negative numbers never see a zero."""
    text = (
        f'<ir_version: 10, opset_import: ["": 21]> g (float[1, 2, 6, 6] x) => (float[1, 2, n, m] y) {{ '
        f"p = Constant<value_ints=[0, 0, {begin}, {begin}, 0, 0, {end}, {end}]>() none = Constant<value_float=0.0>() "
        f"other = Constant<value_float=-9.0>() h = Pad(x, p{fill and ', ' + fill}) y = {pool}(h) }}"
    )
    given = onnx.parser.parse_model(text)
    x = -1 - np.random.default_rng(0).random((1, 2, 6, 6)).astype(np.float32)
    (expected,) = ReferenceEvaluator(given).run(None, {"x": x})
    cleaned = ir.to_proto(clean_up(normalise(given)))
    (found,) = ort.InferenceSession(cleaned.SerializeToString(), providers=["CPUExecutionProvider"]).run(None, {"x": x})
    np.testing.assert_allclose(found, expected, rtol=1e-6)


@pytest.mark.parametrize("pads", ["{2, 0}", "{0, 3}", "q"])
@pytest.mark.parametrize("after", ["y = Transpose<perm=[2, 1, 0]>(h)", "m = MaxPool<kernel_shape=[2]>(h) y = Neg(m)"])
def test_pads_of_some_axes_are_not_lost_in_onnxruntime(pads: str, after: str) -> None:
    """Its optimizer, moving a Transpose past such a Pad, reads as many pads as there were for all axes."""
    given = onnx.parser.parse_model(
        '<ir_version: 10, opset_import: ["": 21]> g (float[3, 4, 5] x, int64[2] q) => (float[a, b, c] y) { '
        f"p = Constant<value_ints=[{pads.strip('{}') if pads != 'q' else '0, 0'}]>() i = Constant<value_ints=[-1]>() "
        f"none = Constant<value_float=0.0>() t = Transpose<perm=[2, 1, 0]>(x) "
        f"h = Pad(t, {'q' if pads == 'q' else 'p'}, none, i) {after} }}"
    )
    feeds = {"x": np.random.default_rng(0).normal(-3, 1, (3, 4, 5)).astype(np.float32), "q": np.array([1, 2])}
    (expected,) = ReferenceEvaluator(given).run(None, feeds)
    cleaned = ir.to_proto(clean_up(normalise(given))).SerializeToString()
    (found,) = ort.InferenceSession(cleaned, providers=["CPUExecutionProvider"]).run(None, feeds)
    np.testing.assert_allclose(found, expected, rtol=1e-6)

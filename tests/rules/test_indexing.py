"""What the rule kit does not reach: slices at random, positions that repeat, half precision, how little is emitted."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx
import onnx.parser
import pytest

import gradgraph.rules.families  # noqa: F401  (fills the registry)
from gradgraph.rules.registry import RULES, Case, Point, Rule
from gradgraph.transforms import vjp
from gradgraph.verify import cases
from gradgraph.verify.reference import Oracle
from tests.kit.running import run

FAMILIES = ("shape", "indexing", "padding", "resize")
HERE = [r for r in RULES.values() if r.family in FAMILIES]
UNORDERED = "the order of the chosen is unspecified"
WHOLE = np.iinfo(np.int64)


def model(body: str, inputs: str = "double[4, 6] x", output: str = "double z") -> onnx.ModelProto:
    """One graph from ONNX's text form, whose numbers are Constant nodes."""
    m = onnx.parser.parse_model(f'<ir_version: 10, opset_import: ["": 21]> g ({inputs}) => ({output}) {{ {body} }}')
    for o in m.graph.output:
        o.type.tensor_type.ClearField("shape")
    return m


def gradient_model(m: onnx.ModelProto, wrt: Sequence[str] = ("x",)) -> onnx.ModelProto:
    result = vjp(m, wrt=list(wrt))
    assert isinstance(result, onnx.ModelProto)
    return result


def emitted(m: onnx.ModelProto, wrt: Sequence[str] = ("x",)) -> list[str]:
    """The operators that the backward pass adds."""
    return [n.op_type for n in gradient_model(m, wrt).graph.node if n.name.startswith("grad/")]


# --- slices at random ----------------------------------------------------------------------------------------


def random_slices(count: int) -> list[tuple[list[int], ...]]:
    """Starts, ends and steps of two axes; no end of 2**63 - 1 going backwards, which onnxruntime reads as -2**63."""
    rng = np.random.default_rng(0)
    edges = [WHOLE.min, -9, -6, -5, -1, 0, 1, 3, 4, 9]
    steps = [-7, -3, -2, -1, 1, 2, 3, 5]
    return [tuple(rng.choice(values, 2).tolist() for values in (edges, edges, steps)) for _ in range(count)]


@pytest.mark.sweep(0.19)
@pytest.mark.parametrize("kind", ["known", "open", "fed"])
def test_slices_at_random(kind: str) -> None:
    x = np.random.default_rng(1).uniform(-1, 1, (5, 4))
    for starts, ends, steps in random_slices(60):
        feeds = {"s": starts, "e": ends, "a": [1, 0], "t": steps}
        m = model("z = Slice(x, s, e, a, t)", "double[N, M] x" if kind != "known" else "double[5, 4] x")
        tensors = {k: np.array(v, np.int64) for k, v in feeds.items()}
        if kind == "fed":
            m.graph.input.extend(onnx.helper.make_tensor_value_info(k, onnx.TensorProto.INT64, [2]) for k in tensors)
        else:
            m.graph.initializer.extend(onnx.numpy_helper.from_array(v, k) for k, v in tensors.items())
            tensors = {}
        y = Oracle(m)({"x": x, **tensors})["z"]
        dy = np.arange(1.0, y.size + 1).reshape(y.shape)
        got = Oracle(gradient_model(m))({"x": x, **tensors, "z.cotangent": dy})["x.grad"]
        # element by element: which position of x each element of y is
        where = Oracle(m)({"x": np.arange(20.0).reshape(5, 4), **tensors})["z"].astype(int)
        expected = np.zeros(20)
        expected[where.ravel()] = dy.ravel()
        np.testing.assert_array_equal(got, expected.reshape(5, 4), err_msg=str(feeds))


# --- positions that repeat -----------------------------------------------------------------------------------


@pytest.mark.sweep(0)
def test_nothing_is_added_by_scatternd() -> None:
    """Onnxruntime's ScatterND adds from several threads at once: positions that repeat lose updates, now and then."""
    for rule in HERE:
        for call in rule.cases:
            t = cases.trial(rule, call)
            result = vjp(t.model, outputs=t.read, wrt=t.wrt, allow_unused=True)
            assert isinstance(result, onnx.ModelProto)
            reductions = [
                a.s
                for n in result.graph.node
                for a in n.attribute
                if n.op_type == "ScatterND" and a.name == "reduction" and n.name != "node"
            ]
            assert set(reductions) <= {b"none"}, rule.op_type


@pytest.mark.parametrize("dtype", ["int32", "int64"])
@pytest.mark.parametrize(("places", "width"), [(7, 1), (7, 64), (200, 1), (200, 64)])
def test_an_embedding_with_many_repeats(places: int, width: int, dtype: str) -> None:
    m = gradient_model(model("z = Gather(w, i)", f"float[{places}, {width}] w, {dtype}[B, T] i", "float z"), ["w"])
    ids = np.random.default_rng(0).integers(-places, places, (64, 500))
    dy = np.random.default_rng(1).integers(-8, 8, (64, 500, width)).astype(np.float32)  # float32 sums are exact
    expected = np.zeros((places, width), np.float32)
    np.add.at(expected, ids % places, dy)
    got = run(m, {"w": np.zeros((places, width), np.float32), "i": ids.astype(dtype), "z.cotangent": dy})["w.grad"]
    np.testing.assert_array_equal(got, expected)


@pytest.mark.parametrize("places", [7, 200])
def test_an_embedding_of_nothing(places: int) -> None:
    m = gradient_model(model("z = Gather(w, i)", f"float[{places}, 2] w, int64[B] i", "float z"), ["w"])
    feeds = {"w": np.ones((places, 2)), "z.cotangent": np.zeros((0, 2))}
    singles = {k: v.astype(np.float32) for k, v in feeds.items()}
    got = run(m, {**singles, "i": np.zeros(0, np.int64)})["w.grad"]
    np.testing.assert_array_equal(got, np.zeros((places, 2)))


# --- element types -------------------------------------------------------------------------------------------

HALF = [
    pytest.param(r, c, id=f"{r.op_type}-{i}")
    for r in HERE
    for i, c in enumerate(r.cases)
    # onnxruntime has no half-precision Range, Scatter with a reduction, or Resize with a region, to run forward
    if c.onnxruntime != UNORDERED
    and r.op_type != "Range"
    and not (r.op_type.startswith("Scatter") and c.attrs.get("reduction", "none") != "none")
    and c.attrs.get("coordinate_transformation_mode") != "tf_crop_and_resize"
]


@pytest.mark.sweep(0.143)
@pytest.mark.parametrize(("rule", "call"), HALF)
def test_float16_in_onnxruntime(rule: Rule, call: Case) -> None:
    half, wide = (cases.trial(rule, call, dtype=dtype) for dtype in (np.float16, np.float64))
    got = cases.run_gradient(half, lambda m, feeds: list(run(m, feeds).values()))
    expected = cases.run_gradient(wide, lambda m, feeds: list(Oracle(m)(feeds).values()))
    for g, e in zip(got, expected, strict=True):
        assert g.dtype == np.float16
        np.testing.assert_allclose(g, e, rtol=2e-2, atol=2e-2)


POINTS = [pytest.param(r, p, id=f"{r.op_type}-{i}") for r in HERE for i, p in enumerate(r.points)]


@pytest.mark.parametrize(("rule", "at"), POINTS)
def test_conventions_hold_in_onnxruntime_in_float32(rule: Rule, at: Point) -> None:
    t = cases.trial(rule, at.case, fed=True, dtype=np.float32)
    wanted = {f"x{i}.grad": g for i, g in enumerate(at.gives) if g is not None}
    result = vjp(t.model, outputs=t.read, wrt=[name.removesuffix(".grad") for name in wanted])
    assert isinstance(result, onnx.ModelProto)
    ones = np.ones_like(Oracle(t.model)(t.feeds)["y0"])
    got = run(result, {**t.feeds, "y0.cotangent": ones})
    for name, expected in wanted.items():
        np.testing.assert_allclose(got[name], np.asarray(expected, np.float32), rtol=1e-6)


# --- few nodes -----------------------------------------------------------------------------------------------

PLAIN: dict[str, list[str]] = {
    "s = Constant<value = int64[2] {2, 12}> () z = Reshape(x, s)": ["Reshape"],
    "z = Flatten(x)": ["Reshape"],
    "z = Transpose<perm = [1, 0]>(x)": ["Transpose"],
    "z = Concat<axis = 0>(x, x)": ["Split", "Add"],
    "a, b = Split<axis = 1, num_outputs = 2>(x) z = Mul(a, b)": ["Mul", "Mul", "Concat"],
    "s = Constant<value = int64[1] {1}> () e = Constant<value = int64[1] {3}> () z = Slice(x, s, e)": ["Pad"],
    "i = Constant<value = int64 {0}> () z = Gather<axis = 1>(x, i)": ["Unsqueeze", "Pad"],
    "i = Constant<value = int64[3] {2, 0, 1}> () z = Gather(x, i)": ["ScatterND"],
    "p = Constant<value = int64[4] {1, 1, 1, 1}> () z = Pad(x, p)": ["Slice"],
    "k = Constant<value = int64[1] {2}> () z, i = TopK(x, k)": ["ScatterElements"],
    "s = Constant<value = int64[3] {2, 4, 6}> () z = Expand(x, s)": ["ReduceSum"],
    "r = Constant<value = int64[2] {2, 1}> () z = Tile(x, r)": ["Reshape", "ReduceSum"],
}


@pytest.mark.parametrize("body", PLAIN)
def test_the_plain_case_is_short(body: str) -> None:
    assert emitted(model(body)) == PLAIN[body]


def test_constant_shapes_stay_small() -> None:
    """Positions of a large tensor are counted at run time, not stored in the model."""
    m = model('z = Pad<mode = "wrap">(x, p)', "double[700, 700] x, int64[4] p")
    assert len(gradient_model(m).SerializeToString()) < 5000

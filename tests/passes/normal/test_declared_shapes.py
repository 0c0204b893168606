"""Shapes that a file does not declare, declares wrongly, or that ONNX's inference miscounts."""

from __future__ import annotations

import numpy as np
import onnx
import onnx.parser
import pytest
from onnx import TensorProto, helper

import gradgraph as gg
from gradgraph.graph.shape_inference import shape_of
from gradgraph.passes.normal import normalise
from tests.kit.running import run


def model(body: str, inputs: str, weights: str = "", outputs: str = "float y") -> onnx.ModelProto:
    text = f'<ir_version: 10, opset_import: ["": 21]> g ({inputs}) => ({outputs}) {weights} {{ {body} }}'
    return onnx.parser.parse_model(text)


def slope(m: onnx.ModelProto, x: np.ndarray, same: onnx.ModelProto | None = None, **others: np.ndarray) -> None:
    """The gradient by ``x`` is the slope of what ``same`` computes, the model itself, along a random direction."""
    gradient = gg.value_and_grad(m, output="y", wrt=["x"])
    kept = {i.name for i in gradient.graph.input}
    found = run(gradient, {k: v for k, v in {"x": x, **others}.items() if k in kept})
    direction = np.random.default_rng(1).normal(size=x.shape).astype(np.float32) * 1e-3
    ahead, behind = (run(same or m, {"x": x + d, **others})["y"] for d in (direction, -direction))
    assert found["x.grad"].shape == x.shape
    np.testing.assert_allclose((found["x.grad"] * direction).sum(), (ahead - behind) / 2, rtol=1e-2, atol=2e-4)


# --- what an exporter declares of a branch -----------------------------------------------------------------


INPUTS = "float[4, 2] x, int64[4, 2] places"
WEIGHTS = "<float[3, 2] zeros = {0, 0, 0, 0, 0, 0}, float[2, 2] w = {1, 2, 3, 4}>"


def scattered(condition: str, declared: str) -> onnx.ModelProto:
    """As PyTorch's legacy exporter writes scatter_reduce: shapes of one branch are declared for both."""
    return model(
        f"""{condition}
        a, i, u = If (scalar) < then_branch = t () => (float[6] ta, int64[8] ti, float[8] tu) {{
            all = Constant <value_ints = [-1]> ()
            ta = Reshape(zeros, all) ti = Reshape(places, all) tu = Reshape(x, all) }},
          else_branch = e () => (float[3, 2] ea, int64[4, 2] ei, float[4, 2] eu) {{
            ea = Identity(zeros) ei = Identity(places) eu = Identity(x) }} >
        s = ScatterElements <axis = 0, reduction = "add"> (a, i, u)
        r = If (scalar) < then_branch = p () => ({declared} pr) {{ pr = Squeeze(s) }},
          else_branch = q () => ({declared} qr) {{ qr = Identity(s) }} >
        b = MatMul(r, w) z = Mul(b, b) y = ReduceSum <keepdims = 0> (z)""",
        INPUTS,
        WEIGHTS,
    )


CONDITIONS = {
    "constant": "scalar = Constant <value = bool {0}> ()",
    "folded": """sizes = Shape(x) rank = Size(sizes) zero = Constant <value_int = 0> () scalar = Equal(rank, zero)""",
}


@pytest.mark.parametrize("declared", ["float[6]", "float[]", "float[3, 2]", "float[5, 2]"])
@pytest.mark.parametrize("condition", CONDITIONS.values(), ids=list(CONDITIONS))
def test_what_a_taken_branch_declares_is_forgotten(condition: str, declared: str) -> None:
    rng = np.random.default_rng(0)
    x, places = rng.normal(size=(4, 2)).astype(np.float32), rng.integers(0, 3, (4, 2))
    plain = model(
        """s = ScatterElements <axis = 0, reduction = "add"> (zeros, places, x)
        b = MatMul(s, w) z = Mul(b, b) y = ReduceSum <keepdims = 0> (z)""",
        INPUTS,
        WEIGHTS,
    )
    slope(scattered(condition, declared), x, plain, places=places)


def test_what_is_declared_behind_a_taken_branch_stays_where_nothing_else_is_known() -> None:
    m = model(
        """yes = Constant <value = bool {1}> ()
        a = If (yes) < then_branch = t () => (float[2] ta) { ta = Neg(x) },
                       else_branch = e () => (float[2] ea) { ea = Abs(x) } >
        b = custom.Opaque(a) c = Softmax(b) d = Mul(c, x) y = ReduceSum <keepdims = 0> (d)""",
        "float[2] x",
    )
    m.opset_import.append(helper.make_opsetid("custom", 1))
    m.graph.value_info.append(helper.make_tensor_value_info("b", TensorProto.FLOAT, ["batch", 2]))
    (b,) = (v for node in normalise(m).graph for v in node.outputs if v.name == "b")
    assert shape_of(b) == ("batch", 2)


# --- ranks behind loops, branches and sequences ------------------------------------------------------------

# each gives a = x * x, of shape [3, 5, 5]
SOURCES = {
    "Loop": """one = Constant <value_int = 1> ()
        a = Loop < body = b (int64 i, bool c, float[3, 5, 5] s) => (bool d, float[3, 5, 5] t) {
            d = Identity(c) t = Mul(s, s) } > (one, , x)""",
    "rows of a Loop": """one = Constant <value_int = 1> () first = Constant <value_int = 0> ()
        rows = Loop < body = b (int64 i, bool c) => (bool d, float[] t) { d = Identity(c) t = Mul(x, x) } > (one, yes)
        a = Gather(rows, first)""",
    "Scan": """rows = Unsqueeze(x, front) first = Constant <value_int = 0> ()
        out = Scan <num_scan_inputs = 1, body = b (float[3, 5, 5] s) => (float[] t) { t = Mul(s, s) } > (rows)
        a = Gather(out, first)""",
    "If": """a = If (flag) < then_branch = p () => (float[] t) { t = Mul(x, x) },
                         else_branch = q () => (float[] e) { e = Identity(x) } >""",
    "sequence": """one = Constant <value_int = 1> () first = Constant <value_int = 0> ()
        none = SequenceEmpty <dtype = 1> ()
        list = Loop < body = b (int64 i, bool c, seq(float[]) s) => (bool d, seq(float[]) t) {
            d = Identity(c) e = Mul(x, x) t = SequenceInsert(s, e) } > (one, , none)
        a = SequenceAt(list, first)""",
    "sequence, filled in an inner Loop by a branch": """one = Constant <value_int = 1> ()
        first = Constant <value_int = 0> () none = SequenceEmpty <dtype = 1> ()
        list = Loop < body = b (int64 i, bool c, seq(float[]) s) => (bool d, seq(float[]) t) {
            d = Identity(c)
            t = Loop < body = b (int64 j, bool f, seq(float[]) u) => (bool g, seq(float[]) v) {
                g = Identity(f)
                v = If (flag) < then_branch = p () => (seq(float[]) m) { e = Mul(x, x) m = SequenceInsert(u, e) },
                                else_branch = q () => (seq(float[]) n) { n = Identity(u) } >
            } > (one, , s)
        } > (one, , none)
        a = SequenceAt(list, first)""",
}
READERS = {
    "Conv": "b = Conv(a, k)",
    "Gather": "b = Gather <axis = 1> (a, second)",
    "GroupNormalization": "b = GroupNormalization <num_groups = 1> (a, five, five)",
    "InstanceNormalization": "b = InstanceNormalization(a, five, five)",
    "LayerNormalization": "b = LayerNormalization(a, five)",
    "LpPool": "b = LpPool <kernel_shape = [2]> (a)",
    "MatMul": "b = MatMul(a, column)",
    "MaxPool": "b = MaxPool <kernel_shape = [2], strides = [3], ceil_mode = 1> (a)",
    "MeanVarianceNormalization": "b = MeanVarianceNormalization <axes = [0, 2]> (a)",
    "Slice": "b = Slice(a, second, third, second)",
}


@pytest.mark.sweep(0.41)
@pytest.mark.parametrize("reader", READERS.values(), ids=list(READERS))
@pytest.mark.parametrize("source", SOURCES.values(), ids=list(SOURCES))
def test_ranks_are_known_behind_bodies(source: str, reader: str) -> None:
    m = model(
        f"{source} {reader} u = Sin(b) z = Mul(u, b) y = ReduceSum <keepdims = 0> (z)",
        "float[3, 5, 5] x, bool flag",
        """<float[1, 5, 1] k = {1, 2, 3, 4, 5}, float[5] five = {1, 2, 3, 4, 5}, float[5, 1] column = {1, 2, 3, 4, 5},
        int64[1] second = {1}, int64[1] third = {3}, int64[1] front = {0}, bool yes = {1}>""",
    )
    slope(m, spaced(3, 5, 5), flag=np.array(True))


def spaced(*shape: int) -> np.ndarray:
    """Numbers that are far enough apart for slopes of maxima."""
    count = int(np.prod(shape))
    return (np.random.default_rng(0).permutation(count).reshape(shape) / count + 0.2).astype(np.float32)


def test_sizes_of_elements_that_differ_are_open() -> None:
    m = model(
        """two = Constant <value_int = 2> () last = Constant <value_int = 1> () none = SequenceEmpty <dtype = 1> ()
        list = Loop < body = b (int64 i, bool c, seq(float[]) s) => (bool d, seq(float[]) t) {
            d = Identity(c) n = Add(i, two) to = Unsqueeze(n, front) e = Slice(x, front, to, front)
            t = SequenceInsert(s, e) } > (two, , none)
        a = SequenceAt(list, last) z = MatMul(a, w) y = ReduceSum <keepdims = 0> (z)""",
        "float[4, 3] x",
        "<int64[1] front = {0}, float[3, 1] w = {1, 2, 3}>",
    )
    gradient = gg.value_and_grad(m, output="y", wrt=["x"])
    x = np.ones((4, 3), np.float32)
    np.testing.assert_array_equal(run(gradient, {"x": x})["x.grad"], [[1, 2, 3]] * 3 + [[0, 0, 0]])


# --- pools whose windows ONNX's inference miscounts --------------------------------------------------------

# kernel, strides, pads, sizes: with a last window that starts behind the end along one axis or both
WINDOWS = [
    ("2, 2", "3, 3", "0, 0, 0, 0", (6, 6)),
    ("3, 3", "3, 2", "1, 0, 1, 1", (5, 7)),
    ("2, 3", "4, 2", "0, 1, 1, 1", (8, 6)),
    ("1, 1", "2, 2", "0, 0, 0, 0", (4, 5)),
]
OPEN = ["2, 3, {0}, {1}", "2, 3, {0}, w", "2, 3, h, {1}", "b, c, {0}, {1}", "b, c, h, w"]
POOLS = ["AveragePool <", "AveragePool <count_include_pad = 1,", "LpPool <", "MaxPool <"]


@pytest.mark.sweep(0.443)
@pytest.mark.parametrize("pool", POOLS)
@pytest.mark.parametrize("dims", OPEN)
@pytest.mark.parametrize(("kernel", "strides", "pads", "sizes"), WINDOWS)
def test_windows_behind_the_end_are_dropped(
    pool: str, dims: str, kernel: str, strides: str, pads: str, sizes: tuple[int, int]
) -> None:
    slope(pooled(pool, dims.format(*sizes), kernel, strides, pads), spaced(2, 3, *sizes))


def pooled(
    pool: str, dims: str, kernel: str, strides: str, pads: str, before: str = "a = Mul(x, x)"
) -> onnx.ModelProto:
    return model(
        f"""{before} p = {pool} kernel_shape = [{kernel}], strides = [{strides}], pads = [{pads}], ceil_mode = 1> (a)
        z = Mul(p, p) y = ReduceSum <keepdims = 0> (z)""",
        f"float[{dims}] x",
        "<float[3] v = {1, 2, 3}>",
    )


def test_windows_of_what_onnx_infers_nothing_about_are_counted() -> None:
    norm = "a = GroupNormalization <num_groups = 1> (x, v, v)"
    slope(pooled("MaxPool <", "2, 3, 6, 6", *WINDOWS[0][:3], before=norm), spaced(2, 3, 6, 6))


@pytest.mark.parametrize("dims", OPEN)
def test_windows_in_bodies_are_counted(dims: str) -> None:
    m = model(
        """one = Constant <value_int = 1> ()
        rows = Loop < body = b (int64 i, bool c) => (bool d, float[] t) {
            d = Identity(c) t = AveragePool <kernel_shape = [2, 2], strides = [3, 3], ceil_mode = 1> (x) } > (one, yes)
        z = Mul(rows, rows) y = ReduceSum <keepdims = 0> (z)""",
        f"float[{dims.format(6, 6)}] x",
        "<bool yes = {1}>",
    )
    slope(m, spaced(2, 3, 6, 6))


def test_a_count_that_a_file_declares_wrongly_is_no_reason_to_refuse_it() -> None:
    m = pooled("AveragePool <", "2, 3, 6, w", *WINDOWS[0][:3])
    m.graph.value_info.append(helper.make_tensor_value_info("p", TensorProto.FLOAT, [2, 3, 3, None]))
    slope(m, spaced(2, 3, 6, 6))


# --- names of sizes that are others ------------------------------------------------------------------------


PICTURES = "float[rows, 3, height, width] x"
KERNEL = "<float[2, 3, 1, 1] k = {1, 2, 3, 4, 5, 6}>"
STRIDED = "a = Conv <strides = [2, 2]> (x, k)"
DECLARED = {  # sizes of the output, after its two classes
    "half as high and wide": (f"{STRIDED} y = Identity(a)", ("y.2", "y.3")),
    "half as wide": ("a = Conv <strides = [1, 2]> (x, k) y = Identity(a)", ("height", "y.3")),
    "turned": ("a = Conv(x, k) y = Transpose <perm = [0, 1, 3, 2]> (a)", ("y.2", "y.3")),
    "the same": ("a = Conv(x, k) y = Identity(a)", ("height", "width")),
    "the same again": (
        f"{STRIDED} f = Constant <value_floats = [1.0, 1.0, 2.0, 2.0]> () y = Resize(a, , f)",
        ("height", "width"),
    ),
}


@pytest.mark.parametrize("name", DECLARED)
def test_names_of_sizes_are_believed_only_if_they_can_be_true(name: str) -> None:
    body, sizes = DECLARED[name]
    m = model(body, PICTURES, KERNEL, "float[rows, 2, height, width] y")
    step = gg.build(m, "cross_entropy")
    assert next(t for t in step.manifest.targets if t.name == "target").shape == ("rows", *sizes)
    x = np.random.default_rng(0).normal(size=(3, 3, 8, 12)).astype(np.float32)
    labels = run(m, {"x": x})["y"].argmax(1)
    assert np.isfinite(gg.Trainer(step).step({"x": x, "target": labels})["loss"])
    with pytest.raises(gg.errors.GradgraphError):
        gg.Trainer(step).step({"x": x, "target": labels[:, 1:]})

"""Attention by native kernels, forward and back, against the portable form in float64."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
import onnx.parser
import onnx_ir as ir
import pytest

import gradgraph as gg
from gradgraph.backends.ort_native import library as native
from gradgraph.backends.ort_native import native_attention
from gradgraph.backends.ort_native.native_precision import set_high
from gradgraph.runtime.execution.session import Placement, RuntimeOptions, create_session
from gradgraph.verify.reference import Oracle, in_float64
from tests.kit.running import run

pytestmark = pytest.mark.usefixtures("library", "every_attention")

CPU = Placement(("CPUExecutionProvider",))


@dataclass(frozen=True)
class Sizes:
    batch: int
    heads: int
    queries: int
    keys: int
    size: int
    value_size: int


SMALL = Sizes(2, 3, 5, 7, 4, 6)
SQUARE = Sizes(2, 2, 40, 40, 24, 24)
SIZES = [
    Sizes(1, 1, 2, 2, 2, 2),
    SMALL,
    Sizes(1, 1, 33, 50, 17, 40),
    Sizes(2, 4, 64, 64, 64, 64),
    Sizes(1, 2, 100, 300, 130, 20),
    Sizes(1, 2, 300, 90, 32, 48),
    Sizes(3, 1, 2, 40, 16, 16),
    Sizes(1, 2, 48, 3, 16, 33),
    *(
        FEW := [
            Sizes(1, 2, 130, 200, 8, 5),
            Sizes(2, 1, 70, 129, 13, 16),
            Sizes(1, 1, 3, 65, 2, 3),
            Sizes(1, 3, 600, 64, 8, 8),
        ]
    ),
]
DRAWN = [Sizes(*np.random.default_rng(seed).integers((1, 1, 2, 2, 1, 1), (4, 4, 80, 80, 50, 50))) for seed in range(40)]

# (batch, length, heads·size) as heads, and back
SPLIT = "{0}5 = Reshape ({0}, [0, 0, {heads}, -1])  {0}4 = Transpose <perm = [0, 2, 1, 3]> ({0}5)"
JOINED = "o5 = Transpose <perm = [0, 2, 1, 3]> (o4)  y = Reshape (o5, [0, 0, -1])"
SCORES = """
    kt = Transpose <perm = [0, 1, 3, 2]> (k4)
    s = MatMul (q4, kt)
    {masked}
    p = Softmax <axis = -1> (w)
    o4 = MatMul (p, v4)
"""
SCALED = "w = Mul (s, c)"
GUARDED = SCORES.replace("(p, v4)", "(g, v4)").replace("o4 =", "n = IsNaN (p)  g = Where (n, none, p)  o4 =")


def model_of(text: str, inputs: dict[str, np.ndarray], **constants: object) -> onnx.ModelProto:
    """``text`` with lists of numbers written as constants, and shapes known."""
    types = {np.dtype(np.float32): "float", np.dtype(bool): "bool"}
    given = ", ".join(f"{types[x.dtype]}[{', '.join(map(str, x.shape))}] {n}" for n, x in inputs.items())
    body, count = "", 0
    while "[" in text:
        before, rest = text.split("[", 1)
        numbers, text = rest.split("]", 1)
        if before.rstrip().endswith("="):  # an attribute
            body += f"{before}\0{numbers}\1"
            continue
        count += 1
        constants[f"shape{count}"] = np.array([int(n) for n in numbers.split(",") if n], np.int64)
        body += f"{before}shape{count}"
    body = (body + text).replace("\0", "[").replace("\1", "]")
    head = '<ir_version: 10, opset_import: ["" : 21]>'
    model = onnx.parser.parse_model(f"{head} g ({given}) => (float[a, b, c] y) {{ {body} }}")
    model.graph.output[0].type.tensor_type.ClearField("shape")
    for name, value in constants.items():
        array = np.asarray(value, None if isinstance(value, np.ndarray) else np.float32)
        model.graph.initializer.append(onnx.numpy_helper.from_array(array, name))
    return onnx.shape_inference.infer_shapes(model)


def numbers(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng([seed, *shape]).normal(0, 1, shape).astype(np.float32)


def heads(it: Sizes) -> dict[str, np.ndarray]:
    """q, k and v as [batch, heads, length, size]."""
    lead = it.batch, it.heads
    q, k = numbers(*lead, it.queries, it.size, seed=1), numbers(*lead, it.keys, it.size, seed=2)
    return {"q4": q, "k4": k, "v4": numbers(*lead, it.keys, it.value_size, seed=3)}


def kernels(model: onnx.ModelProto) -> list[str]:
    return sorted(n.op_type for n in model.graph.node if "Attention" in n.op_type)


def native_vjp(model: onnx.ModelProto, wrt: list[str]) -> onnx.ModelProto:
    return gg.vjp(model, wrt=wrt, backend="ort-cpu-native")


@dataclass
class Both:
    """The vector-Jacobian products, portable and with kernels, and what to feed them."""

    portable: onnx.ModelProto
    fast: onnx.ModelProto
    feeds: dict[str, np.ndarray]

    @staticmethod
    def of(model: onnx.ModelProto, inputs: dict[str, np.ndarray], wrt: list[str]) -> Both:
        portable, fast = gg.vjp(model, wrt=wrt), native_vjp(model, wrt)
        (cotangent,) = [i for i in portable.graph.input if i.name.endswith(".cotangent")]
        shape = [d.dim_value for d in cotangent.type.tensor_type.shape.dim]
        return Both(portable, fast, {**inputs, cotangent.name: numbers(*shape, seed=9)})

    def results(self, threads: int = 2) -> dict[str, np.ndarray]:
        session = create_session(self.fast, CPU, RuntimeOptions(native_kernels=True, threads=threads))
        return dict(zip([o.name for o in session.get_outputs()], session.run(None, self.feeds), strict=True))

    def check(self, *expected: str, names: Sequence[str] | None = None) -> None:
        """As exact as float32 (these, or all), and the same bits by any number of threads."""
        assert kernels(self.fast) == sorted(expected)
        left = {n.op_type for n in self.fast.graph.node} & {"MatMul", "FusedMatMul", "Softmax", "SoftmaxGrad"}
        assert not left
        wide = {n: x.astype(np.float64) if x.dtype == np.float32 else x for n, x in self.feeds.items()}
        wanted = Oracle(in_float64(self.portable))(wide)
        found = self.results()
        for name in names or found:
            scale = max(1.0, float(np.abs(wanted[name]).max()))
            np.testing.assert_allclose(found[name], wanted[name], rtol=2e-5, atol=2e-6 * scale, err_msg=name)
        for threads in (1, 4):
            for name, value in self.results(threads).items():
                np.testing.assert_array_equal(value, found[name])


ALL = ["q4", "k4", "v4"]
SEPARATE = ("Attention", "AttentionGrad")
PACKED = ("Attention", "PackedAttentionGrad")


@pytest.mark.parametrize("it", SIZES, ids=str)
def test_sizes(it: Sizes) -> None:
    check_sizes(it)


@pytest.mark.sweep(0.1)
@pytest.mark.parametrize("it", DRAWN, ids=str)
def test_drawn_sizes(it: Sizes) -> None:
    check_sizes(it)


def check_sizes(it: Sizes) -> None:
    inputs = heads(it)
    model = model_of(SCORES.format(masked=SCALED) + "y = Identity (o4)", inputs, c=it.size**-0.5)
    Both.of(model, inputs, ALL).check(*SEPARATE)


@pytest.mark.parametrize("it", [SMALL, SQUARE], ids=str)
def test_heads_are_read_and_written_where_they_lie(it: Sizes) -> None:
    widths = {"q": (it.queries, it.size), "k": (it.keys, it.size), "v": (it.keys, it.value_size)}
    inputs = {n: numbers(it.batch, rows, it.heads * w, seed=i) for i, (n, (rows, w)) in enumerate(widths.items())}
    split = "\n".join(SPLIT.format(n, heads=it.heads) for n in "qkv")
    text = f"{split} {SCORES.format(masked=SCALED)} {JOINED}"
    both = Both.of(model_of(text, inputs, c=0.3), inputs, ["q", "k", "v"])
    both.check(*SEPARATE)
    assert not {n.op_type for n in both.fast.graph.node} & {"Transpose", "Reshape", "Gather", "Mul"}


def test_one_tensor_holds_queries_keys_and_values() -> None:
    inputs = {"x": numbers(2, 40, 3 * 48)}
    split = "\n".join(SPLIT.format(n, heads=2) for n in "qkv")
    text = f"q, k, v = Split <axis = 2> (x, [48, 48, 48]) {split} {SCORES.format(masked=SCALED)} {JOINED}"
    both = Both.of(model_of(text, inputs, c=0.2), inputs, ["x"])
    both.check(*PACKED)
    assert {n.op_type for n in both.fast.graph.node} == set(PACKED)


def test_keys_are_transposed_at_once_and_factors_carry_the_scale() -> None:
    inputs = {n: numbers(2, 40, 48, seed=i) for i, n in enumerate("qkv")}
    text = f"""
        {SPLIT.format("q", heads=2)} {SPLIT.format("v", heads=2)}
        k5 = Reshape (k, [0, 0, 2, -1])
        kt = Transpose <perm = [0, 2, 3, 1]> (k5)
        kc = Mul (kt, c)
        qc = Mul (c, q4)
        w = MatMul (qc, kc)
        p = Softmax <axis = -1> (w)
        o4 = MatMul (p, v4)
        {JOINED}
    """
    Both.of(model_of(text, inputs, c=0.45), inputs, ["q", "k", "v"]).check(*SEPARATE)


def test_a_factor_that_is_merged_with_that_of_an_adapter() -> None:
    """Of queries that are scaled before the product, in the first layer: only their adapter gets a gradient."""
    inputs = {n: numbers(2, 2, 40, 24, seed=i) for i, n in enumerate(("a4", "r4", "k4", "v4"))}
    text = f"""
        scaled = Mul (a4, two)
        sum = Add (r4, scaled)
        q4 = Mul (sum, c)
        {SCORES.format(masked="w = Add (s, bias)")}
        y = Identity (o4)
    """
    Both.of(model_of(text, inputs, c=0.3, two=2.0, bias=numbers(1, 1, 40, 40)), inputs, ["a4", "k4", "v4"]).check(
        *SEPARATE
    )


def test_parts_of_an_axis_of_its_own() -> None:
    """[batch, length, 3, heads, size], as vision transformers have it."""
    inputs = {"x": numbers(2, 40, 3 * 48)}
    text = f"""
        x5 = Reshape (x, [0, 0, 3, 2, 24])
        x6 = Transpose <perm = [2, 0, 3, 1, 4]> (x5)
        q6, k6, v6 = Split <axis = 0> (x6, [1, 1, 1])
        q4 = Squeeze (q6, [0])  k4 = Squeeze (k6, [0])  v4 = Squeeze (v6, [0])
        {SCORES.format(masked=SCALED)} {JOINED}
    """
    both = Both.of(model_of(text, inputs, c=0.2), inputs, ["x"])
    both.check(*PACKED)
    assert {n.op_type for n in both.fast.graph.node} == set(PACKED)


def test_heads_and_images_in_one_axis() -> None:
    inputs = {n: numbers(6, 40, 24, seed=i) for i, n in enumerate(("q4", "k4", "v4"))}
    text = SCORES.replace("[0, 1, 3, 2]", "[0, 2, 1]").format(masked="w = Div (s, c)") + "y = Identity (o4)"
    Both.of(model_of(text, inputs, c=4.0), inputs, ALL).check(*SEPARATE)


@pytest.mark.parametrize("causal", [0, 1])
@pytest.mark.parametrize("mask", [None, "float[40, 40] m", "bool[2, 1, 40, 40] m"], ids=str)
def test_the_operator_of_onnx(mask: str | None, causal: int) -> None:
    """With one mask: a causal one beside another that is added is left alone."""
    inputs = {n: numbers(2, 40, 48, seed=i) for i, n in enumerate("qkv")}
    given = "".join(f", {m}" for m in [mask] if m)
    model = onnx.parser.parse_model(
        f"""<ir_version: 11, opset_import: ["" : 23]>
        g (float[2, 40, 48] q, float[2, 40, 48] k, float[2, 40, 48] v{given}) => (float[2, 40, 48] y) {{
            y = Attention <q_num_heads = 2, kv_num_heads = 2, is_causal = {causal}> (q, k, v{", m" if mask else ""})
        }}"""
    )
    if mask is not None:
        inputs["m"] = (
            numbers(40, 40) if "float" in mask else np.broadcast_to(np.tri(40, dtype=bool), (2, 1, 40, 40)).copy()
        )
    both = Both.of(model, inputs, ["q", "k", "v"])
    if mask is not None and "float" in mask and causal:
        assert kernels(both.fast) == []
    else:
        both.check(*SEPARATE)


# --- masks -----------------------------------------------------------------------------------------------------------

LOWEST = float(np.finfo(np.float32).min)
CAUSAL = np.tri(70, dtype=bool)
KEPT = {
    "causal": CAUSAL,
    "padded": np.arange(70) < np.array([33, 70]).reshape(2, 1, 1, 1),
    "by head": np.stack([CAUSAL, np.ones_like(CAUSAL)])[None],
    "in a window": CAUSAL & ~np.tri(70, k=-20, dtype=bool),
    "by query": np.arange(70).reshape(70, 1) < 69,
}
LONG = Sizes(2, 2, 70, 70, 24, 24)


@pytest.mark.parametrize("hidden", [-np.inf, LOWEST, -10_000.0], ids=str)
@pytest.mark.parametrize("kept", [n for n in KEPT if n != "by query"])
def test_masks_that_are_added(kept: str, hidden: float) -> None:
    inputs = heads(LONG) | {"mask": np.where(KEPT[kept], 0, hidden).astype(np.float32)}
    masked = "t = Mul (s, c)  w = Add (mask, t)"
    Both.of(model_of(SCORES.format(masked=masked) + "y = Identity (o4)", inputs, c=0.2), inputs, ALL).check(*SEPARATE)


@pytest.mark.sweep(0.37)
@pytest.mark.parametrize("hidden", [LOWEST / 2, -3.0], ids=str)
@pytest.mark.parametrize("negated", [False, True])
@pytest.mark.parametrize("kept", KEPT)
def test_masks_that_replace_scores(kept: str, negated: bool, hidden: float) -> None:
    inputs = heads(LONG) | {"mask": KEPT[kept] != negated}
    masked = "t = Mul (s, c)  w = Where (mask, h, t)" if negated else "t = Mul (s, c)  w = Where (mask, t, h)"
    model = model_of(SCORES.format(masked=masked) + "y = Identity (o4)", inputs, c=0.2, h=hidden)
    Both.of(model, inputs, ALL).check(*SEPARATE)


@pytest.mark.parametrize("it", [SQUARE, LONG], ids=str)
def test_small_numbers_that_are_added_hide_nothing(it: Sizes) -> None:
    inputs = heads(it) | {"mask": numbers(it.heads, it.queries, it.keys)}
    masked = "w = Add (s, mask)"
    Both.of(model_of(SCORES.format(masked=masked) + "y = Identity (o4)", inputs), inputs, ALL).check(*SEPARATE)


def test_queries_that_see_nothing_but_hidden_blocks() -> None:
    """Their scores are no larger than those of hidden keys: nothing may be left out."""
    mask = np.where(CAUSAL, 0, LOWEST).astype(np.float32)
    mask[40:] = np.linspace(LOWEST / 2, LOWEST / 4, 70)
    inputs = heads(LONG) | {"mask": mask}
    model = model_of(SCORES.format(masked="w = Add (s, mask)") + "y = Identity (o4)", inputs)
    Both.of(model, inputs, ALL).check(*SEPARATE)


def test_scores_that_are_as_large_as_what_hides_them() -> None:
    inputs = heads(LONG) | {"mask": np.where(CAUSAL, 0, -2e30).astype(np.float32)}
    inputs["q4"][0, 0, 3], inputs["k4"][0, 0, 60] = 1e15, 1e15
    model = model_of(SCORES.format(masked="w = Add (s, mask)") + "y = Identity (o4)", inputs)
    Both.of(model, inputs, ALL).check(*SEPARATE, names=["y", "v4.grad"])  # others are 1e15 times rounding


@pytest.mark.parametrize("it", [it for it in FEW if it.size > 2], ids=str)
@pytest.mark.parametrize("falling", [1, -1])
def test_scores_that_grow_from_key_to_key(it: Sizes, falling: int) -> None:
    """The largest score of a query is another one behind each piece of the keys; most weights vanish."""
    inputs = heads(it)
    inputs["q4"] = np.abs(inputs["q4"])
    inputs["k4"] *= np.linspace(0.1, 10 / it.size, it.keys, dtype=np.float32)[::falling, None]
    inputs["k4"] = np.abs(inputs["k4"])
    Both.of(model_of(SCORES.format(masked=SCALED) + "y = Identity (o4)", inputs, c=1.0), inputs, ALL).check(*SEPARATE)


# --- numbers that are none --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("where", ["q4", "k4", "v4", "mask"])
def test_numbers_that_are_not_finite_spread_as_in_the_portable_form(where: str, number: float) -> None:
    inputs = heads(LONG) | {"mask": np.where(CAUSAL, 0, -np.inf).astype(np.float32)}
    inputs[where][(0, 1, 50, 2)[-inputs[where].ndim :]] = number
    model = model_of(SCORES.format(masked="w = Add (s, mask)") + "y = Identity (o4)", inputs)
    both = Both.of(model, inputs, ALL)
    wanted, found = run(both.portable, both.feeds), both.results()
    for name, value in found.items():
        finite = np.isfinite(wanted[name])
        np.testing.assert_array_equal(np.isfinite(value), finite, err_msg=name)
        np.testing.assert_allclose(value[finite], wanted[name][finite], rtol=1e-3, atol=1e-4, err_msg=name)


@pytest.mark.parametrize("number", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("where", ALL)
@pytest.mark.parametrize("guarded", [False, True])
def test_numbers_that_are_not_finite_spread_without_a_mask(where: str, number: float, guarded: bool) -> None:
    inputs = heads(Sizes(1, 2, 40, 70, 8, 8))
    inputs[where][0, 1, 30, 2] = number
    text = (GUARDED if guarded else SCORES).format(masked=SCALED)
    both = Both.of(model_of(text + "y = Identity (o4)", inputs, c=0.3, none=0.0), inputs, ALL)
    assert kernels(both.fast) == sorted(SEPARATE)
    wanted, found = run(both.portable, both.feeds), both.results()
    for name, value in found.items():
        finite = np.isfinite(wanted[name])
        np.testing.assert_array_equal(np.isfinite(value), finite, err_msg=name)
        np.testing.assert_allclose(value[finite], wanted[name][finite], rtol=1e-3, atol=1e-4, err_msg=name)


def test_keys_of_no_weight_in_front_of_all_others_leave_outputs_as_they_are() -> None:
    inputs = heads(Sizes(1, 2, 40, 150, 8, 8))
    inputs["q4"] = np.abs(inputs["q4"])
    inputs["k4"][:, :, :70] = -np.inf
    both = Both.of(model_of(SCORES.format(masked=SCALED) + "y = Identity (o4)", inputs, c=0.3), inputs, ALL)
    wanted, found = run(both.portable, both.feeds), both.results()
    assert np.isfinite(wanted["y"]).all()
    for name in ("y", "v4.grad"):
        np.testing.assert_allclose(found[name], wanted[name], rtol=2e-5, atol=1e-5, err_msg=name)


def test_queries_without_a_key_give_nan_as_in_the_portable_form() -> None:
    mask = np.zeros((70, 70), np.float32)
    mask[[1, 40]] = -np.inf
    inputs = heads(LONG) | {"mask": mask}
    both = Both.of(model_of(SCORES.format(masked="w = Add (s, mask)") + "y = Identity (o4)", inputs), inputs, ALL)
    wanted, found = run(both.portable, both.feeds), both.results()
    for name, value in found.items():
        np.testing.assert_array_equal(np.isnan(value), np.isnan(wanted[name]), err_msg=name)


def test_queries_without_a_key_give_zeros_where_they_are_guarded() -> None:
    """As PyTorch's exporter writes attentions with a mask."""
    mask = np.where(KEPT["padded"], 0, -np.inf).astype(np.float32) + np.zeros((2, 1, 70, 70), np.float32)
    mask[0, 0, [1, 40]] = mask[1, 0, 64:] = -np.inf
    inputs = heads(LONG) | {"mask": mask}
    text = GUARDED.format(masked="t = Mul (s, c)  w = Add (t, mask)") + "y = Identity (o4)"
    both = Both.of(model_of(text, inputs, c=0.2, none=0.0), inputs, ALL)
    both.check(*SEPARATE)
    assert "IsNaN" not in {n.op_type for n in both.fast.graph.node}
    found = both.results()
    assert not found["y"][0, :, [1, 40]].any() and not found["q4.grad"][1, :, 64:].any()


@pytest.mark.parametrize("seed", range(12))
def test_gradients_are_those_of_central_differences(seed: int) -> None:
    """Odd lengths and sizes, with masks and without, along one random direction, in float64."""
    rng = np.random.default_rng(seed)
    kind = ("none", "added", "kept", "guarded")[seed % 4]
    most = 17 if kind == "none" else 41  # heads of few numbers and no mask have a kernel of their own
    it = Sizes(*map(int, rng.integers([1, 1, 1, 1, 1, 1], [3, 4, 120, 260, most, most])))
    inputs = heads(it)
    seen = rng.random((it.batch, 1, it.queries, it.keys)) < 0.7
    seen[..., 0] |= kind != "guarded"
    masked = {"none": SCALED, "kept": "t = Mul (s, c)  w = Where (mask, t, low)"}.get(
        kind, "t = Mul (s, c)  w = Add (t, mask)"
    )
    if kind != "none":
        inputs["mask"] = seen if kind == "kept" else np.where(seen, 0, -np.inf).astype(np.float32)
    text = (GUARDED if kind == "guarded" else SCORES).format(masked=masked) + "y = Identity (o4)"
    scale = float(it.size**-0.5)
    both = Both.of(model_of(text, inputs, c=scale, low=LOWEST / 2, none=0.0), inputs, ALL)
    assert kernels(both.fast) == sorted(SEPARATE)
    cotangent = next(x for n, x in both.feeds.items() if n.endswith(".cotangent")).astype(np.float64)

    def total(q: np.ndarray, k: np.ndarray, v: np.ndarray) -> float:
        scores = scale * q @ k.swapaxes(-1, -2)
        scores = np.where(seen, scores, -np.inf) if kind != "none" else scores
        with np.errstate(invalid="ignore"):
            weights = np.exp(scores - scores.max(-1, keepdims=True))
            weights = weights / weights.sum(-1, keepdims=True)
        return float((np.nan_to_num(weights) @ v * cotangent).sum())

    at, found, step = [inputs[n].astype(np.float64) for n in ALL], both.results(), 1e-5
    for i, name in enumerate(ALL):
        direction = rng.normal(size=at[i].shape)
        ends = [total(*(x + sign * step * direction if j == i else x for j, x in enumerate(at))) for sign in (1, -1)]
        slope, gradient = (ends[0] - ends[1]) / (2 * step), found[f"{name}.grad"].astype(np.float64)
        tolerance = 1e-4 * float(np.abs(gradient * direction).sum()) / np.sqrt(gradient.size) + 1e-6
        assert (gradient * direction).sum() == pytest.approx(slope, rel=1e-4, abs=tolerance), name


@pytest.mark.sweep(0.3)
@pytest.mark.parametrize("seed", range(6))
def test_weights_that_are_computed_again_are_those_of_the_kernel(seed: int) -> None:
    """The same bits with ``recompute="attention"`` and without, by the same nodes, and not far from all other forms."""
    rng = np.random.default_rng(seed)
    batch, count, length, size = map(int, rng.integers([1, 1, 2, 1], [3, 4, 90, 20]))
    width = count * size
    weights = {n: rng.normal(0, 0.3, (width, width)).astype(np.float32) for n in ("wq", "wk", "wv")}
    products = "\n".join(f"{n} = MatMul (x, w{n}) {SPLIT.format(n, heads=count)}" for n in "qkv")
    masked = (SCALED, "t = Mul (s, c)  w = Where (seen, t, low)", "t = Mul (s, c)  w = Add (t, added)")[seed % 3]
    seen = np.tri(length, dtype=bool)
    constants = weights | {"seen": seen, "added": np.where(seen, 0, LOWEST).astype(np.float32), "low": LOWEST}
    scores = (GUARDED if seed % 2 else SCORES).format(masked=masked)
    x = numbers(batch, length, width)
    model = model_of(f"{products} {scores} {JOINED}", {"x": x}, c=size**-0.5, none=0.0, **constants)
    model.graph.output[0].type.tensor_type.shape.SetInParent()
    model = onnx.shape_inference.infer_shapes(model)
    found = []
    for again, kernels_too in ((None, True), ("attention", True), (None, False)):
        step = gg.build(model, "mse", gg.optim.sgd(gg.optim.constant(0.1)), train="w?", recompute=again)
        trainer = gg.Trainer(step, device="cpu", options=RuntimeOptions(native_kernels=kernels_too, threads=1))
        losses = [trainer.step({"x": x, "target": numbers(*x.shape, seed=5)})["loss"] for _ in range(2)]
        found.append([np.asarray(losses), *trainer.state_dict().values()])
    for kept, again, other in zip(*found, strict=True):
        np.testing.assert_array_equal(again, kept)
        np.testing.assert_allclose(kept, other, rtol=1e-4, atol=1e-5)


# --- what is left alone -----------------------------------------------------------------------------------------------

FINISHED = "y = Identity (o4)"
OTHERS = {
    "weights are read": SCORES.format(masked=SCALED) + "m = ReduceMax (p, last)  y = Add (o4, m)",
    "scores are read": SCORES.format(masked=SCALED) + "m = ReduceMax (s, last)  y = Add (o4, m)",
    "something between weights and values": SCORES.format(masked=SCALED)
    .replace("(p, v4)", "(p2, v4)")
    .replace("o4 =", "p2 = Mul (p, d)  o4 =")
    + FINISHED,
    "a factor behind the mask": SCORES.format(masked="t = Add (s, d)  w = Mul (t, c)") + FINISHED,
    "another axis": SCORES.format(masked=SCALED).replace("axis = -1", "axis = 2") + FINISHED,
    "two masks": SCORES.format(masked="t = Add (s, d)  w = Add (t, d)") + FINISHED,
    "a guard of other numbers": GUARDED.format(masked=SCALED).replace("none, p", "c, p") + FINISHED,
    "weights are read in front of the guard": GUARDED.format(masked=SCALED)
    + "m = ReduceMax (p, last)  y = Add (o4, m)",
    "a curve": SCORES.format(masked="w = Tanh (s)") + FINISHED,
}


@pytest.mark.parametrize("name", OTHERS)
def test_what_is_read_elsewhere_or_another_formula_is_left_alone(name: str) -> None:
    inputs = heads(SQUARE)
    model = model_of(OTHERS[name], inputs, c=0.2, d=numbers(40, 40), last=np.array([-1]), none=0.0)
    both = Both.of(model, inputs, ALL)
    assert kernels(both.fast) == []
    wanted = run(both.portable, both.feeds)
    for name, value in both.results().items():
        np.testing.assert_allclose(value, wanted[name], rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("wrt", [["q4", "k4"], ["v4"], [*ALL, "mask"]], ids=str)
def test_other_gradients_are_left_alone(wrt: list[str]) -> None:
    inputs = heads(SQUARE) | {"mask": numbers(40, 40)}
    model = model_of(SCORES.format(masked="w = Add (s, mask)") + FINISHED, inputs)
    assert kernels(native_vjp(model, wrt)) == []


LIMIT_OF: dict[
    str, list[tuple[str, Any, Any]]
] = {  # of 40 x 40 scores of heads of 24: limits that leave them to others, and limits that do not
    "tiles": [("LEAST_ROWS", 41, 40), ("LEAST_HEAD_SIZE", 25, 24), ("LEAST_WORK", 153_601, 153_600)],
    "vectors": [
        ("LEAST_SCORES", 1_601, 1_600),
        ("_most_head_size", lambda: 23, lambda: 24),
    ],
}


@pytest.mark.parametrize("by", LIMIT_OF)
def test_open_sizes_small_ones_and_other_processors_are_left_alone(by: str, monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = heads(SQUARE)
    model = model_of(SCORES.format(masked=SCALED) + FINISHED, inputs, c=0.2)
    monkeypatch.setattr(native.Library, "has_tiles", by == "tiles")
    for name, too_far, enough in LIMIT_OF[by]:
        monkeypatch.setattr(native_attention, name, too_far)
        assert kernels(native_vjp(model, ALL)) == [], name
        monkeypatch.setattr(native_attention, name, enough)
        assert kernels(native_vjp(model, ALL)) == sorted(SEPARATE), name
    for value in (*model.graph.input, *model.graph.value_info):
        value.type.tensor_type.shape.dim[0].dim_param = "n"
    assert kernels(native_vjp(model, ALL)) == []
    monkeypatch.setattr(native.Library, "has_tiles", False)
    monkeypatch.setattr(native.Library, "has_fast_vectors", False)
    assert kernels(native_vjp(model_of(SCORES.format(masked=SCALED) + FINISHED, inputs, c=0.2), ALL)) == []


def test_a_kernel_refuses_layouts_that_do_not_fit() -> None:
    inputs = heads(SQUARE)
    model = native_vjp(model_of(SCORES.format(masked=SCALED) + FINISHED, inputs, c=0.2), ALL)
    (node,) = [n for n in model.graph.node if n.op_type == "Attention"]
    (layout,) = [a for a in node.attribute if a.name == "k"]
    layout.ints[0] = 1
    feeds = inputs | {i.name: numbers(2, 2, 40, 24) for i in model.graph.input if i.name.endswith(".cotangent")}
    with pytest.raises(Exception, match="Attention: its tensors are smaller than their layouts"):
        create_session(model, CPU, RuntimeOptions(native_kernels=True)).run(None, feeds)


def test_two_parts_are_enough_where_they_are_asked_for() -> None:
    """Errors of 2^-15 of what is added up, in each product."""
    inputs = heads(Sizes(2, 2, 64, 64, 64, 64))
    both = Both.of(model_of(SCORES.format(masked=SCALED) + FINISHED, inputs, c=0.1), inputs, ALL)
    if not native.here().has_tiles:
        pytest.skip("this processor has no tiles (AMX with bfloat16)")
    exact = both.results()
    model = ir.from_proto(both.fast)
    set_high(model)
    both.fast = ir.to_proto(model)
    for name, value in both.results().items():
        error = np.abs(value - exact[name]).max() / np.abs(exact[name]).max()
        assert 1e-6 < error < 1e-3

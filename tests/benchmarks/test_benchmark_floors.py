"""What a step cannot avoid, counted by hand; how a row is held against its floor. Nothing is timed here."""

from __future__ import annotations

import math

import numpy as np
import onnxruntime as ort
import pytest

from benchmarks.floor_section import causes, floor_section
from benchmarks.floors import line
from benchmarks.peers.floor_step import model_of
from benchmarks.profiling import KEYS, Kernel, class_of
from benchmarks.results import Result
from benchmarks.unavoidable import traffic, work
from tests.kit.small_models import parsed

W = f"<float[3,4] w = {{{', '.join('0' * 12)}}}, float[4] b = {{0, 0, 0, 0}}>"
CONV_W = f"<float[2,4,3,3] w = {{{', '.join('0' * 72)}}}>"
TURNED_W = f"<float[4,3,2,2] w = {{{', '.join('0' * 48)}}}>"
DEPTHWISE_W = f"<float[4,1,3,3] w = {{{', '.join('0' * 36)}}}>"
# graph; multiplications of each product of a step; numbers that pass between products
STEPS = {
    "first": (f"(float[5,2,3] x) => (float[5,2,4] y) {W} {{ y = MatMul(x, w) }}", [120] * 2, 0),  # x is not trained
    "gemm": (f"(float[3,2] x) => (float[2,4] y) {W} {{ y = Gemm<transA = 1>(x, w) }}", [24] * 2, 0),
    "bias": (f"(float[2,3] x) => (float[2,4] y) {W} {{ a = MatMul(x, w) y = Add(a, b) }}", [24] * 2, 0),
    # there 8 are read and written; back both are read, and 8 written
    "second": (
        f"(float[2,3] x) => (float[2,3] y) {W} {{ a = MatMul(x, w) r = Relu(a) t = Transpose(w) y = MatMul(r, t) }}",
        [24] * 5,
        40,
    ),
    "one group": (  # four operators, one pass each way
        f"(float[2,3] x) => (float[2,3] y) {W} {{ a = MatMul(x, w) r = Relu(a) s = Tanh(r) u = Mul(r, s) "
        "v = Add(u, a) t = Transpose(w) y = MatMul(v, t) }",
        [24] * 5,
        40,
    ),
    "conv": (f"(float[1,4,5,5] x) => (float[1,2,3,3] y) {CONV_W} {{ y = Conv(x, w) }}", [648] * 2, 0),
    "turned": (
        f"(float[1,4,5,5] x) => (float[1,3,10,10] y) {TURNED_W} {{ y = ConvTranspose<strides = [2, 2]>(x, w) }}",
        [1200] * 2,
        0,
    ),
    "depthwise": (f"(float[1,4,5,5] x) => (float[1,4,3,3] y) {DEPTHWISE_W} {{ y = Conv<group = 4>(x, w) }}", None, 0),
}


def inner(shapes: tuple[tuple[int, ...], ...], body: str) -> int:
    """Multiplications for one number of the result."""
    a, b, y = shapes
    if "Conv" in body:
        return math.prod(b[1:])
    return math.isqrt(math.prod(a[-2:]) * math.prod(b[-2:]) // math.prod(y[-2:]))


@pytest.mark.parametrize("name", STEPS)
def test_counts(name: str) -> None:
    text, products, numbers = STEPS[name]
    model = parsed(text)
    found = [
        math.prod(form.shapes[-1]) * inner(form.shapes, form.body)
        for item, times in work(model).items()
        for form in item.forms[-1:] * times
    ]
    assert products is None or found == products
    parameters = sum(math.prod(t.dims) for t in model.graph.initializer)
    assert traffic(model, "sgd") == 4 * (3 * parameters + numbers)
    assert traffic(model, "adamw") == 4 * (7 * parameters + numbers)


@pytest.mark.parametrize("name", STEPS)
def test_every_form_runs(name: str) -> None:
    """The forms of one product are as much arithmetic, and give what they say."""
    for item in work(parsed(STEPS[name][0])):
        assert len({math.prod(f.shapes[-1]) * inner(f.shapes, f.body) for f in item.forms}) == 1
        for form in item.forms:
            inputs = {
                name: np.ones(form.shapes[i], np.float32) for i, name in enumerate("a" if form.constant else "ab")
            }
            session = ort.InferenceSession(model_of(form), providers=["CPUExecutionProvider"])
            (y,) = session.run(None, inputs)
            assert y.shape == form.shapes[-1]
            if not form.constant:
                np.testing.assert_array_equal(y.flat[0], inner(form.shapes, form.body))


def test_products_of_two_computed_factors_are_those_of_an_attention() -> None:
    """The floor's part for them is held against the kernels of attentions."""
    model = parsed(f"(float[2,5,3] x) => (float[2,4,4] y) {W} {{ a = MatMul(x, w) t = Transpose(a) y = MatMul(t, a) }}")
    assert [item.kind for item in work(model)] == ["products"] * 2 + ["attention"] * 3


def test_unknown_sizes_are_refused() -> None:
    with pytest.raises(KeyError):
        work(parsed(f"(float[n,3] x) => (float[n,4] y) {W} {{ y = MatMul(x, w) }}"))


@pytest.mark.parametrize(
    ("node", "operator", "expected"),
    [
        ("MatMul_3", "MatMul", "products"),
        ("update/Gemm_1", "Gemm", "products"),  # the gradient's product, and the update as it writes
        ("grad/node_conv2d/ConvGradWeight/FusedMatMul", "FusedMatMul", "convolutions"),
        ("node_conv2d_19/MatMul", "MatMul", "convolutions"),
        ("grad/x", "ConvGradInput", "convolutions"),
        ("update/Add_9", "Add", "update"),
        ("grad/x", "AdamUpdate", "update"),
        ("grad/LayerNormalizationGrad/Sub", "Sub", "normalisation"),
        ("bn", "BatchNormalization", "normalisation"),
        ("grad/a", "PackedAttentionGrad", "attention"),
        ("grad/a", "MaxPoolGrad", "pools and sums"),
        ("loss/ReduceSum", "ReduceSum", "pools and sums"),
        ("t", "Transpose", "data moved"),
        ("gelu", "Erf", "element by element"),
    ],
)
def test_classes(node: str, operator: str, expected: str) -> None:
    assert class_of(Kernel(node, operator, "CPUExecutionProvider", 1.0)) == expected


def test_profiles_have_classes() -> None:
    assert "class" in KEYS


def result(step: float) -> Result:
    setup = {"date": "2026-01-02", "machine": "a processor", "device": "cpu", "threads": 2, "optimizer": "sgd"}
    floor = {"step": 0.010, "parts": {"products": 0.008, "memory": 0.002}}
    ours = {"step": step, "classes": {"products": 0.5, "update": 0.3, "data moved": 0.2}}
    return Result("mlp", {**setup, "dynamic": False}, {"flops": 1e9}, {"gradgraph": ours, "floor": floor})


def test_the_two_largest_causes_are_named_from_the_limit_on() -> None:
    assert causes(result(0.0125), "gradgraph") == ""
    assert causes(result(0.020), "gradgraph") == "2.00 times its floor; update +6.0 ms, data moved +4.0 ms"


def test_products_of_attentions_are_held_against_the_products_and_kernels_of_attentions() -> None:
    it = result(0.020)
    it.rows["floor"]["parts"] = {"products": 0.002, "attention": 0.003, "memory": 0.005}
    it.rows["gradgraph"]["classes"] = {"products": 0.4, "attention": 0.2, "update": 0.4}
    assert causes(it, "gradgraph") == "2.00 times its floor; update +8.0 ms, products and attention +7.0 ms"


def test_causes_name_their_largest_operators() -> None:
    it = result(0.020)
    kernels = [("Gemm in forward", 0.5), ("Pad in forward", 0.15), ("Cast in grad", 0.05), ("Split in grad", 0.01)]
    moved = "data moved +4.0 ms (Pad in forward 15 %, Cast in grad 5 %)"
    assert causes(it, "gradgraph", kernels) == f"2.00 times its floor; update +6.0 ms, {moved}"
    it.rows["gradgraph"]["kernels"] = kernels
    assert moved in "\n".join(floor_section([it], [it]))
    assert moved not in "\n".join(floor_section([it], [result(0.020)]))


def test_section_and_table() -> None:
    assert floor_section([]) == []
    text = "\n".join(floor_section([result(0.020)]))
    assert "| MLP 784-512-512-10, batch 128, gradgraph | 20.00 | 10.00 | 8.00 | 0.00 | 2.00 | 2.00 |" in text
    assert "- MLP 784-512-512-10, batch 128, gradgraph: 2.00 times its floor" in text
    assert "20.00 (2.00)" in line(result(0.020)) and "products 50 %" in line(result(0.020))
    alone = result(0.020)
    alone.setup["clock"] = "processor"
    assert f"| {alone.title}, one thread, processor time, gradgraph | 20.00 |" in "\n".join(floor_section([alone]))
    refused = result(0.020)
    refused.rows["floor"] = {"cannot": "no memory"}
    assert line(refused).endswith("cannot: no memory")


@pytest.mark.sweep(0)
def test_floors_are_drawn(tmp_path) -> None:
    pytest.importorskip("matplotlib", reason="only the chart needs it")
    from benchmarks.chart import draw_floors

    for name in ("a.svg", "b.svg"):
        draw_floors([result(0.020)], tmp_path / name)
    assert "<svg" in (tmp_path / "a.svg").read_text()
    assert (tmp_path / "a.svg").read_bytes() == (tmp_path / "b.svg").read_bytes()

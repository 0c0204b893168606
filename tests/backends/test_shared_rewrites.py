"""Rewrites that backends share leave the numbers what they are, and leave nothing of what they are there to replace."""

from __future__ import annotations

import numpy as np
import onnx
import onnx.parser
import onnx_ir as ir
import pytest

import gradgraph as gg
from gradgraph.backends import BACKENDS
from gradgraph.backends.capability import Condition
from gradgraph.backends.facts import facts_of
from gradgraph.backends.shared_rewrites import close_scans, make_scans_forward, narrow_numbers
from gradgraph.files.models import to_proto
from gradgraph.passes.normal.edit import nodes_of
from tests.kit.running import run

RNG = np.random.default_rng(3)
FEEDS = {name: RNG.normal(size=shape).astype(np.float32) for name, shape in {"s": (2,), "x": (5, 2), "w": (2,)}.items()}

# two states, slices along two axes in both directions, a constant, an outer value
SCAN = """
<ir_version: 10, opset_import: ["": 21]>
g (float[2] s, float[5, 2] x, float[2] w) => (float[2] last, float[5, 2] y, float[2, 5] back, float[5, 2] z)
<float[1] two = {2.0}> {
    t = Transpose<perm = [1, 0]>(x)
    last, y, back, z = Scan<
        num_scan_inputs = 2, scan_input_axes = [0, 1], scan_input_directions = [1, 0],
        scan_output_axes = [0, 1, 0], scan_output_directions = [0, 1, 1],
        body = b (float[2] state, float[2] a, float[2] c) => (float[2] next, float[2] one, float[2] other, float[2] v)
        { m = Mul(state, w) n = Add(m, a) next = Mul(n, two) one = Sub(next, c) other = Mul(a, w) v = Identity(w) }
    >(s, x, t)
}
"""


def opened(text: str) -> ir.Model:
    return ir.from_proto(onnx.parser.parse_model(text))


def facts(model: ir.Model) -> set[str]:
    return {fact for node in nodes_of(model) if node.op_type == "Scan" for fact in facts_of(node)}


@pytest.mark.parametrize(
    "rewrites",
    [[make_scans_forward], [close_scans], [make_scans_forward, close_scans], [close_scans, make_scans_forward]],
)
def test_scans_give_the_same(rewrites: list) -> None:
    model = opened(SCAN)
    before = run(to_proto(model), FEEDS)
    assert Condition.read("captures").holds(frozenset(facts(model)))
    for rewrite in rewrites:
        rewrite(model)
    after = to_proto(model)
    onnx.checker.check_model(after, full_check=True)
    assert list(run(after, FEEDS)) == list(before)
    for name, value in run(after, FEEDS).items():
        np.testing.assert_array_equal(value, before[name])
    left = facts(opened_again := ir.from_proto(after))
    assert ("captures" in left) == (close_scans not in rewrites)
    scan = next(n for n in nodes_of(opened_again) if n.op_type == "Scan")
    assert any("directions" in name for name in scan.attributes) == (make_scans_forward not in rewrites)


def test_a_scan_that_runs_forward_and_reads_nothing_stays() -> None:
    model = opened("""
        <ir_version: 10, opset_import: ["": 21]> g (float[2] s, float[5, 2] x) => (float[2] last, float[5, 2] y) {
            last, y = Scan<num_scan_inputs = 1,
                body = b (float[2] state, float[2] a) => (float[2] next, float[2] out)
                { next = Add(state, a) out = Neg(next) }>(s, x)
        }""")
    before = to_proto(model)
    make_scans_forward(model)
    close_scans(model)
    assert to_proto(model) == before


def corrections(steps: np.ndarray, beta: float) -> tuple[np.ndarray, np.ndarray]:
    """``1 − βᵗ`` as the rewrite has it in float32, and in float64."""
    text = f"""
        <ir_version: 10, opset_import: ["": 21]> g (int64[n] t) => (float[n] y)
        <double one = {{1.0}}, double beta = {{{beta}}}> {{
            wide = Cast<to = 11>(t) power = Pow(beta, wide) c = Sub(one, power) y = Cast<to = 1>(c)
        }}"""
    model = opened(text)
    for value in (v for node in nodes_of(model) for v in node.outputs[:1]):
        value.type = ir.TensorType(ir.DataType.FLOAT if value.name == "y" else ir.DataType.DOUBLE)
    narrow_numbers(model)
    assert not any(v.dtype == ir.DataType.DOUBLE for n in nodes_of(model) for v in (*n.inputs, *n.outputs) if v)
    return run(to_proto(model), {"t": steps})["y"], 1 - beta ** steps.astype(np.float64)


@pytest.mark.parametrize("beta", [0.5, 0.9, 0.99, 0.999, 0.9999])
def test_corrections_of_adam_in_float32(beta: float) -> None:
    steps = np.array([*range(1, 2000), *range(2000, 100_000, 997), 2**24])
    narrow, exact = corrections(steps, beta)
    np.testing.assert_allclose(narrow, exact, rtol=4e-7)


def test_a_network_in_float64_keeps_it() -> None:
    text = """<ir_version: 10, opset_import: ["": 21]> g (double[2] x) => (double[2] y) { y = Neg(x) }"""
    model = opened(text)
    before = to_proto(model)
    narrow_numbers(model)
    assert to_proto(model) == before


@pytest.mark.parametrize("backend", ["openvino", "iree", "web-gpu"])
@pytest.mark.parametrize("optimizer", ["adam", "nadam", "radam", "adamax"])
def test_no_optimizer_computes_in_float64(backend: str, optimizer: str) -> None:
    """Also in steps of which an optimizer is not the one of the matrix."""
    text = """
        <ir_version: 10, opset_import: ["": 21]> g (float[n, 2] x) => (float[n, 2] y)
        <float[2, 2] w = {1, 2, 3, 4}> { y = MatMul(x, w) }"""
    step, usual = (gg.build(onnx.parser.parse_model(text), "mse", optimizer, backend=b) for b in (backend, "auto"))
    assert BACKENDS[backend].name == step.manifest.backend
    model = ir.from_proto(step.train)
    assert not any(v.dtype == ir.DataType.DOUBLE for n in nodes_of(model) for v in n.outputs)
    state = run(step.init)
    feeds = {"x": np.ones((3, 2), np.float32), "target": np.zeros((3, 2), np.float32)}
    feeds |= {k: np.array(v, np.float32) for k, v in step.manifest.hyperparameters.items()}
    results = [run(s.train, {**feeds, **state}) for s in (step, usual)]
    np.testing.assert_allclose(results[0]["w.next"], results[1]["w.next"], rtol=1e-6)

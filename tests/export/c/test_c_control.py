"""Loop, If and Scan as C, beside onnxruntime: models, training steps, and refusals."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import onnx
import onnx.parser
import pytest

import gradgraph as gg
from gradgraph.errors import BuildError
from tests.kit.compiled_c import NEEDS_COMPILER, Program
from tests.kit.networks_in_c import OPTIMIZERS
from tests.kit.running import run
from tests.kit.trained_c import train_beside

HEAD = '<ir_version: 10, opset_import: ["" : 21]>'
RNG = np.random.default_rng(0)

MODELS = {
    "a constant number of steps": """g (float[4] x, float[4, 4] w) => (float[4] y, float[3, 4] all) {
        trips = Constant <value_int = 3> ()
        y, all = Loop <body = b (int64 i, bool c, float[4] s) => (bool d, float[4] t, float[4] z) {
            d = Identity(c) f = Cast <to = 1> (i) u = MatMul(w, s) v = Add(u, f) t = Tanh(v) z = Mul(t, x)
        }> (trips, , x)
    }""",
    "no step": """g (float[4] x) => (float[4] y) {
        trips = Constant <value_int = 0> ()
        y = Loop <body = b (int64 i, bool c, float[4] s) => (bool d, float[4] t) { d = Identity(c) t = Tanh(s) }>
            (trips, , x)
    }""",
    "one step": """g (float[4] x) => (float[4] y, float[1, 4] all) {
        trips = Constant <value_int = 1> ()
        y, all = Loop <body = b (int64 i, bool c, float[4] s) => (bool d, float[4] t, float[4] z) {
            d = Identity(c) f = Cast <to = 1> (i) t = Tanh(s) z = Add(t, f)
        }> (trips, , x)
    }""",
    "states that change places": """g (float[4] x, float[4] w) => (float[4] y, float[4] z) {
        trips = Constant <value_int = 5> ()
        y, z = Loop <body = b (int64 i, bool c, float[4] r, float[4] s) => (bool d, float[4] t, float[4] u) {
            d = Identity(c) t = Identity(s) u = Add(r, s)
        }> (trips, , x, w)
    }""",
    "steps that are counted at run time": """g (float[4] x, int64 n) => (float[4] y) {
        y = Loop <body = b (int64 i, bool c, float[4] s) => (bool d, float[4] t) {
            d = Identity(c) f = Cast <to = 1> (i) u = Add(s, f) t = Sin(u)
        }> (n, , x)
    }""",
    "an early end": """g (float[4] x) => (float[4] y, float h) {
        go = Constant <value = bool[1] {1}> ()
        axes = Constant <value_ints = [0]> ()
        start = Squeeze(go, axes)
        zero = Constant <value_float = 0.0> ()
        one = Constant <value_float = 1.0> ()
        y, h = Loop <body = b (int64 i, bool c, float[4] s, float k) => (bool d, float[4] t, float l) {
            half = Constant <value_float = 0.5> ()
            t = Mul(s, half) l = Add(k, one)
            m = ReduceMax <keepdims = 0> (t) d = Greater(m, half)
        }> (, start, x, zero)
    }""",
    "a branch": """g (float[4] x, float[4] w) => (float[4] y, float z) {
        t = ReduceSum <keepdims = 0> (x)
        zero = Constant <value_float = 0.0> ()
        c = Greater(t, zero)
        y, z = If (c) <
            then_branch = a () => (float[4] a0, float a1) { a0 = Identity(w) a1 = ReduceMax <keepdims = 0> (x) },
            else_branch = b () => (float[4] b0, float b1) {
                e = Less(t, zero)
                b0 = If (e) <then_branch = p () => (float[4] p0) { p1 = Exp(x) p0 = Mul(p1, w) },
                             else_branch = q () => (float[4] q0) { q0 = Neg(x) }>
                b1 = ReduceMin <keepdims = 0> (w)
            }>
    }""",
    "a branch in a loop": """g (float[4] x) => (float[4] y) {
        trips = Constant <value_int = 6> ()
        y = Loop <body = b (int64 i, bool c, float[4] s) => (bool d, float[4] t) {
            d = Identity(c) two = Constant <value_int = 2> () odd = Mod(i, two) o = Cast <to = 9> (odd)
            t = If (o) <then_branch = p () => (float[4] p0) { p0 = Sin(s) },
                        else_branch = q () => (float[4] q0) { r = Cos(s) q0 = Add(r, x) }>
        }> (trips, , x)
    }""",
    "a loop in a branch": """g (float[4] x, bool c) => (float[4] y) {
        trips = Constant <value_int = 3> ()
        y = If (c) <
            then_branch = p () => (float[4] p0) {
                p0 = Loop <body = b (int64 i, bool d, float[4] s) => (bool e, float[4] t) {
                    e = Identity(d) t = Sin(s)
                }> (trips, , x)
            },
            else_branch = q () => (float[4] q0) { q0 = Mul(x, x) }>
    }""",
    "a scan along other axes": """g (float[4] x, float[2, 3, 4] w)
            => (float[4] y, float[4, 3] all, float[2, 4, 3] turned) {
        y, all, turned = Scan <num_scan_inputs = 1, scan_input_axes = [1], scan_output_axes = [1, -1],
            scan_output_directions = [0, 1],
            body = b (float[4] s, float[2, 4] r) => (float[4] t, float[4] u, float[2, 4] v) {
                axes = Constant <value_ints = [0]> () m = ReduceSum <keepdims = 0> (r, axes)
                t = Add(s, m) u = Sin(t) v = Mul(r, s)
            }> (x, w)
    }""",
    "products with vectors as results of a scan": """g (float[4] x, float[4, 4] w, float[3, 4] rows)
            => (float[4] y, float[4, 3] all, float[3, 4] sum) {
        y, all, plain = Scan <num_scan_inputs = 1, scan_output_axes = [1, 0],
            body = b (float[4] s, float[4] r) => (float[4] t, float[4] u, float[4] v) {
                t = MatMul(w, s) u = MatMul(w, r) v = MatMul(r, w)
            }> (x, rows)
        sum = Add(plain, rows)
    }""",
    "products with vectors as results of a loop and of a branch": """g (float[4] x, float[4, 4] w, int64 n, bool c)
            => (float[2, 4] y, float[2, 4] z) {
        s = Loop <body = b (int64 i, bool c0, float[4] s0) => (bool d, float[4] t) {
            d = Identity(c0) t = MatMul(w, s0)
        }> (n, , x)
        r = If (c) <then_branch = p () => (float[4] p0) { p0 = MatMul(w, x) },
                    else_branch = q () => (float[4] q0) { q0 = MatMul(x, w) }>
        rows = Constant <value_ints = [2, 4]> ()
        e = Expand(s, rows) y = Neg(e) f = Expand(r, rows) z = Neg(f)
    }""",
    "a sum of a product, and an input that is not read": """g
            (float[3, 4] x, float[4, 9] x_1, float[2] x_2, float[2] x_22) => (float y) {
        p = MatMul(x, x_1) q = ReduceSum <keepdims = 0> (p) r = ReduceSum <keepdims = 0> (x_22) y = Add(q, r)
    }""",
    "a loop in a loop": """g (float[4] x) => (float[4] y, float[2, 3, 4] all) {
        trips = Constant <value_int = 2> ()
        more = Constant <value_int = 3> ()
        y, all = Loop <body = b (int64 i, bool c, float[4] s) => (bool d, float[4] t, float[3, 4] z) {
            d = Identity(c)
            t, z = Loop <body = e (int64 j, bool f, float[4] u) => (bool g, float[4] v, float[4] w) {
                g = Identity(f) k = Add(i, j) l = Cast <to = 1> (k) m = Mul(u, x) v = Add(m, l) w = Identity(u)
            }> (more, , s)
        }> (trips, , x)
    }""",
}


def model(name: str) -> onnx.ModelProto:
    return onnx.parser.parse_model(HEAD + MODELS[name])


def inputs(graph: onnx.GraphProto) -> dict[str, np.ndarray]:
    made = {}
    for value in graph.input:
        shape = [d.dim_value for d in value.type.tensor_type.shape.dim]
        kind = value.type.tensor_type.elem_type
        made[value.name] = (
            RNG.normal(size=shape).astype(np.float32) * 2 if kind == 1 else np.array(RNG.integers(0, 4)) if kind == 7
            else np.array(RNG.random() < 0.5)
        )  # fmt: skip
    return made


@NEEDS_COMPILER
@pytest.mark.parametrize("name", MODELS)
def test_control_flow_computes_what_onnxruntime_does(name: str, tmp_path: Path) -> None:
    source = model(name)
    gg.export.c(source, tmp_path / "c")
    program = Program(tmp_path / "c", "model")
    for _ in range(6):
        feeds = inputs(source.graph)
        expected = run(source, feeds)
        results = {n: np.zeros_like(v) for n, v in expected.items()}
        passed = [v if v.shape else int(v) if v.dtype.kind in "bi" else float(v) for v in feeds.values()]
        assert program.call("run", *passed, *results.values()) == 0
        for output, value in expected.items():
            np.testing.assert_allclose(results[output], value, rtol=1e-5, atol=1e-6, err_msg=output)


def test_the_manifest_has_the_shapes_of_the_model(tmp_path: Path) -> None:
    """The tensors of these results have other shapes: those of a product of matrices, and of a sum."""
    text = """g (float[4] x, float[4, 4] w) => (float[4] y, float[1] z, float[2, 2] r) {
        y = MatMul(w, x) s = ReduceSum <keepdims = 0> (x) zero = Constant <value_ints = [0]> () z = Unsqueeze(s, zero)
        square = Constant <value_ints = [2, 2]> () e = Exp(x) r = Reshape(e, square)
    }"""
    gg.export.c(onnx.parser.parse_model(HEAD + text), tmp_path / "c")
    results = json.loads((tmp_path / "c" / "manifest.json").read_text())["functions"]["run"]["results"]
    assert {r["name"]: r["shape"] for r in results} == {"y": [4], "z": [1], "r": [2, 2]}
    assert "#define MODEL_Z_SIZE 1 /* [1] */" in (tmp_path / "c" / "model.h").read_text()


TRAINED = {
    "a recurrence": """g (float[3, 4] x) => (float[3, 4] y) <float[4, 4] w = {WEIGHTS}> {
        trips = Constant <value_int = 3> ()
        y = Loop <body = b (int64 i, bool c, float[3, 4] s) => (bool d, float[3, 4] t) {
            d = Identity(c) u = MatMul(s, w) v = Add(u, x) t = Tanh(v)
        }> (trips, , x)
    }""",
    "rows of a sequence": """g (float[5, 3, 4] x) => (float[5, 3, 4] y)
            <float[4, 4] w = {WEIGHTS}, float[3, 4] first = {FIRST}> {
        trips = Constant <value_int = 5> ()
        last, y = Loop <body = b (int64 i, bool c, float[3, 4] s) => (bool d, float[3, 4] t, float[3, 4] z) {
            d = Identity(c) row = Gather(x, i) u = MatMul(s, w) v = Add(u, row) t = Tanh(v) z = Mul(t, t)
        }> (trips, , first)
    }""",
    "a branch": """g (float[3, 4] x) => (float[3, 4] y) <float[4, 4] w = {WEIGHTS}, float[4, 4] v = {WEIGHTS}> {
        t = ReduceSum <keepdims = 0> (x)
        zero = Constant <value_float = 0.0> ()
        c = Greater(t, zero)
        y = If (c) <then_branch = p () => (float[3, 4] p0) { p1 = MatMul(x, w) p0 = Tanh(p1) },
                    else_branch = q () => (float[3, 4] q0) { q0 = MatMul(x, v) }>
    }""",
}  # fmt: skip


@NEEDS_COMPILER
@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
@pytest.mark.parametrize("name", TRAINED)
def test_steps_with_control_flow_train_as_onnxruntime_does(name: str, optimizer: str, tmp_path: Path) -> None:
    """The gradient of a Loop has its past states in a sequence, which becomes an array."""
    text = TRAINED[name]
    for key, count in (("WEIGHTS", 16), ("FIRST", 12)):
        text = text.replace(key, ", ".join(f"{v:.5f}" for v in RNG.normal(size=count) / 2))
    step = gg.build(onnx.parser.parse_model(HEAD + text), "mse", OPTIMIZERS[optimizer]())
    gg.export.c(step, tmp_path / "c")
    assert train_beside(step, Program(tmp_path / "c"), 10, optimizer == "sgd") < 1e-5


REFUSED = {
    "its state '.*' changes its size": """g (float[4] x) => (float[8] y) {
        trips = Constant <value_int = 1> ()
        y = Loop <body = b (int64 i, bool c, float[n] s) => (bool d, float[m] t) {
            d = Identity(c) t = Concat <axis = 0> (s, s)
        }> (trips, , x)
    }""",
    "its number of steps must be constant": """g (float[4] x, int64 n) => (float[r, 4] all) {
        y, all = Loop <body = b (int64 i, bool c, float[4] s) => (bool d, float[4] t, float[4] z) {
            d = Identity(c) t = Tanh(s) z = Neg(t)
        }> (n, , x)
    }""",
}


@pytest.mark.parametrize("words", REFUSED)
def test_loops_of_unknown_size_are_refused_by_node(words: str, tmp_path: Path) -> None:
    with pytest.raises(BuildError, match=rf"\((Loop|Scan)\).*cannot be exported as C code: {words}"):
        gg.export.c(onnx.parser.parse_model(HEAD + REFUSED[words]), tmp_path / "c")

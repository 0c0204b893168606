"""Random operators of a training step draw from (seed, step, place): right numbers, repeated after a resume."""

from __future__ import annotations

import itertools
import math
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.parser
import pytest
from onnx.reference import ReferenceEvaluator

import gradgraph as gg
from gradgraph.graph.builder import Builder, Var
from gradgraph.passes.randomness import RandomSource, initial_state
from tests.kit.running import Loop, run

ROWS, COLUMNS = 40, 1000


def model(body: str, weights: dict[str, np.ndarray], **inputs: str) -> onnx.ModelProto:
    """Nodes in ONNX's text form that end in a scalar ``y``, over ``weights`` and ``inputs`` (name=type)."""
    given = ", ".join(f"{kind} {name}" for name, kind in inputs.items())
    text = f'<ir_version: 10, opset_import: ["": 21]> g ({given}) => (float y) {{ {body} }}'
    read = onnx.parser.parse_model(text)
    read.graph.initializer.extend(onnx.numpy_helper.from_array(a, n) for n, a in weights.items())
    return read


def drawn(body: str, shape: tuple[int, ...], steps: int = 1, seed: int = 0, **feeds: Any) -> np.ndarray:
    """What ``body`` draws as ``d`` in each step: [steps, *shape].

    The gradient of Σ w·d, which a rate of 1 takes off a w of zeros, so that d need not be an output.
    """
    kinds = {np.dtype("float32"): "float", np.dtype("float16"): "float16", np.dtype("float64"): "double"}
    inputs = {n: f"{kinds[a.dtype]}[{','.join('abc'[: a.ndim])}]" for n, a in feeds.items()}
    whole = model(f"{body} wide = Cast<to = 1>(d) each = Mul(w, wide) y = ReduceSum<keepdims = 0>(each)", {}, **inputs)
    whole.graph.initializer.append(onnx.numpy_helper.from_array(np.zeros(shape, np.float32), "w"))
    loop = Loop(gg.build(whole, None, gg.optim.sgd(1.0), seed=seed, train="w"))
    found = []
    for _ in range(steps):
        loop.state["w"] = np.zeros(shape, np.float32)
        loop(feeds)
        found.append(-loop.state["w"])
    return np.array(found)


def of_normal(x: np.ndarray) -> np.ndarray:
    return np.array([0.5 * (1 + math.erf(v / math.sqrt(2))) for v in x])


# operator, its numbers brought to [0, 1) or to a standard normal
CONTINUOUS = {
    "RandomUniform": ("d = RandomUniform<shape = [40, 1000], low = -2.0, high = 3.0>()", lambda d: (d + 2) / 5),
    "RandomNormal": ("d = RandomNormal<shape = [40, 1000], mean = 4.0, scale = 0.5>()", lambda d: (d - 4) / 0.5),
    "RandomUniformLike": ("d = RandomUniformLike<low = 1.0, high = 2.0>(x)", lambda d: d - 1),
    "RandomNormalLike": ("d = RandomNormalLike<scale = 3.0>(x)", lambda d: d / 3),
}
DTYPES = [np.float16, np.float32, np.float64]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("op_type", CONTINUOUS)
def test_numbers_have_their_distribution_and_nothing_in_common(op_type: str, dtype: type[np.floating[Any]]) -> None:
    body, standard = CONTINUOUS[op_type]
    number = onnx.helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
    feeds = {"x": np.zeros((ROWS, COLUMNS), dtype)} if "(x)" in body else {}
    body = body if feeds else body.replace("<", f"<dtype = {number}, ")
    x = standard(drawn(body, (ROWS, COLUMNS), steps=3, **feeds).astype(np.float64))
    assert np.isfinite(x).all()
    cumulative = np.clip(x, 0, 1) if "Uniform" in op_type else x
    ranks = np.sort(cumulative, axis=None)
    of = ranks if "Uniform" in op_type else of_normal(ranks)
    n = ranks.size
    assert np.abs(of - (np.arange(n) + 0.5) / n).max() < 2.2 / math.sqrt(n) + 5e-4  # of float16, the width of steps
    if "Uniform" in op_type:
        assert x.min() >= 0
        assert x.max() <= 1
        x = (x - 0.5) * math.sqrt(12)
    moments = [(x**k).mean() for k in (1, 2, 3)]
    np.testing.assert_allclose(moments, [0, 1, 0], atol=0.04)
    pairs = {
        "steps": (x[0], x[1]),
        "later steps": (x[0], x[2]),
        "rows": (x[:, :-1], x[:, 1:]),
        "neighbours": (x[..., :-1], x[..., 1:]),
        "the same place of squares": (x[0] ** 2 - 1, x[1] ** 2 - 1),
    }
    for name, (a, b) in pairs.items():
        assert abs((a * b).mean()) < 6 / math.sqrt(a.size), name


def test_seeds_and_nodes_differ_and_a_seed_repeats() -> None:
    body = "d = RandomNormalLike(x)"
    x = np.zeros((3, 50), np.float32)
    first, again, other = (drawn(body, x.shape, seed=s, x=x) for s in (1, 1, 2))
    np.testing.assert_array_equal(first, again)
    assert (first != other).mean() > 0.99
    two = "a = RandomNormalLike(x) b = RandomNormalLike(x) d = Sub(a, b)"
    assert (drawn(two, x.shape, x=x) != 0).mean() > 0.99
    own = drawn("d = RandomNormalLike<seed = 7.0>(x)", x.shape, seed=1, x=x)
    np.testing.assert_array_equal(own, first)  # the operator's own seed says nothing


def test_calls_of_a_function_differ() -> None:
    text = """<ir_version: 10, opset_import: ["": 21, "own": 1]> g (float[2, 30] x) => (float y)
    { a = own.noise(x) b = own.noise(x) d = Sub(a, b) p = Mul(w, d) y = ReduceSum<keepdims = 0>(p) }
    <domain: "own", opset_import: ["": 21]> noise (x) => (z) { z = RandomUniformLike(x) }"""
    read = onnx.parser.parse_model(text)
    read.graph.initializer.append(onnx.numpy_helper.from_array(np.zeros((2, 30), np.float32), "w"))
    loop = Loop(gg.build(read, None, gg.optim.sgd(1.0)))
    loop({"x": np.zeros((2, 30), np.float32)})
    assert (loop.state["w"] != 0).mean() > 0.99


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
@pytest.mark.parametrize("result", ["", "<dtype = 6>", "<dtype = 9>"])
def test_bernoulli(dtype: type[np.floating[Any]], result: str) -> None:
    p = np.tile(np.array([0.0, 0.125, 0.5, 0.75, 1.0], dtype), (4000, 1))
    d = drawn(f"d = Bernoulli{result}(p)", p.shape, p=p)[0]
    assert set(np.unique(d)) == {0.0, 1.0}
    np.testing.assert_allclose(d.mean(0), p[0], atol=5 * 0.5 / math.sqrt(4000))
    assert (d[:, 0] == 0).all()
    assert (d[:, -1] == 1).all()


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
@pytest.mark.parametrize("number", [6, 7])
def test_multinomial(dtype: type[np.floating[Any]], number: int) -> None:
    """Unnormalised logarithms; what has the probability 0 is never drawn, at either end."""
    shares = np.array([[0, 1, 2, 5, 0], [3, 0, 1, 0, 4]]) / 8
    with np.errstate(divide="ignore"):
        logits = (np.log(shares) + np.array([[3.0], [-2.0]])).astype(dtype)
    d = drawn(f"d = Multinomial<sample_size = 8000, dtype = {number}>(x)", (2, 8000), x=logits)[0]
    for row, expected in zip(d, shares, strict=True):
        found = np.bincount(row.astype(int), minlength=5) / 8000
        np.testing.assert_allclose(found, expected, atol=5 * 0.5 / math.sqrt(8000))
        assert (found[expected == 0] == 0).all()


class Extreme(RandomSource):
    """Of which every hash is the same."""

    def __init__(self, fractions: tuple[float, float]) -> None:
        super().__init__(Builder().const(initial_state(0)))
        self.fractions = itertools.cycle(fractions)

    def _fractions(self, op: Builder, count: Var, turns: Any) -> Var:
        return op.Expand(op.const(np.float32(next(self.fractions))), count)


@pytest.mark.parametrize("double", [False, True])
@pytest.mark.parametrize("fractions", [*itertools.product([0, 2**-16, 0.5, 1 - 2**-16], repeat=2)], ids=str)
def test_no_hash_is_infinite(fractions: tuple[float, float], double: bool) -> None:
    import onnx_ir as ir

    op, dtype = Builder(), ir.DataType.DOUBLE if double else ir.DataType.FLOAT
    source = Extreme(fractions)
    shape = op.const(np.array([2], np.int64))
    outputs = [source.normal(op, shape, dtype=dtype), source.uniform(op, shape, dtype=dtype)]
    graph = ir.Graph((), [v.value for v in outputs], nodes=(), opset_imports={"": 21})
    op.finish(graph)
    normal, uniform = run(ir.to_proto(ir.Model(graph, ir_version=10))).values()
    assert np.isfinite(normal).all()
    assert np.abs(normal).max() < 9
    assert ((uniform >= 0) & (uniform < 1)).all()


# --- bodies ----------------------------------------------------------------------------------------------

LOOP = """
n = Constant<value_int = 3>() t = Constant<value = bool {1}>()
y0 = Loop(n, t, w) <body = b (int64 i, bool c, float[2, 3] s) => (bool k, float[2, 3] z)
    { k = Identity(c) r = RandomUniformLike<low = 0.5, high = 1.5>(s) a = Mul(s, r) z = Mul(a, w) }>
y = ReduceSum<keepdims = 0>(y0)
"""
NESTED = """
n = Constant<value_int = 3>() m = Constant<value_int = 2>() t = Constant<value = bool {1}>()
last, d = Loop(n, t, x) <body = b (int64 i, bool c, float[2, 3] s) => (bool k, float[2, 3] z, float[2, 2, 3] q)
    { k = Identity(c)
      z, q = Loop(m, t, s) <body = f (int64 j, bool g, float[2, 3] u) => (bool l, float[2, 3] v, float[2, 3] r)
        { l = Identity(g) r = RandomNormalLike(u) v = Identity(u) }> }>
"""
W = {"w": np.ones((2, 3), np.float32)}


def test_the_gradient_of_a_loop_meets_the_draws_of_its_forward_pass() -> None:
    """Three times s·r·w, from w: the gradient is four times the value, number by number; iterations differ."""
    loop = Loop(gg.build(model(LOOP, W), None, gg.optim.sgd(1.0), seed=5))
    values = loop({})["y"]
    gradient = W["w"] - loop.state["w"]
    np.testing.assert_allclose(gradient.sum(), 4 * values, rtol=1e-5)
    cubes = np.cbrt(gradient / 4)  # were the three draws of an element one number, it would be this one
    once = drawn("d = RandomUniformLike<low = 0.5, high = 1.5>(x)", (2, 3), seed=5, x=W["w"])
    assert np.abs(cubes - once).min() > 1e-4


def test_every_iteration_of_every_loop_draws_others() -> None:
    found = drawn(NESTED, (3, 2, 2, 3), steps=2, x=W["w"])
    assert len(np.unique(found)) == found.size


def test_a_branch_draws() -> None:
    body = """c = Constant<value = bool {1}>() z = ReduceSum<keepdims = 0>(x) zero = Constant<value = float {0}>()
    g = GreaterOrEqual(z, zero)
    d = If(g) <then_branch = a () => (float[2, 50] p) { p = RandomNormalLike(x) },
               else_branch = b () => (float[2, 50] q) { q = RandomUniformLike(x) }>"""
    x = np.ones((2, 50), np.float32)
    normal, uniform = drawn(body, x.shape, x=x)[0], drawn(body, x.shape, x=-x)[0]
    assert normal.min() < 0
    assert uniform.min() >= 0
    assert len(np.unique(normal)) == 100


def test_a_scan_is_refused() -> None:
    body = """s = Scan<num_scan_inputs = 1, body = b (float[3] r) => (float[3] q)
        { n = RandomNormalLike(r) q = Mul(n, w) }>(x)
    y = ReduceSum<keepdims = 0>(s)"""
    with pytest.raises(gg.errors.BuildError, match=r"\(RandomNormalLike\) draws .* body of a Scan"):
        gg.build(model(body, {"w": np.ones(3, np.float32)}, x="float[4, 3]"), None, "sgd")


# --- whole runs ------------------------------------------------------------------------------------------

RNG = np.random.default_rng(0)


def normal(*shape: int) -> np.ndarray:
    return (RNG.normal(size=shape) * 0.3).astype(np.float32)


VAE = (
    """h = MatMul(x, encode) mean, log = Split<axis = 1, num_outputs = 2>(h) e = RandomNormalLike(mean)
    deviation = Exp(log) s = Mul(e, deviation) z = Add(mean, s) back = MatMul(z, decode) f = Sub(back, x)
    q = Mul(f, f) y = ReduceMean<keepdims = 0>(q)""",
    {"encode": normal(8, 6), "decode": normal(3, 8)},
)
DIFFUSION = (
    """size = Shape<start = 0, end = 1>(x) zeros = ConstantOfShape(size) column = Unsqueeze(zeros, last)
    t = RandomUniformLike<low = 0.02, high = 0.98>(column) noise = RandomNormalLike(x)
    left = Sub(one, t) a = Sqrt(left) b = Sqrt(t) xa = Mul(x, a) nb = Mul(noise, b) noisy = Add(xa, nb)
    joined = Concat<axis = 1>(noisy, t) h = MatMul(joined, first) r = Tanh(h) found = MatMul(r, second)
    f = Sub(found, noise) q = Mul(f, f) y = ReduceMean<keepdims = 0>(q)""",
    {"first": normal(9, 16), "second": normal(16, 8), "one": np.ones((), np.float32), "last": np.array([1])},
)
DATA = {"x": normal(20, 8)}


@pytest.mark.sweep(0.28)
@pytest.mark.parametrize("backend", ["auto", "portable", "ort-cpu"])
@pytest.mark.parametrize("network", [VAE, DIFFUSION], ids=["vae", "diffusion"])
def test_a_resumed_run_repeats(network: tuple[str, dict[str, np.ndarray]], backend: str, tmp_path: Path) -> None:
    """Two times five steps from the saved folder are ten, to the bit; another seed is another run."""
    trained = [n for n, a in network[1].items() if a.ndim == 2]
    built = model(*network, x="float[batch, 8]")
    folder = tmp_path / "step"
    gg.build(built, None, "adam", train=trained, backend=backend, seed=1).save(folder)
    options = {"batch_size": 4, "progress": False}
    whole = gg.Trainer(folder, device="cpu", seed=2)
    whole.fit(DATA, epochs=2, **options)
    half = gg.Trainer(folder, device="cpu", seed=2)
    half.fit(DATA, epochs=2, max_steps=5, checkpoint=tmp_path / "run.ckpt", **options)
    rest = gg.Trainer.resume(folder, tmp_path / "run.ckpt", device="cpu")
    rest.fit(DATA, epochs=2, **options)
    for name, value in whole.state_dict().items():
        np.testing.assert_array_equal(rest.state_dict()[name], value, err_msg=name)
    other = gg.Trainer(gg.build(built, None, "adam", train=trained, seed=3), device="cpu", seed=2)
    other.fit(DATA, epochs=2, **options)
    assert (other.state_dict()[trained[0]] != whole.state_dict()[trained[0]]).any()


def test_the_folder_s_files_run_and_draw_the_same_elsewhere(tmp_path: Path) -> None:
    step = gg.build(model(*VAE, x="float[batch, 8]"), None, gg.optim.sgd(0.1), backend="portable")
    step.save(tmp_path / "step")
    loop = Loop(gg.Step.load(tmp_path / "step"))
    feeds = {**DATA, **loop.state, "learning_rate": np.array(0.1, np.float32)}
    expected = ReferenceEvaluator(step.train).run(None, feeds)
    found = loop(DATA)
    np.testing.assert_allclose(found["y"], expected[0], rtol=1e-5)
    losses = [float(loop.evaluate(DATA)["y"]) for _ in range(2)]
    assert np.isfinite(losses).all()
    assert {"RandomNormalLike"} <= {n.op_type for n in step.eval.graph.node}  # there the runtime draws

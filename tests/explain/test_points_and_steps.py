"""``along``, ``iterate`` and ``solve`` beside loops in NumPy."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest

import gradgraph as gg
from gradgraph.errors import ArgumentError, BuildError, GradgraphError
from gradgraph.frontend import Module, export, nn
from gradgraph.frontend import functional as F
from tests.kit.running import run

RNG = np.random.default_rng(0)
X = RNG.normal(size=(5, 4)).astype(np.float32)


class Net(Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(4, 8), nn.Linear(8, 3)

    def forward(self, x: Any) -> Any:
        y = self.two(F.tanh(self.one(x)))
        return y, y[:, 1].sum()


@pytest.fixture(scope="module")
def net() -> onnx.ModelProto:
    gg.frontend.manual_seed(0)
    return export(Net(), {"x": ("batch", 4)}, ["y", "s"])


@pytest.fixture(scope="module")
def gradient(net: onnx.ModelProto) -> onnx.ModelProto:
    return gg.value_and_grad(net, output="s", wrt="x")


def weights(net: onnx.ModelProto) -> dict[str, np.ndarray]:
    return {t.name: onnx.numpy_helper.to_array(t).astype(np.float64) for t in net.graph.initializer}


def value(net: onnx.ModelProto, x: np.ndarray) -> np.ndarray:
    w = weights(net)
    return np.tanh(x @ w["one.weight"].T + w["one.bias"]) @ w["two.weight"].T + w["two.bias"]


def slope(net: onnx.ModelProto, x: np.ndarray) -> np.ndarray:
    w = weights(net)
    a = np.tanh(x @ w["one.weight"].T + w["one.bias"])
    return (w["two.weight"][1] * (1 - a * a)) @ w["one.weight"]


# --- along ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"unroll": True}, {"chunk": 3}, {"chunk": 7}, {"backend": "ort-cpu"}], ids=str)
def test_means_along_a_line(net: Any, gradient: Any, options: dict[str, Any]) -> None:
    base = RNG.normal(size=(1, 4)).astype(np.float32)
    at, weight = np.polynomial.legendre.leggauss(7)
    expected = sum(w / 2 * slope(net, base + (a + 1) / 2 * (X - base)) for a, w in zip(at, weight, strict=True))
    model = gg.along(gradient, 7, wrt="x", outputs="x.grad", baseline=base, **options)
    np.testing.assert_allclose(run(model, {"x": X})["x.grad.mean"], expected, rtol=1e-4, atol=1e-6)


def test_other_reductions(net: Any) -> None:
    stack = run(gg.along(net, 4, baseline="input", rule="riemann_left", reduce="stack"), {"x": X, "x.baseline": -X})
    expected = np.stack([value(net, -X + a * 2 * X) for a in (0, 0.25, 0.5, 0.75)])
    np.testing.assert_allclose(stack["y.stack"], expected, rtol=1e-4, atol=1e-6)
    assert stack["s.stack"].shape == (4,)
    chunked = gg.along(net, 4, outputs="y", baseline="input", rule="riemann_left", reduce="stack", chunk=3)
    np.testing.assert_allclose(run(chunked, {"x": X, "x.baseline": -X})["y.stack"], expected, rtol=1e-4, atol=1e-6)
    factors = [1.0, -2.0, 0.5, 3.0]
    model = gg.along(net, 4, outputs="y", baseline=0.0, rule="riemann_left", weights=factors)
    parts = np.stack([value(net, a * X) for a in (0, 0.25, 0.5, 0.75)])
    np.testing.assert_allclose(run(model, {"x": X})["y.sum"], np.tensordot(factors, parts, 1), rtol=1e-4, atol=1e-5)
    total = gg.along(net, 4, outputs="y", baseline=0.0, rule="riemann_left", reduce="sum", chunk=3)
    np.testing.assert_allclose(run(total, {"x": X})["y.sum"], parts.sum(0), rtol=1e-4, atol=1e-5)


def test_a_line_of_inner_values(net: Any) -> None:
    hidden = next(n.output[0] for n in net.graph.node if n.op_type == "Tanh")
    w = weights(net)
    a = np.tanh(X @ w["one.weight"].T + w["one.bias"])
    model = gg.along(net, 2, wrt=hidden, outputs="y", baseline=1.0, rule="riemann_middle", reduce="stack")
    expected = np.stack([(1 + t * (a - 1)) @ w["two.weight"].T + w["two.bias"] for t in (0.25, 0.75)])
    np.testing.assert_allclose(run(model, {"x": X})["y.stack"], expected, rtol=1e-4, atol=1e-6)


def test_noise_is_seeded_and_normal(net: Any) -> None:
    same = onnx.parser.parse_model('<ir_version: 10, opset_import: ["" : 21]> g (float[n,4] x) => (float[n,4] y) {'
                                   "y = Identity(x) }")  # fmt: skip
    draws = [run(gg.along(same, 400, noise=0.5, seed=s, reduce="stack"), {"x": X})["y.stack"] - X for s in (1, 1, 2)]
    np.testing.assert_array_equal(draws[0], draws[1])
    assert np.abs(draws[0] - draws[2]).max() > 0.1
    assert abs(draws[0].mean()) < 0.02 and abs(draws[0].std() - 0.5) < 0.02
    assert len(np.unique(np.round(draws[0], 4))) > 4000  # every point has its own
    unrolled = gg.along(same, 400, noise=0.5, seed=1, reduce="stack", chunk=200, unroll=True)
    found = run(unrolled, {"x": X})["y.stack"] - X
    assert abs(found.std() - 0.5) < 0.02


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({}, "pass either baseline or noise"),
        ({"baseline": 0.0, "noise": 0.1}, "pass either baseline or noise"),
        ({"noise": 0.1, "rule": "riemann_left"}, "rule selects points on a line"),
        ({"baseline": 0.0, "seed": 3}, "seed selects the noise"),
        ({"baseline": np.zeros(3)}, r"the baseline of 'x' has shape \[3\], but 'x' has shape \['batch', 4\]"),
        ({"baseline": {"z": 0.0}}, "the baseline names 'z'"),
        ({"baseline": "zero"}, "the baseline is 'zero'; pass a number, an array or 'input'"),
        ({"baseline": 0.0, "weights": [1.0]}, "1 weight for 3 points"),
        ({"baseline": 0.0, "weights": [1.0] * 3, "reduce": "sum"}, "exclude each other"),
        ({"baseline": 0.0, "chunk": 2}, "does not have one row per sample"),
        (
            {"outputs": "y", "wrt": "one.weight", "noise": 0.1, "chunk": 2},
            "'one.weight' does not have one row per sample",
        ),
        ({"baseline": 0.0, "rule": "simpson"}, "rule"),
        ({"baseline": 0.0, "wrt": "q"}, "no input, initializer or inner value matches 'q'"),
    ],
)
def test_errors_of_along(net: Any, options: dict[str, Any], words: str) -> None:
    with pytest.raises(GradgraphError, match=words):
        gg.along(net, 3, **options)


# --- iterate -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("unroll", [False, True])
@pytest.mark.parametrize("norm", ["linf", "l2"])
def test_projected_steps(net: Any, norm: Any, unroll: bool) -> None:
    model = gg.iterate(net, 6, wrt="x", output="s", maximize=True, bounds=(-1.2, 1.2), norm=norm, radius=0.6,
                       update=lambda x, g: x - 0.25 * F.sign(g), unroll=unroll)  # fmt: skip
    result, x, history = run(model, {"x": X}), X.astype(np.float64), []
    for _ in range(6):
        history.append(value(net, x)[:, 1].sum())
        change = x + 0.25 * np.sign(slope(net, x)) - X
        length = np.sqrt((change**2).sum(1, keepdims=True))
        change = np.clip(change, -0.6, 0.6) if norm == "linf" else change * np.minimum(1, 0.6 / length)
        x = np.clip(X + change, -1.2, 1.2)
    np.testing.assert_allclose(result["x.result"], x, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(result["y"], value(net, x), rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(result["s.history"], history, rtol=1e-4, atol=1e-5)


def test_optimizers_are_those_of_training(net: Any) -> None:
    """Fitting a weight equals a step folder's training on the same batch."""
    target = RNG.normal(size=(5, 3)).astype(np.float32)
    for optimizer in (gg.optim.adamw(gg.optim.cosine(0.1, 10)), gg.optim.sgd(0.1, momentum=0.9), gg.optim.rprop(0.01)):
        model = gg.iterate(net, 5, wrt=["one.weight", "two.bias"], output="y", loss="mse", update=optimizer)
        found = run(model, {"x": X, "target": target})
        step = gg.build(net, loss="mse", output="y", optimizer=optimizer, train=["one.weight", "two.bias"])
        trainer = gg.Trainer(step, device="cpu")
        losses = [float(trainer.step({"x": X, "target": target})["loss"]) for _ in range(5)]
        np.testing.assert_allclose(found["loss.history"], losses, rtol=1e-5)
        state = trainer.state_dict()
        np.testing.assert_allclose(found["one.weight.result"], state["one.weight"], rtol=1e-4, atol=1e-6)


def test_other_outputs_keep_their_names() -> None:
    model = export(lambda x, z: {"s": (x * x).sum(), "w": z * z}, {"x": ("batch", 4), "z": ("batch", 4)})
    found = run(gg.iterate(model, 2, wrt="x", output="s", update="sgd"), {"x": X, "z": X})
    assert list(found) == ["s", "w", "x.result", "s.history"]


def test_a_random_start_is_in_the_ball(net: Any) -> None:
    for norm, order in (("linf", np.inf), ("l2", 2)):
        start = gg.iterate(net, 1, wrt="x", output="s", norm=norm, radius=0.5, random_start=True, seed=2,
                           update=lambda x, g: x)  # fmt: skip
        lengths = np.linalg.norm(run(start, {"x": X})["x.result"] - X, order, axis=1)
        assert (lengths <= 0.5001).all() and lengths.min() > 0.05 and lengths.std() > 0.005


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"norm": "l2"}, "pass both"),
        ({"radius": 0.1}, "pass both"),
        ({"random_start": True}, "needs a radius"),
        ({"seed": 4}, "seed selects the random start"),
        ({"update": "nadamax"}, "there is no optimizer 'nadamax'"),
        ({"update": gg.optim.ema(gg.optim.adam(0.1))}, "does not support"),
        ({"update": gg.optim.lbfgs()}, "needs tensors of fixed sizes"),
        ({"update": lambda x: x}, "it is called with two tensors"),
        ({"update": lambda x, g: 3}, "update returned 3"),
        ({"update": lambda x, g: g.sum()}, "return the shape of x"),
        ({"output": "y"}, "a gradient needs a scalar"),
        ({"bounds": (np.zeros(3), None)}, "the lower bound of 'x' has shape"),
        ({"bounds": 3}, "bounds is 3"),
        ({"bounds": (np.zeros(4), [1, 1, 1, -1])}, "a lowest and a highest value in this order"),
        ({"norm": "l1", "radius": 1.0}, "norm is 'l1'"),
        ({"wrt": "one/Gemm"}, "no input or initializer matches"),
    ],
)
def test_errors_of_iterate(net: Any, options: dict[str, Any], words: str) -> None:
    with pytest.raises(GradgraphError, match=words):
        gg.iterate(net, 2, **{"wrt": "x", "output": "s", "update": "adam", **options})


# --- solve ---------------------------------------------------------------------------------------------------------


class Curve(Module):
    """y = a·exp(-b·t) + c at ten places, of which the parameters a, b, c are the input."""

    def forward(self, p: Any) -> Any:
        t = np.linspace(0, 3, 10).reshape(1, 10)
        return p[:, 0:1] * F.exp(-p[:, 1:2] * t) + p[:, 2:3]


def curve(p: np.ndarray) -> np.ndarray:
    return p[0] * np.exp(-p[1] * np.linspace(0, 3, 10)) + p[2]


TRUE = np.array([[2.0, 1.3, 0.5], [1.0, 0.4, -0.2], [3.0, 2.0, 1.0]])
NOISY = (np.stack([curve(p) for p in TRUE]) + 0.05 * RNG.normal(size=(3, 10))).astype(np.float64)
BOUNDS = (np.array([0.0, 0.0, -0.1]), np.array([2.5, np.inf, 0.6]))


@pytest.mark.parametrize("bounds", [None, BOUNDS], ids=["free", "bounded"])
@pytest.mark.parametrize("per_sample", [True, False])
def test_solutions_beside_scipy(bounds: Any, per_sample: bool) -> None:
    optimize = pytest.importorskip("scipy.optimize", reason="compares with SciPy")
    model = export(Curve(), {"p": gg.frontend.Input(("batch", 3), "float64")}, "y")
    start = np.full((3, 3), 0.5)
    result = run(gg.solve(model, 40, wrt="p", bounds=bounds, per_sample=per_sample), {"p": start, "y.target": NOISY})
    limits = (-np.inf, np.inf) if bounds is None else bounds
    for i in range(3):
        expected = optimize.least_squares(
            lambda p, i=i: curve(p) - NOISY[i], start[i], bounds=limits, xtol=1e-12, ftol=1e-12
        )
        np.testing.assert_allclose(result["p.result"][i], expected.x, rtol=2e-4, atol=2e-4)
        error = 0.5 * ((result["y"][i] - NOISY[i]) ** 2).sum()
        np.testing.assert_allclose(error, expected.cost, rtol=1e-4)
    history = result["y.history"]
    assert history.shape == ((40, 3) if per_sample else (40,))
    assert (np.diff(history, axis=0) <= 0).all()


def test_a_bound_at_distance_1_is_like_any_other() -> None:
    solver = gg.solve(export(F.exp, {"x": (1,)}, "y"), 4, target=2.0, bounds=(None, 1.0))
    one, near = (run(solver, {"x": np.array([x], np.float32)})["y.history"] for x in (0.0, 1e-4))
    np.testing.assert_allclose(one, near, rtol=0.02, atol=1e-6)


def test_gauss_newton_on_a_linear_problem_takes_one_step() -> None:
    a, b = RNG.normal(size=(6, 4)).astype(np.float32), RNG.normal(size=6).astype(np.float32)
    linear = onnx.parser.parse_model('<ir_version: 10, opset_import: ["" : 21]> g (float[4] x) => (float[6] y) {'
                                     "y = MatMul(a, x) }")  # fmt: skip
    linear.graph.initializer.append(onnx.numpy_helper.from_array(a, "a"))
    result = run(gg.solve(linear, 1, wrt="x", method="gauss-newton", target=b), {"x": np.zeros(4, np.float32)})
    np.testing.assert_allclose(result["x.result"], np.linalg.lstsq(a, b, rcond=None)[0], rtol=1e-3, atol=1e-4)


def test_weights_can_be_calibrated(net: Any) -> None:
    goal = value(net, X) + 1.5
    model = gg.solve(net, 3, wrt="two.bias", output="y", unroll=True)
    result = run(model, {"x": X, "y.target": goal.astype(np.float32)})
    np.testing.assert_allclose(result["two.bias.result"], weights(net)["two.bias"] + 1.5, rtol=1e-4)
    np.testing.assert_allclose(result["y"], goal, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"method": "newton"}, ArgumentError, "method is 'newton'"),
        ({"target": np.zeros(2)}, BuildError, r"the target of 'y' has shape \[2\]"),
        ({"bounds": (np.zeros(3), None)}, BuildError, "the lower bound of 'x' has shape"),
        ({"damping": 0}, ArgumentError, "damping"),
        ({"wrt": "two.bias", "per_sample": True}, BuildError, "'two.bias' has no row for each sample"),
        ({"output": "s", "per_sample": True}, GradgraphError, "does not have one row per sample; use per_sample=False"),
        ({"wrt": "one.weight", "output": "x"}, GradgraphError, "x"),
    ],
)
def test_errors_of_solve(net: Any, options: dict[str, Any], error: Any, words: str) -> None:
    with pytest.raises(error, match=words):
        gg.solve(net, **{"wrt": "x", **options})

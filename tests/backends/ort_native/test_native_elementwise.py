"""The kernel that runs programs: every instruction at awkward points, every way to broadcast, and what it refuses."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import numpy as np
import onnxruntime as ort
import pytest

from tests.kit.native_node import opened, run

pytestmark = pytest.mark.usefixtures("library")

Function = Callable[..., np.ndarray]
LEAST, LARGEST = 1.4e-45, float(np.finfo(np.float32).max)
POINTS = np.array(
    [0.0, -0.0, 1.0, -1.0, 0.5, -2.5, 3.7, 1e-40, -LEAST, 1e-30, -1e30, LARGEST, -LARGEST, np.inf, -np.inf, np.nan],
    np.float32,
)


def program(text: str, *inputs: np.ndarray, outputs: tuple[int, ...] = (), threads: int = 2) -> list[np.ndarray]:
    """What the lines ``outputs`` give, counted from the first line; the last one by default."""
    lines = outputs or (text.count(";"),)
    attributes = f'program = "{text}", arity = {len(inputs)}, outputs = {[len(inputs) + i for i in lines]}'
    return run("Elementwise", attributes, len(lines), *inputs, threads=threads)


def truth(function: Function) -> Function:
    return lambda *x: function(*x).astype(np.float32)


# --- bit for bit -----------------------------------------------------------------------------------------------

EXACT: dict[str, tuple[int, Function]] = {
    "Identity": (1, lambda x: x),
    "Neg": (1, np.negative),
    "Abs": (1, np.abs),
    "Sign": (1, np.sign),
    "Floor": (1, np.floor),
    "Ceil": (1, np.ceil),
    "Round": (1, np.rint),
    "Sqrt": (1, np.sqrt),
    "Reciprocal": (1, lambda x: np.float32(1.0) / x),
    "Relu": (1, lambda x: np.maximum(x, np.float32(0.0))),
    "Add": (2, np.add),
    "Sub": (2, np.subtract),
    "Mul": (2, np.multiply),
    "Div": (2, np.divide),
    "Max": (2, np.maximum),
    "Min": (2, np.minimum),
    "Greater": (2, truth(np.greater)),
    "GreaterOrEqual": (2, truth(np.greater_equal)),
    "Less": (2, truth(np.less)),
    "LessOrEqual": (2, truth(np.less_equal)),
    "Equal": (2, truth(np.equal)),
    "NotEqual": (2, truth(np.not_equal)),
    "LeakyRelu": (2, lambda x, y: np.where(x < 0, y * x, x)),
    "ReluGrad": (2, lambda x, y: np.where(y > 0, x, np.float32(0.0))),
    "ClipGrad": (3, lambda x, y, z: np.where(y == z, x, np.float32(0.0))),
    "Where": (3, lambda c, y, z: np.where(c == 0, z, y)),
}
TRUTHS: dict[str, tuple[int, Function]] = {
    "Not": (1, lambda a: 1 - a),
    "And": (2, lambda a, b: a * b),
    "Or": (2, np.maximum),
}


@pytest.mark.sweep(0.5)
@pytest.mark.parametrize("name", EXACT)
def test_what_is_exact(name: str) -> None:
    """All pairs (and triples) of points, the operands as tensors and, one after the other, as numbers."""
    arity, function = EXACT[name]
    columns = [np.array(column, np.float32) for column in zip(*itertools.product(POINTS, repeat=arity), strict=True)]
    with np.errstate(all="ignore"):
        same(program(f"{name} {' '.join(map(str, range(arity)))}", *columns)[0], function(*columns))
        for i, number in itertools.product(range(arity) if arity > 1 else (), POINTS):
            others = [x for k, x in enumerate(columns) if k != i]
            operands = [*map(str, range(arity - 1))]
            operands.insert(i, f"#{number:.9g}")
            filled = [np.full_like(x, number) if k == i else x for k, x in enumerate(columns)]
            same(program(f"{name} {' '.join(operands)}", *others)[0], function(*filled))


def same(found: np.ndarray, wanted: np.ndarray) -> None:
    """NaN for NaN; zeros of both signs are one, as in what is compared."""
    assert found.dtype == wanted.dtype == np.float32
    np.testing.assert_array_equal(found, wanted)


@pytest.mark.parametrize("name", ["Neg", "Abs", "Sqrt", "Reciprocal", "Add", "Sub", "Mul", "Div"])
def test_zeros_keep_their_signs(name: str) -> None:
    arity, function = EXACT[name]
    columns = [np.array(column, np.float32) for column in zip(*itertools.product(POINTS, repeat=arity), strict=True)]
    (found,) = program(f"{name} {' '.join(map(str, range(arity)))}", *columns)
    with np.errstate(all="ignore"):
        wanted = function(*columns)
    known = ~np.isnan(wanted)
    np.testing.assert_array_equal(found[known].view(np.int32), wanted[known].view(np.int32))


@pytest.mark.parametrize("name", TRUTHS)
def test_truth_values(name: str) -> None:
    arity, function = TRUTHS[name]
    columns = [np.array(x, np.float32) for x in zip(*itertools.product((0, 1), repeat=arity), strict=True)]
    same(program(f"{name} {' '.join(map(str, range(arity)))}", *columns)[0], function(*columns))


# --- within units of the last place ----------------------------------------------------------------------------

ERF = np.vectorize(math.erf, otypes=[np.float64])


def sigmoid(x: np.ndarray) -> np.ndarray:
    return np.where(x < 0, np.exp(np.minimum(x, 0)), 1.0) / (1 + np.exp(-np.abs(x)))


def cdf(x: np.ndarray) -> np.ndarray:
    return (1 + ERF(x / np.sqrt(2))) / 2


def gelu_slope(x: np.ndarray) -> np.ndarray:
    return cdf(x) + x * np.exp(-x * x / 2) / np.sqrt(2 * np.pi)


def tanh_gelu_slope(x: np.ndarray) -> np.ndarray:
    k, c = np.sqrt(8 / np.pi), 0.044715
    s = sigmoid(k * (x + c * x**3))
    return s + x * s * (1 - s) * k * (1 + 3 * c * x * x)


NEAR: dict[str, tuple[str, Function, float]] = {  # a program of x, what it gives, and units of the last place
    "Exp": ("Exp 0", np.exp, 2),
    "Log": ("Log 0", np.log, 2),
    "Erf": ("Erf 0", ERF, 3),
    "Tanh": ("Tanh 0", np.tanh, 3),
    "Sigmoid": ("Sigmoid 0", sigmoid, 3),
    "Softplus": ("Softplus 0", lambda x: np.maximum(x, 0) + np.log1p(np.exp(-np.abs(x))), 3),
    "Elu": ("Elu 0 #1.5", lambda x: np.where(x > 0, x, 1.5 * np.expm1(np.minimum(x, 0))), 3),
    "HardSigmoid": ("HardSigmoid 0 #0.25 #0.5", lambda x: np.clip(0.25 * x + 0.5, 0, 1), 1),
    "Pow": ("Abs 0; Pow 1 #2.5", lambda x: np.abs(x) ** 2.5, 1),
}


def sample() -> np.ndarray:
    """All sizes of numbers, and more of those where functions bend."""
    rng = np.random.default_rng(0)
    bits = rng.integers(0, 2**32, 200_000, dtype=np.uint32).view(np.float32)
    near = np.concatenate([np.linspace(-110, 110, 100_003), rng.normal(size=50_000)])
    return np.concatenate([POINTS, bits, near.astype(np.float32)])


@pytest.mark.parametrize("name", NEAR)
def test_what_is_rounded(name: str) -> None:
    text, function, units = NEAR[name]
    x = sample()
    (found,) = program(text, x)
    with np.errstate(all="ignore"):
        wanted = function(x.astype(np.float64))
        rounded = wanted.astype(np.float32)
    np.testing.assert_array_equal(np.isnan(found), np.isnan(rounded))
    finite = np.isfinite(rounded) & np.isfinite(found)
    np.testing.assert_array_equal(found[~finite], rounded[~finite])
    error = np.abs(found[finite] - wanted[finite]) / np.spacing(np.minimum(np.abs(rounded[finite]), np.float32(1e38)))
    worst = int(error.argmax())
    assert error[worst] <= units, (x[finite][worst], found[finite][worst], wanted[finite][worst], error[worst])


@pytest.mark.parametrize(
    ("text", "slope"),
    [
        ("Mul 1 #0.707106769; Erf 2; HardSigmoid 3 #0.5 #0.5; GeluGrad 0 1 4", gelu_slope),
        ("TanhGeluGrad 0 1", tanh_gelu_slope),
    ],
    ids=["erf", "tanh"],
)
def test_slopes_of_gelu_are_as_exact_as_float32_is(text: str, slope: Function) -> None:
    x = np.concatenate([np.linspace(-14, 14, 100_001), [0.0, -0.0, 1e-30, 1e30, -1e30]]).astype(np.float32)
    (found,) = program(text, np.ones_like(x), x)
    error = np.abs(found - slope(np.clip(x.astype(np.float64), -40, 40)))
    assert error.max() < 4e-7, x[error.argmax()]
    assert np.isnan(program(text, np.ones(1, np.float32), np.full(1, np.nan, np.float32))[0]).all()


def test_the_slope_of_silu() -> None:
    rng = np.random.default_rng(0)
    dy, y, gate = rng.normal(size=(3, 999)).astype(np.float32)
    np.testing.assert_allclose(program("SiluGrad 0 1 2", dy, y, gate)[0], dy * (y * (1 - gate) + gate), 1e-5, 1e-6)


def test_a_cotangent_that_is_not_finite_stays_out_where_relu_is_flat() -> None:
    dy, y = np.array([np.inf, np.nan, 2.0], np.float32), np.array([0.0, -0.0, 1e-40], np.float32)
    assert program("ReluGrad 0 1", dy, y)[0].tolist() == [0.0, 0.0, 2.0]


# --- shapes ----------------------------------------------------------------------------------------------------

SHAPES = [
    ((5, 7), (5, 7)),
    ((5, 7), ()),
    ((5, 7), (1, 1, 1)),
    ((5, 7), (7,)),
    ((5, 7), (5, 1)),
    ((5, 1), (1, 7)),
    ((2, 3, 5, 7), (3, 1, 1)),
    ((2, 3, 5, 7), (2, 1, 5, 1)),
    ((2, 3, 5, 7), (1, 3, 1, 7)),
    ((2, 1, 5, 1), (1, 3, 1, 7)),
    ((3, 1, 4000), (1, 2, 4000)),
    ((2, 6, 1, 33, 16), (6, 1, 1, 16)),
    ((2, 1, 2, 1, 2, 1, 2, 5), (1, 2, 1, 2, 1, 2, 1, 5)),
    ((), ()),
    ((1,), (1, 1)),
    ((0, 3), (3,)),
    ((0, 3), (1, 1)),
    ((1, 3), (0, 1)),
    ((1024,), (1024,)),
    ((16_385,), ()),
    ((100, 1003), (1003,)),
    ((100_003,), (100_003,)),
]


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("shapes", SHAPES, ids=str)
def test_broadcasting(shapes: tuple[tuple[int, ...], ...], threads: int) -> None:
    rng = np.random.default_rng(0)
    a, b = (rng.normal(size=shape).astype(np.float32) for shape in shapes)
    for x, y in ((a, b), (b, a)):
        difference, product = program("Sub 0 1; Mul 2 #3; Mul 3 1", x, y, outputs=(0, 2), threads=threads)
        same(difference, x - y)
        same(product, (x - y) * np.float32(3) * y)


def test_pieces_of_work_are_cut_by_size_alone() -> None:
    """The same bits on one thread and on two."""
    x = np.random.default_rng(0).normal(size=300_007).astype(np.float32)
    text = "Exp 0; Tanh 0; Mul 1 2; Erf 3; Sigmoid 3; Sub 4 5"
    same(program(text, x, threads=1)[0], program(text, x, threads=2)[0])


def test_many_values_at_once() -> None:
    """More than fit into large tiles: each is read again at the end."""
    x = np.random.default_rng(0).normal(size=5_001).astype(np.float32)
    lines = [f"Mul 0 #{i}" for i in range(1, 41)] + ["Add 1 2"] + [f"Add {39 + i} {i}" for i in range(2, 41)]
    wanted = x + x * np.float32(2)
    for i in range(2, 41):
        wanted = wanted + x * np.float32(i)
    same(program("; ".join(lines), x)[0], wanted)


def test_an_output_may_lie_where_an_input_does() -> None:
    """Also if that is read after the output is written, as an optimizer's state may be."""
    p, g = np.random.default_rng(0).normal(size=(2, 40_000)).astype(np.float32)
    text = 'program = "Add 0 1; Mul 2 0; Sub 3 1", arity = 2, outputs = [2, 4]'
    session = opened("Elementwise", text, 2, p, g)
    binding, state = session.io_binding(), [ort.OrtValue.ortvalue_from_numpy(x.copy()) for x in (p, g)]
    for i, value in enumerate(state):
        binding.bind_ortvalue_input(f"x{i}", value)
        binding.bind_ortvalue_output(f"y{i}", value)
    session.run_with_iobinding(binding)
    same(state[0].numpy(), p + g)
    same(state[1].numpy(), (p + g) * p - g)


# --- what it refuses -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("attributes", "says"),
    [
        ('program = "Mul 0 1; Foo 2", arity = 2, outputs = [2]', "there is no instruction 'Foo'"),
        ('program = "", arity = 2, outputs = [2]', "output 2 is not what a line"),
        ('program = ";", arity = 2, outputs = [2]', "there is no instruction ''"),
        ('program = "Mul 0", arity = 2, outputs = [2]', "'Mul 0' should have 2 operands"),
        ('program = "Mul 0 1 1", arity = 2, outputs = [2]', "should have 2 operands"),
        ('program = "Mul 0 2", arity = 2, outputs = [2]', "'2' is neither an input nor what a line before gives"),
        ('program = "Mul 0 -1", arity = 2, outputs = [2]', "'-1' is neither"),
        ('program = "Mul 0 99999999999999999999", arity = 2, outputs = [2]', "is neither"),
        ('program = "Mul 0 #1x", arity = 2, outputs = [2]', "'#1x' is no number"),
        ('program = "Mul 0 #", arity = 2, outputs = [2]', "'#' is no number"),
        ('program = "Mul 0 1", arity = 0, outputs = [2]', "it should have an input"),
        ('program = "Mul 0 1", arity = -3, outputs = [2]', "it should have an input"),
        ('program = "Mul 0 1", arity = 2, outputs = [1]', "output 1 is not what a line"),
        ('program = "Mul 0 1", arity = 2, outputs = [-1]', "output -1 is not what a line"),
        ('program = "Mul 0 1", arity = 2, outputs = [3]', "output 3 is not what a line"),
        ('program = "Mul 0 1; Neg 2", arity = 2, outputs = [2, 2]', "output 2 is named twice"),
        ('program = "Mul 0 1", arity = 3, outputs = [3]', "'.*3 inputs and 1 outputs|3 inputs and 1 outputs"),
        ('program = "Mul 0 1; Neg 2", arity = 2, outputs = [2, 3]', "2 inputs and 2 outputs"),
        ('arity = 2, outputs = [2]', "program"),
    ],
)  # fmt: skip
def test_programs_that_do_not_fit_are_refused(attributes: str, says: str) -> None:
    x = np.ones(3, np.float32)
    with pytest.raises(Exception, match=says):
        run("Elementwise", attributes, 1, x, x)


def test_shapes_that_do_not_broadcast_are_refused() -> None:
    with pytest.raises(Exception, match="Elementwise: the shapes of its inputs do not broadcast"):
        program("Add 0 1", np.ones((2, 3), np.float32), np.ones((3, 2), np.float32))

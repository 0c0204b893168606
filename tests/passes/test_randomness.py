"""The generator behind masks and draws: the usual statistical tests, exactness in float32, and known answers."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import numpy_helper

from gradgraph.graph.builder import Builder
from gradgraph.passes.randomness import COLUMNS, PIECE, RandomSource, initial_state, tables
from tests.kit.running import session

COUNT = 1 << 19
FARTHEST = 4.5  # standard deviations: of 500 statistics one is beyond by chance in 300 such collections
Numbers = np.ndarray


@functools.cache
def graph(place: int, digits: int = PIECE) -> onnx.ModelProto:
    """The ``count`` numbers of one place, from the state."""
    op = Builder()
    inputs = [
        ir.Value(name="rng", type=ir.TensorType(ir.DataType.INT64), shape=ir.Shape([3])),
        ir.Value(name="count", type=ir.TensorType(ir.DataType.INT64), shape=ir.Shape([1])),
    ]
    source = RandomSource(op.wrap(inputs[0]))
    source.places = place - 1
    drawn = source.uniform(op, op.wrap(inputs[1]), digits=digits)
    made = ir.Graph(inputs, [drawn.value], nodes=(), opset_imports={"": 21})
    op.finish(made)
    return ir.to_proto(ir.Model(made, ir_version=10))


@functools.cache
def opened(place: int, digits: int) -> Callable[..., list[Numbers]]:
    return session(graph(place, digits)).run


@functools.cache
def drawn(seed: int, step: int, place: int, count: int = COUNT, digits: int = PIECE) -> Numbers:
    state = initial_state(seed) + np.array([0, 0, step])
    return opened(place, digits)(None, {"rng": state, "count": np.array([count])})[0]


# --- statistics: each in standard deviations from what independent uniform numbers give -----------------------


def counts_of(cells: np.ndarray, kinds: int) -> float:
    """χ² of how often each kind occurs."""
    expected = cells.size / kinds
    chi2 = ((np.bincount(cells.ravel(), minlength=kinds) - expected) ** 2).sum() / expected
    return float((chi2 - (kinds - 1)) / np.sqrt(2 * (kinds - 1)))


def uniformity(u: Numbers, kinds: int) -> float:
    return counts_of((u * kinds).astype(np.int64), kinds)


def correlation(u: Numbers, v: Numbers) -> float:
    return float(((u - 0.5) * (v - 0.5)).mean() * 12 * np.sqrt(u.size))


def in_pairs(u: Numbers, v: Numbers, kinds: int = 64) -> float:
    """χ² of pairs in cells of a square."""
    return counts_of((u * kinds).astype(np.int64) * kinds + (v * kinds).astype(np.int64), kinds * kinds)


def flips(u: Numbers, v: Numbers) -> float:
    """How far from a half the share of numbers is, at worst, in which one of the upper bits differs."""
    differ = (u * 2.0**PIECE).astype(np.int64) ^ (v * 2.0**PIECE).astype(np.int64)
    shares = np.array([(differ >> bit & 1).mean() for bit in range(PIECE)])
    return float(np.abs(shares - 0.5).max() * 2 * np.sqrt(u.size))


def runs(u: Numbers) -> float:
    """How many times it crosses the middle."""
    crossed = (u[1:] < 0.5) != (u[:-1] < 0.5)
    return float((crossed.mean() - 0.5) * 2 * np.sqrt(crossed.size))


def spectrum(u: Numbers) -> float:
    """The largest of all frequencies, whose power is exponential: by how much it exceeds what the largest should be."""
    power = np.abs(np.fft.rfft(u - 0.5)[1:-1]) ** 2 / u.size * 12
    return float((power.max() - np.log(power.size)) / 3)  # beyond 4.5 with a probability of 1e-6


def four_corners(u: Numbers) -> float:
    """The product of signs at the corners of rectangles, which a sum of rows and columns would betray."""
    signs = np.where(u < 0.5, -1.0, 1.0).reshape(-1, COLUMNS)
    rows = signs[:-1] * signs[1:]
    products = rows[:, :-1] * rows[:, 1:]
    return float(products.mean() * np.sqrt(products.size))


def worst(u: Numbers) -> float:
    """The farthest of all statistics of one sequence."""
    lags = (1, 2, 3, 16, COLUMNS - 1, COLUMNS, COLUMNS + 1, 2 * COLUMNS, 1 << 16)
    found = [uniformity(u, kinds) for kinds in (2, 10, 256, 1 << PIECE)]
    found += [correlation(u[:-lag], u[lag:]) for lag in lags]
    found += [in_pairs(u[:-lag], u[lag:]) for lag in lags]
    found += [runs(u), runs(u.reshape(-1, COLUMNS).T.ravel()), spectrum(u), four_corners(u)]
    return max(map(abs, found))


# --- tests ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("seed", "step", "place"), [(0, 0, 1), (1, 0, 1), (0, 1, 1), (0, 0, 2), (2**31 - 1, 10**9, 99)]
)
def test_numbers_of_a_place_are_uniform_and_independent(seed: int, step: int, place: int) -> None:
    assert worst(drawn(seed, step, place)) < FARTHEST


NEIGHBOURS = {
    **{f"seed, bit {bit}": (7 ^ 1 << bit, 3, 1) for bit in range(0, 31, 3)},
    **{f"step, bit {bit}": (7, 3 ^ 1 << bit, 1) for bit in range(0, 32, 3)},
    **{f"place {place}": (7, 3, place) for place in (2, 3, 9, 257)},
    "seed and step exchanged": (3, 7, 1),
    "seed and place exchanged": (1, 3, 7),
}


@pytest.mark.parametrize("name", NEIGHBOURS)
def test_seeds_steps_and_places_are_independent(name: str) -> None:
    """One bit of the key flips half of the bits of all numbers."""
    u, v = drawn(7, 3, 1), drawn(*NEIGHBOURS[name])
    assert max(map(abs, (correlation(u, v), in_pairs(u, v), flips(u, v)))) < FARTHEST
    assert abs(correlation(u[:-1], v[1:])) < FARTHEST


@pytest.mark.parametrize("bit", range(19))
def test_one_bit_of_the_index_flips_half_of_the_bits(bit: int) -> None:
    u = drawn(11, 5, 1)
    assert flips(u, u[np.arange(COUNT) ^ 1 << bit]) < FARTHEST


def test_steps_of_one_number_are_random() -> None:
    """Of one place in the mask over thousands of steps, as an element that is dropped too often would tell."""
    u = np.stack([drawn(0, step, 1, 2 * COLUMNS) for step in range(2048)])
    assert uniformity(u, 256) < FARTHEST
    assert max(abs(correlation(u[:-lag], u[lag:])) for lag in (1, 2, 256)) < FARTHEST
    shares = ((u < 0.25).mean(0) - 0.25) * np.sqrt(2048 / (0.25 * 0.75))
    assert np.abs(shares).max() < FARTHEST
    assert 0.75 < shares.var() < 1.25


@pytest.mark.parametrize("weak", ["no rounding", "one row"])
def test_the_statistics_catch_weak_generators(weak: str) -> None:
    index = np.arange(COUNT)
    if weak == "no rounding":  # the index through one linear round
        row = index // COLUMNS * tables()["number"][0, :1] % 1 * 32
        u = (np.floor(row) * tables()["columns"][-1][index % COLUMNS]) % 1
    else:
        u = np.tile(drawn(0, 0, 1, COLUMNS), COUNT // COLUMNS)
    assert worst(u) > 2 * FARTHEST


def test_float32_loses_nothing() -> None:
    """The same graph in float64 gives the same numbers, and no whole number on the way reaches 2²⁴."""
    wide = onnx.ModelProto()
    wide.CopyFrom(graph(1))
    for tensor in wide.graph.initializer:
        if tensor.data_type == onnx.TensorProto.FLOAT:
            tensor.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(tensor).astype(np.float64), tensor.name))
    for node in wide.graph.node:
        for attribute in node.attribute:
            if node.op_type == "Cast" and attribute.i == onnx.TensorProto.FLOAT:
                attribute.i = onnx.TensorProto.DOUBLE
    wide.graph.output[0].type.tensor_type.elem_type = onnx.TensorProto.DOUBLE
    del wide.graph.value_info[:]
    feeds = {"rng": initial_state(2**31 - 1) + np.array([0, 0, 2**32 - 1]), "count": np.array([1 << 16])}
    exact = session(wide).run(None, feeds)[0]
    np.testing.assert_array_equal(session(graph(1)).run(None, feeds)[0], exact)
    for name, table in tables().items():
        whole, largest = table * 2.0 ** (16 if name == "columns" else 11), 31 if name == "columns" else 255
        np.testing.assert_array_equal(whole, np.round(whole))
        assert largest * whole.sum(0).max() < 2**24
        significant = whole / np.where(whole == 0, 1, 2.0 ** np.floor(np.log2(np.maximum(whole, 1))))
        np.testing.assert_array_equal(significant * 2.0**10, np.round(significant * 2.0**10))  # exact in TensorFloat-32


def in_numpy(seed: int, step: int, place: int, count: int) -> Numbers:
    """The same numbers, for those who write the generator again elsewhere."""

    def rounded(x: np.ndarray, kinds: int) -> np.ndarray:
        return np.floor(x % 1 * kinds)

    def absorbed(key: np.ndarray, numbers: np.ndarray) -> np.ndarray:
        parts = rounded(numbers.reshape(-1, 1) / 2.0 ** np.array([8, 16, 24]), 256)
        return rounded(parts @ table["number"] + key @ table["key"], 256)

    table = {name: numbers.astype(np.float64) for name, numbers in tables().items()}
    words = np.array([seed % 65536, seed // 65536, step % 65536, 0, 0, step // 65536])
    parts = rounded(words.reshape(-1, 1) / 2.0 ** np.array([8, 16]), 256).reshape(1, 12)
    key = absorbed(rounded(parts @ table["state"], 256), np.array([place]))
    lanes = rounded(absorbed(key, np.arange(-(-count // COLUMNS))) @ table["mix"], 32)
    return np.floor((lanes @ table["columns"]).ravel()[:count] % 1 * 2**PIECE) / 2**PIECE


def test_another_implementation_agrees() -> None:
    state = (2**31 - 5, 2**20 + 77, 300)
    np.testing.assert_array_equal(drawn(*state, 5000), in_numpy(*state, 5000))


KNOWN = [0.419677734375, 0.843994140625, 0.63427734375, 0.133544921875]
DIGEST = "b5ca1d687be5d123"


def test_known_answers() -> None:
    """Masks are part of what a run is: a new version draws the same ones."""
    assert drawn(1, 2, 3, 4).tolist() == KNOWN
    digest = hashlib.sha256(drawn(5, 6, 7, 1000, 24).tobytes()).hexdigest()
    assert digest[:16] == DIGEST

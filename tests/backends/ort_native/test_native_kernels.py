"""Kernels by themselves: blocks of channels against the plain layout."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import gradgraph as gg
from gradgraph.backends.engine import for_machine
from gradgraph.backends.ort_native import ORT_NATIVE
from gradgraph.backends.ort_native import library as native
from gradgraph.machine.hardware import nchwc_block
from tests.kit.few_values import CASES, MOST, errors
from tests.kit.lowered_networks import step
from tests.kit.native_node import run

pytestmark = pytest.mark.usefixtures("library")


def blocked(x: np.ndarray, block: int, back: bool = False) -> np.ndarray:
    """[N, C, H, W] with the numbers in the order of [N, C/b, H, W, b], or back."""
    n, c, *size = x.shape
    if back:
        return np.moveaxis(x.reshape(n, c // block, *size, block), -1, 2).reshape(x.shape)
    return np.ascontiguousarray(np.moveaxis(x.reshape(n, c // block, block, *size), 2, -1)).reshape(x.shape)


FREE = "lower = -3e38, upper = 3e38, activation = 0"
NORM = f"{FREE}, epsilon = 0.001, block ="
POOL = "kernel = [3, 2], strides = [2, 1], dilations = [1, 2], begins = [1, 0], block ="


@pytest.mark.parametrize("block", [8, 16])
@pytest.mark.parametrize(
    ("op_type", "attributes", "maps"),
    [
        ("BatchNormalization", NORM, ((3, 32, 20, 19),)),
        ("BatchNormalizationGrad", NORM, ((3, 32, 20, 19),) * 2),
        ("UnscaledBatchNormalizationGrad", NORM, ((3, 32, 20, 19),) * 2),
        ("MaxPoolGrad", POOL, ((2, 32, 4, 6), (2, 32, 7, 8))),
    ],
)
def test_blocks(op_type: str, attributes: str, maps: tuple[tuple[int, ...], ...], block: int) -> None:
    rng = np.random.default_rng(0)
    inputs = [rng.normal(size=shape).astype(np.float32) for shape in maps]
    if op_type == "MaxPoolGrad":
        inputs[1] = np.round(inputs[1])  # with ties
        others, outputs = [], 1
    else:
        others = [rng.uniform(0.5, 1.5, 32).astype(np.float32) for _ in range(2 if len(maps) == 1 else 3)]
        outputs = 4 if op_type.startswith("Un") else 3
    plain = run(op_type, f"{attributes} 1", outputs, *inputs, *others)
    found = run(op_type, f"{attributes} {block}", outputs, *(blocked(x, block) for x in inputs), *others)
    found[0] = blocked(found[0], block, back=True)
    for a, b in zip(plain, found, strict=True):
        np.testing.assert_allclose(b, a, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("block", [8, 16])
@pytest.mark.parametrize("size", [(6, 7), (20, 19)], ids=str)
def test_weight_gradients_of_blocks(size: tuple[int, int], block: int) -> None:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(5, 48, *size)).astype(np.float32)
    dy = rng.normal(size=(5, 32, size[0], size[1] // 2)).astype(np.float32)
    windows = "kernel = [3, 2], strides = [1, 2], dilations = [1, 1], begins = [2, 0], ends = [0, 0], block ="
    (plain,) = run("ConvGradWeight", f"{windows} 1", 1, x, dy)
    (found,) = run("ConvGradWeight", f"{windows} {block}", 1, blocked(x, block), blocked(dy, block))
    np.testing.assert_allclose(found, plain, rtol=1e-5, atol=1e-4)
    with pytest.raises(Exception, match="ConvGradWeight: its channels are no whole number of blocks"):
        run("ConvGradWeight", f"{windows} {block}", 1, x[:, :9], dy)


@pytest.mark.parametrize("shape", [(4, 16, 30, 30), (131, 16, 4, 5), (131, 16, 3, 3), (600, 48, 1, 2)], ids=str)
def test_statistics_keep_their_digits_far_from_zero(shape: tuple[int, ...]) -> None:
    """The variance is that of what is left without the mean; also where images of few pixels are added up together."""
    x = (1000 + np.random.default_rng(0).normal(size=shape)).astype(np.float32)
    ones = np.ones(shape[1], np.float32)
    for block in (1, 16):
        fed = blocked(x, block) if block > 1 else x
        _, mean, var = run("BatchNormalization", f"{NORM} {block}", 3, fed, ones, ones)
        exact = x.astype(np.float64)
        np.testing.assert_allclose(mean, exact.mean((0, 2, 3)), rtol=1e-7)
        np.testing.assert_allclose(var, exact.var((0, 2, 3)), rtol=1e-6)


@pytest.mark.parametrize(("block", "plane"), [(1, (5, 7)), (1, (3, 3)), (16, (5, 7))], ids=str)
@pytest.mark.parametrize("bounds", [(-0.5, 1.0), (0.0, None)], ids=["clip", "relu"])
def test_a_norm_with_an_activation_gives_the_same_bits(
    bounds: tuple[float, float | None], block: int, plane: tuple[int, int]
) -> None:
    """Also on the bounds, where the cotangent passes through a Clip and not through a Relu."""
    rng = np.random.default_rng(0)
    x, dy = rng.normal(size=(2, 3, 32, *plane)).astype(np.float32)
    scale, bias = rng.uniform(0.5, 1.5, (2, 32)).astype(np.float32)
    lower, upper = bounds[0], bounds[1] or 3e38
    x[:, 3] = x[:, 20] = 2.0  # whole channels that lie on a bound
    bias[3], bias[20] = lower, min(upper, 1.0)
    dy[1, 5, 2, 2], dy[1, 3, 2, 2] = np.inf, (np.inf if bounds[1] is None else 1.0)
    x[1, 5, 2, 2] = -9.0  # below both
    kind = f"lower = {lower}, upper = {upper}, activation = {1 if bounds[1] else 2}"
    at = f"epsilon = 0.001, block = {block}"
    lies = blocked(x, block) if block > 1 else x
    given = blocked(dy, block) if block > 1 else dy
    z, mean, var = run("BatchNormalization", f"{FREE}, {at}", 3, lies, scale, bias)
    y, *others = run("BatchNormalization", f"{kind}, {at}", 3, lies, scale, bias)
    np.testing.assert_array_equal(y, np.clip(z, lower, upper))
    np.testing.assert_array_equal(others, [mean, var])
    assert (z == lower).any() and (z < lower).any()
    passed = (z >= lower) & (z <= upper) if bounds[1] else z > lower
    for op_type, outputs in (("BatchNormalizationGrad", 3), ("UnscaledBatchNormalizationGrad", 4)):
        chosen = np.where(passed, given, np.float32(0))
        wanted = run(op_type, f"{FREE}, {at}", outputs, chosen, lies, scale, mean, var)
        found = run(op_type, f"{kind}, {at}", outputs, given, lies, scale, mean, var, bias)
        for a, b in zip(wanted, found, strict=True):
            assert np.isfinite(a).all()
            np.testing.assert_array_equal(b, a)


@pytest.mark.skipif(not nchwc_block(), reason="this processor has no blocked layout")
def test_chains_in_blocks_hold_native_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native.Library, "has_tiles", False)  # with tiles, convolutions leave the blocks
    built = step("residual", "n", gg.optim.sgd(0.05))
    nodes = [n for n in for_machine(built.train, ORT_NATIVE, {"n": 8}).graph.node if n.domain == native.DOMAIN]
    blocks = {n.op_type: {a.i for a in n.attribute if a.name == "block"} for n in nodes}
    assert any(nchwc_block() in found for found in blocks.values()), blocks


def test_kernels_refuse_what_does_not_fit() -> None:
    ones = np.ones((1, 12, 2, 2), np.float32)
    for attributes, says in (("block = 8", "no whole number of blocks"), ("block = 4", "blocks of 4 channels")):
        with pytest.raises(Exception, match=f"BatchNormalization: .*{says}"):
            run(
                "BatchNormalization",
                f"{FREE}, epsilon = 0.1, {attributes}",
                3,
                ones,
                ones[0, :, 0, 0],
                ones[0, :, 0, 0],
            )


@pytest.mark.parametrize(("op_type", "shape", "attributes"), CASES)
def test_of_few_numbers_gradients_keep_their_digits(
    op_type: str, shape: tuple[int, ...], attributes: dict[str, Any]
) -> None:
    assert max(errors(op_type, shape, attributes, ORT_NATIVE.name).values()) < MOST

"""Every kernel that takes tensors as they are, on drawn shapes (nothing, one, odd numbers, all layouts), in float64.

Chains are drawn in `test_native_chains.py`; sizes of attention and of LSTM beside their own references.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from tests.kit.native_node import run

pytestmark = pytest.mark.usefixtures("library")

Array = np.ndarray
Rng = np.random.Generator
FREE: dict[str, Any] = {"lower": -3e38, "upper": 3e38, "activation": 0}
SIZES = [0, 1, 1, 2, 3, 5, 7, 8, 9, 15, 16, 17, 31, 33]


def sizes(rng: Rng, count: int, least: int = 0) -> list[int]:
    return [max(least, int(n)) for n in rng.choice(SIZES, count)]


def normal(rng: Rng, *shape: int) -> Array:
    return rng.normal(size=shape).astype(np.float32)


def native(op_type: str, inputs: Sequence[Array], outputs: int, **attributes: Any) -> list[Array]:
    """Run a kernel by one thread and by two, which give the same bits."""
    written = ", ".join(f"{name} = {v}" for name, v in attributes.items())
    one, two = (run(op_type, written, outputs, *inputs, threads=n) for n in (1, 2))
    for a, b in zip(one, two, strict=True):
        np.testing.assert_array_equal(a, b)
    return one


def close(found: Array, wanted: Array, terms: Array | float) -> None:
    """Within float32's rounding of what is added up: ``terms`` is the sum of magnitudes."""
    assert found.shape == wanted.shape
    assert (np.abs(found - wanted) <= 2e-6 * np.abs(terms) + 1e-30).all()


def wide(*arrays: Array) -> list[Array]:
    return [a.astype(np.float64) for a in arrays]


# --- number by number, row by row ------------------------------------------------------------------------------------


def adam(rng: Rng) -> None:
    p, g, m = normal(rng, 3, *sizes(rng, 2), int(rng.integers(0, 300)))
    v, rate, floor, keep = (np.asarray(x, np.float32) for x in (np.square(m), -0.1, 1e-3, 0.9))
    found = native("AdamUpdate", [p, g, m, v, rate, floor, keep], 3, takes=[0.25, 0.5])
    p, g, m, v = wide(p, g, m, v)
    m, v = 0.75 * m + 0.25 * g, 0.5 * v + 0.5 * g * g
    for a, b in zip(found, [p * keep + m / (np.sqrt(v) + floor) * rate, m, v], strict=True):
        close(a, b, np.abs(p) + np.abs(m) + v + 1)


def momentum(rng: Rng) -> None:
    p, g, m = normal(rng, 3, *sizes(rng, 2), int(rng.integers(0, 300)))
    ahead, rate = int(rng.integers(2)), np.asarray(-0.1, np.float32)
    found = native("MomentumUpdate", [p, g, m, rate], 2, decay=0.75, nesterov=ahead)
    p, g, m = wide(p, g, m)
    m = 0.75 * m + g
    for a, b in zip(found, [p + rate * (g + 0.75 * m if ahead else m), m], strict=True):
        close(a, b, np.abs(p) + np.abs(g) + np.abs(m))


def layer_norm(rng: Rng) -> None:
    shape, axis = sizes(rng, 3), int(rng.integers(1, 3))
    dy, x, scale = normal(rng, *shape), normal(rng, *shape), normal(rng, *shape[axis:])
    rows = [*shape[:axis], *[1] * (3 - axis)]
    mean, inv = normal(rng, *rows), rng.uniform(0.5, 1.5, rows).astype(np.float32)
    found = native("LayerNormalizationGrad", [dy, x, scale, mean, inv], 2, axis=axis)
    dy, x, scale, mean, inv = wide(dy, x, scale, mean, inv)
    normed, axes, count = (x - mean) * inv, tuple(range(axis, 3)), max(scale.size, 1)
    product, before = dy * scale, tuple(range(axis))
    share, slope = (v.sum(axes, keepdims=True) / count for v in (product, product * normed))
    largest = np.abs(product).max(initial=0) * (1 + np.abs(normed).max(initial=0)) ** 2
    close(found[0], inv * (product - share - normed * slope), largest)
    close(found[1], (dy * normed).sum(before), np.abs(dy * normed).sum(before))


def softmax(rng: Rng) -> None:
    shape = sizes(rng, int(rng.integers(1, 4)))
    dy, y, do, o = normal(rng, 4, *shape)
    inputs = [dy, y, do, o][: int(rng.choice([2, 4]))]
    (found,) = native("SoftmaxGrad", inputs, 1)
    dy, y, *_ = given = wide(*inputs)
    a, b = given[-2:]
    close(
        found,
        y * (dy - (a * b).sum(-1, keepdims=True)),
        np.abs(y) * (np.abs(dy) + np.abs(a * b).sum(-1, keepdims=True)),
    )


# --- products --------------------------------------------------------------------------------------------------------


def matmul(rng: Rng) -> None:
    m, k, n = sizes(rng, 3)
    stack = [int(s) for s in rng.choice([1, 2, 5], int(rng.integers(0, 3)))]
    turned = rng.integers(0, 2, 2)
    lead = [[s if rng.random() < 0.7 else 1 for s in stack[int(rng.integers(len(stack) + 1)) :]] for _ in "ab"]
    a, b = normal(rng, *lead[0], m, k), normal(rng, *lead[1], k, n)
    summand = (
        [normal(rng, *[(), (n,), (m, 1), (m, n)][int(rng.integers(4))])] if not stack and rng.random() < 0.5 else []
    )
    given = [np.ascontiguousarray(x.swapaxes(-1, -2)) if t else x for x, t in zip((a, b), turned, strict=True)]
    attributes = {"transA": turned[0], "transB": turned[1], "alpha": -0.5, "beta": 2.0}
    (found,) = native("MatMul", [*given, *summand], 1, **attributes)
    a, b, c = wide(a, b, summand[0] if summand else np.zeros(()))
    close(found, -0.5 * (a @ b) + 2.0 * c, 0.5 * (np.abs(a) @ np.abs(b)) + 2.0 * np.abs(c))


def packed_matmul(rng: Rng) -> None:
    m, n, blocks = sizes(rng, 3, least=1)
    block, bits, by_rows = int(rng.choice([16, 32, 80])), int(rng.choice([4, 8])), int(rng.integers(2))
    k = blocks * block
    q, points = rng.integers(0, 2**bits, (n, k)), rng.integers(0, 2**bits, (n, blocks))
    scales = rng.uniform(0.5, 1.5, (n, blocks)).astype(np.float32)
    x = normal(rng, m, k if by_rows else n)
    given = [x, packed(q, bits), scales, packed(points, bits)]
    sizes_of = {"N": n, "K": k, "bits": bits, "block_size": block}
    (found,) = native("PackedMatMul", given, 1, **sizes_of, by_rows=by_rows, signed=0)
    w = (q - np.repeat(points, block, 1)) * np.repeat(scales.astype(np.float64), block, 1)
    w = w.T if by_rows else w
    close(found, wide(x)[0] @ w, np.abs(wide(x)[0]) @ np.abs(w))


def packed(numbers: Array, bits: int) -> Array:
    """Bytes of numbers of so many bits, low ones first, without gaps."""
    line = numbers.reshape(-1).astype(np.uint8)
    if bits == 8:
        return line
    pairs = np.append(line, np.zeros(line.size % 2, np.uint8)).reshape(-1, 2)
    return np.asarray(pairs[:, 0] | pairs[:, 1] << 4, np.uint8)


# --- windows ---------------------------------------------------------------------------------------------------------


def flat(x: Array) -> Array:
    """[N, C, H, W] as [N, C, H·W], also where there is nothing."""
    return x.reshape(*x.shape[:2], int(np.prod(x.shape[2:])))


class Windows:
    """Windows of a drawn size over drawn images, and which pixel each tap of each window reads."""

    def __init__(self, rng: Rng) -> None:
        def pairs(*choices: int) -> list[int]:
            return [int(n) for n in rng.choice(choices, 2)]

        self.kernel, self.strides, self.dilations = pairs(1, 2, 3, 5), pairs(1, 2), pairs(1, 1, 2, 3)
        self.begins, self.ends = pairs(0, 1, 2), pairs(0, 1, 2)
        extent = [(k - 1) * d + 1 for k, d in zip(self.kernel, self.dilations, strict=True)]
        drawn = [int(n) for n in rng.choice([1, 2, 3, 7, 16, 18, 35], 2)]
        pads = [b + e for b, e in zip(self.begins, self.ends, strict=True)]
        self.size = [max(n, e - p) for n, e, p in zip(drawn, extent, pads, strict=True)]
        axes = zip(self.size, pads, extent, self.strides, strict=True)
        self.count = [(n + p - e) // s + 1 for n, p, e, s in axes]
        reads = []
        for i in range(2):
            taps, windows = np.arange(self.kernel[i]) * self.dilations[i], np.arange(self.count[i]) * self.strides[i]
            reads.append(taps[:, None] + windows[None] - self.begins[i])
        rows, columns = reads[0][:, None, :, None], reads[1][None, :, None, :]
        inside = (rows >= 0) & (rows < self.size[0]) & (columns >= 0) & (columns < self.size[1])
        self.places = np.where(inside, rows * self.size[1] + columns, -1).reshape(np.prod(self.kernel), -1)

    @property
    def attributes(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in ("strides", "dilations", "begins", "ends")}

    def seen(self, x: Array, padding: float = 0.0) -> Array:
        """[N, C, H, W] as [N, C, taps, windows]."""
        padded = np.concatenate([flat(x), np.full((*x.shape[:2], 1), padding)], 2)
        return padded[:, :, self.places]

    def back(self, seen: Array) -> Array:
        """[N, C, taps, windows] added up as [N, C, H, W]."""
        total = np.zeros((*seen.shape[:2], int(np.prod(self.size)) + 1))
        np.add.at(total, (slice(None), slice(None), self.places), seen)
        return total[..., :-1].reshape(*seen.shape[:2], *self.size)


def convolution(rng: Rng, deep: bool) -> None:
    it, images = Windows(rng), int(rng.choice([0, 1, 3]))
    c, m = (int(n) for n in rng.choice([1, 3, 8, 16, 17, 32], 2))
    m, groups = (c, c) if deep else (m, 1)
    block = int(rng.choice([b for b in (1, 8, 16) if c % b == m % b == 0]))
    x, w, bias = normal(rng, images, c, *it.size), normal(rng, m, c // groups, *it.kernel), normal(rng, m)
    dy = normal(rng, images, m, *it.count)
    name, attributes = ("DepthwiseConv", it.attributes | FREE | {"block": block}) if deep else ("Conv", it.attributes)
    bounds = {} if deep else {"lower": -3e38, "upper": 3e38}
    lie = block if deep else 1  # the others of its kernels read and write plain layout
    given = [in_blocks(a, block) for a in (x, dy)]
    sized = {"size": it.size, "kernel": it.kernel}
    (y,) = native(name, [in_blocks(x, lie), w, bias], 1, **attributes, **bounds)
    wants = sized if deep else {"size": it.size}
    (dx,) = native(f"{name}GradInput", [in_blocks(dy, lie), w], 1, **attributes, **wants)
    wants = sized if deep else {"kernel": it.kernel, "block": block}
    (dw,) = native(f"{name}GradWeight", given, 1, **attributes, **wants)
    found = [in_blocks(y, lie, back=True), in_blocks(dx, lie, back=True), dw.reshape(w.shape)]

    def exact(x: Array, w: Array, bias: Array, dy: Array) -> list[Array]:
        seen, taps, cotangent = it.seen(x), flat(w), flat(dy)
        if deep:
            y = np.einsum("nctp,ct->ncp", seen, taps[:, 0])
            dx, dw = np.einsum("ncp,ct->nctp", cotangent, taps[:, 0]), np.einsum("nctp,ncp->ct", seen, cotangent)
        else:
            y, dx = np.einsum("nctp,mct->nmp", seen, taps), np.einsum("nmp,mct->nctp", cotangent, taps)
            dw = np.einsum("nctp,nmp->mct", seen, cotangent)
        return [y.reshape(dy.shape) + bias[:, None, None], it.back(dx), dw.reshape(w.shape)]

    arrays = wide(x, w, bias, dy)
    for a, b, terms in zip(found, exact(*arrays), exact(*map(np.abs, arrays)), strict=True):
        close(a, b, terms)


def max_pool(rng: Rng) -> None:
    it, c = Windows(rng), int(rng.choice([1, 3, 8, 16, 32]))
    block = int(rng.choice([b for b in (1, 8, 16) if c % b == 0]))
    x = np.round(normal(rng, int(rng.choice([0, 1, 3])), c, *it.size))  # with ties: the first one counts
    dy = normal(rng, *x.shape[:2], *it.count)
    attributes = {n: v for n, v in it.attributes.items() if n != "ends"} | {"kernel": it.kernel, "block": block}
    (found,) = native("MaxPoolGrad", [in_blocks(dy, block), in_blocks(x, block)], 1, **attributes)
    seen, given = it.seen(x.astype(np.float64), -np.inf), flat(dy.astype(np.float64))[:, :, None]
    first = seen.argmax(2)[:, :, None] if seen.size else np.zeros(given.shape, int)
    wanted, terms = (it.back((np.arange(seen.shape[2])[:, None] == first) * d) for d in (given, np.abs(given)))
    close(in_blocks(found, block, back=True), wanted, terms)


# --- channels --------------------------------------------------------------------------------------------------------


def in_blocks(x: Array, block: int, back: bool = False) -> Array:
    """[N, C, H, W] with the numbers in the order of [N, C/b, H, W, b], or back."""
    n, c, *size = x.shape
    if back:
        return np.moveaxis(x.reshape(n, c // block, *size, block), -1, 2).reshape(x.shape)
    return np.ascontiguousarray(np.moveaxis(x.reshape(n, c // block, block, *size), 2, -1)).reshape(x.shape)


def batch_norm(rng: Rng) -> None:
    c = int(rng.choice([1, 3, 8, 16, 32, 33]))
    block = int(rng.choice([b for b in (1, 8, 16) if c % b == 0]))
    shape = [int(rng.choice([1, 2, 5, 70])), c, *sizes(rng, 2, least=1)]
    x, dy = normal(rng, *shape), normal(rng, *shape)
    scale, bias = rng.uniform(0.5, 1.5, c).astype(np.float32), normal(rng, c)
    attributes = FREE | {"epsilon": 0.125, "block": block}
    lies, given = in_blocks(x, block), in_blocks(dy, block)
    y, mean, var = native("BatchNormalization", [lies, scale, bias], 3, **attributes)
    dx, dscale, db = native("BatchNormalizationGrad", [given, lies, scale, mean, var], 3, **attributes)
    u, a, *others = native("UnscaledBatchNormalizationGrad", [given, lies, scale, mean, var], 4, **attributes)
    np.testing.assert_array_equal(others, [dscale, db])

    x, dy, scale, bias = wide(x, dy, scale, bias)
    along, axes = (slice(None), None, None), (0, 2, 3)
    close(mean, x.mean(axes), np.abs(x).mean(axes))
    close(var, x.var(axes), 1 + x.var(axes))
    inv = 1 / np.sqrt(x.var(axes) + 0.125)
    normed = (x - x.mean(axes)[along]) * inv[along]
    close(in_blocks(y, block, back=True), normed * scale[along] + bias[along], 10.0)
    close(dscale, (dy * normed).sum(axes), np.abs(dy * normed).sum(axes) + np.abs(dy).sum(axes))
    close(db, dy.sum(axes), np.abs(dy).sum(axes))
    inner = dy - dy.mean(axes)[along] - normed * (dy * normed).mean(axes)[along]
    scaled = (scale * inv)[along]
    close(in_blocks(dx, block, back=True), scaled * inner, 40.0)
    close(in_blocks(u, block, back=True) * a.reshape(-1)[along], scaled * inner, 40.0)


KERNELS: dict[str, Callable[[Rng], None]] = {
    "AdamUpdate": adam,
    "MomentumUpdate": momentum,
    "LayerNormalizationGrad": layer_norm,
    "SoftmaxGrad": softmax,
    "MatMul": matmul,
    "PackedMatMul": packed_matmul,
    "Conv": lambda rng: convolution(rng, deep=False),
    "DepthwiseConv": lambda rng: convolution(rng, deep=True),
    "MaxPoolGrad": max_pool,
    "BatchNormalization": batch_norm,
}


@pytest.mark.sweep(0.05)
@pytest.mark.parametrize("seed", range(60))
@pytest.mark.parametrize("name", KERNELS)
def test_a_kernel_is_right_for_drawn_shapes(name: str, seed: int) -> None:
    KERNELS[name](np.random.default_rng([seed, list(KERNELS).index(name)]))

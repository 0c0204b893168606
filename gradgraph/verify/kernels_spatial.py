"""Sampling and Fourier kernels for the float64 oracle, in the precision of the input.

onnx's own GridSample, AffineGrid and DeformConv compute in float32 inside; MaxRoiPool is missing; RoiAlign and Col2Im
loop in Python over every element.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from gradgraph.verify.kernel import Kernel

Ints = Sequence[int]
WHOLE = slice(None)
CUBIC = -0.75  # Keys' coefficient


# --- interpolation -------------------------------------------------------------------------------------


def _reflected(u: np.ndarray, low: float, high: float) -> np.ndarray:
    """Return ``u`` reflected at ``low`` and ``high`` until it is between them."""
    span = high - low
    if span == 0:
        return np.full_like(u, low)
    far = np.mod(np.abs(u - low), 2 * span)
    return low + np.minimum(far, 2 * span - far)


def _kernel(distance: np.ndarray) -> np.ndarray:
    d, a = np.abs(distance), CUBIC
    near, far = ((a + 2) * d - (a + 3)) * d * d + 1, ((a * d - 5 * a) * d + 8 * a) * d - 4 * a
    return np.asarray(np.where(d <= 1, near, far))


def _taps(u: np.ndarray, mode: str) -> list[tuple[np.ndarray, np.ndarray]]:
    """Return the integer positions for interpolation at ``u``, each with its weight."""
    if mode == "nearest":
        return [(np.rint(u), np.ones_like(u))]
    base = np.floor(u)
    if mode == "linear":
        return [(base, 1 - (u - base)), (base + 1, u - base)]
    return [(base + k, _kernel(u - base - k)) for k in (-1, 0, 1, 2)]


def sample(
    x: np.ndarray, u: np.ndarray, mode: str = "linear", padding: str = "zeros", aligned: bool = True
) -> np.ndarray:
    """Return ``x`` [N, C, *sizes] at the pixel coordinates ``u`` [N, *outputs, axes], interpolated: [N, C, *outputs].

    Clamping and mirroring apply to the pixels read, not the coordinate, as in onnxruntime and PyTorch.
    """
    columns = []
    for axis, size in enumerate(x.shape[2:]):
        low, high = (0.0, size - 1.0) if aligned else (-0.5, size - 0.5)
        columns.append([(*_inside(i, size, padding, low, high), w) for i, w in _taps(u[..., axis], mode)])
    batch = np.arange(len(x)).reshape(-1, *[1] * (u.ndim - 2))
    y = np.zeros((len(x), *u.shape[1:-1], x.shape[1]), x.dtype)
    for taps in itertools.product(*columns):
        weight = np.prod([valid * w for _, valid, w in taps], axis=0)
        y += np.moveaxis(x, 1, -1)[(batch, *(i for i, _, _ in taps))] * weight[..., None]
    return np.moveaxis(y, -1, 1)


def _inside(i: np.ndarray, size: int, padding: str, low: float, high: float) -> tuple[np.ndarray, np.ndarray]:
    """Return positions clamped or reflected into the axis, and whether each is valid: false for zero padding."""
    valid = (i >= 0) & (i < size) if padding == "zeros" else np.ones(i.shape, bool)
    if padding == "reflection":
        i = _reflected(i, low, high)
    return np.clip(i, 0, size - 1).astype(np.int64), valid


class GridSample(Kernel):
    def _run(
        self,
        x: np.ndarray,
        grid: np.ndarray,
        align_corners: int | None = 0,
        mode: str | None = "linear",
        padding_mode: str | None = "zeros",
    ) -> tuple[np.ndarray]:
        sizes = np.array(x.shape[2:], grid.dtype)
        u = (grid[..., ::-1] + 1) * (sizes - 1) / 2 if align_corners else ((grid[..., ::-1] + 1) * sizes - 1) / 2
        return (sample(x, u, mode or "linear", padding_mode or "zeros", bool(align_corners)),)


class AffineGrid(Kernel):
    def _run(self, theta: np.ndarray, size: np.ndarray, align_corners: int | None = 0) -> tuple[np.ndarray]:
        sizes = [int(n) for n in size[2:]]
        axes = [_ticks(n, bool(align_corners)) for n in sizes]
        base = np.stack([*np.meshgrid(*axes, indexing="ij")[::-1], np.ones(sizes)], -1)
        return (np.einsum("...j,nij->n...i", base, theta).astype(theta.dtype),)


def _ticks(n: int, aligned: bool) -> np.ndarray:
    # a single tick is at 1, as in onnxruntime (ONNX divides by zero there)
    return np.linspace(1, -1, n)[::-1] if aligned else (2 * np.arange(n) + 1) / n - 1


class DeformConv(Kernel):
    def _run(
        self,
        x: np.ndarray,
        w: np.ndarray,
        offset: np.ndarray,
        b: np.ndarray | None = None,
        mask: np.ndarray | None = None,
        dilations: Ints | None = None,
        group: int | None = 1,
        kernel_shape: Ints | None = None,
        offset_group: int | None = 1,
        pads: Ints | None = None,
        strides: Ints | None = None,
    ) -> tuple[np.ndarray]:
        kernel, out, axes = w.shape[2:], offset.shape[2:], x.ndim - 2
        count, g, og = math.prod(kernel), group or 1, offset_group or 1
        ones = [1] * axes
        start = np.stack(np.meshgrid(*map(np.arange, out), indexing="ij"), -1) * (strides or ones)
        taps = np.stack(np.meshgrid(*map(np.arange, kernel), indexing="ij"), -1) * (dilations or ones)
        place = taps.reshape(count, *ones, axes) + start - np.array((pads or [0] * axes)[:axes])
        moved = np.moveaxis(offset.reshape(-1, count, axes, *out), 2, -1) + place
        seen = sample(x.reshape(len(x) * og, -1, *x.shape[2:]), moved)  # [N·og, C/og, taps, *out]
        if mask is not None:
            seen = seen * mask.reshape(-1, 1, count, *out)
        columns = seen.reshape(len(x), g, -1, math.prod(out))
        y = (w.reshape(g, len(w) // g, -1) @ columns).reshape(len(x), -1, *out)
        return ((y if b is None else y + b.reshape(-1, *ones)).astype(x.dtype),)


# --- regions of interest -------------------------------------------------------------------------------


class RoiAlign(Kernel):
    """RoiAlign whose mode "max" takes the largest single weighted pixel, as onnx's kernel and onnxruntime do."""

    def _run(
        self,
        x: np.ndarray,
        rois: np.ndarray,
        batch_indices: np.ndarray,
        coordinate_transformation_mode: str | None = "half_pixel",
        mode: str | None = "avg",
        output_height: int | None = 1,
        output_width: int | None = 1,
        sampling_ratio: int | None = 0,
        spatial_scale: float | None = 1.0,
    ) -> tuple[np.ndarray]:
        half = coordinate_transformation_mode == "half_pixel"
        scaled = rois * (1.0 if spatial_scale is None else spatial_scale) - 0.5 * half
        counts = (output_height or 1, output_width or 1)
        y = np.zeros((len(rois), x.shape[1], *counts), x.dtype)
        for r, n in enumerate(batch_indices):
            rows, columns = (
                _weights(x.shape[2 + a], scaled[r, 1 - a], scaled[r, 3 - a], counts[a], sampling_ratio or 0, half)
                for a in (0, 1)
            )
            if mode == "avg":
                y[r] = np.einsum("phi,chw,qwj->cpq", rows.swapaxes(1, 2), x[n], columns.swapaxes(1, 2))
                y[r] /= max(rows.shape[1] * columns.shape[1], 1)
            elif rows.shape[1] and columns.shape[1]:
                y[r] = _largest_product(x[n], rows, columns)
        return (y,)


def _weights(size: int, start: float, end: float, bins: int, ratio: int, half: bool) -> np.ndarray:
    """Return interpolation weights along one axis, [bins, samples, size]: one per bin, sample and pixel."""
    length = end - start if half else max(end - start, 1.0)
    samples = ratio or max(math.ceil(length / bins), 0)
    inner = (np.arange(samples) + 0.5) / max(samples, 1)
    at = start + length / bins * (np.arange(bins)[:, None] + inner)
    hat = np.maximum(0, 1 - np.abs(np.clip(at, 0, size - 1)[..., None] - np.arange(size)))
    return np.asarray(hat * ((at >= -1) & (at <= size))[..., None])


def _largest_product(x: np.ndarray, rows: np.ndarray, columns: np.ndarray) -> np.ndarray:
    """Return the largest product of pixel and weight in each bin, over the four pixels around each of its samples.

    If a sample is exactly on a pixel, the pixels after it have weight 0.
    """
    near = [np.sort(np.argsort(w, -1, kind="stable")[..., -2:], -1) for w in (rows, columns)]
    u, v = (np.take_along_axis(w, i, -1) for w, i in zip((rows, columns), near, strict=True))
    (i, u), (j, v) = ((n.reshape(len(n), -1), w.reshape(len(w), -1)) for n, w in zip(near, (u, v), strict=True))
    products = x[:, i[:, :, None, None], j] * (u[:, :, None, None] * v)
    return np.asarray(products.max((2, 4)))


class MaxRoiPool(Kernel):
    def _run(
        self, x: np.ndarray, rois: np.ndarray, pooled_shape: Ints, spatial_scale: float | None = 1.0
    ) -> tuple[np.ndarray]:
        scaled = rois[:, 1:] * (1.0 if spatial_scale is None else spatial_scale)
        corners = (np.sign(scaled) * np.floor(np.abs(scaled) + 0.5)).astype(np.int64)
        y = np.zeros((len(rois), x.shape[1], *pooled_shape), x.dtype)
        for r, n in enumerate(rois[:, 0].astype(int)):
            rows, columns = (
                _bins(x.shape[2 + a], corners[r, 1 - a], corners[r, 3 - a], pooled_shape[a]) for a in (0, 1)
            )
            for (i, row), (j, column) in itertools.product(enumerate(rows), enumerate(columns)):
                seen = x[n][:, row, column]
                y[r, :, i, j] = seen.max((1, 2)) if seen.size else 0
        return (y,)


def _bins(size: int, first: int, last: int, count: int) -> list[slice]:
    length = max(last - first + 1, 1) / count
    ends = [(first + math.floor(i * length), first + math.ceil((i + 1) * length)) for i in range(count)]
    return [slice(min(max(a, 0), size), min(max(b, 0), size)) for a, b in ends]


# --- columns and spectra -------------------------------------------------------------------------------


class Col2Im(Kernel):
    def _run(
        self,
        x: np.ndarray,
        image_shape: np.ndarray,
        block_shape: np.ndarray,
        dilations: Ints | None = None,
        pads: Ints | None = None,
        strides: Ints | None = None,
    ) -> tuple[np.ndarray]:
        image, block, axes = [int(n) for n in image_shape], [int(n) for n in block_shape], len(image_shape)
        dilations, strides = dilations or [1] * axes, strides or [1] * axes
        begins, ends = np.reshape(pads or [0] * 2 * axes, (2, axes)).tolist()
        axis = zip(image, block, begins, ends, dilations, strides, strict=True)
        counts = [(n + b + e - (k - 1) * d - 1) // s + 1 for n, k, b, e, d, s in axis]
        columns = x.reshape(len(x), -1, *block, *counts)
        padded = np.zeros((*columns.shape[:2], *np.add(image, np.add(begins, ends))), x.dtype)
        for tap in itertools.product(*map(range, block)):
            rows = zip(tap, dilations, counts, strides, strict=True)
            where = [slice(t * d, t * d + (c - 1) * s + 1, s) for t, d, c, s in rows]
            at: tuple[Any, ...] = (WHOLE, WHOLE, *tap)
            padded[(WHOLE, WHOLE, *where)] += columns[at]
        return (padded[(WHOLE, WHOLE, *(slice(b, b + n) for b, n in zip(begins, image, strict=True)))],)

"""Random directions for directional derivatives, and inner products with them, computed without storing them."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]
PIECE = 1 << 18  # numbers drawn at a time


@dataclass(frozen=True)
class Direction:
    """A random direction for a tensor: one number per element, drawn again from the seed whenever it is needed.

    Args:
        shape: the shape of the tensor.
        scale: the mean magnitude of the numbers: the root mean square of the tensor, or 1 if that is 0.
        seed: the seed of the magnitudes.
        negative: the signs, one bit per element, packed into bytes.
    """

    shape: tuple[int, ...]
    scale: float
    seed: int
    negative: Array

    @classmethod
    def drawn(cls, x: Array, slope: Array | None, rng: np.random.Generator) -> Direction:
        """Return a random direction for ``x``.

        With a gradient ``slope``, three quarters of the elements have its sign, so that the products do not cancel.
        """
        signs = []
        for part in parts(x.size):
            flipped = rng.integers(0, 4 if slope is not None else 2, part.stop - part.start) == 0
            if slope is not None:
                along = slope.reshape(-1)[part]
                random = rng.integers(0, 2, len(along)) == 0
                flipped = np.where((along == 0) | np.isnan(along), random, flipped ^ (along < 0))
            signs.append(np.packbits(flipped))
        negative = np.concatenate(signs) if signs else np.zeros(0, np.uint8)
        return cls(x.shape, _size_of(x) or 1.0, int(rng.integers(1 << 62)), negative)

    def parts(self) -> Iterator[tuple[slice, Array]]:
        """Yield slices of the flattened tensor, each with the direction's elements in the slice."""
        rng = np.random.default_rng(self.seed)
        for part in parts(math.prod(self.shape)):
            numbers = rng.uniform(0.5 * self.scale, 1.5 * self.scale, part.stop - part.start)
            # a part has a multiple of 8 numbers, except the last
            bits = np.unpackbits(self.negative[part.start // 8 : -(-part.stop // 8)], count=len(numbers))
            yield part, np.where(bits, -numbers, numbers)

    def moved(self, x: Array, step: float) -> Array:
        """Return ``x`` plus ``step`` times the direction, in the element type of ``x``."""
        flat, found = x.reshape(-1), np.empty(x.shape, x.dtype)
        for part, numbers in self.parts():
            found.reshape(-1)[part] = flat[part].astype(np.float64) + step * numbers
        return found

    def sums(self, gradient: Array) -> tuple[float, float]:
        """Return the inner product of the direction and ``gradient``, and the sum of the products' absolute values."""
        flat, total, size = gradient.reshape(-1), 0.0, 0.0
        for part, numbers in self.parts():
            terms = numbers * flat[part].astype(np.float64)
            total, size = total + float(np.sum(terms)), size + float(np.sum(np.abs(terms)))
        return total, size


def parts(size: int) -> Iterator[slice]:
    for start in range(0, size, PIECE):
        yield slice(start, min(start + PIECE, size))


def _size_of(x: Array) -> float:
    """Return the root mean square of ``x``; 0 if it is empty."""
    flat = x.reshape(-1)
    squares = sum(float(np.sum(np.square(flat[part], dtype=np.float64))) for part in parts(x.size))
    return math.sqrt(squares / x.size) if x.size else 0.0

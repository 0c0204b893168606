"""Random directions in which a tensor moves, and sums along them; of neither is a whole array kept."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]
PIECE = 1 << 18  # numbers that are drawn at once


@dataclass(frozen=True)
class Direction:
    """Random numbers for each element of a tensor, as large as it, which are drawn again wherever they are needed.

    Args:
        shape: of the tensor.
        scale: the root of the mean of its squares, or 1 where that is 0.
        seed: of the sizes of the numbers.
        negative: their signs, a bit each.
    """

    shape: tuple[int, ...]
    scale: float
    seed: int
    negative: Array

    @classmethod
    def drawn(cls, x: Array, slope: Array | None, rng: np.random.Generator) -> Direction:
        """One for ``x``; three quarters of it are along the gradient ``slope``, so that the terms do not cancel."""
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
        """The numbers, one part of the flat tensor after the other."""
        rng = np.random.default_rng(self.seed)
        for part in parts(math.prod(self.shape)):
            numbers = rng.uniform(0.5 * self.scale, 1.5 * self.scale, part.stop - part.start)
            # a part is a multiple of 8 numbers, but for the last
            bits = np.unpackbits(self.negative[part.start // 8 : -(-part.stop // 8)], count=len(numbers))
            yield part, np.where(bits, -numbers, numbers)

    def moved(self, x: Array, step: float) -> Array:
        """``x``, so many steps in this direction, in its own type."""
        flat, found = x.reshape(-1), np.empty(x.shape, x.dtype)
        for part, numbers in self.parts():
            found.reshape(-1)[part] = flat[part].astype(np.float64) + step * numbers
        return found

    def sums(self, gradient: Array) -> tuple[float, float]:
        """The sums of the products with ``gradient``, and of their magnitudes."""
        flat, total, size = gradient.reshape(-1), 0.0, 0.0
        for part, numbers in self.parts():
            terms = numbers * flat[part].astype(np.float64)
            total, size = total + float(np.sum(terms)), size + float(np.sum(np.abs(terms)))
        return total, size


def parts(size: int) -> Iterator[slice]:
    for start in range(0, size, PIECE):
        yield slice(start, min(start + PIECE, size))


def _size_of(x: Array) -> float:
    """The root of the mean of the squares of ``x``; 0 where it is empty."""
    flat = x.reshape(-1)
    squares = sum(float(np.sum(np.square(flat[part], dtype=np.float64))) for part in parts(x.size))
    return math.sqrt(squares / x.size) if x.size else 0.0

"""GPTQ: rounding of a weight whose errors are compensated by the columns that are not rounded yet.

Rounding to the nearest integer minimises the error of each number, and undoes an update that is smaller than half the
distance of two integers. GPTQ (Frantar et al. 2022) minimises the error of the layer's outputs, ``‖(Q - W)·Xᵀ‖²``, for
inputs X: columns are rounded one after another, and after each, its error is subtracted from the remaining columns as
far as X correlates them. Scales and zero points are chosen before, so the columns with the largest inputs can be first
(``act_order`` with ``static_groups``).

Without inputs, the rows of the update take their place: the directions that the update reads, for an adapter those of
its first factor, are kept, and the error moves to others.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from gradgraph.surgery.operation import Array

Grams = list[Array]  # from ``grams``

DAMPING = 0.01  # of the mean of the Hessian's diagonal, added to it, as in the paper
WIDEST = 2048  # columns whose errors compensate each other: 5 matrices of this size in float64 take 170 MB
_BLOCK = 128  # columns whose errors are subtracted from all later ones at once, as in the paper
_AT_ONCE = 1 << 20  # numbers that are rounded at once: 16 MB with all intermediate results


class Gptq:
    """The rounding of one weight after an update.

    Args:
        update: the change of the weight, (outputs, inputs).
        inputs: the products of the layer's inputs, from ``grams``; those of the update if they are unknown.

    Attributes:
        error, effect: the squared norms of ``(Q - W)·Xᵀ``, for the rows that were rounded so far, and ``update·Xᵀ``.
    """

    def __init__(self, update: Array, inputs: Grams | None = None) -> None:
        found = grams(update) if inputs is None else inputs
        self._parts = [_Part(update, gram, at) for gram, at in zip(found, _slices(update.shape[1]), strict=True)]
        self.error, self.effect = 0.0, sum(part.effect for part in self._parts)

    @property
    def lost(self) -> float:
        """The share of the update's effect that rounding has lost, ``‖(Q - W)·Xᵀ‖² / ‖update·Xᵀ‖²``; 0 without one."""
        return self.error / self.effect if self.effect else 0.0

    def rounded(self, weight: Array, limits: tuple[int, int], scales: Array, points: Array) -> Array:
        """Return the integers of some rows of the weight, and count their errors.

        Args:
            weight: rows of the updated weight, (rows, inputs).
            limits: the smallest and the largest integer.
            scales, points: the scale and the zero point of each number, in the shape of ``weight``.

        Returns:
            int32 of the same shape.
        """
        found = np.empty(weight.shape, np.int32)
        step = max(1, _AT_ONCE // weight.shape[1])
        for first in range(0, len(weight), step):
            rows = slice(first, first + step)
            for part in self._parts:
                at = rows, part.columns
                found[at], error = part.rounded(weight[at], scales[at], points[at], limits)
                self.error += error
        return found


class _Part:
    """Columns of a weight whose errors compensate each other.

    Attributes:
        columns: their slice.
        effect: the squared norm of the update's effect, ``tr(update·H·updateᵀ)`` for the damped Hessian H.
    """

    def __init__(self, update: Array, gram: Array, columns: slice) -> None:
        self.columns, hessian = columns, gram.astype(np.float64)
        if not hessian.any():
            hessian = np.eye(len(hessian))
        hessian[np.diag_indices_from(hessian)] += DAMPING * np.trace(hessian) / len(hessian)
        self.effect = sum(float(np.sum((rows @ hessian) * rows)) for rows in _pieces(update, columns))
        self._order = np.argsort(-np.diag(hessian), kind="stable")
        # The inverse of H is U.T @ U, where U is upper triangular: the inverse of the factor of H in reversed order.
        lower = np.linalg.cholesky(hessian[np.ix_(self._order[::-1], self._order[::-1])])
        del hessian
        self._diagonal = np.diag(lower)[::-1].copy()
        upper = np.linalg.inv(lower)[::-1, ::-1]
        self._feedback = (upper * self._diagonal[:, None]).astype(np.float32)

    def rounded(self, weight: Array, scales: Array, points: Array, limits: tuple[int, int]) -> tuple[Array, float]:
        """Return the integers of these columns of some rows, and the squared norm of their error's effect."""
        order, count = self._order, len(self._order)
        left, steps, zeros = (
            np.ascontiguousarray(each[:, order].T, np.float32) for each in (weight, scales, points)
        )  # (columns, rows), as the columns are rounded one by one
        steps[steps == 0] = 1
        integers, lost = np.empty(left.shape, np.int32), 0.0
        for first in range(0, count, _BLOCK):
            end = min(first + _BLOCK, count)
            errors = np.empty_like(left[first:end])
            for k in range(first, end):
                whole = np.clip(np.rint(left[k] / steps[k] + zeros[k]), *limits)
                integers[k] = whole
                error = errors[k - first] = left[k] - (whole - zeros[k]) * steps[k]
                left[k + 1 : end] -= np.outer(self._feedback[k, k + 1 : end], error)
                lost += float(error @ error) * float(self._diagonal[k]) ** 2
            left[end:] -= self._feedback[first:end, end:].T @ errors
        found = np.empty(weight.shape, np.int32)
        found[:, order] = integers.T
        return found, lost


def grams(samples: Array, before: Grams | None = None) -> Grams:
    """Return the products of pairs of columns, summed over the samples, and added to those ``before``, in place.

    Args:
        samples: (samples, columns), float32 or float64.
        before: the result for other samples.

    Returns:
        A matrix for each ``WIDEST`` columns, of the type of the samples.
    """
    slices = _slices(samples.shape[1])
    if before is None:
        before = [np.zeros((len(range(samples.shape[1])[at]),) * 2, samples.dtype) for at in slices]
    step = max(1, _AT_ONCE // samples.shape[1])
    for first in range(0, len(samples), step):
        for total, at in zip(before, slices, strict=True):
            rows = samples[first : first + step, at]
            total += rows.T @ rows
    return before


def gram_bytes(columns: int) -> int:
    """Return the size of the result of ``grams`` for float32."""
    return sum(4 * len(range(columns)[at]) ** 2 for at in _slices(columns))


def _slices(columns: int) -> list[slice]:
    return [slice(first, first + WIDEST) for first in range(0, columns, WIDEST)]


def _pieces(array: Array, columns: slice) -> Iterator[Array]:
    """Yield the columns of some rows of a matrix at a time, as float64."""
    step = max(1, _AT_ONCE // array.shape[1])
    for first in range(0, len(array), step):
        yield np.asarray(array[first : first + step, columns], np.float64)

"""Means over samples or labels, combined from the means of batches of different sizes."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any


class WeightedMeans:
    """Weighted means of named values; the weights are numbers of samples or labels.

    Attributes:
        sums: weighted sums by name.
        weight: the sum of the weights.
    """

    def __init__(self, sums: Mapping[str, float] | None = None, weight: int = 0) -> None:
        self.sums = dict(sums or {})
        self.weight = weight

    def add(self, values: Mapping[str, float], count: int) -> None:
        self.weight += add_weighted(self.sums, values, count)

    def result(self) -> dict[str, float]:
        """Return the means; NaN if the total weight is 0."""
        return {name: total / self.weight if self.weight else math.nan for name, total in self.sums.items()}


def add_weighted(sums: dict[str, float], values: Mapping[str, float], count: int) -> int:
    """Add the means ``values`` over ``count`` samples to the weighted sums ``sums``, in place; return ``count``."""
    for name, value in values.items():  # the mean of a batch without counted labels may be NaN, and NaN · 0 is NaN
        sums[name] = sums.get(name, 0.0) + (value * count if count else 0.0)
    return count


Totals = tuple[dict[str, WeightedMeans], dict[str, Any], dict[str, list[Any]]]


def pooled(found: Sequence[Totals]) -> Totals:
    """Combine the (means, sums, per-sample rows) of each process to totals over all processes."""
    means: dict[str, WeightedMeans] = {}
    totals: dict[str, Any] = {}
    rows: dict[str, list[Any]] = {}
    for own, sums, arrays in found:
        for step, mean in own.items():
            whole = means.setdefault(step, WeightedMeans())
            add_weighted(whole.sums, mean.sums, 1)
            whole.weight += mean.weight
        for name, value in sums.items():
            totals[name] = totals[name] + value if name in totals else value
        for name, few in arrays.items():
            rows.setdefault(name, []).extend(few)
    return means, totals, rows

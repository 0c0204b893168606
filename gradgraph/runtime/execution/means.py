"""Means over samples or labels, from means over batches of unequal size."""

from __future__ import annotations

from collections.abc import Mapping


class WeightedMeans:
    """Means of named numbers, weighted by the samples or labels behind them."""

    def __init__(self, sums: Mapping[str, float] | None = None, weight: int = 0) -> None:
        self.sums = dict(sums or {})
        self.weight = weight

    def add(self, values: Mapping[str, float], count: int) -> None:
        self.weight += add_weighted(self.sums, values, count)

    def result(self) -> dict[str, float]:
        return {name: total / self.weight for name, total in self.sums.items()}


def add_weighted(sums: dict[str, float], values: Mapping[str, float], count: int) -> int:
    """Add means over ``count`` samples to ``sums``, in place; returns ``count``."""
    for name, value in values.items():
        sums[name] = sums.get(name, 0.0) + value * count
    return count

"""Means over samples or labels, from means over batches of unequal size."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


class WeightedMeans:
    """Means of named numbers, weighted by the samples or labels behind them."""

    def __init__(self, sums: Mapping[str, float] | None = None, weight: int = 0) -> None:
        self.sums = dict(sums or {})
        self.weight = weight

    def add(self, values: Mapping[str, Any], count: int) -> None:
        for name, value in values.items():
            self.sums[name] = self.sums.get(name, 0.0) + float(value) * count
        self.weight += count

    def result(self) -> dict[str, float]:
        return {name: total / self.weight for name, total in self.sums.items()}

"""Metrics by name, or as text such as ``f1`` or ``top_k(k=3)``.

A metric consists of a few sums that a step computes in its graph. They are added over all batches, and the metric is
computed from the totals at the end (``gradgraph.step.finishes``), so it is exact over all samples. Ranking metrics keep
one row per sample instead. The formulas are in ``frontend/metric_sums.py``, ``metrics_numbers.py`` and
``metrics_sequences.py``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from gradgraph.frontend import metrics_numbers, metrics_sequences
from gradgraph.frontend.metric_sums import METRICS, Metric, Sums, share

__all__ = ["METRICS", "Metric", "Sums", "by_name", "share", "typed"]
assert metrics_numbers and metrics_sequences  # importing them registers their metrics

if TYPE_CHECKING:

    def __getattr__(name: str) -> Callable[..., Metric]: ...

else:

    def __getattr__(name: str) -> Callable[..., Metric]:
        try:
            return METRICS[name]
        except KeyError:
            raise AttributeError(f"module '{__name__}' has no attribute '{name}'{METRICS.hint(name)}") from None


def __dir__() -> list[str]:
    return sorted([*__all__, *METRICS])


by_name, typed = METRICS.by_name, METRICS.typed

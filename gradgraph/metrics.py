"""Metrics by name, also as text: ``f1``, ``top_k(k=3)``.

A metric is a few sums that a step computes in its graph; they are added up over all batches and finished at the end
(``gradgraph.step.finishes``), so that a metric is exact over all samples. Ranking metrics keep a row of each sample
instead. ``frontend/metric_sums.py`` and ``metrics_sequences.py`` have the formulas.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from gradgraph.frontend import metrics_sequences
from gradgraph.frontend.metric_sums import METRICS, Metric, Sums, share

__all__ = ["METRICS", "Metric", "Sums", "by_name", "share", "typed"]
assert metrics_sequences  # the import fills the table

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

"""Metrics by name, and as they are typed: ``f1``, ``top_k(k=3)``.

Each is a few sums that a step computes in its graph; they are added up over all batches and finished at the end
(``gradgraph.step.finishes``), so that a metric is exact over all samples. ``frontend/metric_sums.py`` has the formulas.
"""

from __future__ import annotations

import ast
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from gradgraph.arguments import make_named
from gradgraph.errors import BuildError, shown
from gradgraph.frontend.metric_sums import METRICS, Metric, Sums, share

__all__ = ["METRICS", "Metric", "Sums", "by_name", "share", "typed"]

if TYPE_CHECKING:

    def __getattr__(name: str) -> Callable[..., Metric]: ...

else:

    def __getattr__(name: str) -> Callable[..., Metric]:
        try:
            return METRICS[name]
        except KeyError:
            raise AttributeError(f"module '{__name__}' has no attribute '{name}'") from None


def __dir__() -> list[str]:
    return sorted([*globals(), *METRICS])


def by_name(name: str, **arguments: Any) -> Metric:
    """The metric called ``name``.

    Raises:
        BuildError: there is no such metric, or it has no such argument.
    """
    return make_named("metric", METRICS, name, arguments)


def typed(text: str) -> Metric:
    """The metric that ``text`` names or calls, as in Python.

    Raises:
        BuildError: it is no call of a metric.
    """
    try:
        call = ast.parse(text, mode="eval").body
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and not call.args:
            return by_name(call.func.id, **{k.arg or "": ast.literal_eval(k.value) for k in call.keywords})
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        call = None
    if call is None or isinstance(call, ast.Call):
        raise BuildError(f"'{shown(text)}' is no metric; write a name, or a call such as 'top_k(k=3)'")
    return by_name(text)

"""Losses and metrics by name.

Names, arguments and defaults are those of ``torch.nn.functional``; ``axis`` (the classes, default 1) is ours, so that
models with classes on the last axis need no transpose. Each is defined in a ``losses_*.py`` of ``gradgraph.frontend``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import onnx_ir as ir

from gradgraph.frontend import functional
from gradgraph.frontend.loss import LOSSES, Loss
from gradgraph.frontend.losses_classes import class_axis
from gradgraph.graph.builder import Builder, Var

__all__ = ["LOSSES", "METRICS", "Loss", "accuracy", "by_name", "class_axis"]
assert functional  # importing it fills the table

if TYPE_CHECKING:

    def __getattr__(name: str) -> Callable[..., Loss]: ...

else:

    def __getattr__(name: str) -> Callable[..., Loss]:
        try:
            return LOSSES[name]
        except KeyError:
            raise AttributeError(f"module '{__name__}' has no attribute '{name}'") from None


def __dir__() -> list[str]:
    return sorted([*__all__, *LOSSES])


by_name = LOSSES.by_name


# --- metrics ---------------------------------------------------------------------------------------------


def accuracy(op: Builder, x: Var, target: Var, loss: Loss) -> Var:
    """The share of labels that the largest prediction hits, over those that count."""
    at = class_axis(x.shape or (None,) * x.rank, loss.axis)
    counted = op.Not(op.Equal(target, loss.ignore_index if loss.ignore_index is not None else -100))
    hit = op.And(op.Equal(op.ArgMax(x, axis=at, keepdims=0), target), counted)
    total = op.ReduceSum(op.cast(counted, ir.DataType.FLOAT), keepdims=0)
    return op.ReduceSum(op.cast(hit, ir.DataType.FLOAT), keepdims=0) / op.Max(total, 1.0)


METRICS: dict[str, Callable[[Builder, Var, Var, Loss], Var]] = {f.__name__: f for f in (accuracy,)}

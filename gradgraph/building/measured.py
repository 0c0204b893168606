"""The results that an objective writes: what is minimised, scalars, and sums that are carried from batch to batch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import onnx_ir as ir

from gradgraph.frontend.pointwise import cast
from gradgraph.frontend.tensor import Tensor
from gradgraph.frontend.trace import op
from gradgraph.graph.builder import Builder, Var
from gradgraph.step.manifest import MeasureSpec


class Written(NamedTuple):
    """What an objective has written: what is minimised, scalar metrics, and sums with the columns that they make.

    Attributes:
        weight: writes what the loss is a mean over, a float32 scalar; None where only who feeds a batch knows.
        adds_up: the loss is a sum over the batch.
    """

    loss: ir.Value
    metrics: Sequence[ir.Value] = ()
    measures: Sequence[tuple[MeasureSpec, ir.Value]] = ()
    weight: Callable[[], Var] | None = None
    adds_up: bool = False


def measured(
    builder: Builder, column: str, sums: Tensor, shape: Sequence[int], finish: str, arguments: Mapping[str, Any]
) -> tuple[MeasureSpec, ir.Value]:
    """``sums`` (float32, of fixed shape) as an output of its own, and the column that they make."""
    value = op.Reshape(cast(sums, ir.DataType.FLOAT), list(shape)).traced.value
    value.name = builder.fresh(f"{column}.sums")
    value.shape = ir.Shape(shape)
    return MeasureSpec(column, value.name, tuple(shape), finish, dict(arguments)), value

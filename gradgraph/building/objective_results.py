"""Results that an objective adds to a graph: the loss, metrics as numbers, and sums that are added up over batches."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import onnx_ir as ir

from gradgraph.frontend.pointwise import cast
from gradgraph.frontend.tensor import Tensor
from gradgraph.frontend.trace import op
from gradgraph.graph.builder import Builder, Var
from gradgraph.step.manifest import MeasureSpec

Measure: TypeAlias = tuple[MeasureSpec, ir.Value]  # a column, and the output with its sums


class Written(NamedTuple):
    """The results of an objective.

    Attributes:
        loss: the loss, a scalar.
        metrics: the metrics that are numbers.
        measures: the sums, each with its column.
        weight: a function that writes the divisor of the loss, a float32 scalar (the number of samples or labels); None
            if only the caller knows it.
        adds_up: whether the loss is a sum over the batch.
        differs: the reason (a verb phrase with the loss as subject) why gradients accumulated with ``weight`` differ
            from the gradients of one large batch; empty if they are equal.
        every_label: whether these gradients differ only if labels are ignored.
    """

    loss: ir.Value
    metrics: Sequence[ir.Value] = ()
    measures: Sequence[Measure] = ()
    weight: Callable[[], Var] | None = None
    adds_up: bool = False
    differs: str = ""
    every_label: bool = False

    def without_rows(self) -> Written:
        """Return a copy without measures with a row per sample, which only an evaluation computes."""
        return self._replace(measures=[(spec, sums) for spec, sums in self.measures if not spec.rows])

    @property
    def results(self) -> list[ir.Value]:
        """The values that become outputs of the graph: loss, metrics and sums."""
        return [self.loss, *self.metrics, *(sums for _, sums in self.measures)]


def measured(
    builder: Builder,
    column: str,
    sums: Tensor,
    shape: Sequence[int],
    finish: str,
    arguments: Mapping[str, Any],
    rows: bool = False,
) -> Measure:
    """Return the column ``column`` and the value with its sums, as float32, named ``<column>.sums``.

    Args:
        sums: the sums, of ``shape``; with ``rows``, one row of that shape for each sample.
        finish, arguments: the function that computes the column from the totals, and its arguments.
    """
    count = [-1] if rows else []
    value = op.Reshape(cast(sums, ir.DataType.FLOAT), [*count, *shape]).traced.value
    value.name = builder.fresh(f"{column}.sums")
    value.shape = ir.Shape([*(None for _ in count), *shape])
    return MeasureSpec(column, value.name, tuple(shape), finish, dict(arguments), rows), value


def renamed(op: Builder, var: Var, name: str) -> ir.Value:
    """Rename a scalar to ``name`` (or a free name derived from it) and return its value."""
    var.value.name = op.fresh(name)
    var.value.shape = ir.Shape(())
    return var.value

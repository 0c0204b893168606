"""Results that an objective writes: a loss, numbers, and sums that are accumulated over batches."""

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
    """The results of an objective: the loss, metrics that are numbers, and sums with their columns.

    Attributes:
        weight: writes the number that the loss is a mean over, a float32 scalar; None if only the caller knows it.
        adds_up: the loss is a sum over the batch.
        differs: why accumulated gradients, weighted by ``weight``, differ from those of one batch; empty if they do
            not.
        every_label: they do not differ if no label is ignored.
    """

    loss: ir.Value
    metrics: Sequence[ir.Value] = ()
    measures: Sequence[Measure] = ()
    weight: Callable[[], Var] | None = None
    adds_up: bool = False
    differs: str = ""
    every_label: bool = False

    def without_rows(self) -> Written:
        """Return these results without those that only an evaluation computes."""
        return self._replace(measures=[(spec, sums) for spec, sums in self.measures if not spec.rows])

    @property
    def results(self) -> list[ir.Value]:
        """List the outputs that it adds."""
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
    """Make ``sums`` (float32, of fixed shape; or rows of it) an output, and return it with its column."""
    count = [-1] if rows else []
    value = op.Reshape(cast(sums, ir.DataType.FLOAT), [*count, *shape]).traced.value
    value.name = builder.fresh(f"{column}.sums")
    value.shape = ir.Shape([*(None for _ in count), *shape])
    return MeasureSpec(column, value.name, tuple(shape), finish, dict(arguments), rows), value


def renamed(op: Builder, var: Var, name: str) -> ir.Value:
    """Return a scalar result under its public name."""
    var.value.name = op.fresh(name)
    var.value.shape = ir.Shape(())
    return var.value

"""The optimal assignment of objects to predictions, as graph nodes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
import onnx_ir as ir

from gradgraph.errors import ModelError
from gradgraph.frontend.dims import Extent
from gradgraph.frontend.gradients import detach
from gradgraph.frontend.pointwise import cast
from gradgraph.frontend.shaping import op_sizes
from gradgraph.frontend.subscripts import arange
from gradgraph.frontend.trace import TensorLike, current, op, tensor, wrap
from gradgraph.graph.builder import Var, all_of
from gradgraph.graph.shapes import Shape

if TYPE_CHECKING:
    from gradgraph.frontend.tensor import Tensor

__all__ = ["linear_sum_assignment"]

NUMBER, WHOLE, FLAG = ir.DataType.DOUBLE, ir.DataType.INT64, ir.DataType.BOOL


def linear_sum_assignment(cost: TensorLike, counts: TensorLike) -> Tensor:
    """Return the row assigned to each column at minimum total cost, or −1 for columns without a row: int64 ``[B, m]``.

    The result is optimal, like that of ``scipy.optimize.linear_sum_assignment``. The algorithm finds shortest
    augmenting paths (Jonker and Volgenant 1987, as in Crouse 2016) in float64, in a Loop over rows, for all matrices of
    the batch at once. It is not differentiable.

    Args:
        cost: finite costs, ``[B, n, m]``.
        counts: mask of the rows to assign, bool ``[B, n]``. The result is undefined if more than m rows are selected.
    """
    x, flags = detach(cast(cost, NUMBER)), cast(counts, FLAG)
    if (x.ndim, flags.ndim) != (3, 2):
        raise ModelError(
            f"linear_sum_assignment expects cost [B, n, m] and counts [B, n], but got shapes {x.shape} and "
            f"{flags.shape}"
        )
    batch, rows, columns = x.shape
    wide, thin = (batch, columns), (batch, 1)
    first = {
        "length": _all_of(wide, np.inf, NUMBER),
        "before": _all_of(wide, -1, WHOLE),
        "seen": _all_of(wide, 0, FLAG),
        "least": _all_of(thin, 0.0, NUMBER),
        "at": _all_of(thin, -1, WHOLE),
    }
    price, row_of = _all_of(wide, 0.0, NUMBER), _all_of(wide, -1, WHOLE)
    assign = _Assignment(x, flags, arange(columns).unsqueeze(0), first)
    found = assign.all(current().size(rows), current().size(columns), price, row_of)
    current().record(found, wide)
    return wrap(found)


def _all_of(sizes: Sequence[Extent], value: float, dtype: ir.DataType) -> Tensor:
    return op.Expand(tensor(value, dtype), op_sizes(sizes), shape=sizes)


class _Assignment:
    """A builder of the ONNX Loops that solve the assignment.

    Each state of a Loop is a tensor with one number per column, ``[B, m]``, or per matrix, ``[B, 1]``. An assigned
    column satisfies ``cost = price of row + price of column`` (the dual variables), so row prices need not be stored.
    The Loops terminate even if there is no free column.
    """

    def __init__(self, cost: Tensor, counts: Tensor, columns: Tensor, first: Mapping[str, Tensor]) -> None:
        self.op = current().builder
        self.cost, self.counts, self.columns = cost.traced, counts.traced, columns.traced
        self.first = {name: x.traced for name, x in first.items()}

    def all(self, rows: Var, columns: Var, price: Tensor, row_of: Tensor) -> Var:
        """Return the row that is assigned to each column, −1 for none, after all rows are assigned."""
        self.rounds = self.op.Squeeze(columns)
        states = {"price": price.traced, "row_of": row_of.traced}
        return self._loop("assign", self.op.Squeeze(rows), states, self.one)[1]

    def one(self, row: Var, price: Var, row_of: Var) -> list[Var]:
        """Return the state after ``row`` is assigned: rows are shifted along the shortest path to a free column."""
        op = self.op
        skipped = op.Not(op.Gather(self.counts, op.Unsqueeze(row, [0]), axis=1))
        start = {"costs": op.Gather(self.cost, row, axis=1), **self.first, "found": skipped}
        ends = self._loop("search", self.rounds, start, lambda _, *state: self.search(price, row_of, *state))
        _, length, before, seen, least, end, _ = ends
        price = op.Where(seen, price - (least - length), price)
        moving = {"row_of": row_of, "at": end, "moves": op.Not(skipped)}
        moved = self._loop("move", self.rounds, moving, lambda _, *state: self.move(row, before, *state))
        return [op.const(np.array(True)), price, moved[0]]

    def search(self, price: Var, row_of: Var, costs: Var, length: Var, before: Var, seen: Var, least: Var, at: Var,
               found: Var) -> list[Var]:  # fmt: skip
        """Return the state after one step of the shortest-path search: visit the nearest unvisited column.

        If that column has a row, the path continues from the row; otherwise the search has found its end.

        Args:
            costs: the costs of the last row of the path, minus the price of that row.
            length: the length of the shortest path to each column.
            before: for each column, the previous column on the shortest path to it, or −1.
            seen: the visited columns.
            least: the length of the path to ``at``, the current column.
            found: whether a column without a row was reached.
        """
        op = self.op
        through = least + costs - price
        nearer = op.And(through < length, op.Not(op.Or(seen, found)))
        length, before = op.Where(nearer, through, length), op.Where(nearer, at, before)
        open_ = op.Where(seen, np.inf, length)
        at = op.Where(found, at, op.ArgMin(open_, axis=1, keepdims=1))
        least = op.Where(found, least, op.ReduceMin(open_, [1], keepdims=1))
        row = op.GatherElements(row_of, at, axis=1)
        found = op.Or(found, row < 0)
        seen = op.Or(seen, op.And(op.Not(found), op.Equal(self.columns, at)))
        costs = op.GatherND(self.cost, row, batch_dims=1)
        of_row = op.GatherElements(costs, at, axis=1) - op.GatherElements(price, at, axis=1)
        go = op.Not(op.Cast(op.ReduceMin(op.Cast(found, to=WHOLE), keepdims=0), to=FLAG))
        return [go, costs - of_row, length, before, seen, least, at, found]

    def move(self, row: Var, before: Var, row_of: Var, at: Var, moves: Var) -> list[Var]:
        """Return the state after one step back along the path: the column ``at`` gets the row of the previous column on
        the path, or the new ``row`` if it is the first.
        """
        op = self.op
        last = op.GatherElements(before, at, axis=1)
        is_first = last < 0
        given = op.Where(is_first, row, op.GatherElements(row_of, last, axis=1))
        row_of = op.Where(op.And(moves, op.Equal(self.columns, at)), given, row_of)
        moves = op.And(moves, op.Not(is_first))
        go = op.Cast(op.ReduceMax(op.Cast(moves, to=WHOLE), keepdims=0), to=FLAG)
        return [go, row_of, op.Where(moves, last, at), moves]

    def _loop(
        self, name: str, rounds: Var, states: Mapping[str, Var], write: Callable[..., Sequence[Var]]
    ) -> list[Var]:
        """Write a Loop of at most ``rounds`` iterations from the initial ``states``, and return the final states.

        The body ``write(round, *states)`` returns whether to continue, then the new states.
        """
        inputs = [_value("round", WHOLE, ()), _value("goes", FLAG, ())]
        inputs += [_value(name, x.dtype, x.shape) for name, x in states.items()]
        body = self.op.graph(inputs, lambda i, _, *state: write(i, *state), name)
        found = all_of(self.op.Loop(rounds, True, *states.values(), body=body, outputs=len(states)))
        for x, before in zip(found, states.values(), strict=True):
            x.value.type = ir.TensorType(before.dtype)
        return found


def _value(name: str, dtype: ir.DataType, shape: Shape | None) -> ir.Value:
    return ir.Value(name=name, type=ir.TensorType(dtype), shape=None if shape is None else ir.Shape(shape))

"""A sliding cache of keys and values, as in GroupQueryAttention of com.microsoft: it keeps the last positions only.

It has C rows for a window of W ≤ C positions. After T positions its first L(T) rows contain the last L(T) positions, in
order, and the other rows are undefined. L(T) = T up to T = C; after that, G = C − W + 1 positions are evicted whenever
the cache is full, so that L(T) = T − G · ⌈(T − C) / G⌉.
"""

from __future__ import annotations

from dataclasses import dataclass

from gradgraph.graph.builder import Builder, Var
from gradgraph.passes.normal.opsets.attention_formula import Masks


@dataclass(frozen=True)
class SlidingCache:
    """A cache [batch, heads, C, size] that new tokens are appended to; C and W are defined in the module's docstring.

    Attributes:
        capacity: C, the number of rows of the cache, with shape [1].
        window: W, the number of positions that a query sees.
        earlier: the number of positions before the new tokens, [batch].
        lengths: the number of positions including the new tokens, [batch].
    """

    op: Builder
    capacity: Var
    window: int
    earlier: Var
    lengths: Var

    def slide(
        self, past: tuple[Var, Var], new: tuple[Var, Var], places: Var, bias: Var | None
    ) -> tuple[tuple[Var, Var], tuple[Var, Var], Masks]:
        """Append the keys and values ``new`` to the cache ``past``.

        Args:
            places: the positions of the new tokens, [batch, tokens].
            bias: an optional attention bias, with a column for every position.

        Returns:
            The keys and values to attend to (past and new), the next caches of keys and values, and the masks.
        """
        positions = self.positions(new[0])
        k, v = (self.op.Concat(a, b, axis=2) for a, b in zip(past, new, strict=True))
        seen = self.seen(positions, places)
        masks = Masks(None if bias is None else self.bias(bias, positions), seen, empty_rows=True)
        return (k, v), (self.present(k), self.present(v)), masks

    def positions(self, new: Var) -> Var:
        """Return the position of every row of the cache and of ``new``, [batch, 1, 1, C + tokens]; −1 if undefined."""
        row = self._rows(self.capacity)
        held = self._column(self._held(self.earlier))
        old = self.op.Where(row < held, row + self._column(self.earlier) - held, -1)
        now = self._rows(self.op.dim(new, 2)) + self._column(self.earlier)
        now = self.op.Where(now < self._column(self.lengths), now, -1)
        return self.op.Unsqueeze(self.op.Concat(old, now, axis=1), [1, 2])

    def seen(self, positions: Var, places: Var) -> Var:
        """Return a mask [batch, 1, tokens, C + tokens] of the rows that queries at ``places`` [batch, tokens] see."""
        place = self.op.Unsqueeze(places, [1, 3])
        return (positions >= 0) & (positions <= place) & (positions > place - self.window)

    def bias(self, bias: Var, positions: Var) -> Var:
        """Return the columns of ``bias``, one per position, for the rows of the cache and the new tokens."""
        op = self.op
        batch, columns = op.dim(positions, 0), op.dim(positions, 3)
        rows = op.Expand(bias, op.Concat(batch, op.dim(bias, 1), op.dim(bias, 2), op.dim(bias, 3), axis=0))
        shape = op.Concat(batch, op.dim(bias, 1), op.dim(bias, 2), columns, axis=0)
        return op.GatherElements(rows, op.Expand(op.Max(positions, 0), shape), axis=3)

    def present(self, joined: Var) -> Var:
        """Return the next cache from the rows ``joined``; undefined rows repeat the last defined one."""
        op = self.op
        position = self._rows(self.capacity) + self._column(self.lengths - self._held(self.lengths))
        position = op.Min(position, self._column(self.lengths) - 1)
        earlier = self._column(self.earlier)
        old = position - earlier + self._column(self._held(self.earlier))
        row = op.Where(position < earlier, old, position - earlier + self.capacity)
        shape = op.Concat(op.dim(joined, 0), op.dim(joined, 1), self.capacity, op.dim(joined, 3), axis=0)
        return op.GatherElements(joined, op.Expand(op.Unsqueeze(row, [1, 3]), shape), axis=2)

    def _held(self, length: Var) -> Var:
        """Return L(T), the number of defined rows after T = ``length`` positions."""
        leaving = self.capacity - self.window + 1
        too_many = self.op.Max(length - self.capacity, 0)
        return length - leaving * self.op.Div(too_many + leaving - 1, leaving)

    def _rows(self, count: Var) -> Var:
        return self.op.Unsqueeze(self.op.Range(0, self.op.Squeeze(count, [0]), 1), [0])

    def _column(self, x: Var) -> Var:
        return self.op.Unsqueeze(x, [1])

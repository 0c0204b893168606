"""Magnitude pruning: masks that set a growing share of the smallest weights to 0 (``wrappers.magnitude_pruning``)."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from gradgraph.arguments import matching
from gradgraph.errors import BuildError, UnknownNameError, shown, suggestion
from gradgraph.graph.builder import Builder, Var
from gradgraph.graph.shapes import known_sizes
from gradgraph.graph.weight_layouts import layout_of


@dataclass(frozen=True)
class Pruning:
    """The pruning settings: which weights are pruned, to what sparsity, and when.

    Attributes:
        target: names or globs of weights.
        sparsity: the final share of zeros.
        kept, group: N and M of N:M sparsity; 0 otherwise.
        scope: "layer": each weight has this sparsity; "global": all weights together.
        begin: the number of finished updates before the first change of the masks.
        end: the number of finished updates before the last change.
        every: the number of updates between changes.
    """

    target: tuple[str, ...]
    sparsity: float
    kept: int
    group: int
    scope: str
    begin: int
    end: int
    every: int

    def members(self, params: Sequence[ir.Value]) -> list[int]:
        """Return the indices of the weights in ``params`` that are pruned.

        Raises:
            UnknownNameError: if a glob matches no trained weight.
            BuildError: if a weight in ``target`` cannot be divided into groups of M.
        """
        return sorted({i for pattern in self.target for i in self.matched(pattern, params)})

    def matched(self, pattern: str, params: Sequence[ir.Value]) -> list[int]:
        """Return the indices of the weights that ``pattern`` matches.

        Raises:
            UnknownNameError, BuildError: as for :meth:`members`.
        """
        names = [p.name or "" for p in params]
        matrices = [n for n, p in zip(names, params, strict=True) if p.shape is not None and len(p.shape) > 1]
        here = [pattern] if pattern in names else matching(pattern, matrices)
        if not here:
            raise UnknownNameError(
                f"the pruning target '{shown(pattern)}' matches no trained weight with two axes or more"
                f"{suggestion(pattern, names)}"
            )
        places = [names.index(name) for name in here]
        fitting = [i for i in places if not self.group or self._fits(params[i], pattern == names[i])]
        if not fitting:
            of = "" if pattern == "*" else f" that '{shown(pattern)}' matches"
            raise BuildError(
                f"no weight{of} has an input axis divisible by {self.group}; use another pattern, or another target"
            )
        return fitting

    def _fits(self, weight: ir.Value, named: bool) -> bool:
        axis = layout_of(weight).inputs
        size = weight.shape[axis] if axis is not None and weight.shape is not None else 0
        fits = isinstance(size, int) and size > 0 and size % self.group == 0
        if named and not fits:
            raise BuildError(
                f"'{shown(weight.name)}' has no input axis divisible by {self.group}; use another pattern, or remove "
                "the weight from target"
            )
        return fits

    def due(self, op: Builder, step: Var) -> Var:
        """Return a boolean scalar: whether the masks change after update number ``step``, counted from 0."""
        if self.group or self.end <= self.begin:
            return op.Equal(step, np.int64(self.begin))
        passed = op.And(op.Not(op.Less(step, np.int64(self.begin))), op.Not(op.Greater(step, np.int64(self.end))))
        on_time = op.Equal(op.Mod(step - np.int64(self.begin), np.int64(self.every)), np.int64(0))
        return op.And(passed, op.Or(on_time, op.Equal(step, np.int64(self.end))))

    def masks(
        self, op: Builder, weights: Sequence[Var], masks: Sequence[Var], axes: Sequence[int | None], step: Var
    ) -> list[Var]:
        """Return the updated masks: 1 for remaining elements, 0 for pruned ones, which stay pruned.

        Args:
            weights: the pruned weights.
            masks: their current masks.
            axes: for each weight, its input axis, over which the layer sums products.
            step: the number of this update, from 0.
        """
        sizes = [op.Where(op.cast(m, ir.DataType.BOOL), op.cast(op.Abs(w), ir.DataType.FLOAT), -1.0)
                 for w, m in zip(weights, masks, strict=True)]  # fmt: skip
        if self.group:
            return [self._in_groups(op, s, a or 0) for s, a in zip(sizes, axes, strict=True)]
        counts = [math.prod(known_sizes(w.shape)) for w in weights]
        flat = [op.Reshape(s, [-1]) for s in sizes]
        if self.scope == "global" and len(flat) > 1:
            kept = _largest(op, op.Concat(*flat, axis=0), self._kept(op, sum(counts), step))
            bounds = np.cumsum([0, *counts])
            parts = [op.Slice(kept, [int(a)], [int(b)], [0]) for a, b in itertools.pairwise(bounds)]
        else:
            parts = [_largest(op, f, self._kept(op, n, step)) for f, n in zip(flat, counts, strict=True)]
        return [op.Reshape(m, known_sizes(w.shape)) for m, w in zip(parts, weights, strict=True)]

    def _kept(self, op: Builder, count: int, step: Var) -> Var:
        """Return the number of unpruned elements at ``step``, out of ``count``.

        The share of zeros is ``sparsity·(1 − (1 − done)³)``, where ``done`` grows from 0 at ``begin`` to 1 at ``end``.
        """
        if self.end <= self.begin:
            part = op.const(self.sparsity)
        else:
            left = 1.0 - op.cast(step - np.int64(self.begin), ir.DataType.FLOAT) / float(self.end - self.begin)
            part = self.sparsity * (1.0 - left * left * left)
        pruned = op.cast(op.Round(op.cast(part, ir.DataType.DOUBLE) * np.float64(count)), ir.DataType.INT64)
        return op.Reshape(np.int64(count) - pruned, [1])

    def _in_groups(self, op: Builder, sizes: Var, axis: int) -> Var:
        """Return a mask of the N largest of each M consecutive elements along the input axis (N:M sparsity)."""
        rank, known = sizes.rank, known_sizes(sizes.shape)
        order = [*(a for a in range(rank) if a != axis), axis]
        turned = [known[a] for a in order]
        rows = op.Reshape(op.Transpose(sizes, perm=order), [-1, self.group])
        _, places = op.TopK(rows, [self.kept], axis=-1, outputs=2)
        zeros = op.full(op.const(np.array([math.prod(turned) // self.group, self.group])), 0, ir.DataType.UINT8)
        ones = op.full(op.Shape(places), 1, ir.DataType.UINT8)
        mask = op.Reshape(op.ScatterElements(zeros, places, ones, axis=1), turned)
        return op.Transpose(mask, perm=[order.index(a) for a in range(rank)])


def _largest(op: Builder, sizes: Var, count: Var) -> Var:
    """Return a mask with 1 at the ``count`` largest elements of a vector; of equal elements, the first are selected."""
    _, places = op.TopK(sizes, count, outputs=2)
    zeros = op.full(op.Shape(sizes), 0, ir.DataType.UINT8)
    return op.ScatterElements(zeros, places, op.full(op.Shape(places), 1, ir.DataType.UINT8))

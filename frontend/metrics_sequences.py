"""Metrics of sequences: the edit distance between prediction and truth, counted in labels or in words.

An edit inserts, deletes or replaces one label (Levenshtein, 1966).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import onnx_ir as ir

from gradgraph.errors import ModelError
from gradgraph.frontend import reductions
from gradgraph.frontend.losses_classes import classes_at
from gradgraph.frontend.metric_sums import Share, metric
from gradgraph.frontend.pointwise import cast, logical_and, logical_not, maximum, minimum, where
from gradgraph.frontend.reductions import cumsum
from gradgraph.frontend.scans import scanned
from gradgraph.frontend.shaping import cat
from gradgraph.frontend.subscripts import arange, full, scatter, zeros
from gradgraph.frontend.trace import op, tensor
from gradgraph.graph.builder import Var

if TYPE_CHECKING:
    from gradgraph.frontend.tensor import Tensor

_LABELS = " ignore_index axis"
FAR = 1e9  # larger than the distance of any two sequences


class Row(NamedTuple):
    """A batch of label sequences: labels ``[N, T + 1]``, padded with −1 at the end, and lengths ``[N]``."""

    labels: Tensor
    lengths: Tensor


@metric(_LABELS, reads="sequences", better="min")
def edit_distance(
    x: Tensor, target: Tensor, mask: Tensor | None = None, ignore_index: int | None = None, axis: int | None = None
) -> Share:
    """The mean edit distance, in labels, between predicted and true sequences."""
    found, truth, counts = _sequences(x, target, mask, ignore_index, axis)
    return Share(_edits(found, truth) * counts, counts)


@metric(_LABELS, reads="sequences", better="min")
def cer(
    x: Tensor, target: Tensor, mask: Tensor | None = None, ignore_index: int | None = None, axis: int | None = None
) -> Share:
    """The character error rate, for labels of any kind: total number of edits over total number of true labels."""
    found, truth, counts = _sequences(x, target, mask, ignore_index, axis)
    return _rate(found, truth, counts)


@metric("space" + _LABELS, reads="sequences", better="min")
def wer(
    x: Tensor,
    target: Tensor,
    mask: Tensor | None = None,
    space: int | None = None,
    ignore_index: int | None = None,
    axis: int | None = None,
) -> Share:
    """The word error rate. The label ``space`` separates words; if it is None, each label is a word."""
    found, truth, counts = _sequences(x, target, mask, ignore_index, axis)
    return _rate(found, truth, counts) if space is None else _rate(_words(found, space), _words(truth, space), counts)


def _rate(found: Row, truth: Row, counts: Tensor) -> Share:
    return Share(_edits(found, truth) * counts, cast(truth.lengths, ir.DataType.FLOAT) * counts)


def _sequences(
    x: Tensor, target: Tensor, mask: Tensor | None, ignore_index: int | None, axis: int | None
) -> tuple[Row, Row, Tensor]:
    """Return the predicted and the true sequences, and the weight of each row: 0.0 if it is masked, else 1.0.

    If ``x`` contains scores, the prediction is the best class at each position with a true label; if it contains
    labels, negative labels are padding.
    """
    if target.ndim != 2 or target.is_floating_point():
        raise ModelError(
            f"the edit distance requires targets [rows, times] of class indices, but they have shape {target.shape} "
            f"and type {target.dtype.name.lower()}"
        )
    counted = logical_and(target >= 0, target != (-100 if ignore_index is None else ignore_index))
    if mask is not None and mask.ndim == 2:
        counted = logical_and(counted, mask)
    if x.is_floating_point():
        called, said = op.ArgMax(x, axis=classes_at(x, 1 if axis is None else axis), keepdims=0), counted
    else:
        called, said = x, x >= 0
    rows = full((target.shape[0],), 1.0) if mask is None or mask.ndim == 2 else cast(mask, ir.DataType.FLOAT)
    return _joined(called, said), _joined(target, counted), rows


def _joined(labels: Tensor, kept: Tensor) -> Row:
    """Return the labels at positions where ``kept`` is True, moved to the start of their row."""
    rows, most = labels.shape
    count = cast(kept, ir.DataType.INT64)
    places = where(kept, cumsum(count, 1) - 1, most)
    found = where(kept, cast(labels, ir.DataType.INT64), -1)
    return Row(scatter(full((rows, most + 1), -1, "int64"), 1, places, found), reductions.sum(count, 1))


def _edits(found: Row, truth: Row) -> Tensor:
    """Return the edit distance of each pair of rows, as float32 ``[N]``.

    The formula is from Wagner and Fischer, "The string-to-string correction problem" (1974): ``dᵢⱼ = min(dᵢ₋₁ⱼ + 1,
    dᵢⱼ₋₁ + 1, dᵢ₋₁ⱼ₋₁ + [aᵢ ≠ bⱼ])``. Each iteration computes the diagonal ``i + j = k``, for all ``j`` at once, from
    the two diagonals before it.
    """
    (rows, times), most = found.labels.shape, truth.labels.shape[1]
    diagonals = arange(1, times + most + 1)
    at = diagonals.unsqueeze(1) - arange(1, most + 1) - 1  # the label aᵢ compared with bⱼ on a diagonal [K, S]
    meets = op.Gather(found.labels, minimum(maximum(at, 0), times - 1), axis=1, shape=(rows, *at.shape))
    differs = cast(meets != truth.labels.unsqueeze(1), ir.DataType.FLOAT)
    start = where(arange(most + 1) == 0, tensor(0.0, ir.DataType.FLOAT), FAR).unsqueeze(0).expand(rows, most + 1)
    before = full((rows, most + 1), FAR)
    ends, column = (found.lengths + truth.lengths).unsqueeze(1), truth.lengths.unsqueeze(1)
    builder, edge = start.traced.op, full((rows, 1), FAR).traced

    def step(one: Var, two: Var, result: Var, differ: Var, k: Var) -> list[Var]:
        def shifted(diagonal: Var) -> Var:
            return builder.Slice(diagonal, [0], [-1], [1])

        replaced = shifted(two) + differ
        moved = builder.Min(one, builder.Concat(edge, builder.Min(shifted(one), replaced - 1.0), axis=1)) + 1.0
        here = builder.GatherElements(moved, column.traced, axis=1)
        return [moved, one, builder.Where(builder.Equal(ends.traced, k), here, result)]

    nothing = zeros(rows, 1)
    return scanned(step, [start, before, nothing], [differs.transpose(0, 1), diagonals])[2].squeeze(1)


_FACTORS, _PRIME = np.array([[1_000_003], [69_069]]), 2**31 - 1


def _words(letters: Row, space: int) -> Row:
    """Return the words of each row, split at ``space``, as numbers: polynomial hashes to two bases modulo a prime."""
    rows = letters.labels.shape[0]
    inside = logical_and(letters.labels != space, letters.labels >= 0)
    builder = letters.labels.traced.op

    def step(number: Var, letter: Var, is_inside: Var) -> list[Var]:
        longer = builder.Mod(number * _FACTORS + letter + 1, _PRIME)
        after = builder.Where(is_inside, longer, 0)
        return [after, after]

    along = [letters.labels.transpose(0, 1), inside.transpose(0, 1)]
    _, numbers = scanned(step, [zeros(2, rows, dtype="int64")], along, rows=1)
    ends = logical_and(inside, logical_not(cat([inside[:, 1:], full((rows, 1), 0, "bool")], 1)))
    both = numbers[:, 0] * (2**31) + numbers[:, 1]
    return _joined(both.transpose(0, 1), ends)

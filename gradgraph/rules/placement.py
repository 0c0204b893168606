"""Write cotangents back to the places where elements were read: helpers for rules of indexing, padding and sampling.

None of the helpers adds with ScatterND: onnxruntime's kernel is multithreaded and loses concurrent updates of one index
(most test runs gave wrong sums). Its ScatterElements is single-threaded and therefore correct, but adds element by
element. Whole rows are added faster, by sorting.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

from gradgraph.graph.builder import Builder, Var
from gradgraph.graph.shapes import record_shape
from gradgraph.rules.named_operators import named_operator
from gradgraph.rules.rounding import HALF
from gradgraph.rules.shape import flat, reshaped, total

FLOAT, DOUBLE, INT64 = ir.DataType.FLOAT, ir.DataType.DOUBLE, ir.DataType.INT64
FIRST, LAST = np.iinfo(np.int64).min, np.iinfo(np.int64).max
MOST_PLACES = 128  # up to this many indices, a matrix product adds faster than sorting


def positions(op: Builder, x: Var) -> Var:
    """Return the row-major position of each element of ``x``, in the shape of ``x``."""
    return reshaped(op, op.Range(0, total(op, x), 1), x)


def put(op: Builder, dy: Var, where: Var, x: Var, reduction: str = "none") -> Var:
    """Return zeros in the shape of ``x`` with ``dy`` written (or added) at the row-major positions ``where``."""
    zeros = op.full(op.Reshape(total(op, x), [1]), 0, dy.dtype)
    return reshaped(op, scattered(op, zeros, flat(op, where), flat(op, dy), 0, reduction), x)


def scattered(op: Builder, data: Var, indices: Var, updates: Var, axis: int, reduction: str) -> Var:
    """Return ScatterElements of the operands; reductions run in float32, as onnxruntime has none in half precision."""
    dtype = data.dtype
    if reduction != "none" and dtype in HALF:
        data, updates = op.cast(data, FLOAT), op.cast(updates, FLOAT)
    result = op.ScatterElements(data, indices, updates, axis=axis, reduction=reduction)
    return op.cast(op.like(result, data), dtype)


def as_block(op: Builder, x: Var, axis: int) -> Var:
    """Return ``x``, of any rank, reshaped to 3-D: [axes before ``axis``, ``axis``, axes after it]."""
    behind = op.Shape(x, start=axis + 1) if axis != -1 else op.const(np.zeros(0, np.int64))
    around = [op.ReduceProd(sizes, keepdims=1) for sizes in (op.Shape(x, end=axis), behind)]
    block = op.Reshape(x, op.Concat(around[0], op.dim(x, axis), around[1], axis=0), allowzero=1)
    record_shape(block.value, (None, None, None))
    return block


def add_slices(op: Builder, dy: Var, where: Var, x: Var, axis: int, distinct: bool = False) -> Var:
    """Return zeros in the shape of ``x`` with slice i of ``dy`` along ``axis`` added at position ``where[i]``.

    ``where`` is an int32 or int64 vector; negative positions count from the end. If all positions are ``distinct``,
    slices are written instead of added.
    """
    where = as_int64(op, where)
    if not distinct and not _differ(where):
        return gather_gradient(op, dy, where, x, axis=axis)
    front = [axis, *(i for i in range(x.rank) if i != axis)]
    return turned(op, _placed(op, turned(op, dy, front), where, x, front), np.argsort(front).tolist())


@named_operator("GatherGrad", like=[2], shape_only=[2])
def gather_gradient(op: Builder, dy: Var, where: Var, x: Var, *, axis: int) -> Var:
    """Return zeros in the shape of ``x`` with slice i of ``dy`` along ``axis`` added at ``where[i]``.

    Positions are int64 and may repeat.
    """
    front = [axis, *(i for i in range(x.rank) if i != axis)]
    rows, back = turned(op, dy, front), np.argsort(front).tolist()
    if few := few_places(x, axis):
        hot = op.Equal(np.arange(few).reshape(-1, 1), op.Mod(where, few))  # [few, n]: whether row j is added at index i
        return turned(op, op.cast(hot, rows.dtype) @ rows, back)  # 4 to 30 times faster than sorting
    count = op.Max(op.dim(x, axis), 1)  # onnxruntime cannot divide by zero, even for empty tensors
    places, rows = _summed(op, op.Mod(where, count), rows)
    return turned(op, _placed(op, rows, places, x, front), back)


def few_places(x: Var, axis: int) -> int:
    """Return the size of ``axis`` if it is small enough to add slices by a matrix product, else 0."""
    size = x.shape[axis] if x.shape is not None and x.rank <= 2 else None
    return size if isinstance(size, int) and size <= MOST_PLACES else 0


def _placed(op: Builder, rows: Var, where: Var, x: Var, front: Sequence[int]) -> Var:
    zeros = op.full(sizes_of(op, x, front), 0, rows.dtype)
    return op.ScatterND(zeros, op.Unsqueeze(where, [-1]), rows)


def _differ(where: Var) -> bool:
    known = where.const
    return known is not None and (known.size == 0 or known.min() >= 0) and len(np.unique(known)) == known.size


def _summed(op: Builder, where: Var, rows: Var) -> tuple[Var, Var]:
    """Return each distinct position in ``where``, and the sum of its rows.

    Rows are sorted by position. The sums are differences of one running sum, in float64 to limit cancellation.
    """
    places, order = op.TopK(where, op.Shape(where), outputs=2, largest=0)
    following = op.Concat(op.Slice(places, [1], [LAST], [0]), [-1], axis=0)
    last = flat(op, op.NonZero(op.Not(op.Equal(places, following))))
    running = op.CumSum(op.cast(op.Gather(rows, order), DOUBLE), op.const(0))
    upto = op.Gather(running, last)
    before = op.Pad(op.Slice(upto, [0], [-1], [0]), [1, 0], None, [0])
    return op.Gather(places, last), op.cast(upto - before, rows.dtype)


def turned(op: Builder, x: Var, perm: Sequence[int]) -> Var:
    return x if list(perm) == sorted(perm) else op.Transpose(x, perm=perm)


def sizes_of(op: Builder, x: Var, axes: Sequence[int]) -> Var:
    if list(axes) == list(range(axes[0], axes[0] + len(axes))):
        return op.dims(x, axes[0], axes[0] + len(axes))
    return op.Concat(*(op.dim(x, a) for a in axes), axis=0)


def as_int64(op: Builder, x: Var) -> Var:
    return op.const(x.const.astype(np.int64)) if x.const is not None else op.cast(x, INT64)

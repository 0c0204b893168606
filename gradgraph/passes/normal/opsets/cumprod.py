"""CumProd (opset 26) by doubling: after step k, each entry is the product of the 2^k entries that end at it.

This takes log2(n) elementwise products, whose derivative needs no division and is exact where entries are zero.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import onnx_ir as ir

from gradgraph.graph.builder import Builder, Var

INT64, BOOL = ir.DataType.INT64, ir.DataType.BOOL

Shift = Callable[[Var, Var], Var]


def running_product(op: Builder, x: Var, axis: Var, exclusive: bool, reverse: bool) -> Var:
    """Compute the cumulative product along ``axis``, an int64 vector of length 1.

    Entry i of the result is the product of the entries j ≤ i (j < i if ``exclusive``), or, if ``reverse``, j ≥ i
    (j > i). The steps are unrolled if the size of the axis is known, and run in a Loop otherwise.
    """

    def shift(v: Var, by: Var) -> Var:
        """Shift entries along the axis, filling with ones."""
        pads = (-by, by) if reverse else (by, -by)
        shifted = op.Pad(v, op.Concat(*pads, axis=0), op.const(1, v.dtype), axis)
        return op.like(shifted, v)

    size = op.Gather(op.shape(x), axis)
    y = op.like(shift(x, op.const([1])), x) if exclusive else x
    return _looped(op, y, size, shift) if size.const is None else _written_out(op, y, int(size.const.item()), shift)


def _written_out(op: Builder, y: Var, size: int, shift: Shift) -> Var:
    reach = 1
    while reach < size:
        y = y * shift(y, op.const([reach]))
        reach *= 2
    return y


def _looped(op: Builder, y: Var, size: Var, shift: Shift) -> Var:
    def step(_: Var, going: Var, y: Var, reach: Var) -> Sequence[Var]:
        further = op.Mul(reach, 2)
        return op.Squeeze(further < size, [0]), y * shift(y, reach), further

    inputs = [
        ir.Value(name="iteration", type=ir.TensorType(INT64), shape=ir.Shape([])),
        ir.Value(name="going", type=ir.TensorType(BOOL), shape=ir.Shape([])),
        ir.Value(name="product", type=ir.TensorType(y.dtype), shape=y.value.shape),
        ir.Value(name="reach", type=ir.TensorType(INT64), shape=ir.Shape([1])),
    ]
    going = op.Squeeze(op.const([1]) < size, [0])
    product, _ = op.Loop(None, going, y, [1], body=op.graph(inputs, step, "doubling"), outputs=2)
    return op.like(product, y)

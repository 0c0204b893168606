"""Order that a runtime cannot undo: a tensor that is there only once others are computed.

Nodes that compute again what the forward pass has computed must run late, and must not be taken for equal to the first
ones. ``After(x, turn)`` is ``x``; but ``turn`` is computed from other tensors, so nothing that reads the result runs
before these are there. ``turn_after`` makes it: a zero, which no runtime knows to be one.

``After`` is written as a Reshape whose target is zeros: each copies a size of ``x``. A Reshape moves no numbers, and
simplifying would take it away; so it stays a named operator until a graph is final (``write_orders``).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

from gradgraph.graph.builder import Builder, Var
from gradgraph.passes.normal.edit import Editor, nodes_of
from gradgraph.rules.named_operators import named_operator, operator_of, write_portable
from gradgraph.rules.registry import case, integers, real

NAME = "After"
_ZERO = integers(0, 1, 1)


@named_operator(NAME, case(real(2, 3), _ZERO), case(real(), _ZERO), case(real(2, 1, 3, 4), _ZERO))
def after(op: Builder, x: Var, turn: Var) -> Var:
    """``x``, computed after ``turn``, an int64 vector of one zero."""
    if x.shape is None:
        return op.Reshape(x, op.Shape(x) + turn)
    return op.Reshape(x, op.Expand(turn, op.const(np.array([x.rank], np.int64))))


def turn_after(op: Builder, values: Sequence[Var]) -> Var:
    """An int64 vector of one zero, which is computed from an element of each of ``values``, tensors that have some.

    onnxruntime computes first what the last node of several needs: so ``values`` are computed in their order.
    """
    firsts = [op.cast(_first(op, x), ir.DataType.FLOAT) for x in reversed(values)]
    one = op.sum_of(firsts)
    return op.cast(op.Less(one, one), ir.DataType.INT64)  # false, of NaN too


def _first(op: Builder, x: Var) -> Var:
    """An element as a vector. No long vector is written: ONNX's inference of shapes would note each of its numbers."""
    if x.shape is None:
        return op.Gather(op.Reshape(x, [-1]), op.const(np.array([0], np.int64)), axis=0)
    begin, end = (op.const(np.full(x.rank, i, np.int64)) for i in (0, 1))
    corner = op.Slice(x, begin, end) if x.rank else x
    return corner if x.rank == 1 else op.Reshape(corner, [-1])


def is_order(node: ir.Node) -> bool:
    """Is it a call of ``After``?"""
    known = operator_of(node)
    return known is not None and known.name == NAME


def write_orders(model: ir.Model) -> ir.Model:
    """Write each ``After`` in standard nodes, in place; nothing may simplify ``model`` afterwards."""
    editor = Editor(model)
    for node in [n for n in nodes_of(model) if is_order(n)]:
        editor.op.scope = node.name or ""
        editor.replace(node, *write_portable(editor.op, node))
    return model

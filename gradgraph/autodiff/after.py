"""Enforced execution order: a tensor that exists only once others are computed.

Nodes that recompute the forward pass must run late, and must not be merged with the original ones. ``After(x, turn)``
is ``x``; but ``turn`` is computed from other tensors, so nothing that reads the result runs before these exist.
``turn_after`` computes it: a zero that no runtime can fold.

``After`` is written as a Reshape whose target is zeros, each of which copies a size of ``x``. A Reshape moves no data,
and simplification would remove it; so it stays a named operator until a graph is final (``write_orders``).
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
    """An int64 vector of one zero, computed from an element of each of ``values``, which are not empty.

    onnxruntime first computes the dependencies of a node's last input, so ``values`` are computed in order.
    """
    firsts = [op.cast(_first(op, x), ir.DataType.FLOAT) for x in reversed(values)]
    one = op.sum_of(firsts)
    return op.cast(op.Less(one, one), ir.DataType.INT64)  # false, for NaN, too


def _first(op: Builder, x: Var) -> Var:
    """One element as a vector. Writes no long vector, as ONNX's shape inference would record every number."""
    if x.shape is None:
        return op.Gather(op.Reshape(x, [-1]), op.const(np.array([0], np.int64)), axis=0)
    begin, end = (op.const(np.full(x.rank, i, np.int64)) for i in (0, 1))
    corner = op.Slice(x, begin, end) if x.rank else x
    return corner if x.rank == 1 else op.Reshape(corner, [-1])


def is_order(node: ir.Node) -> bool:
    """Whether it is a call of ``After``."""
    known = operator_of(node)
    return known is not None and known.name == NAME


def write_orders(model: ir.Model) -> ir.Model:
    """Write each ``After`` in standard nodes, in place; ``model`` must not be simplified afterwards."""
    editor = Editor(model)
    for node in [n for n in nodes_of(model) if is_order(n)]:
        editor.op.scope = node.name or ""
        editor.replace(node, *write_portable(editor.op, node))
    return model

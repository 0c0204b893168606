"""Execution order in a graph: the named operator ``After`` delays a tensor until other tensors are computed.

Nodes that recompute the forward pass must run late, and must not be merged with the original nodes. ``After(x, turn)``
returns ``x`` unchanged. But ``turn``, a zero that no runtime can fold, is computed from other tensors (``turn_after``),
so readers of the result run only after these tensors exist.

Once the graph is final, ``write_orders`` replaces ``After`` with a Reshape to a shape of zeros (0 copies a dimension),
which moves no data. It stays a named operator until then, because simplification would remove such a Reshape.
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
    """Return a copy of ``x`` that is computed only after ``turn``, an int64 vector of one zero."""
    if x.shape is None:
        return op.Reshape(x, op.Shape(x) + turn)
    return op.Reshape(x, op.Expand(turn, op.const(np.array([x.rank], np.int64))))


def turn_after(op: Builder, values: Sequence[Var]) -> Var:
    """Return an int64 vector of one zero, computed from one element of each of ``values`` (non-empty tensors).

    The tensors are computed in the order of ``values``, because onnxruntime first computes the dependencies of a node's
    last input.
    """
    firsts = [op.cast(_first(op, x), ir.DataType.FLOAT) for x in reversed(values)]
    one = op.sum_of(firsts)
    return op.cast(op.Less(one, one), ir.DataType.INT64)  # false, even for NaN


def _first(op: Builder, x: Var) -> Var:
    """Return the first element of ``x`` as a vector of length 1.

    It writes no long constant vectors, because ONNX's shape inference would record every number in them.
    """
    if x.shape is None:
        return op.Gather(op.Reshape(x, [-1]), op.const(np.array([0], np.int64)), axis=0)
    begin, end = (op.const(np.full(x.rank, i, np.int64)) for i in (0, 1))
    corner = op.Slice(x, begin, end) if x.rank else x
    return corner if x.rank == 1 else op.Reshape(corner, [-1])


def is_order(node: ir.Node) -> bool:
    """Whether ``node`` is a call of ``After``."""
    known = operator_of(node)
    return known is not None and known.name == NAME


def behind_orders(value: ir.Value) -> ir.Value:
    """Return the value that ``value`` copies through nodes whose only effect is the order of execution."""
    while (node := value.producer()) is not None and is_order(node) and node.inputs[0] is not None:
        value = node.inputs[0]
    return value


def write_orders(model: ir.Model) -> ir.Model:
    """Replace each ``After`` with standard nodes, in place; ``model`` must not be simplified afterwards."""
    editor = Editor(model)
    for node in [n for n in nodes_of(model) if is_order(n)]:
        editor.op.scope = node.name or ""
        editor.replace(node, *write_portable(editor.op, node))
    return model

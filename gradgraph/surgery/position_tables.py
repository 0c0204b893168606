"""Correction of position embeddings for padded rows, in models that count positions themselves.

GPT-2 and GPT-Neo exported by older versions of optimum have no input ``position_ids``: they look up 0, 1, 2, … in a
table and add the result to the token embeddings. If the model keeps its mask, positions count visible tokens only.
(Rotary positions, as in Llama, need no change, since only distances between positions matter.)
"""

from __future__ import annotations

from collections.abc import Collection

import numpy as np
import onnx_ir as ir

from gradgraph.errors import BuildError
from gradgraph.graph.builder import Var
from gradgraph.graph.checks import describe
from gradgraph.graph.shape_inference import shape_of
from gradgraph.passes.normal.edit import Editor
from gradgraph.surgery.operation import numbers_of

_OF_SIZES = frozenset({"Shape", "Size"})  # outputs that do not depend on the values of a tensor
_SAME_NUMBERS = frozenset({"Unsqueeze", "Squeeze", "Reshape", "Cast", "Expand", "Identity"})
_ADAPTED = frozenset({"Add", "Mul", "MatMul", "Cast", "Identity"})  # from a table to a sum with other values


def count_seen(work: ir.Model, editor: Editor, fed: Collection[ir.Value], seen: Var) -> None:
    """Look up position tables by ``seen`` instead of by a count along each row.

    ``seen`` is the position of each token among the visible tokens of its row, int64 [batch, length]. ``fed`` are the
    inputs with rows: tokens and mask.

    Raises:
        BuildError: a table is read by indices that may be positions, but do not count from 0.
    """
    editor.place(editor.root[0])
    for node in _lookups(work.graph, fed):
        origin = _origin(node.inputs[1])
        if _all_alike(origin):
            continue
        if not _counts_from_0(origin):
            raise BuildError(
                f"{describe(node)} looks up positions that the model computes in an unknown way, so they cannot be "
                "counted by a mask; pad rows at their ends, and do not keep the mask"
            )
        node.replace_input_with(1, seen.value)
        width = (shape_of(node.outputs[0]) or [None])[-1]
        node.outputs[0].shape = ir.Shape([*(shape_of(seen.value) or (None, None)), width])


def _lookups(graph: ir.Graph, fed: Collection[ir.Value]) -> list[ir.Node]:
    """Return the Gathers that may look up position embeddings.

    Their indices do not depend on the values of inputs, while their rows are added to a value that does.
    """
    told, found = set(fed), []
    for node in graph:
        if node.op_type not in _OF_SIZES and any(value in told for value in node.inputs if value is not None):
            told.update(node.outputs)
        elif node.op_type == "Gather" and not node.domain and _is_table(node.inputs[0]):
            found.append(node)
    return [node for node in found if _is_added(node.outputs[0], told)]


def _is_table(value: ir.Value | None) -> bool:
    floating = value is not None and value.dtype is not None and value.dtype.is_floating_point()
    return floating and len(shape_of(value) or ()) == 2


def _is_added(rows: ir.Value, told: Collection[ir.Value]) -> bool:
    """Whether rows of a table are added, possibly after an adapter, to a value that depends on inputs (in ``told``)."""
    for node in (use.node for use in rows.uses()):
        if node.domain or any(value in told for value in node.inputs):
            if node.op_type == "Add" and not node.domain:
                return True
        elif node.op_type in _ADAPTED and any(_is_added(value, told) for value in node.outputs):
            return True
    return False


def _origin(numbers: ir.Value | None) -> ir.Value | None:
    """Return the value that ``numbers`` is derived from by reshaping, casts and repetition; None for None."""
    while numbers is not None:
        node = numbers.producer()
        if node is None or node.domain or node.op_type not in _SAME_NUMBERS:
            return numbers
        numbers = node.inputs[0]
    return None


def _all_alike(value: ir.Value | None) -> bool:
    """Whether all elements of a stored value are equal, as for token types but not for positions."""
    node = None if value is None else value.producer()
    known = numbers_of(value)
    return (node is not None and node.op_type == "ConstantOfShape") or (
        known is not None and len(np.unique(known.numpy())) == 1
    )


def _counts_from_0(value: ir.Value | None) -> bool:
    node = None if value is None else value.producer()
    if node is None or node.op_type != "Range" or node.domain:
        return False
    begin, _, step = (None if (known := numbers_of(number)) is None else known.numpy() for number in node.inputs)
    return begin is not None and step is not None and (int(begin), int(step)) == (0, 1)

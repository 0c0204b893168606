"""Positions that a model counts by itself, from the beginning of each row, where padding may stand.

GPT-2 and GPT-Neo as older versions of optimum write them have no input ``position_ids``: they read rows of a table by
0, 1, 2, … and add them to what the tokens say. With a mask, the tokens that it shows are counted instead. (Where
positions turn queries and keys, as in Llama, their distances alone count, so that nothing is to be done.)
"""

from __future__ import annotations

from collections.abc import Collection

import numpy as np
import onnx_ir as ir

from gradgraph.errors import BuildError
from gradgraph.graph.builder import Var
from gradgraph.graph.checks import describe
from gradgraph.graph.shapes import shape_of
from gradgraph.passes.normal.edit import Editor
from gradgraph.surgery.operated import numbers_of

_OF_SIZES = frozenset({"Shape", "Size"})  # give nothing of what a tensor says
_SAME_NUMBERS = frozenset({"Unsqueeze", "Squeeze", "Reshape", "Cast", "Expand", "Identity"})
_ADAPTED = frozenset({"Add", "Mul", "MatMul", "Cast", "Identity"})  # between rows of a table and their sum with others


def count_seen(work: ir.Model, editor: Editor, fed: Collection[ir.Value], seen: Var) -> None:
    """Let tables of positions be read by ``seen``, int64 [batch, length], in place of a count along each row.

    Args:
        fed: the inputs that say what stands in rows: tokens and mask.

    Raises:
        BuildError: a table is read by numbers that may be positions and are no count from 0.
    """
    editor.place(editor.root[0])
    for node in _lookups(work.graph, fed):
        origin = _origin(node.inputs[1])
        if _all_alike(origin):
            continue
        if not _counts_from_0(origin):
            raise BuildError(
                f"{describe(node)} adds positions that the model counts by itself, so that a mask cannot say where a "
                "row begins; pad rows at their ends, and keep no mask"
            )
        node.replace_input_with(1, seen.value)
        width = (shape_of(node.outputs[0]) or [None])[-1]
        node.outputs[0].shape = ir.Shape([*(shape_of(seen.value) or (None, None)), width])


def _lookups(graph: ir.Graph, fed: Collection[ir.Value]) -> list[ir.Node]:
    """Each Gather of a table by numbers that depend on no input, whose rows are added to something that does."""
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
    """Whether rows of a table are added to what depends on inputs, as they are or with an adapter on them."""
    for node in (use.node for use in rows.uses()):
        if node.domain or any(value in told for value in node.inputs):
            if node.op_type == "Add" and not node.domain:
                return True
        elif node.op_type in _ADAPTED and any(_is_added(value, told) for value in node.outputs):
            return True
    return False


def _origin(numbers: ir.Value | None) -> ir.Value | None:
    """The value of the same numbers before they were given another shape."""
    while numbers is not None:
        node = numbers.producer()
        if node is None or node.domain or node.op_type not in _SAME_NUMBERS:
            return numbers
        numbers = node.inputs[0]
    return None


def _all_alike(value: ir.Value | None) -> bool:
    """Whether all numbers are one, as of a kind of token: they say no position."""
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

"""Work out what follows from a model, whatever is fed: sizes, integers, and what is computed from constants alone.

Runtimes work it out before they run, so their tables are asked about nodes with it.
"""

from __future__ import annotations

import onnx_ir as ir

from gradgraph.graph.checks import DRAWING, has_bodies
from gradgraph.graph.marks import mark_constant
from gradgraph.graph.shapes import is_static, shape_of
from gradgraph.passes.normal.edit import nodes_of
from gradgraph.passes.normal.simplifying.fold import fold_constants
from gradgraph.passes.normal.sizes.infer import infer_shapes
from gradgraph.passes.normal.spelling.constants import gather_constants

_DERIVED = "gradgraph.derived"


def is_derived(value: ir.Value) -> bool:
    """Is it the result of a node that reads only constants, or sizes that are known? ``work_out`` finds it."""
    return _DERIVED in value.meta


def work_out(model: ir.Model) -> None:
    """Record on the values of ``model``, in place, what follows; all of its nodes stay.

    Its names must be unique. Arithmetic on sizes is done, so that shapes are known behind it: exporters write the size
    of a bias, for one, as what a Shape, a Gather and an Expand come to.
    """
    infer_shapes(model)
    _mark_derived(model)
    folded = model.clone()
    gather_constants(folded)
    for value in folded.graph.initializers.values():
        mark_constant(value, not value.is_graph_input())  # here weights are numbers like others
    while fold_constants(folded):
        infer_shapes(folded)
    known = {v.name: v for v in folded.graph.initializers.values()}
    known |= {v.name: v for node in nodes_of(folded) for v in node.outputs}
    for value in (v for node in nodes_of(model) for v in node.outputs if v.name in known):
        found = known[value.name]
        if found.shape is not None:
            value.shape = found.shape
        if is_derived(value) and found.is_initializer():
            value.const_value = found.const_value


def _mark_derived(model: ir.Model) -> None:
    """Mark the results of all that reads only constants and known sizes."""
    known = {v for v in model.graph.initializers.values() if not v.is_graph_input()}
    for node in nodes_of(model):
        if _follows(node, known):
            known.update(node.outputs)
            if node.op_type != "Constant":
                for value in node.outputs:
                    value.meta[_DERIVED] = True


def _follows(node: ir.Node, known: set[ir.Value]) -> bool:
    """Does what ``node`` computes follow from ``known`` values, or from known sizes?"""
    if node.domain or has_bodies(node) or node.op_type in DRAWING:
        return False
    if node.op_type in ("Shape", "Size") and node.inputs[0] is not None:
        return is_static(shape_of(node.inputs[0]))
    return all(v in known for v in node.inputs if v is not None)

"""Derive the static facts of a model: shapes, and values that are computed from constants and known sizes only.

Runtimes derive these facts when they load a model, so their support is checked against tables with them.
"""

from __future__ import annotations

import onnx_ir as ir

from gradgraph.graph.checks import DRAWING, has_bodies
from gradgraph.graph.marks import mark_constant
from gradgraph.graph.shape_inference import shape_of
from gradgraph.graph.shapes import is_static
from gradgraph.passes.normal.edit import nodes_of
from gradgraph.passes.normal.simplifying.fold import fold_constants
from gradgraph.passes.normal.sizes.infer import infer_shapes
from gradgraph.passes.normal.spelling.constants import gather_constants

_DERIVED = "gradgraph.derived"


def is_derived(value: ir.Value) -> bool:
    """Return whether ``value`` is computed from constants or known sizes only; ``derive_facts`` must have run."""
    return _DERIVED in value.meta


def derive_facts(model: ir.Model) -> None:
    """Record shapes and constant values on the values of ``model``, in place, without changing its nodes.

    The names of values must be unique. Arithmetic on sizes is evaluated, so that shapes that depend on it become known:
    exporters compute the size of a bias, for example, by a Shape, a Gather and an Expand.
    """
    infer_shapes(model)
    _mark_derived(model)
    folded = model.clone()
    gather_constants(folded)
    for value in folded.graph.initializers.values():
        mark_constant(value, not value.is_graph_input())  # weights count as constants here
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
    """Mark the outputs of nodes that read only constants and known sizes; ``is_derived`` reads the mark."""
    known = {v for v in model.graph.initializers.values() if not v.is_graph_input()}
    for node in nodes_of(model):
        if _follows(node, known):
            known.update(node.outputs)
            if node.op_type != "Constant":
                for value in node.outputs:
                    value.meta[_DERIVED] = True


def _follows(node: ir.Node, known: set[ir.Value]) -> bool:
    """Return whether the outputs of ``node`` depend only on values in ``known`` or on known sizes."""
    if node.domain or has_bodies(node) or node.op_type in DRAWING:
        return False
    if node.op_type in ("Shape", "Size") and node.inputs[0] is not None:
        return is_static(shape_of(node.inputs[0]))
    return all(v in known for v in node.inputs if v is not None)

"""Sizes of a graph whose inputs have known ones, node by node: ONNX's inference of a whole graph takes longer.

It writes the graph as a protobuf message and reads what it finds. In a step whose batch has become a number, nearly all
sizes are recorded, and the others follow from those of what their node reads.
"""

from __future__ import annotations

import onnx_ir as ir

from gradgraph.graph.checks import has_bodies
from gradgraph.graph.nodes import is_standard
from gradgraph.graph.shapes import POOLS, ask_again, is_static, recorded_shape, shape_of
from gradgraph.passes.normal.edit import nodes_of


def infer_each(model: ir.Model) -> bool:
    """Record types and sizes, in place; False where the graph must be looked at as a whole (``infer_shapes``).

    It must where a size follows from no node alone (a Reshape to computed sizes), where there are bodies, and where
    nodes are rewritten as soon as their sizes are known.
    """
    nodes = list(nodes_of(model))
    if any(has_bodies(node) or _may_be_rewritten(node) for node in nodes):
        return False
    return all(_is_known(value) for node in nodes for value in node.outputs if value.name)


def _may_be_rewritten(node: ir.Node) -> bool:
    """Whether ``infer_shapes`` may write it anew, or corrects what ONNX's inference says of it."""
    if is_standard(node, *POOLS):
        return bool(node.attributes.get_int("ceil_mode", 0))
    return is_standard(node, "Attention", "Resize", "STFT", "Upsample")


def _is_known(value: ir.Value) -> bool:
    """Whether type and sizes are known, or its node tells them; what is recorded stays where it tells less."""
    if not is_static(recorded_shape(value)):
        recorded, value.shape = value.shape, None
        ask_again([value])
        if not is_static(shape_of(value)):
            value.shape = recorded
            return False
    return value.type is not None
